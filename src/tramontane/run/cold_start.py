"""The cold start of a run: fine-tuning before the reinforcement learning (`cold_start`).

Magistral Small was trained this way (arXiv 2506.10910, section 5). The result is `sft/` in the
run's folder, the checkpoint that reinforcement learning starts from.
"""

from __future__ import annotations

import os
from pathlib import Path

from tramontane.config import Config, PromptConfig, SFTConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.interrupt import Interrupt
from tramontane.models import loading
from tramontane.models.shape import load_shape
from tramontane.placement.thread import torch_threads
from tramontane.run.folder import RunFolder
from tramontane.run.screen import Screen
from tramontane.sft.examples import ExampleStream
from tramontane.sft.sft import SFTMetrics, is_unfinished, sft
from tramontane.trainer import forwards, lora
from tramontane.workplace import commit


def check(config: Config, encoder: PromptEncoder) -> None:
    """Check the machine and the examples of the cold start, before any work is done.

    Raises:
        InputError: a missing device or compiler, or unusable examples.
    """
    settings = supervised_config(config, Path("sft"))
    loading.check_device(settings.device, "cold_start.device")
    forwards.compilation(settings)
    if settings.lora:
        lora.check(settings.lora, load_shape(config.model).linear_layers)
    context = loading.context_length(loading.load_config(config.model))
    ExampleStream(settings, encoder, context)


def supervised_config(config: Config, output: Path) -> SFTConfig:
    """The supervised run at the start of a training run, with the same prompt format."""
    assert config.cold_start is not None
    settings = config.cold_start.model_dump()
    shared = (*PromptConfig.model_fields, "effort")
    settings["data"] |= {key: getattr(config.data, key) for key in shared}
    settings["data"]["thinking_tags"] = config.verifier.thinking_tags
    settings["data"]["tokens"] = config.conversation.tokens
    of_run = {
        "name": config.name,
        "seed": config.seed,
        "model": config.model,
        "tokenizer": config.tokenizer,
        "output": str(output),
    }
    return SFTConfig.model_validate(settings | of_run)


def _cores() -> int:
    """The cores that this process may use: all that the system lets it have, or as many as
    OMP_NUM_THREADS says, as in a study's runs beside each other."""
    cores, wanted = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(wanted)) if wanted.isdecimal() else cores


def fine_tune(config: Config, folder: RunFolder, screen: Screen, interrupt: Interrupt) -> None:
    """Fine-tune the base model into `folder.sft`, or finish an earlier session's fine-tuning.

    Raises:
        KeyboardInterrupt, SystemExit: a signal ended it, after the current step.
    """
    if folder.sft.is_dir():
        return
    unfinished = folder.sft.with_suffix(".partial")
    settings = supervised_config(config, unfinished)

    def show(metrics: SFTMetrics) -> None:
        screen.phase("cold start", metrics.step, settings.steps)

    # No generator runs during the cold start; the trainer's threads share the cores.
    threads = max(1, _cores() // settings.threads)
    with (
        folder.writing(unfinished),
        torch_threads(threads),
        interrupt.steps() as stopping,
    ):
        sft(settings, is_unfinished(unfinished), show, stopping)
        commit(unfinished, folder.sft)
