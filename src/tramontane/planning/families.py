"""Whether a run's models can be trained and sampled, asked of their configs alone."""

from __future__ import annotations

import copy

from tramontane.config import Config
from tramontane.generator.forward import check_steps, examine_model
from tramontane.models.families import ForwardFails
from tramontane.models.miniature import miniature
from tramontane.models.shape import load_shape_config
from tramontane.trainer import Trainer

TOKENS = 64  # positions of the engine's cache


def check_families(config: Config, shape: str | None = None) -> None:
    """Check small models of the families of the run's models.

    Args:
        config: the run's config.
        shape: the trained model, as in `models.shape.load_shape`; None: the config's.

    Raises:
        InputError: as trainer, generator or teacher raise it when they load the model.
    """
    for teacher in config.teachers:
        miniature(load_shape_config(teacher))
    try:
        small = miniature(load_shape_config(shape or config.model))
    except ForwardFails:  # at these widths; the whole model will tell
        return
    if config.generator.kind == "slots":
        sampled = copy.deepcopy(small).requires_grad_(False)
        examine_model(sampled, TOKENS)
        check_steps(sampled)
    numerics = {"device": "cpu", "dtype": "float32", "threads": 1, "compile": False}
    alone = numerics | {"ranks": 1, "context_parallel": 1}
    Trainer(small, config.trainer.model_copy(update=alone), updates=1)
