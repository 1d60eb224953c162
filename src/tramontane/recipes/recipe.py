"""`tramontane recipe`: the steps of Medium or Small, one command each."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tramontane.recipes.config import MediumRecipe, SmallRecipe
from tramontane.recipes.medium import Medium
from tramontane.recipes.small import Small
from tramontane.recipes.steps import Announce, Facts, Screens, begin, run_steps
from tramontane.run.screen import QuietScreen
from tramontane.workplace import owned_folder

RecipeName = Literal["medium", "small"]
KINDS: dict[RecipeName, type[MediumRecipe] | type[SmallRecipe]] = {
    "medium": MediumRecipe,
    "small": SmallRecipe,
}


def run(
    recipe: MediumRecipe | SmallRecipe,
    screens: Screens = QuietScreen,
    announce: Announce = lambda number, total, title, finished: None,
) -> dict[str, Facts]:
    """Run a recipe's steps in its folder; the same call resumes after a stop or kill, between steps
    or within one.

    Args:
        recipe: the settings.
        screens: opens a screen for each phase of work.
        announce: called before each step.

    Returns:
        The facts of each step by name, as in its `done.json`; `report.md` and `report.html` in the
        recipe's folder compare the models.

    Raises:
        InputError: errors that are detectable before any work is done; else see the steps.
        Stopped: training was interrupted.
    """
    out, steps = Path(recipe.out), steps_of(recipe, screens).steps()
    with owned_folder(out, "followed as a recipe"):
        begin(recipe, out, steps)
        return run_steps(out, steps, announce)


def steps_of(recipe: MediumRecipe | SmallRecipe, screens: Screens = QuietScreen) -> Medium | Small:
    """The recipe's steps.

    Raises:
        InputError: an invalid training config.
    """
    return Medium(recipe, screens) if isinstance(recipe, MediumRecipe) else Small(recipe, screens)
