"""The two recipes of Magistral (arXiv 2506.10910, section 5), as lists of steps.

Medium is reinforcement learning alone, in stages. Small is fine-tuning on a teacher's traces, or
on-policy distillation from the teacher, then reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, Literal

from tramontane.config import PromptConfig, SFTConfig, parse
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.evaluation.checkpoint import prepare as prepare_evaluation
from tramontane.evaluation.checkpoint import problems_of
from tramontane.interrupt import Interrupt
from tramontane.models.names import numbered, with_tokenizer
from tramontane.recipes import mixture
from tramontane.recipes.config import MediumRecipe, RunSettings, SmallRecipe
from tramontane.recipes.harvest import finished_run, harvest
from tramontane.recipes.page import write_report
from tramontane.recipes.steps import (
    Announce,
    Facts,
    Measuring,
    Screens,
    Step,
    Training,
    begin,
    flat,
    mean_pass_at_1,
    newest_weights,
    run_steps,
    training_config,
)
from tramontane.run.folder import RunFolder
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
    """What both recipes have: training, and a comparison of models.

    Checks use the models that exist before the recipe starts.

    Args:
        recipe: the settings.
        screens: opens a screen that shows progress.

    Attributes:
        trainings: the trainings with different configs, by name.

    Raises:
        InputError: an invalid training config.
    """

    paper: ClassVar[dict[str, float]] = {}  # the paper's keys, as defaults

    def __init__(self, recipe: MediumRecipe | SmallRecipe, screens: Screens) -> None:
        self.start, self.screens, self.out = recipe.model, screens, Path(recipe.out)
        self.name = recipe.name
        self.rl = self._training(recipe.rl, "rl.set")
        self.trainings = {"reinforcement learning": self.rl}
        self.compared = Measuring(recipe.compare, self.rl.config)

    def _training(self, settings: RunSettings, where: str) -> Training:
        keys = {"name": self.name, "model": self.start, "run_dir": None}
        return Training(training_config(settings, self.paper, keys, where))

    def _given(self) -> dict[str, str]:
        """The compared models that exist before the recipe starts, by label."""
        return {"start": self.start}

    def _trains(
        self, name: str, title: str, uses: tuple[str, ...], training: Training, after: str = ""
    ) -> Step:
        """A step that trains the result of the step `after`, by default the start."""

        def work(folder: Path, facts: Mapping[str, Facts]) -> Facts:
            model = facts[after]["weights"] if after else self.start
            return training.run(model, folder / "run", self.screens)

        return Step(name, title, uses, work, training.read, training.check)

    def _compares(
        self, name: str, uses: tuple[str, ...], trained: Mapping[str, str], report: str
    ) -> Step:
        """A step that compares the given models with the results of other steps, by label; `report`
        is the title of the recipe's report."""

        def work(folder: Path, facts: Mapping[str, Facts]) -> Facts:
            models = self._given() | {k: facts[step]["weights"] for k, step in trained.items()}
            found = self.compared.compare(models, folder, self.screens)
            write_report(self.out, report, found, facts)
            return {"pass_at_1": mean_pass_at_1(found, models)}

        return Step(
            name,
            "compare the models",
            uses,
            work,
            self.compared.read,
            lambda: self.compared.check(self._given()),
            measures=True,
        )


class Medium(_Recipe):
    """The steps of Medium.

    Raises:
        InputError: an invalid training config, or one without stages.
    """

    def __init__(self, recipe: MediumRecipe, screens: Screens) -> None:
        super().__init__(recipe, screens)
        if not self.rl.config.stages:
            raise InputError(
                "rl: the recipe trains in stages (harder data, longer answers, smaller batches); "
                "give the config a section `stages`, or use `tramontane train`"
            )

    def steps(self) -> list[Step]:
        """The steps, in order."""
        report = "Magistral Medium's recipe"
        return [
            self._trains("1_rl", "RL in stages", ("model", "rl"), self.rl),
            self._compares("2_compare", ("compare",), {"RL": "1_rl"}, report),
        ]


class Small(_Recipe):
    """The steps of Small."""

    paper: ClassVar = {"generator.temperature": 1.0, "trainer.objective.magistral.eps_high": 0.3}

    def __init__(self, recipe: SmallRecipe, screens: Screens) -> None:
        super().__init__(recipe, screens)
        self.recipe = recipe
        self.selected = Measuring(recipe.select, self.rl.config)
        if recipe.distill:
            self.trainings = {"distillation": self._distillation(), **self.trainings}

    def _distillation(self) -> Training:
        """The training with the teacher's scores in place of rewards."""
        rl, distillation = self.recipe.rl, self.recipe.distillation
        changes = {
            **flat(rl.set),
            "pipeline.updates": distillation.updates,
            "pipeline.diversity": "none",  # rewards do not count
            "trainer.objective.name": "distill",
            "trainer.objective.distill.top_k": 16,
            "teacher.model": self.recipe.teacher,
            **flat(distillation.set),
        }
        return self._training(RunSettings(config=rl.config, set=changes), "distillation.set")

    def steps(self) -> list[Step]:
        """The steps, in order."""
        label = "distillation" if self.recipe.distill else "SFT"
        steps = [self._distill_step()] if self.recipe.distill else self._sft_steps()
        tuned = steps[-1].name
        number = int(tuned.partition("_")[0])
        rl, rl_only = f"{number + 1}_rl", f"{number + 2}_rl_only"
        steps.append(self._trains(rl, f"RL after {label}", ("rl",), self.rl, tuned))
        trained = {label: tuned}
        if self.recipe.rl_only:
            steps.append(self._trains(rl_only, "RL alone", ("model", "rl"), self.rl))
            trained["RL"] = rl_only
        trained[f"{label}+RL"] = rl
        report = f"Magistral Small's recipe, {label} and RL"
        uses = ("compare", "rl_only")
        return [*steps, self._compares(f"{number + 3}_compare", uses, trained, report)]

    def _distill_step(self) -> Step:
        title = f"distillation from {self.recipe.teacher}"
        uses = ("model", "teacher", "distillation", "rl")
        return self._trains("1_distill", title, uses, self.trainings["distillation"])

    def _sft_steps(self) -> list[Step]:
        harvested, tuned = ("model", "teacher", "harvest", "rl"), ("model", "sft", "rl")
        asked, mixed = ("teacher", "answers"), ("harvest", "answers", "general")
        first, further = "harvest the teacher's traces", "the teacher answers further prompts"
        steps = [
            Step("1_harvest", first, harvested, self._harvest, self._teacher_weights),
            Step("2_answers", further, asked, self._answer, check=self._check_answers),
            Step("3_mixture", "mix the examples", mixed, self._mix, self._read_general),
            Step("4_sft", "fine-tune on them", tuned, self._fine_tune, check=self._check_sft),
            Step(
                "5_select",
                "choose the best checkpoint",
                ("select",),
                self._select,
                self.selected.read,
                partial(self.selected.check, {"start": self.start}),
                measures=True,
            ),
        ]
        return steps if self.recipe.answers else [*steps[:1], *steps[2:]]

    def _read_general(self) -> None:
        if self.recipe.general:
            mixture.general_pairs(self.recipe.general, 1, 0)

    def _given(self) -> dict[str, str]:
        return {"start": self.start, "teacher": self._teacher_weights()}

    def _teacher_weights(self) -> str:
        """Weights of the teacher's finished run. Distillation needs no run, only a checkpoint.

        Raises:
            InputError: not a run, or not finished.
        """
        if self.recipe.distill and not RunFolder(self.recipe.teacher).begun:
            return self.recipe.teacher
        return str(newest_weights(finished_run(self.recipe.teacher)))

    @cached_property
    def _encoder(self) -> PromptEncoder:
        """Prompts of the model that learns, as in the training config."""
        from tramontane.models import loading

        config = self.rl.config
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
        keys, data = self.recipe.sft.set, self.rl.config.data
        decided = {"steps", "data", "output", "model", "new_model", "keep_every", "name"}
        if taken := sorted(decided & keys.keys()):
            raise InputError(f"sft.set: the recipe decides {', '.join(taken)}; remove it")
        prompts = {key: getattr(data, key) for key in PromptConfig.model_fields}
        tags = self.rl.config.verifier.thinking_tags
        examples = str(self.out / "3_mixture" / EXAMPLES)
        raw = {
            **keys,
            "name": self.name,
            "model": self.start,
            "tokenizer": self.rl.config.tokenizer,
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
