"""The whole catalogue of studies: its plan, its runs, and the page of all results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from tramontane.errors import InputError
from tramontane.studies.figures import save
from tramontane.studies.page import (
    Result,
    arms_table,
    judge_runs,
    plain,
    plots,
    recorded_result,
    size_of,
    write_page,
)
from tramontane.studies.runner import (
    Plan,
    finished,
    finished_runs,
    minutes_of,
    run_study,
    share_of,
)
from tramontane.studies.study import Claim, Study, StudySet, load_study, names_in
from tramontane.studies.verdicts import Verdict

PLOTS_SHOWN = 2  # of each study
OnFinished = Callable[[str, str, int, int], None]  # study, run, runs finished, runs in all


@dataclass(frozen=True)
class FurtherClaim:
    """A claim of the paper that no study tests.

    Args:
        claim: the claim.
        paper: finding of the paper, with its figures.
        command: command that checks the claim, or its counterpart on a real checkpoint.
        large: what only a large model could show.
    """

    claim: str
    paper: str
    command: str
    large: str


@dataclass(frozen=True)
class Planned:
    """A study of the catalogue.

    Args:
        name: its name.
        plan: its runs.
        minutes: estimated minutes of all of its runs on two cores.
        finished, runs: number of runs that are finished, and of all.
    """

    name: str
    plan: Plan
    minutes: float
    finished: int
    runs: int


def plan_catalogue(
    out: Path, seeds: int, budget: float | None = None, chosen: StudySet | None = None
) -> list[Planned]:
    """The plan of the whole catalogue, or of one of its sets.

    Args:
        out: folder of the studies.
        seeds: number of runs of each arm.
        budget: minutes for these studies together; None: the default budget of each.
        chosen: the set; None: all of them.
    """
    studies = {name: load_study(name) for name in names_in(chosen)}
    share = 1.0 if budget is None else share_of(studies.values(), budget, seeds)
    planned = []
    for name, study in studies.items():
        plan = Plan(study, out / name, seeds, share)
        folders = [folder for _, _, folder in plan.runs()]
        done = sum(map(finished, folders))
        planned.append(Planned(name, plan, minutes_of(study, seeds, share), done, len(folders)))
    return planned


def run_catalogue(
    planned: Sequence[Planned], on_finished: OnFinished = lambda study, run, done, total: None
) -> dict[str, str]:
    """Run all studies, one after the other, and write their pages. Finished runs are kept.

    A study that fails does not stop the others.

    Args:
        planned: the studies.
        on_finished: called after each run.

    Returns:
        The error of each study that failed, by name.
    """
    failed = {}
    for item in planned:
        try:
            run_study(item.plan, partial(on_finished, item.name))
            write_page(item.plan)
        except InputError as error:
            failed[item.name] = str(error)
        except Exception as error:  # a broken measure must not cost the other studies their hours
            failed[item.name] = f"{error!r}"
    return failed


def write_report(out: Path, page: Path) -> dict[str, Result]:
    """Write the page of all claims from what is finished, with its data and plots next to it.

    `docs/reproduction.md` has `docs/reproduction/NAME.json` and `docs/reproduction/NAME_PLOT.svg`.
    A study whose data are there already, of more seeds than the runs in `out`, keeps them: its runs
    may have been made elsewhere. Data of arms that have changed since are removed.

    Args:
        out: folder of the studies.
        page: the page.

    Returns:
        The results of the studies of which a whole seed is finished, by name.
    """
    data = page.with_suffix("")
    data.mkdir(parents=True, exist_ok=True)
    entries, results = [], {}
    for name in names_in(None):
        study = load_study(name)
        entry: dict[str, Any] = {"name": name, "study": study, "result": None}
        if result := _published(name, study, out, data):
            results[name] = result
            entry |= {
                "result": result,
                "size": size_of(study, result),
                "table": arms_table(study, result),
                "plots": [f"{data.name}/{name}_{plot}.svg" for plot in _plots_shown(study)],
            }
        entries.append(entry)
    kept = {f"{name}.json" for name in results} | {
        Path(plot).name for entry in entries for plot in entry.get("plots", [])
    }
    for old in [*data.glob("*.svg"), *data.glob("*.json")]:
        if old.name not in kept:
            old.unlink()
    source = resources.files("tramontane.studies").joinpath("reproduction.md.j2").read_text("utf-8")
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(difference=_difference, smallest=_smallest, slug=_slug)
    counts: dict[str, int] = {}
    for result in results.values():
        for _, verdict in result.verdicts:
            counts[verdict.outcome] = counts.get(verdict.outcome, 0) + 1
    text = environment.from_string(source).render(
        entries=entries,
        counts=counts,
        waiting=sum(len(e["study"].claims) for e in entries if e["result"] is None),
        further=further_claims(),
    )
    page.write_text(text, encoding="utf-8")
    return results


def _published(name: str, study: Study, out: Path, data: Path) -> Result | None:
    """The result of a study in the page's folder `data`, brought up to date with its runs."""
    file = data / f"{name}.json"
    recorded = recorded_result(study, file)
    seeds = max(len(list((out / name / arm).glob("seed_*/"))) for arm in study.arms)
    runs = finished_runs(study, out / name, seeds)
    if not any(runs.values()):
        return recorded
    result = judge_runs(study, runs)
    if recorded and recorded.seeds > result.seeds:
        return recorded
    figures = plots(study, runs, result)
    for plot in _plots_shown(study):
        save(figures[plot], data / f"{name}_{plot}.svg")
    file.write_text(json.dumps(plain(study, result), indent=1) + "\n", encoding="utf-8")
    return result


def _plots_shown(study: Study) -> list[str]:
    """Names of the plots on the page: the arms, and the first curve."""
    return ["arms", *study.plots][:PLOTS_SHOWN]


def further_claims() -> list[FurtherClaim]:
    """Claims of the paper that no study tests."""
    text = resources.files("tramontane.studies").joinpath("further.yaml").read_text("utf-8")
    return [FurtherClaim(**row) for row in yaml.safe_load(text)]


def _slug(title: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def _difference(entry: dict[str, Any], claim: Claim, verdict: Verdict) -> str:
    """The difference with its interval, in the measure's format."""
    form = entry["study"].shown[claim.measure].format.replace(",", "")
    if abs(verdict.low) == float("inf"):
        return f"{verdict.difference:+{form}}"
    return f"{verdict.difference:+{form}} [{verdict.low:+{form}}, {verdict.high:+{form}}]"


def _smallest(entry: dict[str, Any], claim: Claim, verdict: Verdict) -> str:
    """The smallest effect that the runs would have shown."""
    form = entry["study"].shown[claim.measure].format.replace(",", "")
    return "–" if verdict.detectable == float("inf") else f"{verdict.detectable:{form}}"
