"""The cold start of a run: fine-tuning before the reinforcement learning (`cold_start`).

Magistral Small was trained this way (arXiv 2506.10910, section 5). The result is `sft/` in the
run's folder, the checkpoint that reinforcement learning starts from.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tramontane.config import Config, PromptConfig, SFTConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.models import loading
from tramontane.models.shape import load_shape
from tramontane.run.threads import torch_threads
from tramontane.sft.examples import ExampleStream
from tramontane.sft.sft import SFTMetrics, is_unfinished, sft
from tramontane.trainer import compiling, lora
from tramontane.workplace import commit

if TYPE_CHECKING:
    from tramontane.run.interrupt import Interrupt
    from tramontane.run.session import Session


def check(config: Config, encoder: PromptEncoder) -> None:
    """Check the machine and the examples of the cold start, before any work is done.

    Raises:
        InputError: a missing device or compiler, or unusable examples.
    """
    settings = supervised_config(config, Path("sft"))
    loading.check_device(settings.device, "cold_start.device")
    if settings.compile:
        compiling.check(settings.device)
    if settings.lora:
        lora.check(settings.lora, load_shape(config.model).linear_layers)
    context = loading.context_length(loading.load_config(config.model))
    ExampleStream(settings, encoder, context)


def supervised_config(config: Config, output: Path) -> SFTConfig:
    """The supervised run at the start of a training run, with the same prompt format."""
    assert config.cold_start is not None
    settings = config.cold_start.model_dump()
    settings["data"] |= {key: getattr(config.data, key) for key in PromptConfig.model_fields}
    settings["data"]["thinking_tags"] = config.verifier.thinking_tags
    of_run = {
        "name": config.name,
        "seed": config.seed,
        "model": config.model,
        "tokenizer": config.tokenizer,
        "output": str(output),
    }
    return SFTConfig.model_validate(settings | of_run)


def fine_tune(session: Session, interrupt: Interrupt) -> None:
    """Fine-tune the base model into `session.model`, or finish an earlier session's fine-tuning.

    Raises:
        KeyboardInterrupt, SystemExit: a signal ended it, after the current step.
    """
    if session.config.cold_start is None or session.sft_folder.is_dir():
        return
    unfinished = session.sft_folder.with_suffix(".partial")
    settings = supervised_config(session.config, unfinished)

    def show(metrics: SFTMetrics) -> None:
        session.screen.phase("cold start", metrics.step, settings.steps)

    # All cores, since no generator runs during the cold start; the trainer's threads share them.
    threads = max(1, len(os.sched_getaffinity(0)) // settings.threads)
    with (
        session.folder.writing(unfinished),
        torch_threads(threads),
        interrupt.steps() as stopping,
    ):
        sft(settings, is_unfinished(unfinished), show, stopping)
        commit(unfinished, session.sft_folder)
