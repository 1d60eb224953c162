"""Commands for studies: claims with verdicts, compute curves, length laws and landscapes."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from typer.core import TyperGroup

import tramontane
from tramontane.cli.terminal import (
    CONTINUES,
    RESEARCH,
    app,
    console,
    if_stopped,
    progress,
    say,
    show_table,
)
from tramontane.errors import InputError

if TYPE_CHECKING:
    from tramontane.evaluation.settings import SamplingOptions
    from tramontane.studies.plan import Plan

Runs = Annotated[
    list[Path],
    typer.Argument(help="Run folders; a folder of runs, e.g. a study's arm, is fitted as one."),
]
Out = Annotated[Path, typer.Option(help="Folder of the studies' runs and pages.")]
Page = Annotated[Path, typer.Option(help="File of the page of all claims.")]
STUDIES, PAGE = Path("studies"), Path("docs/reproduction.md")


class StudyGroup(TyperGroup):
    """`tramontane study NAME` is `tramontane study run NAME`; `--verify` and `--undecided` choose
    other commands in its place."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            command = next((c for c in ("verify", "undecided") if f"--{c}" in args), "run")
            args = [command, *(arg for arg in args if arg != f"--{command}")]
        return super().parse_args(context, args)


study = typer.Typer(
    cls=StudyGroup,
    no_args_is_help=True,
    help="Test claims by runs: `study NAME` runs a study's arms; other commands analyze runs.",
)
app.add_typer(study, name="study", rich_help_panel=RESEARCH)


@study.command()
def run(
    name: Annotated[
        str | None, typer.Argument(help="A study by name, or the path of its YAML file.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each arm.")] = 3,
    budget: Annotated[
        float | None,
        typer.Option(help="Total minutes of all runs; by default, the base's number of updates."),
    ] = None,
    base: Annotated[Path | None, typer.Option(help="The config that the arms change.")] = None,
    out: Out = STUDIES,
    every: Annotated[
        bool, typer.Option("--all", help="Run all shipped studies; resumable.")
    ] = False,
    chosen: Annotated[
        str | None, typer.Option("--set", help="With --all: magistral, siblings or checkpoints.")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="With --all: print the plan, and stop.")] = False,
    smoke: Annotated[
        bool, typer.Option(help="Run every arm for two small updates; code 2 if one fails.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Write the page of all claims from finished runs.")
    ] = False,
    page: Page = PAGE,
) -> None:
    """Test a claim: run the arms of a study, and judge it by their results."""
    if (name is not None) == (every or report or smoke):
        raise InputError(
            "name one study (`tramontane study list` names them all), or give --all, --report or "
            "--smoke"
        )
    if every and base is not None:
        raise InputError("--base belongs to a single study; --all runs on the studies' own base")
    if not every and (dry_run or chosen):
        raise InputError("--dry-run and --set belong to --all")
    if name is not None:
        with if_stopped(CONTINUES):
            found = tramontane.study(
                name, seeds=seeds, budget=budget, base=base, out=out,
                on_finished=partial(_said, name),
            )  # fmt: skip
        for claim, verdict in found.verdicts:
            console.print(f"{claim.text} [bold]{verdict.outcome}[/bold]", highlight=False)
        say(f"the page, its plots and every run: {out / Path(name).stem}")
        return
    from tramontane.studies import reproduction
    from tramontane.studies.plan import other_runs
    from tramontane.studies.runner import run_all, run_smoke
    from tramontane.studies.study import StudySet

    if chosen is not None and chosen not in get_args(StudySet):
        raise InputError(f"--set {chosen}: choose from {', '.join(get_args(StudySet))}")
    plans, failed = reproduction.default_plans(out), {}
    if every or budget is not None:
        planned = reproduction.plan_all(out, seeds, budget, cast("StudySet | None", chosen))
        plans |= planned
        if every:
            _show_plans(planned)
        if every and not dry_run:
            with if_stopped(CONTINUES):
                failed = run_all(planned, _said)
    if smoke:
        plans = reproduction.smoke_plans(out)
        failed |= run_smoke(plans, out)
    if report and not dry_run:
        results = reproduction.write_report(plans, page)
        for folder in [folder for plan in plans.values() for folder in other_runs(plan)]:
            say(f"skipped: {folder} has different settings from the study")
        say(f"{page}: {len(results)} studies with results")
    _end_with(failed)


def _said(study: str, run: str, done: int, total: int) -> None:
    say(f"{study}: {done}/{total}  {run}")


def _end_with(failed: dict[str, str]) -> None:
    if failed:
        raise InputError("\n".join(f"study {name}: {error}" for name, error in failed.items()))


@study.command()
def verify(
    name: Annotated[str, typer.Argument(help="A study by name.")], page: Page = PAGE
) -> None:
    """`study NAME --verify`: recompute its verdicts from the page's data; code 2 if the data were
    changed."""
    from tramontane.studies.reproduction import verified

    result, wrong = verified(name, page)
    for claim, verdict in result.verdicts:
        figures = f"{verdict.difference:+.4g} [{verdict.low:+.4g}, {verdict.high:+.4g}]"
        text = f"{claim.text.strip()} {figures} [bold]{verdict.outcome}[/bold]"
        console.print(text, highlight=False)
    if wrong:
        raise InputError("\n".join(wrong))
    data = page.with_suffix("") / f"{name}.json"
    say(f"{name}: seals, registrations and verdicts are those of {data}")


@study.command()
def undecided(
    hours: Annotated[float, typer.Option(help="Hours to run for.")],
    out: Out = STUDIES,
    page: Page = PAGE,
) -> None:
    """`study --undecided --hours H`: add seeds to studies with undecided claims, the most decidable
    first."""
    from tramontane.studies import reproduction
    from tramontane.studies.runner import run_all

    found = reproduction.undecided(out, page)
    rows = [
        (u.name, str(u.claims), str(u.plan.seeds), f"{u.hours:.1f}", f"{u.decided:.1f}")
        for u in found
    ]
    show_table(
        ("study", "undecided", "seeds of the next look", "its hours", "hours to decide"), rows
    )
    failed: dict[str, str] = {}
    end = time.monotonic() + 3600 * hours
    for each in found:
        if each.hours * 3600 > end - time.monotonic():
            say(f"{each.name}: skipped, its next look takes {each.hours:.1f} h")
            continue
        with if_stopped(CONTINUES):
            failed |= run_all({each.name: each.plan}, _said)
    _end_with(failed)


def _show_plans(planned: dict[str, Plan]) -> None:
    rows, total, rest = [], 0.0, 0.0
    for name, plan in planned.items():
        arms, finished = len(plan.study.arms), plan.finished
        runs = arms * plan.seeds
        size = (f"{arms} × {plan.seeds}", f"{finished}/{runs}", f"{plan.minutes:.0f}")
        rows.append((name, plan.study.set, *size))
        total += plan.minutes
        rest += plan.minutes * (1 - finished / runs)
    show_table(("study", "set", "arms × seeds", "finished", "minutes, estimated"), rows)
    say(f"{total / 60:.1f} hours on two cores; {rest / 60:.1f} hours left")


@study.command(name="list")
def list_studies() -> None:
    """List the shipped studies, with the minutes of three seeds on two cores."""
    from tramontane.studies.plan import minutes_of
    from tramontane.studies.study import load_study, names

    for known in names():
        found = load_study(known)
        say(f"{known:24} {minutes_of(found, seeds=3):4.0f} min  {found.title}")


@study.command()
def curve(
    runs: Runs,
    over: Annotated[
        str, typer.Option(help="Compute: seconds of training, tokens trained on, or updates.")
    ] = "seconds",
    of: Annotated[
        str, typer.Option(help="held_out (pass@1 by evaluation.every), or pass_rate in training.")
    ] = "held_out",
    skip: Annotated[
        int, typer.Option(min=0, help="Updates to skip at the start, e.g. the first epoch.")
    ] = 0,
    until: Annotated[
        float | None, typer.Option(help="Fit only the points up to this compute, and extrapolate.")
    ] = None,
    out: Out = STUDIES / "curve",
) -> None:
    """Fit ScaleRL's compute curve to runs, with an interval for the asymptote."""
    _check_runs(runs)
    from tramontane.studies.analyses import curve_table, study_curve

    _show_fits(
        curve_table(study_curve(runs, over=over, of=of, skip=skip, until=until, out=out)), out
    )


@study.command()
def length(runs: Runs, out: Out = STUDIES / "length") -> None:
    """Fit raw reward against the log of the length, with an interval for the slope."""
    _check_runs(runs)
    from tramontane.studies.analyses import law_table, study_length

    _show_fits(law_table(study_length(runs, out=out)), out)


def _check_runs(runs: list[Path]) -> None:
    # Before scipy and matplotlib are imported, which takes seconds.
    from tramontane.studies.fits import runs_in

    for path in runs:
        runs_in(path)


def _show_fits(table: str, out: Path) -> None:
    from rich.markdown import Markdown

    console.print(Markdown(table))
    say(f"the page and its plot: {out}")


@study.command()
def landscape(
    run: Annotated[Path, typer.Argument(help="A run folder with all its checkpoints.")],
    points: Annotated[int, typer.Option(min=3, help="Points along each axis.")] = 7,
    ranges: Annotated[
        tuple[float, float, float, float] | None,
        typer.Option(
            "--range",
            help="Ends of the axes around the final checkpoint; default: the checkpoints' path.",
        ),
    ] = None,
    problems: Annotated[int, typer.Option(min=1, help="Problems; the paper: 512.")] = 128,
    samples: Annotated[int, typer.Option(min=1, help="Completions of each; the paper: 16.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Folder; by default RUN/landscape.")] = None,
) -> None:
    """Draw reward and length on the plane of a run's principal components."""
    from tramontane.run.folder import RunFolder

    RunFolder(run).check_begun()
    from tramontane.studies.landscape import study_landscape

    sampling: SamplingOptions = {"problems": problems, "samples": samples}
    with progress("points") as show:
        found = study_landscape(
            run, points=points, ranges=ranges, sampling=sampling, out=out, on_point=show
        )
    first, second = found.plane.explained[:2]
    say(f"the plane holds {first + second:.0%} of the variance ({first:.0%} and {second:.0%})")
    law = found.law
    say(f"raw reward per factor e of length: {law.slope:+.3f} [{law.low:+.3f}, {law.high:+.3f}]")
    say(f"the page and its plots: {out or run / 'landscape'}")
