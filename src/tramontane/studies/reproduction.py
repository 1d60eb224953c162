"""All shipped studies: the plans of their runs, and the page of their results."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from tramontane.config.yaml_text import read_own
from tramontane.errors import InputError
from tramontane.pages import render
from tramontane.studies.measures import Measure
from tramontane.studies.page import (
    Result,
    difference,
    extended,
    judge_runs,
    recorded_result,
    size_of,
    write_data,
)
from tramontane.studies.plan import Plan, finished_runs, minutes_of, share_of
from tramontane.studies.plots import plot_arms, plot_forest, save
from tramontane.studies.registry import edited, faults, rule_of
from tramontane.studies.study import LOOKS, Claim, Study, StudySet, load_study, look, names_in
from tramontane.studies.verdicts import ClaimVerdict, q_values, seeds_needed, surviving
from tramontane.workplace import owned_file, write_whole

SMOKE_SHARE = 0.05  # of the default budget, for arms that are not training runs
DEFAULT_SEEDS = 3  # of `tramontane study`
NOT_RUN = "not run yet"
ON_THE_TINY_BASE: tuple[StudySet, ...] = ("magistral", "siblings")


def plan_all(
    out: Path, seeds: int, budget: float | None = None, chosen: StudySet | None = None
) -> dict[str, Plan]:
    """The plan of each shipped study, or of those of one set, by its name.

    Args:
        out: folder of the studies.
        seeds: number of runs of each arm.
        budget: minutes for these studies together; None: the default budget of each.
        chosen: the set; None: those that need no checkpoint.
    """
    chosen_names = names_in(chosen) if chosen else names_in(*ON_THE_TINY_BASE)
    studies = {name: load_study(name) for name in chosen_names}
    share = 1.0 if budget is None else share_of(studies.values(), budget, seeds)
    return {name: Plan(study, out / name, seeds, share) for name, study in studies.items()}


def default_plans(out: Path, chosen: Iterable[str] | None = None) -> dict[str, Plan]:
    """The plan of each study with its own budget, for the seeds that have a folder."""
    plans = {}
    for name in chosen or names_in():
        study = load_study(name)
        folders = [f for arm in study.arms for f in (out / name / arm).glob("seed_*/")]
        seeds = [int(folder.name.removeprefix("seed_")) for folder in folders] or [-1]
        plans[name] = Plan(study, out / name, max(seeds) + 1, first=max(0, min(seeds)))
    return plans


def smoke_plans(out: Path, chosen: Iterable[str] | None = None) -> dict[str, Plan]:
    """The plan of each study for the smoke test, which detects configs that do not run and missing
    measures: one seed, and runs so small that their results are meaningless."""
    return {
        name: Plan(load_study(name), out / Path(name).stem, 1, SMOKE_SHARE, small=True)
        for name in chosen or names_in(*ON_THE_TINY_BASE)
    }


def write_report(plans: Mapping[str, Plan], page: Path) -> dict[str, Result]:
    """Write the page of all claims from finished runs, with its data and plots next to it.

    `docs/reproduction.md` has `docs/reproduction/NAME.json` and `docs/reproduction/NAME_arms.svg`.
    Runs with settings different from the plan's are skipped, and so are seeds between two looks,
    which do not count yet. Existing data with a larger share of the budget or more seeds than the
    runs are kept, since they may come from another machine, and runs that begin after their first
    seeds extend them; other runs of as many seeds do not count, so that nobody picks the better
    ones. Data of arms that have changed since are removed.

    Args:
        plans: the plan of each study by its name, in the order of the page.
        page: the page.

    Returns:
        The results of the studies with at least one complete seed, by name.

    Raises:
        InputError: another process writes the page, no file can be written there, or figures in
            the data were edited.
    """
    with owned_file(page, "written"):
        data = page.with_suffix("")
        data.mkdir(parents=True, exist_ok=True)
        published = {name: _published(name, plan, data) for name, plan in plans.items()}
        results = {name: result for name, result in published.items() if result}
        kept = {file for name in results for file in (f"{name}.json", f"{name}_arms.svg")}
        # Data of other studies stay: the packages that have them may not be installed here.
        for name in plans:
            for old in (data / f"{name}.json", *data.glob(f"{name}_*.svg")):
                if old.name not in kept:
                    old.unlink(missing_ok=True)
        judged = [verdict for result in results.values() for _, verdict in result.verdicts]
        shown = iter(q_values(judged))
        entries = [
            _entry(name, plan.study, published[name], data.name, shown)
            for name, plan in plans.items()
        ]
        outcomes = Counter(row["verdict"] for entry in entries for row in entry["rows"])
        forests = {}
        for group in get_args(StudySet):
            of = [(plans[n].study, r) for n, r in results.items() if plans[n].study.set == group]
            if of:
                save(
                    plot_forest([(study.source, r.verdicts) for study, r in of]),
                    data / f"{group}.svg",
                )
                forests[f"{data.name}/{group}.svg"] = f"Differences in margins: {group}"
        text = render(
            "studies/reproduction.md.j2",
            entries=entries,
            waiting=outcomes.pop(NOT_RUN, 0),
            outcomes=outcomes,
            holds=surviving(judged, "holds"),
            fails=surviving(judged, "does not hold"),
            looks=", ".join(map(str, LOOKS)),
            last=max(LOOKS),
            forests=forests,
            **page_texts(),
        )
        write_whole(page, text)
        return results


@dataclass(frozen=True)
class Undecided:
    """A study with undecided claims, and what more seeds would cost.

    Args:
        name: the study's.
        claims: number of its undecided claims.
        plan: up to its next look.
        hours: of the seeds that the next look adds, on two cores.
        decided: hours until half of its undecided claims have the seeds of `seeds_needed`; infinite
            if these are more than the last look has.
    """

    name: str
    claims: int
    plan: Plan
    hours: float
    decided: float


def undecided(out: Path, page: Path) -> list[Undecided]:
    """The studies with undecided claims and a look to come, the most decidable first.

    Args:
        out: folder of the studies' runs.
        page: the page whose data say what is undecided; finished runs in `out` count too.
    """
    studies = []
    for name in names_in(*ON_THE_TINY_BASE):
        study = load_study(name)
        result = recorded_result(study, page.with_suffix("") / f"{name}.json")
        plan = default_plans(out, [name])[name]
        if result is None:
            if not any((runs := finished_runs(plan)).values()):
                continue
            result = judge_runs(plan, runs)
        # Seeds that are recorded beside the page need not be run again, unless a claim compares the
        # runs of all seeds.
        first = plan.first if plan.seeds else result.seeds
        if result.share != 1 or "timed_pass_rate" in {claim.measure for claim in study.claims}:
            first = 0
        open_claims = [pair for pair in result.verdicts if pair[1].outcome == "undecided"]
        coming = [seeds for seeds in LOOKS if seeds > result.seeds]
        if not open_claims or not coming:
            continue
        needed = sorted(seeds_needed(verdict, claim) for claim, verdict in open_claims)
        half = max(needed[(len(needed) - 1) // 2], coming[0])
        look = next((seeds for seeds in coming if seeds >= half), math.inf)
        minutes = minutes_of(study, 1)
        done = first + plan.finished // len(study.arms)
        studies.append(
            Undecided(
                name,
                len(open_claims),
                Plan(study, out / name, coming[0], first=first),
                minutes * (coming[0] - done) / 60,
                minutes * (look - done) / 60,
            )
        )
    return sorted(studies, key=lambda study: study.decided)


def verified(name: str, page: Path) -> tuple[Result, list[str]]:
    """A study's result as its recorded data give it today, and what is wrong with them.

    Raises:
        InputError: no data of the study beside the page, or its arms have changed since.
    """
    study, file = load_study(name), page.with_suffix("") / f"{name}.json"
    result = recorded_result(study, file)
    if result is None:
        raise InputError(
            f"{file}: no data of the study {name} as it is today; run it and write the page: "
            f"tramontane study {name}"
        )
    data = json.loads(file.read_text("utf-8"))
    wrong = faults(study, data)
    then = {rule_of(row["claim"]): row["outcome"] for row in data["verdicts"]}
    for claim, verdict in result.verdicts:
        outcome = then.get(rule_of(claim.model_dump()), verdict.outcome)
        if verdict.outcome != outcome:
            wrong.append(
                f"claim {claim.text.strip()!r}: its data say {verdict.outcome!r}, the file "
                f"{outcome!r}; rewrite the page (--report)"
            )
    return result, wrong


def _entry(
    name: str, study: Study, result: Result | None, data: str, q: Iterator[float]
) -> dict[str, Any]:
    """What the page shows of a study; takes the q-value of each of its verdicts."""
    rows = []
    for number, claim in enumerate(study.claims):
        measure = study.shown[claim.measure]
        row = {"claim": claim.text.strip(), "measure": measure.title, "expected": _expected(claim)}
        row |= {"difference": "–", "q": "–", "verdict": NOT_RUN, "needs": ""}
        if result:
            _, verdict = result.verdicts[number]
            row["difference"] = difference(verdict, measure)
            row["q"] = f"{next(q):.2g}"
            row["verdict"] = verdict.outcome
            if verdict.outcome == "undecided":
                row["needs"] = _needs(study, claim, verdict, measure)
        rows.append(row)
    seeds = f" --seeds {result.seeds}" if result and result.seeds != DEFAULT_SEEDS else ""
    return {
        "study": study,
        "anchor": re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", study.title).strip().lower()),
        "large": f" Only a large model could show: {study.large.strip()}" if study.large else "",
        "command": f"tramontane study {name}{seeds}",
        "rows": rows,
        "size": size_of(study, result) if result else None,
        "data": f"{data}/{name}.json",
        "plot": f"{data}/{name}_arms.svg",
    }


def _needs(study: Study, claim: Claim, verdict: ClaimVerdict, measure: Measure) -> str:
    """What is known of an undecided claim: the largest effect that its interval allows, and the
    seeds that would decide it, with the hours of the missing ones."""
    needed = seeds_needed(verdict, claim)
    if not math.isfinite(needed):
        return "a single seed"
    coming = [seeds for seeds in LOOKS if seeds > verdict.seeds and seeds >= needed]
    seeds = coming[0] if coming else math.ceil(max(needed, verdict.seeds + 1))
    hours = minutes_of(study, 1) * (seeds - verdict.seeds) / 60
    ends = {"higher": verdict.high, "lower": -verdict.low}
    largest = ends.get(claim.expect, max(verdict.high, -verdict.low))
    cost = f"{seeds:,} seeds, {hours:,.{1 if hours < 10 else 0}f} h"
    return f"no effect above {largest:{measure.format}}; {cost}"


def _published(name: str, plan: Plan, data: Path) -> Result | None:
    """The result of a study in the page's folder `data`, brought up to date with its runs."""
    file = data / f"{name}.json"
    result = recorded_result(plan.study, file)
    if result and (wrong := edited(plan.study, json.loads(file.read_text("utf-8")))):
        raise InputError(f"{file}: {wrong[0]}")  # rewriting it would seal the edited figures
    runs = finished_runs(plan)
    counting = max(0, look(plan.first + min(map(len, runs.values()))) - plan.first)
    runs = {arm: of_arm[:counting] for arm, of_arm in runs.items()}
    made = judge_runs(plan, runs) if counting else None
    if made and plan.first:
        extends = result and result.share == made.share and result.seeds >= plan.first
        made = extended(result, plan, made) if result and extends else None
    if made and (result is None or (made.share, made.seeds) > (result.share, result.seeds)):
        result = made
    if result:
        save(plot_arms(plan.study, result.values), data / f"{name}_arms.svg")
        write_data(file, plan, result)
    return result


def page_texts() -> dict[str, Any]:
    """Texts of the page that no study has: `further`, claims of the paper that no study tests, each
    with `claim`, `paper` (its finding, with its figures), `command` (checks the claim, or its
    counterpart on a real checkpoint) and `large` (what only a large model could show); `amended`,
    claims that were changed after data had been seen; and `beyond`, what the miniature cannot
    say."""
    text = resources.files("tramontane.studies").joinpath("page.yaml").read_bytes()
    texts: dict[str, Any] = read_own(text)
    return texts


def _expected(claim: Claim) -> str:
    """`equal within 0.05`, or `higher; margin 0.03`."""
    if claim.expect == "equal":
        return f"equal within {claim.margin:g}"
    return f"{claim.expect}; margin {claim.margin:g}"
