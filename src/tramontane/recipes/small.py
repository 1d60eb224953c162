"""Magistral Small (arXiv 2506.10910, section 5): fine-tuning on a teacher's traces, then RL."""

from __future__ import annotations

import json
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path

from tramontane.config import Config, PromptConfig, SFTConfig, parse
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.evaluation.checkpoint import prepare as prepare_evaluation
from tramontane.evaluation.checkpoint import problems_of
from tramontane.interrupt import Interrupt
from tramontane.models.names import numbered, with_tokenizer
from tramontane.recipes import mixture
from tramontane.recipes.config import SmallRecipe
from tramontane.recipes.harvest import finished_run, harvest
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
    newest_weights,
    read_measuring,
    train_or_resume,
    training_config,
)
from tramontane.run.input import RunInput, read_input
from tramontane.run.screen import Screen
from tramontane.sft.examples import ExampleStream
from tramontane.sft.sft import KEPT, SFTMetrics, is_unfinished, sft

TRACES = "traces.jsonl"
EXAMPLES = "examples.jsonl"
PAPER = {"generator.temperature": 1.0, "trainer.objective.magistral.eps_high": 0.3}


class Small:
    """The steps of the recipe; each reads the folders of earlier ones.

    Args:
        recipe: the settings.
        screens: opens a screen that shows progress.

    Raises:
        InputError: an invalid training config.
    """

    def __init__(self, recipe: SmallRecipe, screens: Screens) -> None:
        self.recipe, self.screens, self.out = recipe, screens, Path(recipe.out)
        self.rl_config = self._rl("6_rl", recipe.model)

    def steps(self) -> list[Step]:
        """The steps, in order."""
        recipe = self.recipe
        steps = [
            Step(
                "1_harvest",
                f"harvest traces of {recipe.teacher}",
                self._harvest,
                lambda: self._teacher_weights,
                ("model", "teacher", "harvest", "rl"),
                read=lambda: self._teacher_weights,
            )
        ]
        if recipe.answers:
            title = "the teacher answers further prompts"
            uses: tuple[str, ...] = ("teacher", "answers")
            steps.append(Step("2_answers", title, self._answers, self._check_answers, uses))
        uses = ("harvest", "answers", "general")
        title, mixed = "mix the examples", self._check_mixture
        steps.append(Step("3_mixture", title, self._mix, mixed, uses, read=mixed))
        title, uses = "fine-tune on the mixture", ("model", "sft", "rl")
        steps.append(Step("4_sft", title, self._fine_tune, self._check_sft, uses))
        title, uses = "choose the best checkpoint", ("select",)
        read = partial(read_measuring, {"start": recipe.model}, recipe.select, self.rl_config)
        steps.append(
            Step(
                "5_select", title, self._select, self._check_select, uses, measures=True, read=read
            )
        )
        title = "reinforcement learning from that checkpoint"
        read_rl = self._read_rl
        steps.append(Step("6_rl", title, self._train, self._check_rl, ("rl",), read=read_rl))
        if recipe.rl_only:
            title, uses = "reinforcement learning without fine-tuning", ("model", "rl")
            steps.append(
                Step("7_rl_only", title, self._train_only, self._check_rl, uses, read=read_rl)
            )
        title, uses = "compare all models", ("compare", "rl_only")
        steps.append(
            Step(
                "8_compare",
                title,
                self._compare,
                self._check_compare,
                uses,
                measures=True,
                read=partial(
                    read_measuring, {"start": recipe.model}, recipe.compare, self.rl_config
                ),
            )
        )
        return steps

    # Checks use the models that exist before the recipe starts: start and teacher.

    def _check_answers(self) -> None:
        assert self.recipe.answers is not None
        settings = mixture.answer_settings(self.recipe.answers, self._teacher_weights)
        prepare_evaluation(settings, problems_of(settings, "train"))

    def _check_mixture(self) -> None:
        if self.recipe.general:
            mixture.general_pairs(self.recipe.general, 1, 0)

    def _check_sft(self) -> None:
        from tramontane.models import loading

        config = self._sft_config(self.out / "4_sft" / "model")
        loading.check_device(config.device, "sft.set.device")
        _ = self._encoder

    def _check_select(self) -> None:
        check_measuring({"start": self.recipe.model}, self.recipe.select, self.rl_config)

    @cached_property
    def _rl_input(self) -> RunInput:
        return read_input(self.rl_config)

    def _read_rl(self) -> None:
        _ = self._rl_input

    def _check_rl(self) -> None:
        from tramontane.run.prepare import prepare

        prepare(self.rl_config, self._rl_input)

    def _check_compare(self) -> None:
        models = {"start": self.recipe.model, "teacher": self._teacher_weights}
        check_measuring(models, self.recipe.compare, self.rl_config)

    @property
    def _teacher_weights(self) -> str:
        return str(newest_weights(finished_run(self.recipe.teacher)))

    @cached_property
    def _encoder(self) -> PromptEncoder:
        """Prompts of the model that learns, as in the training config."""
        from tramontane.models import loading

        config = self.rl_config
        tokenizer = loading.load_tokenizer(with_tokenizer(config.model, config.tokenizer))
        return PromptEncoder(tokenizer, config.data, config.verifier.thinking_tags)

    def _rl(self, step: str, model: str) -> Config:
        """The config of a training run in a step's folder."""
        keys = {"name": self.recipe.name, "model": model, "run_dir": str(self.out / step / "run")}
        return training_config(self.recipe.rl, PAPER, keys)

    def _facts(self, step: str) -> Facts:
        found: Facts = json.loads((self.out / step / DONE).read_text())
        return found

    def _harvest(self, folder: Path) -> Facts:
        recipe = self.recipe
        found = harvest(recipe.teacher, folder / TRACES, recipe.harvest, self._encoder.tags)
        return found.to_dict()

    def _answers(self, folder: Path) -> Facts:
        config = self.recipe.answers
        assert config is not None
        settings = mixture.answer_settings(config, self._teacher_weights)
        with closing(self.screens()) as screen:
            show = partial(screen.phase, "answers")
            return mixture.answer(settings, config.keep, folder, self._encoder.tags, show)

    def _mix(self, folder: Path) -> Facts:
        sources = [self.out / "1_harvest" / TRACES]
        if self.recipe.answers:
            sources.append(self.out / "2_answers" / EXAMPLES)
        seed = self.recipe.harvest.seed
        return mixture.mix(sources, self.recipe.general, seed, folder / EXAMPLES)

    def _fine_tune(self, folder: Path) -> Facts:
        from tramontane.models import loading

        output = folder / "model"
        config = self._sft_config(output)
        context = loading.context_length(loading.load_config(self.recipe.model))
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
                show = partial(_show, screen, config.steps)
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
            "name": self.recipe.name,
            "model": self.recipe.model,
            "tokenizer": self.rl_config.tokenizer,
            "output": str(output),
            "data": prompts | {"train": examples, "thinking_tags": tags},
        }
        return parse(SFTConfig, raw, "sft.set")

    def _select(self, folder: Path) -> Facts:
        kept = numbered(self.out / "4_sft/model" / KEPT)
        models = {path.name: str(path) for path in kept}
        plan = measuring_plan(models, self.recipe.select, self.rl_config)
        found = compare_models(plan, folder, self.screens)
        means = {name: mean_pass_at_1(found, name) for name in models}
        best = max(means, key=means.__getitem__)  # the earliest in a tie
        return {"best": best, "weights": models[best], "pass_at_1": means}

    def _train(self, folder: Path) -> Facts:
        return train_or_resume(self._rl("6_rl", self._facts("5_select")["weights"]), self.screens)

    def _train_only(self, folder: Path) -> Facts:
        return train_or_resume(self._rl("7_rl_only", self.recipe.model), self.screens)

    def _compare(self, folder: Path) -> Facts:
        models = {"start": self.recipe.model, "teacher": self._teacher_weights}
        models["SFT"] = self._facts("5_select")["weights"]
        if self.recipe.rl_only:
            models["RL"] = self._facts("7_rl_only")["weights"]
        models["SFT+RL"] = self._facts("6_rl")["weights"]
        plan = measuring_plan(models, self.recipe.compare, self.rl_config)
        found = compare_models(plan, folder, self.screens)
        columns = [
            Column("start", "start"),
            Column("teacher", "teacher"),
            Column("SFT", "SFT only"),
            *([Column("RL", "RL only")] if self.recipe.rl_only else []),
            Column("SFT+RL", "SFT + RL"),
        ]
        names = [step.name for step in self.steps()[:-1]]
        steps = {name: self._facts(name) for name in names}
        write_report(self.out, "Magistral Small's recipe", columns, found, steps)
        return {"pass_at_1": {name: mean_pass_at_1(found, name) for name in models}}


def _show(screen: Screen, steps: int, metrics: SFTMetrics) -> None:
    screen.phase("fine-tuning", metrics.step, steps)
