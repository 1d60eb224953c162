"""Whether a run's models can be trained and sampled, asked of their configs alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from tramontane.config import Config, TrainerConfig
from tramontane.generator.forward import check_steps, examine_model
from tramontane.models.families import ForwardFails
from tramontane.models.miniature import miniature
from tramontane.models.shape import load_shape_config
from tramontane.trainer import Trainer

TOKENS = 64  # positions of the engine's cache

_passed: set[tuple[str, ...]] = set()  # (class and keys of a model's config, worker, its settings)


def check_families(config: Config, shape: str | None = None) -> None:
    """Check small models of the families of the run's models, once in a process: the cells of a
    sweep and the steps of a recipe have the same.

    Args:
        config: the run's config.
        shape: the trained model, as in `models.shape.load_shape`; None: the config's.

    Raises:
        InputError: as trainer, generator or teacher raise it when they load the model.
    """
    for teacher in config.teachers:
        own = load_shape_config(teacher)
        if due := _due(own, [("teacher",)]):
            miniature(own)
            _passed.update(due)
    numerics = {"device": "cpu", "dtype": "float32", "threads": 1, "compile": False}
    alone = numerics | {"ranks": 1, "context_parallel": 1}
    trainer = config.trainer.model_copy(update=alone)
    checks: dict[tuple[str, ...], Callable[[PreTrainedModel], object]] = {}
    if config.generator.kind == "slots":
        checks["generator",] = _sampled
    settings = trainer.model_dump_json(exclude={"learning_rate"})
    checks["trainer", settings] = partial(_trained, trainer)
    own = load_shape_config(shape or config.model)
    if not (due := _due(own, checks)):
        return
    try:
        small = miniature(own)
    except ForwardFails:  # at these widths; the whole model will tell
        return
    for key, worker in due.items():
        checks[worker](small)
        _passed.add(key)


def _due(own: Any, workers: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The workers as which no small model of a config's family has passed, by their place in
    `_passed`."""
    family = f"{type(own).__module__}.{type(own).__qualname__}", own.to_json_string(use_diff=False)
    due = {(*family, *worker): worker for worker in workers}
    return {key: worker for key, worker in due.items() if key not in _passed}


def _sampled(small: PreTrainedModel) -> None:
    sampled = copy.deepcopy(small).requires_grad_(False)
    examine_model(sampled, TOKENS)
    check_steps(sampled)


def _trained(config: TrainerConfig, small: PreTrainedModel) -> None:
    Trainer(small, config, updates=1)
