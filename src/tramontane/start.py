"""Starts, resumes and checks runs: `tramontane.train`, `dry_run` and `sft`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from tramontane.data.objects import override_texts
from tramontane.errors import InputError, importing
from tramontane.run.folder import RunFolder
from tramontane.run.task import config_of, new_run, one_or_more, settings_without_sources

# Mistakes in a run's input are reported before torch is imported, which takes seconds.
if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tramontane.config import Config
    from tramontane.data.objects import Settings
    from tramontane.run.prepare import DryRunResult
    from tramontane.run.screen import Screen
    from tramontane.run.session import OnUpdate
    from tramontane.run.summary import TrainResult
    from tramontane.run.task import Data, Function
    from tramontane.types import Reward


class Display(TypedDict, total=False):
    """Keywords of `train` that control its display.

    Args:
        screen: shows progress; by default a `LiveDisplay`.
        quiet: show nothing.
        verbose: show the sizes of the run too, and the whole of the prompt.
        report: draw `report.html` at the end, which takes a few seconds; True by default.
        on_update: called with the metrics of each update (its line of `metrics.jsonl`).
    """

    screen: Screen | None
    quiet: bool
    verbose: bool
    report: bool
    on_update: OnUpdate | None


def train(
    config: Config | str | Path | None = None,
    overrides: Settings | None = None,
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    rewards: Sequence[Function | str | Reward] | None = (),
    environment: Function | str | None = None,
    tools: Sequence[Function | str] | None = (),
    resume: str | Path | None = None,
    **display: Unpack[Display],
) -> TrainResult:
    """Run the whole loop, from a config or Python objects to a finished run folder.

    `train("configs/quickstart.yaml")` is `tramontane train`; `train(model="tiny", data=rows,
    rewards=[function])` defines your own task; both can be combined. See docs/your-rewards.md.

    Args:
        config: a `Config` or the path of one; None: the defaults.
        overrides: `key.sub=value` texts, or a dict of values by `key.sub`; a value may be a
            function, such as a domain's verifier. For a resumed run, only some keys may change.
        model: `tiny`, a checkpoint folder, or a Hugging Face name.
        data: rows to train on: a list of dicts, a `datasets.Dataset`, or the name of a source; or a
            dict (`DatasetDict`) of these with the splits `train` and `eval` (or `test`). A row's
            `problem` (`prompt`, `question`) is a text or a list of chat messages.
        rewards: functions of (problem, text, n_tokens) that return a number from 0 to 1, functions
            of a whole group or of TRL's kind, import paths of these, or `Reward` objects with a
            weight; a single one may stand alone. Rows without domain, answer and tests are graded
            by the rewards alone, as are all rows if there is no config and all rewards have TRL's
            signature.
        environment: replaces `data.environment`: a class, or its import path.
        tools: replace `data.tools`: functions and toolboxes, or their import paths.
        resume: a run folder to continue, instead of a config and all of the above.
        display: see `Display`.

    Raises:
        InputError: before any work is done, except for a full disk, a run without learning signal,
            or a curriculum without problems left.
    """
    rewards, tools = one_or_more(rewards), one_or_more(tools)
    _check_given(resume, config, [*rewards, *tools], model, data, environment)
    if resume is not None:
        RunFolder(resume).check_begun()
        with RunFolder.owned(resume):
            from tramontane.run.changes import open_run

            folder, settings = open_run(resume, override_texts(overrides))
            return _train(settings, folder, **display)
    texts = _with_talk(overrides, environment, tools)
    settings, rows = config_of(config, texts, model=model, data=data, rewards=rewards)
    with new_run(settings, rows) as (folder, settings):
        return _train(settings, folder, **display)


def _with_talk(
    overrides: Settings | None, environment: Function | str | None, tools: Sequence[Function | str]
) -> list[str]:
    talk = {"data.environment": environment, "data.tools": tools}
    return override_texts(overrides) + override_texts({k: v for k, v in talk.items() if v})


def train_or_resume(config: Config, **display: Unpack[Display]) -> TrainResult:
    """Train by a config with a `run_dir`, or continue the run there."""
    if RunFolder(str(config.run_dir)).begun:
        return train(resume=config.run_dir, **display)
    return train(config, **display)


def _train(
    settings: Config,
    folder: RunFolder,
    *,
    screen: Screen | None = None,
    quiet: bool = False,
    verbose: bool = False,
    report: bool = True,
    on_update: OnUpdate | None = None,
) -> TrainResult:
    from tramontane.run.screen import LiveDisplay, QuietScreen

    screen = screen or (QuietScreen() if quiet else LiveDisplay(verbose=verbose))
    screen.phase(f"{settings.name}: reading the data", 0, 0)
    from tramontane.run.input import read_input

    given = read_input(settings)
    screen.phase("loading torch and the model", 0, 0)
    with importing():
        from tramontane.run.train import train as run
        from tramontane.view.report import write_report

    try:
        return run(
            settings,
            screen,
            folder,
            report=write_report if report else None,
            on_update=on_update,
            given=given,
        )
    finally:
        screen.close()


def dry_run(
    config: Config | str | Path | None = None,
    overrides: Settings | None = None,
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    rewards: Sequence[Function | str | Reward] | None = (),
    environment: Function | str | None = None,
    tools: Sequence[Function | str] | None = (),
    resume: str | Path | None = None,
    gpu: str | None = None,
    model_shape: str | None = None,
) -> DryRunResult:
    """Check everything that `train` checks before it starts, and return the run's sizes and the
    memory of its workers.

    A run that does not fit in memory is not an error here; see `result.memory.refusals`.

    Arguments as for `train`, and `gpu`: the GPUs to assume, by name (`h100`) or memory in GiB
    (`"80"`); None: this machine's. `model_shape`: check only sizes, without the model, its
    tokenizer and data; the path of a `config.json` or a name in `models.shape.KNOWN_SHAPES`.

    Raises:
        InputError: for the same reasons as `train`; an unknown GPU or shape.
    """
    rewards, tools = one_or_more(rewards), one_or_more(tools)
    _check_given(resume, config, [*rewards, *tools], model, data, environment)
    overrides = _with_talk(overrides, environment, tools)
    if model_shape is not None:
        overrides = settings_without_sources(config, overrides, on_gpus=gpu is not None)
    rows: dict[str, list[dict[str, Any]]] = {}
    if resume is not None:
        from tramontane.run.changes import open_run

        _, settings = open_run(resume, overrides)
    else:
        settings, rows = config_of(config, overrides, model=model, data=data, rewards=rewards)
    if model_shape is not None:
        with importing():
            from tramontane.planning.families import check_families
            from tramontane.run.prepare import sizes_of_shape

        check_families(settings, model_shape)
        return sizes_of_shape(settings, model_shape, gpu)
    if not rows:
        return _sizes(settings, gpu)
    with new_run(settings, rows) as (_, settings):
        return _sizes(settings, gpu)


def _sizes(settings: Config, gpu: str | None) -> DryRunResult:
    from tramontane.run.input import read_input

    given = read_input(settings)
    with importing():
        from tramontane.planning.families import check_families
        from tramontane.run.header import header, opening_of
    from tramontane.run.prepare import prepare, sizes

    prepared = prepare(settings, given)
    check_families(prepared.config)
    return replace(sizes(prepared, gpu), header=header(prepared, opening_of(prepared)))


def _check_given(
    resume: str | Path | None, config: object, functions: Sequence[Any], *others: object
) -> None:
    given = bool(functions) or any(other is not None for other in others)
    if resume is None and config is None and not given:
        raise InputError("give a config to start a run, or --resume RUN to continue one")
    if resume is not None and (config is not None or given):
        raise InputError(
            f"a resumed run has its config already: give --resume {resume} without a config, "
            f"model, data, rewards, environment or tools; key=value changes a key"
        )


def sft(
    config: Any,
    overrides: Settings | None = None,
    *,
    resume: bool = False,
    on_log: Callable[[Any], None] | None = None,
) -> Path:
    """Supervised fine-tuning; returns the folder of the result. See `sft.sft.sft`.

    The first Ctrl-C, or SIGTERM, saves the state after the current step.

    Args:
        config: an `SFTConfig` or the path of one.
        overrides: `key.sub=value` texts, or a dict of values by `key.sub`, if `config` is a path.
        resume: continue the config's output folder.
        on_log: called with the `SFTMetrics` of each log line.
    """
    from tramontane.config import load_section
    from tramontane.config.sft import SFTConfig
    from tramontane.interrupt import Interrupt

    with importing():
        from tramontane.sft.sft import sft as run

    if not isinstance(config, SFTConfig):
        config = load_section(SFTConfig, config, override_texts(overrides))
    with Interrupt() as interrupt, interrupt.steps() as stopping:
        return run(config, resume, on_log, stopping)
