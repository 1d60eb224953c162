"""Studies: claims, the arms that test them, and verdicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

# torch and transformers take seconds to import: each function imports what it needs.
if TYPE_CHECKING:
    from tramontane.studies.page import Result as StudyResult


def study(
    name: str,
    *,
    seeds: int = 3,
    budget: float | None = None,
    base: str | Path | None = None,
    out: str | Path = "studies",
    on_finished: Callable[[str, int, int], None] | None = None,
) -> StudyResult:
    """Run the arms of a study and judge its claims; see docs/studies.md.

    Finished runs in the folder are kept, and an unfinished one resumes.

    Args:
        name: a study that is shipped, or the path of a study's YAML file.
        seeds: runs of each arm.
        budget: total minutes of all runs, which sets the number of updates (estimated from a run's
            time on two cores); None: the base's updates.
        base: the config that the arms change; None: the tiny base on the playground. Not for a
            study with a `runner`.
        out: folder for the studies' runs and pages.
        on_finished: called with (run, runs finished, runs in all).

    Raises:
        InputError: no such study or base, an invalid key of an arm, runs with different settings in
            the folder, a failed run, or another process working in the folder.
    """
    from tramontane.studies.plan import Plan, share_of
    from tramontane.studies.runner import run_study
    from tramontane.studies.study import load_study
    from tramontane.workplace import owned_folder

    found = load_study(name)
    share = 1.0 if budget is None else share_of([found], budget, seeds)
    plan = Plan(found, Path(out) / Path(name).stem, seeds, share, Path(base) if base else None)
    with owned_folder(plan.out, "studied"):
        run_study(plan, on_finished or (lambda run, done, total: None))
        from tramontane.studies.page import write_page  # its matplotlib takes a second to import

        return write_page(plan)
