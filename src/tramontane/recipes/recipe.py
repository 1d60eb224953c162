"""The two recipes of Magistral (arXiv 2506.10910, section 5), as lists of steps.

Medium is reinforcement learning alone, in stages. Small is fine-tuning on a teacher's traces, then
reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, Literal

from tramontane.config import Config, PromptConfig, SFTConfig, parse
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.evaluation.checkpoint import prepare as prepare_evaluation
from tramontane.evaluation.checkpoint import problems_of
from tramontane.interrupt import Interrupt
from tramontane.models.names import numbered, with_tokenizer
from tramontane.recipes import mixture
from tramontane.recipes.config import MediumRecipe, SmallRecipe
from tramontane.recipes.harvest import finished_run, harvest
from tramontane.recipes.page import write_report
from tramontane.recipes.steps import (
    Announce,
    Facts,
    Measuring,
    Screens,
    Step,
    begin,
    mean_pass_at_1,
    newest_weights,
    run_steps,
    train_or_resume,
    training_config,
)
from tramontane.run.input import RunInput, read_input
from tramontane.run.screen import QuietScreen
from tramontane.sft.examples import ExampleStream
from tramontane.sft.sft import KEPT, SFTMetrics, is_unfinished, sft
from tramontane.workplace import owned_folder

TRACES = "traces.jsonl"
EXAMPLES = "examples.jsonl"

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


class _Recipe:
    """What both recipes have: a training, and a comparison with its start.

    Checks use the models that exist before the recipe starts.

    Args:
        recipe: the settings.
        screens: opens a screen that shows progress.

    Raises:
        InputError: an invalid training config.
    """

    rl_step: ClassVar[str]  # name of the step that trains
    paper: ClassVar[dict[str, float]] = {}  # the paper's keys, as defaults

    def __init__(self, recipe: MediumRecipe | SmallRecipe, screens: Screens) -> None:
        self.start, self.screens, self.out = recipe.model, screens, Path(recipe.out)
        self.name, self.rl = recipe.name, recipe.rl
        self.rl_config = self._training(self.rl_step, recipe.model)
        self.compared = Measuring(recipe.compare, self.rl_config)

    def _training(self, step: str, model: str) -> Config:
        keys = {"name": self.name, "model": model, "run_dir": str(self.out / step / "run")}
        return training_config(self.rl, self.paper, keys)

    @cached_property
    def _rl_input(self) -> RunInput:
        return read_input(self.rl_config)

    def _read_rl(self) -> None:
        _ = self._rl_input

    def _check_rl(self) -> None:
        from tramontane.run.prepare import prepare

        prepare(self.rl_config, self._rl_input)


class Medium(_Recipe):
    """The steps of Medium.

    Raises:
        InputError: an invalid training config, or one without stages.
    """

    rl_step = "1_rl"

    def __init__(self, recipe: MediumRecipe, screens: Screens) -> None:
        super().__init__(recipe, screens)
        if not self.rl_config.stages:
            raise InputError(
                "rl: the recipe trains in stages (harder data, longer answers, smaller batches); "
                "give the config a section `stages`, or use `tramontane train`"
            )

    def steps(self) -> list[Step]:
        """The steps, in order."""
        return [
            Step(
                self.rl_step,
                "reinforcement learning in stages",
                ("model", "rl"),
                lambda folder, facts: train_or_resume(self.rl_config, self.screens),
                self._read_rl,
                self._check_rl,
            ),
            Step(
                "2_compare",
                "compare start and result",
                ("compare",),
                self._compare,
                partial(self.compared.read, self.start),
                partial(self.compared.check, {"start": self.start}),
                measures=True,
            ),
        ]

    def _compare(self, folder: Path, facts: Mapping[str, Facts]) -> Facts:
        models = {"start": self.start, "RL": facts[self.rl_step]["weights"]}
        found = self.compared.compare(models, folder, self.screens)
        columns = {"start": "start", "RL": "RL in stages"}
        write_report(self.out, "Magistral Medium's recipe", columns, found, facts)
        return {"pass_at_1": mean_pass_at_1(found, models)}


class Small(_Recipe):
    """The steps of Small."""

    rl_step = "6_rl"
    paper: ClassVar = {"generator.temperature": 1.0, "trainer.objective.magistral.eps_high": 0.3}

    def __init__(self, recipe: SmallRecipe, screens: Screens) -> None:
        super().__init__(recipe, screens)
        self.recipe = recipe
        self.selected = Measuring(recipe.select, self.rl_config)

    def steps(self) -> list[Step]:
        """The steps, in order."""
        recipe = self.recipe
        steps = [
            Step(
                "1_harvest",
                f"harvest traces of {recipe.teacher}",
                ("model", "teacher", "harvest", "rl"),
                self._harvest,
                self._teacher_weights,
            ),
            Step(
                "2_answers",
                "the teacher answers further prompts",
                ("teacher", "answers"),
                self._answer,
                check=self._check_answers,
            ),
            Step(
                "3_mixture",
                "mix the examples",
                ("harvest", "answers", "general"),
                self._mix,
                lambda: recipe.general and mixture.general_pairs(recipe.general, 1, 0),
            ),
            Step(
                "4_sft",
                "fine-tune on the mixture",
                ("model", "sft", "rl"),
                self._fine_tune,
                check=self._check_sft,
            ),
            Step(
                "5_select",
                "choose the best checkpoint",
                ("select",),
                self._select,
                partial(self.selected.read, self.start),
                partial(self.selected.check, {"start": self.start}),
                measures=True,
            ),
            Step(
                self.rl_step,
                "reinforcement learning from that checkpoint",
                ("rl",),
                lambda folder, facts: self._train(self.rl_step, facts["5_select"]["weights"]),
                self._read_rl,
                self._check_rl,
            ),
            Step(
                "7_rl_only",
                "reinforcement learning without fine-tuning",
                ("model", "rl"),
                lambda folder, facts: self._train("7_rl_only", self.start),
                self._read_rl,
                self._check_rl,
            ),
            Step(
                "8_compare",
                "compare all models",
                ("compare", "rl_only"),
                self._compare,
                partial(self.compared.read, self.start),
                lambda: self.compared.check(
                    {"start": self.start, "teacher": self._teacher_weights()}
                ),
                measures=True,
            ),
        ]
        left_out = {"2_answers"} if recipe.answers is None else set[str]()
        left_out |= set() if recipe.rl_only else {"7_rl_only"}
        return [step for step in steps if step.name not in left_out]

    def _teacher_weights(self) -> str:
        return str(newest_weights(finished_run(self.recipe.teacher)))

    @cached_property
    def _encoder(self) -> PromptEncoder:
        """Prompts of the model that learns, as in the training config."""
        from tramontane.models import loading

        config = self.rl_config
        tokenizer = loading.load_tokenizer(with_tokenizer(config.model, config.tokenizer))
        return PromptEncoder(
            tokenizer, config.data, config.verifier.thinking_tags, config.data.effort
        )

    def _harvest(self, folder: Path, facts: Mapping[str, Facts]) -> Facts:
        recipe = self.recipe
        found = harvest(recipe.teacher, folder / TRACES, recipe.harvest, self._encoder.tags)
        return asdict(found)

    def _check_answers(self) -> None:
        assert self.recipe.answers is not None
        settings = mixture.answer_settings(self.recipe.answers, self._teacher_weights())
        prepare_evaluation(settings, problems_of(settings, "train"))

    def _answer(self, folder: Path, facts: Mapping[str, Facts]) -> Facts:
        config = self.recipe.answers
        assert config is not None
        settings = mixture.answer_settings(config, self._teacher_weights())
        with closing(self.screens()) as screen:
            show = partial(screen.phase, "answers")
            return mixture.answer(settings, config.keep, folder, self._encoder.tags, show)

    def _mix(self, folder: Path, facts: Mapping[str, Facts]) -> Facts:
        sources = [self.out / "1_harvest" / TRACES]
        if self.recipe.answers:
            sources.append(self.out / "2_answers" / EXAMPLES)
        seed = self.recipe.harvest.seed
        return mixture.mix(sources, self.recipe.general, seed, folder / EXAMPLES)

    def _check_sft(self) -> None:
        from tramontane.models import loading

        config = self._sft_config(self.out / "4_sft" / "model")
        loading.check_device(config.device, "sft.set.device")
        _ = self._encoder

    def _fine_tune(self, folder: Path, facts: Mapping[str, Facts]) -> Facts:
        from tramontane.models import loading

        output = folder / "model"
        config = self._sft_config(output)
        context = loading.context_length(loading.load_config(self.start))
        stream = ExampleStream(config, self._encoder, context)
        epoch = stream.steps_of_epoch(config.batch_tokens)
        changes = {"steps": self.recipe.sft.epochs * epoch, "keep_every": epoch}
        if "checkpoint_every" not in self.recipe.sft.set:
            changes["checkpoint_every"] = epoch
        config = config.model_copy(update=changes)
        if not (output / KEPT / f"step_{config.steps}").is_dir():
            with (
                closing(self.screens()) as screen,
                Interrupt(warn=screen.warn) as interrupt,
                interrupt.steps() as stopping,
            ):

                def show(metrics: SFTMetrics) -> None:
                    screen.phase("fine-tuning", metrics.step, config.steps)

                sft(config, is_unfinished(output), show, stopping)
        return {"epochs": self.recipe.sft.epochs, "steps": config.steps}

    def _sft_config(self, output: Path) -> SFTConfig:
        """The config of the fine-tuning; prompts are written as in reinforcement learning.

        Raises:
            InputError: an invalid key of `sft.set`, or one set by the recipe.
        """
        keys, data = self.recipe.sft.set, self.rl_config.data
        decided = {"steps", "data", "output", "model", "new_model", "keep_every", "name"}
        if taken := sorted(decided & keys.keys()):
            raise InputError(f"sft.set: the recipe decides {', '.join(taken)}; remove it")
        prompts = {key: getattr(data, key) for key in PromptConfig.model_fields}
        tags = self.rl_config.verifier.thinking_tags
        examples = str(self.out / "3_mixture" / EXAMPLES)
        raw = {
            **keys,
            "name": self.name,
            "model": self.start,
            "tokenizer": self.rl_config.tokenizer,
            "output": str(output),
            "data": prompts | {"train": examples, "thinking_tags": tags},
        }
        return parse(SFTConfig, raw, "sft.set")

    def _select(self, folder: Path, facts: Mapping[str, Facts]) -> Facts:
        kept = numbered(self.out / "4_sft/model" / KEPT)
        models = {path.name: str(path) for path in kept}
        found = self.selected.compare(models, folder, self.screens)
        means = mean_pass_at_1(found, models)
        best = max(means, key=means.__getitem__)  # the earliest in a tie
        return {"best": best, "weights": models[best], "pass_at_1": means}

    def _train(self, step: str, model: str) -> Facts:
        return train_or_resume(self._training(step, model), self.screens)

    def _compare(self, folder: Path, facts: Mapping[str, Facts]) -> Facts:
        models = {"start": self.start, "teacher": self._teacher_weights()}
        columns = {"start": "start", "teacher": "teacher", "SFT": "SFT only"}
        models["SFT"] = facts["5_select"]["weights"]
        if self.recipe.rl_only:
            models["RL"], columns["RL"] = facts["7_rl_only"]["weights"], "RL only"
        models["SFT+RL"], columns["SFT+RL"] = facts[self.rl_step]["weights"], "SFT + RL"
        found = self.compared.compare(models, folder, self.screens)
        write_report(self.out, "Magistral Small's recipe", columns, found, facts)
        return {"pass_at_1": mean_pass_at_1(found, models)}
