"""The whole catalogue of studies: its plan, its runs, and the page of all results."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
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
    plot_arms,
    plots,
    recorded_result,
    size_of,
    write_data,
    write_page,
)
from tramontane.studies.plan import Plan, minutes_of, share_of
from tramontane.studies.runner import finished, finished_runs, run_study
from tramontane.studies.study import Claim, Study, StudySet, load_study, names_in
from tramontane.studies.verdicts import Verdict
from tramontane.workplace import owned_file, owned_folder, write_whole

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
        finished, runs: number of finished runs, and of all runs.
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
    """Run all studies in order, and write their pages. Finished runs are kept.

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
            with owned_folder(item.plan.out, "studied"):
                run_study(item.plan, partial(on_finished, item.name))
                write_page(item.plan)
        except InputError as error:
            failed[item.name] = str(error)
        except Exception as error:  # a broken measure must not stop the other studies
            failed[item.name] = f"{error!r}"
    return failed


def default_plans(out: Path) -> dict[str, Plan]:
    """The plan of each shipped study with its own budget, for as many seeds as have a folder."""
    plans = {}
    for name in names_in(None):
        study = load_study(name)
        seeds = max(len(list((out / name / arm).glob("seed_*/"))) for arm in study.arms)
        plans[name] = Plan(study, out / name, seeds)
    return plans


def write_report(plans: Mapping[str, Plan], page: Path) -> dict[str, Result]:
    """Write the page of all claims from finished runs, with its data and plots next to it.

    `docs/reproduction.md` has `docs/reproduction/NAME.json` and `docs/reproduction/NAME_PLOT.svg`.
    Runs with settings different from the plan's are skipped. Existing data with a larger share of
    the budget or more seeds than the runs are kept, since they may come from another machine. Data
    of arms that have changed since are removed.

    Args:
        plans: the plan of each study by its name, in the order of the page.
        page: the page.

    Returns:
        The results of the studies with at least one complete seed, by name.

    Raises:
        InputError: another process writes the page, or no file can be written there.
    """
    with owned_file(page, "written"):
        return _write_report(plans, page)


def _write_report(plans: Mapping[str, Plan], page: Path) -> dict[str, Result]:
    data = page.with_suffix("")
    data.mkdir(parents=True, exist_ok=True)
    entries, results = [], {}
    for name, plan in plans.items():
        study = plan.study
        entry: dict[str, Any] = {"name": name, "study": study, "result": None}
        if result := _published(name, plan, data):
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
    environment.globals.update(
        difference=_difference, expected=_expected, smallest=_smallest, slug=_slug
    )
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
    write_whole(page, text)
    return results


def _published(name: str, plan: Plan, data: Path) -> Result | None:
    """The result of a study in the page's folder `data`, brought up to date with its runs."""
    file = data / f"{name}.json"
    recorded = recorded_result(plan.study, file)
    runs = finished_runs(plan)
    made = judge_runs(plan, runs) if any(runs.values()) else None
    if made and (recorded is None or (made.share, made.seeds) >= (recorded.share, recorded.seeds)):
        figures = plots(plan.study, runs, made)
        for plot in _plots_shown(plan.study):
            save(figures[plot], data / f"{name}_{plot}.svg")
    elif recorded:
        # Its curves are kept; figures and verdicts are recomputed.
        made = recorded
        save(plot_arms(plan.study, made), data / f"{name}_arms.svg")
    if made:
        write_data(file, plan, made)
    return made


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


def _form(entry: dict[str, Any], claim: Claim) -> str:
    form: str = entry["study"].shown[claim.measure].format
    return form.replace(",", "")


def _difference(entry: dict[str, Any], claim: Claim, verdict: Verdict) -> str:
    """The difference with its interval, in the measure's format."""
    form = _form(entry, claim)
    if math.isnan(verdict.difference):
        return "–"
    if math.isinf(verdict.low):
        return f"{verdict.difference:+{form}}"
    return f"{verdict.difference:+{form}} [{verdict.low:+{form}}, {verdict.high:+{form}}]"


def _expected(claim: Claim) -> str:
    """`equal within 0.05`, or `higher; margin 0.03`."""
    if claim.expect == "equal":
        return f"equal within {claim.margin:g}"
    return f"{claim.expect}; margin {claim.margin:g}"


def _smallest(entry: dict[str, Any], claim: Claim, verdict: Verdict) -> str:
    """The smallest detectable effect."""
    return "–" if math.isinf(verdict.detectable) else f"{verdict.detectable:{_form(entry, claim)}}"
