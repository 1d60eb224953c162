"""A recipe's steps, one folder each: finished steps are skipped, an unfinished one resumes."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from tramontane.config import Config, Section, load_section, parse_settings, read_settings
from tramontane.data.objects import override_texts
from tramontane.errors import InputError
from tramontane.evaluation import comparison
from tramontane.evaluation.checkpoint import problems_of
from tramontane.evaluation.comparison import Comparison
from tramontane.evaluation.settings import Settings, settings_for
from tramontane.recipes.config import MeasuredOn, RunSettings
from tramontane.run.folder import RunFolder
from tramontane.run.input import RunInput, read_input
from tramontane.run.screen import Screen
from tramontane.workplace import check_folder, write_whole

RECIPE = "recipe.yaml"  # the resolved settings
DONE = "done.json"  # in the folder of a finished step: its facts

Facts = dict[str, Any]
Screens = Callable[[], Screen]  # opens a screen for one phase of work
# Takes a step's number, the number of steps, its title, and True if it is finished already.
Announce = Callable[[int, int, str, bool], object]


class Stopped(Exception):
    """A step was interrupted; the same command continues it."""


@dataclass(frozen=True)
class Step:
    """One step of a recipe.

    Args:
        name: name of its folder.
        title: what it does, for display.
        uses: sections of the recipe that must not change once the step has begun.
        work: does or resumes the step in its folder, with the facts of the steps before it by name;
            returns facts for the report.
        read: loads input of the step that exists before the recipe starts, without torch, which
            takes seconds to import.
        check: loads the rest of that input, and checks it.
        measures: the step only evaluates models: its sections may change until it is done, since
            each file of completions records its settings.
    """

    name: str
    title: str
    uses: tuple[str, ...]
    work: Callable[[Path, Mapping[str, Facts]], Facts]
    read: Callable[[], object] | None = None
    check: Callable[[], object] | None = None
    measures: bool = False

    def fixes(self, out: Path) -> bool:
        """True if the sections used by the step can no longer change."""
        folder = out / self.name
        return (folder / DONE).is_file() if self.measures else folder.is_dir()


def check(recipe: Section, out: Path, steps: Sequence[Step]) -> None:
    """Check a recipe before any work is done: the settings against those in its folder, and the
    input of unfinished steps.

    Raises:
        InputError: the first error found; or the folder has a recipe with different settings.
    """
    check_folder(out)
    file = out / RECIPE
    if file.is_file():
        before = load_section(type(recipe), file).model_dump(mode="json")
        free = {key for step in steps for key in step.uses}
        free -= {key for step in steps if step.fixes(out) for key in step.uses}
        settings = recipe.model_dump(mode="json")
        if changed := [k for k in settings if before[k] != settings[k] and k not in free]:
            raise InputError(
                f"{out}: already started with different settings ({', '.join(changed)}); use "
                f"those of {file}, or name another folder (out=FOLDER)"
            )
    todo = [step for step in steps if not (out / step.name / DONE).is_file()]
    checked = set()  # steps may share a check
    for step, work in [(step, step.read) for step in todo] + [(step, step.check) for step in todo]:
        if work is None or work in checked:
            continue
        checked.add(work)
        try:
            work()
        except InputError as error:
            raise InputError(f"{', '.join(step.uses)} (step {step.name}): {error}") from None


def begin(recipe: Section, out: Path, steps: Sequence[Step]) -> None:
    """`check` a recipe, and write its settings to its folder, which the caller owns."""
    check(recipe, out, steps)
    settings = recipe.model_dump(mode="json")
    write_whole(out / RECIPE, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


def run_steps(out: Path, steps: list[Step], announce: Announce) -> dict[str, Facts]:
    """Do the unfinished steps, in order; returns the facts of all, by name.

    Raises:
        Stopped: a step was interrupted.
    """
    import torch

    facts: dict[str, Facts] = {}
    for number, step in enumerate(steps, 1):
        folder = out / step.name
        done = folder / DONE
        announce(number, len(steps), step.title, done.is_file())
        if not done.is_file():
            folder.mkdir(exist_ok=True)
            began = time.monotonic()
            found = step.work(folder, facts)
            found["seconds"] = round(time.monotonic() - began, 1)  # of the last session
            write_whole(done, json.dumps(found, indent=2) + "\n")
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # the next step's workers may be different processes
        facts[step.name] = json.loads(done.read_text(encoding="utf-8"))
    return facts


def flat(keys: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys of a `set` by dotted path: `{data: {train: a}}` and `{data.train: a}` are the same."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def training_config(
    settings: RunSettings,
    defaults: Mapping[str, Any],
    keys: Mapping[str, Any],
    where: str = "rl.set",
) -> Config:
    """The config of a training run.

    Args:
        settings: the recipe's part.
        defaults: keys that apply if neither the config file nor `set` has them.
        keys: keys set by the recipe.
        where: the recipe's key that holds `set`, for errors.

    Raises:
        InputError: no such file, an invalid key, or a key in `set` that the recipe sets.
    """
    raw = read_settings(settings.config) if settings.config else {}
    changes = flat(settings.set)
    if taken := sorted(keys.keys() & changes.keys()):
        raise InputError(f"{where}: the recipe decides {', '.join(taken)}; remove it")
    present = flat(raw)
    missing = {key: value for key, value in defaults.items() if key not in present}
    texts = override_texts({**missing, **changes, **keys})
    return parse_settings(Config, raw, texts, settings.config or "rl")


@dataclass(frozen=True)
class Training:
    """Training with one config, from any weights.

    Args:
        config: the training config, with the recipe's start as model.
    """

    config: Config

    @cached_property
    def _input(self) -> RunInput:
        return read_input(self.config)

    def read(self) -> object:
        """Load the data, without torch.

        Raises:
            InputError: it is invalid.
        """
        return self._input

    def check(self) -> None:
        """Load and check the rest of the input, with the models that already exist.

        Raises:
            InputError: the model, the data or the sizes are invalid.
        """
        from tramontane.run.prepare import prepare

        prepare(self.config, self._input)

    def run(self, model: str, folder: Path, screens: Screens) -> Facts:
        """Train a model in a folder, or continue the run there; its weights and figures.

        Raises:
            Stopped: the run was interrupted.
        """
        from tramontane.run.train import train
        from tramontane.view.report import write_report

        config = self.config.model_copy(update={"model": model, "run_dir": str(folder)})
        with RunFolder.owned(folder) as run:
            if not run.finished:
                if run.begun:
                    config = run.config()
                with closing(screens()) as screen:
                    if not train(config, screen, run, report=write_report).finished:
                        raise Stopped
        summary = json.loads((folder / "summary.json").read_text())
        keys = ("updates", "minutes", "trained_completion_tokens")
        return {"weights": str(newest_weights(run)), **{key: summary[key] for key in keys}}


def newest_weights(run: RunFolder) -> Path:
    """The weights of a run's newest checkpoint.

    Raises:
        InputError: there is none.
    """
    weights = run.checkpoint(run.newest_version) / "weights"
    if not weights.is_dir():
        raise InputError(f"{run.path}: it has no checkpoint with weights")
    return weights


@dataclass(frozen=True)
class Measuring:
    """An evaluation of models, with the prompts of a training config.

    Args:
        on: the suites and how completions are drawn.
        config: the training config.
    """

    on: MeasuredOn
    config: Config

    def plan(self, models: Mapping[str, str]) -> dict[str, dict[str, Settings]]:
        """The settings by suite, then by model.

        Raises:
            InputError: an invalid protocol, or two suites with the same name.
        """
        sampling: Any = self.on.sampling
        return {
            suite: {
                label: settings_for(model, source, self.config, [], sampling)
                for label, model in models.items()
            }
            for suite, source in comparison.suites(self.on.suites).items()
        }

    def read(self) -> None:
        """Load the problems, without torch.

        Raises:
            InputError: no such source, or an invalid protocol.
        """
        for settings in self.plan({"start": self.config.model}).values():
            problems_of(settings["start"])

    def check(self, models: Mapping[str, str]) -> None:
        """Load and check all input, with models that already exist.

        Raises:
            InputError: no such model or source, or an invalid protocol.
        """
        comparison.prepare_suites(self.plan(models))

    def compare(self, models: Mapping[str, str], folder: Path, screens: Screens) -> Comparison:
        """Compare models; finished problems in the folder are kept."""
        plan = self.plan(models)
        with closing(screens()) as screen:

            def show(suite: str, model: str, done: int, total: int) -> None:
                screen.phase(f"{suite}, {model}", done, total)

            return comparison.compare(plan, folder, on_progress=show)


def mean_pass_at_1(found: Comparison, models: Mapping[str, str]) -> dict[str, float]:
    """Each model's mean pass@1 over the suites."""
    return {
        model: sum(suite[model].result.pass_at_1.value for suite in found.values()) / len(found)
        for model in models
    }
