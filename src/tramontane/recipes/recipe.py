"""The two recipes of Magistral (arXiv 2506.10910, section 5), as lists of steps.

Medium is reinforcement learning alone, in stages. Small is fine-tuning on a teacher's traces, or
on-policy distillation from the teacher, then reinforcement learning. Checks before the work use the
models that exist before the recipe starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from tramontane.config import Config, PromptConfig, SFTConfig, parse, parse_settings, read_settings
from tramontane.data.objects import override_texts
from tramontane.errors import InputError
from tramontane.evaluation import comparison
from tramontane.evaluation.checkpoint import encoder_of, problems_of
from tramontane.evaluation.checkpoint import prepare as prepare_evaluation
from tramontane.evaluation.comparison import Comparison
from tramontane.evaluation.settings import settings_for
from tramontane.models.names import find_weights, numbered
from tramontane.pages import render
from tramontane.recipes import mixture
from tramontane.recipes.config import MeasuredOn, MediumRecipe, RunSettings, SmallRecipe, flat
from tramontane.recipes.harvest import finished_run, harvest
from tramontane.recipes.steps import Announce, Facts, Step, begin, run_steps
from tramontane.run.folder import RunFolder
from tramontane.run.screen import QuietScreen, Screen
from tramontane.sft.examples import ExampleStream
from tramontane.sft.sft import KEPT, SFTMetrics, is_unfinished
from tramontane.start import dry_run, sft, train_or_resume
from tramontane.workplace import owned_folder, write_whole

TRACES = "traces.jsonl"
EXAMPLES = "examples.jsonl"
REPORT = "report"  # .md and .html
# The paper's keys of Small's training, as defaults.
PAPER = {"generator.temperature": 1.0, "trainer.objective.magistral.eps_high": 0.3}

Recipe = MediumRecipe | SmallRecipe
RecipeName = Literal["medium", "small"]
KINDS: dict[RecipeName, type[Recipe]] = {"medium": MediumRecipe, "small": SmallRecipe}
Screens = Callable[[], Screen]  # opens a screen for one phase of work


def run(
    recipe: Recipe,
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
        KeyboardInterrupt: training was interrupted; the same call continues it.
    """
    out, steps = Path(recipe.out), steps_of(recipe, screens)
    with owned_folder(out, "followed as a recipe"):
        begin(recipe, out, steps)
        return run_steps(out, steps, announce)


def steps_of(recipe: Recipe, screens: Screens = QuietScreen) -> list[Step]:
    """The recipe's steps, in order.

    Raises:
        InputError: an invalid training config, or Medium's without stages.
    """
    if isinstance(recipe, MediumRecipe):
        return _medium(recipe, screens)
    return _small(recipe, screens)


def _medium(recipe: MediumRecipe, screens: Screens) -> list[Step]:
    rl = training_config(recipe, recipe.rl)
    if not rl.stages:
        raise InputError(
            "rl: the recipe trains in stages (harder data, longer answers, smaller batches); "
            "give the config a section `stages`, or use `tramontane train`"
        )
    return [
        _train("1_rl", "RL in stages", ("model", "rl"), rl, screens),
        _compare("2_compare", recipe, rl, {"RL": "1_rl"}, screens),
    ]


def _small(recipe: SmallRecipe, screens: Screens) -> list[Step]:
    rl = training_config(recipe, recipe.rl, PAPER)
    if recipe.distill:
        title = f"distillation from {recipe.teacher}"
        uses = ("model", "teacher", "distillation", "rl")
        steps = [_train("1_distill", title, uses, distillation_config(recipe), screens)]
        label = "distillation"
    else:
        label, steps = "SFT", _FineTuning(recipe, rl, screens).steps()
    tuned = steps[-1].name
    number = int(tuned[0])
    after, alone = f"{number + 1}_rl", f"{number + 2}_rl_only"
    steps.append(_train(after, f"RL after {label}", ("rl",), rl, screens, tuned))
    trained = {label: tuned}
    if recipe.rl_only:
        steps.append(_train(alone, "RL alone", ("model", "rl"), rl, screens))
        trained["RL"] = alone
    trained[f"{label}+RL"] = after
    return [*steps, _compare(f"{number + 3}_compare", recipe, rl, trained, screens)]


# ------------------------------------------------------------------------------------- training


def training_config(
    recipe: Recipe,
    settings: RunSettings,
    defaults: Mapping[str, Any] | None = None,
    where: str = "rl.set",
) -> Config:
    """The config of a training from the recipe's start.

    Args:
        recipe: the recipe.
        settings: its part.
        defaults: keys that apply if neither the config file nor `set` has them.
        where: the recipe's key that holds `set`, for errors.

    Raises:
        InputError: no such file, an invalid key, or a key in `set` that the recipe sets.
    """
    keys = {"name": recipe.name, "model": recipe.model, "run_dir": None}
    raw = read_settings(settings.config) if settings.config else {}
    changes = flat(settings.set)
    if taken := sorted(keys.keys() & changes.keys()):
        raise InputError(f"{where}: the recipe decides {', '.join(taken)}; remove it")
    present = flat(raw)
    missing = {key: value for key, value in (defaults or {}).items() if key not in present}
    texts = override_texts({**missing, **changes, **keys})
    return parse_settings(Config, raw, texts, settings.config or "rl")


def distillation_config(recipe: SmallRecipe) -> Config:
    """The training with the teacher's scores in place of rewards.

    Raises:
        InputError: see `training_config`.
    """
    changes = {
        **flat(recipe.rl.set),
        "pipeline.updates": recipe.distillation.updates,
        "pipeline.diversity": "none",  # rewards do not count
        "trainer.objective.name": "distill",
        "trainer.objective.distill.top_k": 16,
        "teacher.model": recipe.teacher,
        **flat(recipe.distillation.set),
    }
    settings = RunSettings(config=recipe.rl.config, set=changes)
    return training_config(recipe, settings, PAPER, "distillation.set")


def _train(
    name: str, title: str, uses: tuple[str, ...], config: Config, screens: Screens, after: str = ""
) -> Step:
    """A step that trains the result of the step `after`, by default the start."""

    def work(folder: Path, facts: Mapping[str, Facts]) -> Facts:
        run = RunFolder(folder / "run")
        if not run.finished:
            model = facts[after]["weights"] if after else config.model
            settings = config.model_copy(update={"model": model, "run_dir": str(run.path)})
            if not train_or_resume(settings, screen=screens()).finished:
                raise KeyboardInterrupt
        summary = json.loads((run.path / "summary.json").read_text())
        keys = ("updates", "minutes", "trained_completion_tokens")
        return {"weights": find_weights(str(run.path)), **{key: summary[key] for key in keys}}

    return Step(name, title, uses, work, partial(dry_run, config), training=config)


# ------------------------------------------------------------------- fine-tuning on traces (Small)


def _teacher(recipe: SmallRecipe) -> str:
    """The teacher: a finished run; for distillation, also a checkpoint.

    Raises:
        InputError: not a run, or not finished.
    """
    if not recipe.distill or RunFolder(recipe.teacher).begun:
        finished_run(recipe.teacher)
    return recipe.teacher


@dataclass(frozen=True)
class _FineTuning:
    """The steps up to the best fine-tuned checkpoint; `rl` is the config of the training after."""

    recipe: SmallRecipe
    rl: Config
    screens: Screens

    def steps(self) -> list[Step]:
        recipe, start = self.recipe, {"start": self.recipe.model}
        harvested, tuned = ("model", "teacher", "harvest", "rl"), ("model", "sft", "rl")
        asked, mixed = ("teacher", "answers"), ("harvest", "answers", "general")
        first, further = "harvest the teacher's traces", "the teacher answers further prompts"
        steps = [
            Step("1_harvest", first, harvested, self._harvest, lambda: _teacher(recipe)),
            Step("2_answers", further, asked, self._answer, self._check_answers),
            Step("3_mixture", "mix the examples", mixed, self._mix, self._read_general),
            Step("4_sft", "fine-tune on them", tuned, self._fine_tune, self._check_sft),
            Step(
                "5_select",
                "choose the best checkpoint",
                ("select",),
                self._select,
                lambda: comparison.prepare_suites(_plan(recipe.select, self.rl, start)),
                measures=True,
            ),
        ]
        return steps if recipe.answers else [*steps[:1], *steps[2:]]

    def _harvest(self, folder: Path, facts: Mapping[str, Facts]) -> Facts:
        recipe, tags = self.recipe, encoder_of(self.rl).tags
        return asdict(harvest(recipe.teacher, folder / TRACES, recipe.harvest, tags))

    def _check_answers(self) -> None:
        assert self.recipe.answers is not None
        settings = mixture.answer_settings(self.recipe.answers, _teacher(self.recipe))
        prepare_evaluation(settings, problems_of(settings, "train"))

    def _answer(self, folder: Path, facts: Mapping[str, Facts]) -> Facts:
        config = self.recipe.answers
        assert config is not None
        settings = mixture.answer_settings(config, _teacher(self.recipe))
        with closing(self.screens()) as screen:
            show = partial(screen.phase, "answers")
            return mixture.answer(settings, config.keep, folder, encoder_of(self.rl).tags, show)

    def _read_general(self) -> None:
        if self.recipe.general:
            mixture.general_pairs(self.recipe.general, 1, 0)

    def _mix(self, folder: Path, facts: Mapping[str, Facts]) -> Facts:
        recipe, out = self.recipe, folder.parent
        sources = [out / "1_harvest" / TRACES]
        sources += [out / "2_answers" / EXAMPLES] if recipe.answers else []
        return mixture.mix(sources, recipe.general, recipe.harvest.seed, folder / EXAMPLES)

    def _check_sft(self) -> None:
        from tramontane.models import loading

        config = self._sft_config(Path(self.recipe.out) / "4_sft")
        loading.check_device(config.device, "sft.set.device")
        encoder_of(self.rl)

    def _fine_tune(self, folder: Path, facts: Mapping[str, Facts]) -> Facts:
        from tramontane.models import loading

        config, asked = self._sft_config(folder), self.recipe.sft
        output = Path(config.output)
        context = loading.context_length(loading.load_config(self.recipe.model))
        stream = ExampleStream(config, encoder_of(self.rl), context)
        epoch = stream.steps_of_epoch(config.batch_tokens)
        changes = {"steps": asked.epochs * epoch, "keep_every": epoch}
        if "checkpoint_every" not in asked.set:
            changes["checkpoint_every"] = epoch
        config = config.model_copy(update=changes)
        if not (output / KEPT / f"step_{config.steps}").is_dir():
            with closing(self.screens()) as screen:

                def show(metrics: SFTMetrics) -> None:
                    screen.phase("fine-tuning", metrics.step, config.steps)

                sft(config, resume=is_unfinished(output), on_log=show)
        return {"epochs": asked.epochs, "steps": config.steps}

    def _sft_config(self, folder: Path) -> SFTConfig:
        """The config of the fine-tuning; prompts are written as in reinforcement learning.

        Raises:
            InputError: an invalid key of `sft.set`, or one set by the recipe.
        """
        recipe, data = self.recipe, self.rl.data
        decided = {"steps", "data", "output", "model", "new_model", "keep_every", "name"}
        if taken := sorted(decided & recipe.sft.set.keys()):
            raise InputError(f"sft.set: the recipe decides {', '.join(taken)}; remove it")
        examples = {key: getattr(data, key) for key in PromptConfig.model_fields}
        examples["train"] = str(folder.parent / "3_mixture" / EXAMPLES)
        examples["thinking_tags"] = self.rl.verifier.thinking_tags
        raw = {
            **recipe.sft.set,
            "name": recipe.name,
            "model": recipe.model,
            "tokenizer": self.rl.tokenizer,
            "output": str(folder / "model"),
            "data": examples,
        }
        return parse(SFTConfig, raw, "sft.set")

    def _select(self, folder: Path, facts: Mapping[str, Facts]) -> Facts:
        kept = numbered(folder.parent / "4_sft/model" / KEPT)
        models = {path.name: str(path) for path in kept}
        plan = _plan(self.recipe.select, self.rl, models)
        means = _means(_measure(plan, folder, self.screens))
        best = max(means, key=means.__getitem__)  # the earliest in a tie
        return {"best": best, "weights": models[best], "pass_at_1": means}


# ----------------------------------------------------------------------------------- comparison


def _compare(
    name: str, recipe: Recipe, rl: Config, trained: Mapping[str, str], screens: Screens
) -> Step:
    """A step that compares the models that exist before the recipe starts with the results of other
    steps, by label, and writes the report."""
    small = isinstance(recipe, SmallRecipe)

    def given() -> dict[str, str]:
        teacher = {"teacher": _teacher(recipe)} if isinstance(recipe, SmallRecipe) else {}
        return {"start": recipe.model} | teacher

    def work(folder: Path, facts: Mapping[str, Facts]) -> Facts:
        models = given() | {label: facts[step]["weights"] for label, step in trained.items()}
        found = _measure(_plan(recipe.compare, rl, models), folder, screens)
        title = f"Magistral {'Small' if small else 'Medium'}'s recipe: {[*trained][-1]}"
        write_report(folder.parent, title, found, facts)
        return {"pass_at_1": _means(found)}

    return Step(
        name,
        "compare the models",
        ("compare", "rl_only") if small else ("compare",),
        work,
        lambda: comparison.prepare_suites(_plan(recipe.compare, rl, given())),
        measures=True,
    )


def _plan(on: MeasuredOn, config: Config, models: Mapping[str, str]) -> comparison.Plan:
    """A comparison of models with the prompts of a training config."""
    sampling: Any = on.model_dump(exclude={"suites"}, exclude_none=True)
    return {
        suite: {
            label: settings_for(model, source, config, [], sampling)
            for label, model in models.items()
        }
        for suite, source in comparison.suites(on.suites).items()
    }


def _measure(plan: comparison.Plan, folder: Path, screens: Screens) -> Comparison:
    """Compare models; finished problems in the folder are kept."""
    with closing(screens()) as screen:

        def show(suite: str, model: str, done: int, total: int) -> None:
            screen.phase(f"{suite}, {model}", done, total)

        return comparison.compare(plan, folder, on_progress=show)


def _means(found: Comparison) -> dict[str, float]:
    """Each model's mean pass@1 over the suites."""
    return {
        model: fmean(suite[model].result.pass_at_1.value for suite in found.values())
        for model in next(iter(found.values()))
    }


def write_report(out: Path, title: str, found: Comparison, steps: Mapping[str, Facts]) -> None:
    """Write `report.md` and `report.html`: a table with a column for each model, and rows for each
    suite's pass@1 and, with several samples whose answers can be equal, its majority vote, as in
    the paper's table 2; and the facts of each step."""
    for ending in ("md", "html"):
        text = render(
            f"recipes/report.{ending}.j2",
            title=title,
            columns=list(next(iter(found.values()))),
            rows=_table(found),
            steps={name: _sentence(facts) for name, facts in steps.items()},
        )
        write_whole(out / f"{REPORT}.{ending}", text)


def _table(found: Comparison) -> list[tuple[str, list[str]]]:
    """(name of the figure, its text for each model) of each row, in percent with intervals."""
    rows = []
    for suite, models in found.items():
        results = [model.result for model in models.values()]
        left_out = next(iter(models.values())).left_out
        note = f" ({left_out} overlong problems skipped)" if left_out else ""
        rows.append((f"{suite} pass@1{note}", [_percent(r.pass_at_1) for r in results]))
        k = max(results[0].maj_at_k, default=1)
        if k > 1:
            rows.append((f"{suite} maj@{k}", [_percent(r.maj_at_k[k]) for r in results]))
    return rows


def _percent(estimate: Any) -> str:
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _sentence(facts: Facts) -> str:
    """A step's facts as text: `name: value` in turn, nested ones in brackets."""
    return ", ".join(f"{key.replace('_', ' ')}: {_value(value)}" for key, value in facts.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({_sentence({**value})})"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
