"""The page of a study: question, arms, figures over seeds, plots, and verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy import stats

from tramontane.config import read_settings
from tramontane.studies.figures import COLOURS, colours, dash, new_figure, save
from tramontane.studies.measures import FinishedRun, Measure
from tramontane.studies.plan import Plan
from tramontane.studies.runner import finished_runs
from tramontane.studies.study import Claim, Study, base_config
from tramontane.studies.verdicts import Verdict, finite, judge, mean_and_interval
from tramontane.workplace import write_whole

MEASURES_SHOWN = 3  # in the plot of arms, side by side


@dataclass(frozen=True)
class Result:
    """A study's runs, judged.

    Args:
        seeds: number of seeds that all arms have finished.
        share: share of the study's default budget that the runs had.
        lines: smallest and largest number of lines of the runs' `metrics.jsonl`, e.g. updates; 0
            without this file.
        minutes: time that the runs took, together.
        values: each measure of each run, by measure and arm.
        verdicts: one for each claim, in order.
    """

    seeds: int
    share: float
    lines: tuple[int, int]
    minutes: float
    values: dict[str, dict[str, list[float]]]
    verdicts: list[tuple[Claim, Verdict]]


def judge_runs(plan: Plan, runs: Mapping[str, Sequence[FinishedRun]]) -> Result:
    """Judge a study's claims.

    Args:
        plan: of the study.
        runs: its finished runs by arm, the same number of each (`finished_runs`).

    Raises:
        ValueError: no runs.
    """
    if not any(runs.values()):
        raise ValueError("no seed was finished by all arms")
    values = {
        name: {arm: [measure.value(run) for run in found] for arm, found in runs.items()}
        for name, measure in plan.study.shown.items()
    }
    every = [run for found in runs.values() for run in found]
    lines = [len(run.updates) for run in every]
    return Result(
        seeds=len(next(iter(runs.values()))),
        share=plan.share,
        lines=(min(lines), max(lines)),
        minutes=sum(run.summary["minutes"] for run in every),
        values=values,
        verdicts=_verdicts(plan.study, values),
    )


def recorded_result(study: Study, file: Path) -> Result | None:
    """The result that was written to a file as `plain` gives it, by the study's claims of today.

    None without the file, or if its arms or their config had other keys, or a measure is missing.
    """
    if not file.is_file():
        return None
    found = json.loads(file.read_text("utf-8"))
    today, then = json.loads(json.dumps(study.model_dump())), found["study"]
    same = all(then.get(key) == today[key] for key in ("base", "arms", "trajectories", "runner"))
    same &= found["config"] == _config(study)
    if not same or study.shown.keys() - found["values"].keys():
        return None
    values = {
        name: {arm: [np.nan if v is None else v for v in runs] for arm, runs in arms.items()}
        for name, arms in found["values"].items()
    }
    return Result(
        seeds=found["seeds"],
        share=found.get("share", 1.0),
        lines=tuple(found["lines"]),
        minutes=found["minutes"],
        values=values,
        verdicts=_verdicts(study, values),
    )


def _verdicts(
    study: Study, values: dict[str, dict[str, list[float]]]
) -> list[tuple[Claim, Verdict]]:
    return [
        (
            claim,
            judge(
                values[claim.measure],
                claim.arm,
                claim.against,
                expect=claim.expect,
                margin=claim.margin,
            ),
        )
        for claim in study.claims
    ]


def write_page(plan: Plan) -> Result:
    """Judge the claims from the finished runs, and write `study.md`, `results.json` and the plots.

    Raises:
        ValueError: no seed has been finished by all arms.
    """
    runs = finished_runs(plan)
    result = judge_runs(plan, runs)
    for name, figure in plots(plan.study, runs, result).items():
        save(figure, plan.out / f"{name}.svg")
    write_data(plan.out / "results.json", plan, result)
    write_whole(plan.out / "study.md", _markdown(plan.study, result))
    return result


def plots(
    study: Study, runs: Mapping[str, Sequence[FinishedRun]], result: Result
) -> dict[str, Figure]:
    """The plots of a study by the name of their file: `arms`, and each of `study.plots`."""
    curves = {key: plot_curve(key, runs, study.over) for key in study.plots}
    return {"arms": plot_arms(study, result), **curves}


def plot_arms(study: Study, result: Result) -> Figure:
    """The measures that the claims compare: each seed as a dot, means with intervals, by arm."""
    names = list(dict.fromkeys(claim.measure for claim in study.claims))[:MEASURES_SHOWN]
    figure, every = new_figure(len(names), 0.9 + 0.32 * len(study.arms))
    places = np.arange(len(study.arms))[::-1]
    for axes, name in zip(every, names, strict=True):
        values = result.values[name]
        found = [mean_and_interval(values[arm]) for arm in study.arms]
        means, halves = np.array(found).T
        for place, arm in zip(places, study.arms, strict=True):
            axes.plot(values[arm], [place] * len(values[arm]), "o", color=COLOURS[5], markersize=3)
        spread = np.where(np.isfinite(halves), halves, 0.0)
        axes.errorbar(
            means, places, xerr=spread, fmt="D", color=COLOURS[0], capsize=3, markersize=4
        )
        shown = study.arms if axes is every[0] else []
        axes.set_yticks(places if len(shown) else [], list(shown))
        axes.set_ylim(-0.6, len(places) - 0.4)
        axes.set_title(study.shown[name].title, loc="left", fontsize=9)
    return figure


def plot_curve(key: str, runs: Mapping[str, Sequence[FinishedRun]], over: str) -> Figure:
    """A metric over another: the mean of an arm's seeds as a line, with its 95 % interval over
    seeds as a band. A moving mean of three points smooths every run first. The axis is logarithmic
    if the largest value is over a thousand times the median, since a diverging run would flatten
    all others."""
    figure, (axes,) = new_figure()
    values = np.concatenate([run.curve(key) for every in runs.values() for run in every])
    values = values[values > 0]
    if len(values) and values.max() > 1000 * np.median(values):
        axes.set_yscale("log", nonpositive="mask")
    for n, (colour, (arm, found)) in enumerate(zip(colours(len(runs)), runs.items(), strict=True)):
        length = min(len(run.updates) for run in found)
        if not length or not any(np.isfinite(run.curve(key)).any() for run in found):
            continue  # this arm has no such metric, e.g. no sampled rewards on trajectories alone
        table = np.stack([_smooth(run.curve(key)[:length]) for run in found])
        x = np.mean([run.curve(over)[:length] for run in found], axis=0)
        mean = table.mean(0)
        axes.plot(x, mean, dash(n), color=colour, label=arm, linewidth=1.6)
        if (seeds := len(table)) > 1:
            half = stats.t.ppf(0.975, seeds - 1) * table.std(0, ddof=1) / np.sqrt(seeds)
            axes.fill_between(x, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(over.replace("_", " "))
    axes.set_title(key.replace("_", " "), loc="left", fontsize=10)
    if axes.lines:
        if len(axes.lines) > 6:  # they would cover the lines
            axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        else:
            axes.legend(frameon=False, fontsize=8)
    return figure


def _smooth(curve: np.ndarray, window: int = 3) -> np.ndarray:
    """A moving mean; the ends have shorter windows."""
    padded = np.pad(curve, window // 2, mode="edge")
    return np.convolve(padded, np.ones(window) / window, mode="valid")


def write_data(file: Path, plan: Plan, result: Result) -> None:
    """Write a result as JSON, with the study and the config that its arms changed."""
    data = {
        "study": plan.study.model_dump(),
        "config": _config(plan.study, plan.base),
        **asdict(result),
        "verdicts": [
            {"claim": claim.model_dump(), **asdict(verdict)} for claim, verdict in result.verdicts
        ],
    }
    write_whole(file, json.dumps(_plain(data), indent=1) + "\n")


def _plain(value: Any) -> Any:
    """A value in JSON types; None for infinity and NaN, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _plain(found) for key, found in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(found) for found in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _config(study: Study, base: Path | None = None) -> dict[str, Any] | None:
    """The keys of the config that the study's arms change, if they change one."""
    return None if study.runner else read_settings(base or base_config())


def _markdown(study: Study, result: Result) -> str:
    source = resources.files("tramontane.studies").joinpath("study.md.j2").read_text("utf-8")
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source).render(
        study=study,
        result=result,
        size=size_of(study, result),
        table=arms_table(study, result),
        plots=["arms", *study.plots],
        sentences=[
            sentence(claim, verdict, study.shown[claim.measure])
            for claim, verdict in result.verdicts
        ],
    )


def size_of(study: Study, result: Result) -> str:
    """`3 seeds of 12 to 48 updates for each arm; runs of 20 minutes in all`, and the share of the
    budget if it is not the study's own. The log has a line for each update; those of anything else
    (`over`) may stand for any number of it, so that they are not counted."""
    low, high = result.lines if study.over == "update" else (0, 0)
    lines = f" of {low if low == high else f'{low} to {high}'} updates" if high else ""
    seeds = f"{result.seeds} seed{'s' if result.seeds != 1 else ''}"
    minutes = f"{result.minutes:.0f}" if result.minutes >= 10 else f"{result.minutes:.1f}"
    budget = "" if result.share == 1 else f", {result.share:.2g} of the study's own budget"
    return f"{seeds}{lines} for each arm; runs of {minutes} minutes in all{budget}"


def arms_table(study: Study, result: Result) -> str:
    """The arms with their keys, and a Markdown table of their figures: a row for each measure."""
    lines = [f"- all arms: {_keys(study.base)}"] if study.base else []
    lines += [f"- **{arm}**: {_keys(changes)}" for arm, changes in study.arms.items()]
    if study.trajectories:
        lines.append(f"- the run that `trajectories` stands for: {_keys(study.trajectories)}")
    lines = [_wrapped(line) for line in lines]
    lines += ["", f"| | {' | '.join(study.arms)} |", "|---|" + "---|" * len(study.arms)]
    for name, measure in study.shown.items():
        found = [_figure(result.values[name][arm], measure.format) for arm in study.arms]
        lines.append(f"| {measure.title} | {' | '.join(found)} |")
    return "\n".join(lines)


def _wrapped(item: str) -> str:
    """An item of a list on lines of at most 100 characters."""
    return fill(item, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _keys(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}: {value}`" for key, value in changes.items()) or "nothing changed"


def _figure(runs: Sequence[float], form: str) -> str:
    mean, half = mean_and_interval(runs)
    if np.isnan(mean):
        return "–"
    shown = f"{mean:{form}}" if np.isinf(half) else f"{mean:{form}} ± {half:{form}}"
    known = len(finite(runs))
    return shown if known == len(runs) else f"{shown} ({known} of {len(runs)} runs)"


def sentence(claim: Claim, verdict: Verdict, measure: Measure) -> str:
    """A verdict with its numbers, in one sentence."""
    form = measure.format.replace(",", "")
    number = f"{verdict.difference:+{form}}"
    pair = f"{claim.arm} − {claim.against}"
    if np.isnan(verdict.difference):
        return f"{pair}: no figure."
    if np.isinf(verdict.low):
        return f"{pair}: {number}, without an interval."
    return (
        f"{pair}: {number} [{verdict.low:+{form}}, {verdict.high:+{form}}]; "
        f"expected: {claim.expect} (margin {claim.margin:g}). The smallest effect that these runs "
        f"would have shown: {verdict.detectable:{form}}."
    )
