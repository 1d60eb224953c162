"""A recipe's steps, one folder each: finished steps are skipped, an unfinished one resumes."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tramontane.config import Config, Section, load_section
from tramontane.errors import InputError
from tramontane.workplace import check_folder, write_whole

RECIPE = "recipe.yaml"  # the resolved settings
DONE = "done.json"  # in the folder of a finished step: its facts

Facts = dict[str, Any]
# Takes a step's number, the number of steps, its title, and True if it is finished already.
Announce = Callable[[int, int, str, bool], object]


@dataclass(frozen=True)
class Step:
    """One step of a recipe.

    Args:
        name: name of its folder.
        title: what it does, for display.
        uses: sections of the recipe that must not change once the step has begun.
        work: does or resumes the step in its folder, with the facts of the steps before it by name;
            returns facts for the report.
        check: loads and checks the step's input that exists before the recipe starts.
        training: the config that the step trains with, if it does.
        measures: the step only evaluates models: its sections may change until it is done, since
            each file of completions records its settings.
    """

    name: str
    title: str
    uses: tuple[str, ...]
    work: Callable[[Path, Mapping[str, Facts]], Facts]
    check: Callable[[], object]
    training: Config | None = None
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
    trained: list[Config] = []
    for step in steps:
        if (out / step.name / DONE).is_file() or step.training in trained:
            continue
        trained += [step.training] if step.training else []
        try:
            step.check()
        except InputError as error:
            raise InputError(f"{', '.join(step.uses)} (step {step.name}): {error}") from None


def begin(recipe: Section, out: Path, steps: Sequence[Step]) -> None:
    """`check` a recipe, and write its settings to its folder, which the caller owns."""
    check(recipe, out, steps)
    settings = recipe.model_dump(mode="json")
    write_whole(out / RECIPE, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


def run_steps(out: Path, steps: Sequence[Step], announce: Announce) -> dict[str, Facts]:
    """Do the unfinished steps, in order; returns the facts of all, by name.

    Raises:
        KeyboardInterrupt: a step was interrupted; the same call continues it.
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
            result = step.work(folder, facts)
            result["seconds"] = round(time.monotonic() - began, 1)  # of the last session
            write_whole(done, json.dumps(result, indent=2) + "\n")
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # the next step's workers may be different processes
        facts[step.name] = json.loads(done.read_text(encoding="utf-8"))
    return facts
