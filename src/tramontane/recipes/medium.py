"""Magistral Medium (arXiv 2506.10910, section 5): reinforcement learning alone, in stages."""

from __future__ import annotations

import json
from functools import cached_property, partial
from pathlib import Path

from tramontane.errors import InputError
from tramontane.recipes.config import MediumRecipe
from tramontane.recipes.page import Column, write_report
from tramontane.recipes.steps import (
    DONE,
    Facts,
    Screens,
    Step,
    check_measuring,
    compare_models,
    mean_pass_at_1,
    measuring_plan,
    read_measuring,
    train_or_resume,
    training_config,
)
from tramontane.run.input import RunInput, read_input


class Medium:
    """The steps of the recipe.

    Args:
        recipe: the settings.
        screens: opens a screen that shows progress.

    Raises:
        InputError: an invalid training config, or one without stages.
    """

    def __init__(self, recipe: MediumRecipe, screens: Screens) -> None:
        self.recipe, self.screens, self.out = recipe, screens, Path(recipe.out)
        keys = {
            "name": recipe.name,
            "model": recipe.model,
            "run_dir": str(self.out / "1_rl" / "run"),
        }
        self.rl_config = training_config(recipe.rl, {}, keys)
        if not self.rl_config.stages:
            raise InputError(
                "rl: the recipe trains in stages (harder data, longer answers, smaller batches); "
                "give the config a section `stages`, or use `tramontane train`"
            )

    def steps(self) -> list[Step]:
        """The steps, in order."""
        start = {"start": self.recipe.model}
        compared = (start, self.recipe.compare, self.rl_config)
        title = "reinforcement learning in stages"
        return [
            Step(
                "1_rl",
                title,
                self._train,
                self._check_rl,
                ("model", "rl"),
                read=lambda: self._rl_input,
            ),
            Step(
                "2_compare",
                "compare start and result",
                self._compare,
                partial(check_measuring, *compared),
                ("compare",),
                measures=True,
                read=partial(read_measuring, *compared),
            ),
        ]

    @cached_property
    def _rl_input(self) -> RunInput:
        return read_input(self.rl_config)

    def _check_rl(self) -> None:
        from tramontane.run.prepare import prepare

        prepare(self.rl_config, self._rl_input)

    def _train(self, folder: Path) -> Facts:
        return train_or_resume(self.rl_config, self.screens)

    def _compare(self, folder: Path) -> Facts:
        facts: Facts = json.loads((self.out / "1_rl" / DONE).read_text())
        models = {"start": self.recipe.model, "RL": facts["weights"]}
        plan = measuring_plan(models, self.recipe.compare, self.rl_config)
        found = compare_models(plan, folder, self.screens)
        columns = [Column("start", "start"), Column("RL", "RL in stages")]
        write_report(self.out, "Magistral Medium's recipe", columns, found, {"1_rl": facts})
        return {"pass_at_1": {name: mean_pass_at_1(found, name) for name in models}}
