"""Fewer and larger kernels for decode steps on a GPU, where each of a thousand small ones costs
microseconds: one product for the layers that read the same input, and compiled blocks.

State dicts keep their names and tensors, and weights that are written in place reach the products.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tramontane.models.compiling import compile_module, compiled, missing_for_compiling
from tramontane.models.products import FullProduct, ProductPart

logger = logging.getLogger("tramontane")

# Names that transformers gives to linear layers of one module with the same input.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fuse(model: PreTrainedModel) -> None:
    """Merge products, and compile the blocks if this machine has what compiling needs."""
    merge_products(model)
    if missing := missing_for_compiling("cuda"):
        logger.warning(
            "decode steps are not compiled, so they take about three times as many kernels: there "
            "is %s. generator.compile=false silences this warning",
            missing,
        )
    else:
        compile_blocks(model)


def is_merged(model: PreTrainedModel) -> bool:
    """True if the model's weights must be written in place."""
    return any(isinstance(module, ProductPart) for module in model.modules())


def compiled_like(model: PreTrainedModel, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled if the model's blocks are."""
    if all(module._compiled_call_impl is None for module in model.modules()):
        return function
    return compiled(function)


@contextmanager
def uncompiled(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: the model's blocks run as they are written. Needed under a dispatch mode, as
    in `examine_model`: code that torch meets there is never compiled afterwards."""
    calls = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl}
    for module in calls:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in calls.items():
            module._compiled_call_impl = call


def merge_products(model: PreTrainedModel) -> None:
    """Compute linear layers with the same input as one product, where the model has them under the
    usual names; others stay as they are. From then on weights must be written in place.
    """
    for module in list(model.modules()):
        for names in _TOGETHER:
            layers = [getattr(module, name, None) for name in names]
            plain = [layer for layer in layers if type(layer) is nn.Linear]
            if len(plain) < len(names) or len({(p.bias is None, p.in_features) for p in plain}) > 1:
                continue
            product = FullProduct(plain)
            for place, (name, layer) in enumerate(zip(names, plain, strict=True)):
                setattr(module, name, ProductPart(layer, layer.weight, product, place))


class _LayerIndex:
    """An attention layer's number in a form whose value the compiler ignores: otherwise it would
    compile each layer separately, and give up after eight."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __index__(self) -> int:
        return self._number


def compile_blocks(model: PreTrainedModel, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each block when it first runs, once for all layers and numbers of rows; likewise the
    rotary embeddings and the last norm.

    In a block, attention with its writes is one operation, which is not compiled.

    Args:
        model: prepared by `examine_model`.
        backend: of torch.compile.
    """
    blocks = set(model._no_split_modules or ())
    for module in model.modules():
        if isinstance(number := getattr(module, "layer_idx", None), int):
            setattr(module, "layer_idx", _LayerIndex(number))  # noqa: B010
        children = list(module.children())
        lists = [child for child in children if isinstance(child, nn.ModuleList)]
        if any(type(block).__name__ in blocks for each in lists for block in each):
            small = [c for c in children if not isinstance(c, nn.ModuleList | nn.Embedding)]
            for part in [*small, *(block for each in lists for block in each)]:
                compile_module(part, backend)
