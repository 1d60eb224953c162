"""The page of a study: question, arms, figures over seeds, plots, and verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tramontane.pages import json_values, render
from tramontane.studies.measures import FinishedRun, Measure
from tramontane.studies.plan import Plan, finished_runs
from tramontane.studies.plots import plot_arms, plot_curve, save
from tramontane.studies.registry import registered, registration, seals
from tramontane.studies.study import Claim, Study, config_of
from tramontane.studies.verdicts import ClaimVerdict, error_of, finite, judge, mean_and_interval
from tramontane.sweeps.settings import function_name
from tramontane.workplace import write_whole


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
        machines: on which the runs were made; empty if the runs are older than this field.
    """

    seeds: int
    share: float
    lines: tuple[int, int]
    minutes: float
    values: dict[str, dict[str, list[float]]]
    verdicts: list[tuple[Claim, ClaimVerdict]]
    machines: list[str] = field(default_factory=list)


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
        name: {arm: [measure.value(run) for run in of_arm] for arm, of_arm in runs.items()}
        for name, measure in plan.study.shown.items()
    }
    every = [run for of_arm in runs.values() for run in of_arm]
    lines = [len(run.updates) for run in every]
    return Result(
        seeds=len(next(iter(runs.values()))),
        share=plan.share,
        lines=(min(lines), max(lines)),
        minutes=sum(run.summary["minutes"] for run in every),
        values=values,
        verdicts=_verdicts(plan.study, values, registered(plan.out), plan.base),
        machines=sorted({run.summary["machine"] for run in every if "machine" in run.summary}),
    )


def extended(earlier: Result, plan: Plan, later: Result) -> Result:
    """A recorded result with the seeds of a plan that begins after its first ones, as one result.

    Args:
        earlier: with at least `plan.first` seeds and the plan's share.
        plan: of the later seeds.
        later: of its runs.
    """
    values = {
        name: {arm: earlier.values[name][arm][: plan.first] + runs for arm, runs in arms.items()}
        for name, arms in later.values.items()
    }
    verdicts = _verdicts(plan.study, values, registered(plan.out), plan.base)
    changed = [verdict.outcome == "changed" for _, verdict in earlier.verdicts]
    return replace(
        later,
        seeds=plan.first + later.seeds,
        lines=(min(earlier.lines[0], later.lines[0]), max(earlier.lines[1], later.lines[1])),
        minutes=earlier.minutes * plan.first / earlier.seeds + later.minutes,
        values=values,
        verdicts=[
            (claim, replace(verdict, outcome="changed", p=1.0) if was else verdict)
            for (claim, verdict), was in zip(verdicts, changed, strict=True)
        ],
        machines=sorted({*earlier.machines, *later.machines}),
    )


def recorded_result(study: Study, file: Path) -> Result | None:
    """The result that `write_data` wrote to a file, judged by the study's current claims.

    None without the file, or if its arms or their config had different keys, or a measure is
    missing.
    """
    if not file.is_file():
        return None
    found = json.loads(file.read_text("utf-8"))
    today, then = json.loads(json.dumps(study.model_dump())), found["study"]
    same = all(then.get(key) == today[key] for key in ("base", "arms", "trajectories"))
    same &= function_name(then.get("runner")) == function_name(study.runner)
    same &= found["config"] == config_of(study)
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
        verdicts=_verdicts(study, values, found.get("registered")),
        machines=found.get("machines", []),
    )


def _verdicts(
    study: Study,
    values: dict[str, dict[str, list[float]]],
    known: list[str] | None,
    base: Path | None = None,
) -> list[tuple[Claim, ClaimVerdict]]:
    """Each claim with its verdict. A claim that is not among the registrations `known` was changed
    after its runs; None: they are older than registrations."""
    verdicts, config = [], config_of(study, base)
    samples = Plan(study, Path(), 1, base=base).samples
    for claim in study.claims:
        verdict = judge(values[claim.measure], claim, study.shown[claim.measure], samples)
        if known is not None and registration(study, claim, config) not in known:
            verdict = replace(verdict, outcome="changed", p=1.0)
        verdicts.append((claim, verdict))
    return verdicts


def write_page(plan: Plan) -> Result:
    """Judge the claims from the finished runs, and write `study.md`, `results.json` and the plots.

    Raises:
        ValueError: no seed has been finished by all arms.
    """
    runs = finished_runs(plan)
    result = judge_runs(plan, runs)
    save(plot_arms(plan.study, result.values), plan.out / "arms.svg")
    for key in plan.study.plots:
        save(plot_curve(key, runs, plan.study.over), plan.out / f"{key}.svg")
    write_data(plan.out / "results.json", plan, result)
    write_whole(plan.out / "study.md", _markdown(plan.study, result))
    return result


def write_data(file: Path, plan: Plan, result: Result) -> None:
    """Write a result as JSON, with the study and the config that its arms changed."""
    data = {
        "study": plan.study.model_dump(),
        "config": config_of(plan.study, plan.base),
        **asdict(result),
        "verdicts": [
            {"claim": claim.model_dump(), **asdict(verdict)} for claim, verdict in result.verdicts
        ],
        "registered": [
            registration(plan.study, claim, config_of(plan.study, plan.base))
            for claim, verdict in result.verdicts
            if verdict.outcome != "changed"
        ],
    }
    data = json_values(data)
    data["seals"] = seals(plan.study, data["values"], result.seeds)
    write_whole(file, json.dumps(data, indent=1) + "\n")


def _markdown(study: Study, result: Result) -> str:
    return render(
        "studies/study.md.j2",
        study=study,
        result=result,
        size=size_of(study, result),
        plots=["arms", *study.plots],
        keys=_keys,
        figure=_figure,
        sentence=_sentence,
    )


def size_of(study: Study, result: Result) -> str:
    """`3 seeds of 12 to 48 updates for each arm; runs of 20 minutes in all`, and the share of the
    budget if it is not the study's own. The log has a line for each update. With a different
    `over`, a line may stand for any number of steps, so lines are not counted."""
    low, high = result.lines if study.over == "update" else (0, 0)
    lines = f" of {low if low == high else f'{low} to {high}'} updates" if high else ""
    seeds = f"{result.seeds} seed{'s' if result.seeds != 1 else ''}"
    minutes = f"{result.minutes:.0f}" if result.minutes >= 10 else f"{result.minutes:.1f}"
    budget = "" if result.share == 1 else f", {result.share:.2g} of the study's own budget"
    machines = f" on {' and '.join(result.machines)}" if result.machines else ""
    shared = f"; all seeds share {study.shared_by_seeds}" if study.shared_by_seeds else ""
    return (
        f"{seeds}{lines} for each arm; runs of {minutes} minutes in all{budget}{machines}{shared}"
    )


def _keys(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}: {value}`" for key, value in changes.items()) or "nothing changed"


def _figure(runs: Sequence[float], form: str) -> str:
    mean, half = mean_and_interval(runs)
    if np.isnan(mean):
        return "–"
    shown = f"{mean:{form}}" if np.isinf(half) else f"{mean:{form}} ± {half:{form}}"
    known = len(finite(runs))
    return shown if known == len(runs) else f"{shown} ({known} of {len(runs)} runs)"


def difference(verdict: ClaimVerdict, measure: Measure) -> str:
    """The difference with its interval, in the measure's format."""
    form = measure.format.replace(",", "")
    if np.isnan(verdict.difference):
        return "–"
    if np.isinf(verdict.low):
        return f"{verdict.difference:+{form}}"
    return f"{verdict.difference:+{form}} [{verdict.low:+{form}}, {verdict.high:+{form}}]"


def detectable(verdict: ClaimVerdict, measure: Measure) -> str:
    """The detectable effect, in the measure's format."""
    form = measure.format.replace(",", "")
    return "–" if np.isinf(verdict.detectable) else f"{verdict.detectable:{form}}"


def _sentence(claim: Claim, verdict: ClaimVerdict, measure: Measure) -> str:
    pair = f"{claim.arm} − {claim.against}"
    if np.isnan(verdict.difference):
        return f"{pair}: no figure."
    shown = f"{pair}: {difference(verdict, measure)}"
    if np.isinf(verdict.low):
        return f"{shown}, without an interval."
    level = 100 * (1 - error_of(verdict.seeds))
    return (
        f"{shown} ({level:.0f} % interval at {verdict.seeds} seeds); expected: {claim.expect} "
        f"(margin {claim.margin:g}). The smallest effect that these runs would have shown: "
        f"{detectable(verdict, measure)}."
    )
