"""LoRA (`trainer.lora`): peft's adapters in the linear layers of a frozen model (arXiv 2106.09685).

A layer with weights W [out, in] computes W x + s · B A x, with A [rank, in] and B [out, rank]. Only
A and B are trained, and B is 0 at first. Generators and checkpoint files get W + s · B A under the
model's own names, so nothing outside the trainer knows about adapters.
"""

from __future__ import annotations

import copy
import importlib.util
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tramontane.config import LoraConfig
from tramontane.errors import InputError, install
from tramontane.models.families import SAME, short_sequences
from tramontane.models.packing import pack
from tramontane.models.shape import LinearLayer, linear_layers
from tramontane.trainer import sharding

ADAPTER = "default"  # peft's name of the only adapter
# Parts of the names of a layer's own weights and of its adapter's, once peft has wrapped the layer.
BASE, PARTS = ".base_layer.", {"lora_A", "lora_B"}
# Last parts of names that peft redirects to the fused experts of models that have them.
_REDIRECTED = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


def check(config: LoraConfig, layers: Sequence[LinearLayer]) -> None:
    """Check that peft is installed, and that a model with these layers can have the adapters.

    Raises:
        InputError: peft is not installed; or see `targets`.
    """
    if importlib.util.find_spec("peft") is None:
        raise InputError(f"lora is set, but peft is not installed; install it: {install('lora')}")
    targets(layers, config)


def targets(layers: Sequence[LinearLayer], config: LoraConfig) -> list[LinearLayer]:
    """The layers that get an adapter.

    Raises:
        InputError: a name in `target_modules` that no layer has, a layer whose weight is tied to
            another's or used in another way than W x + b, or a model without linear layers.
    """
    wanted = config.target_modules
    if wanted is None:
        if found := [x for x in layers if x.plain and not (x.head or x.tied)]:
            return found
        raise InputError("lora: the model has no linear layers except for its output head")
    for name in wanted:
        if not any(_matches(layer, name) for layer in layers):
            there = ", ".join(dict.fromkeys(layer.name.rpartition(".")[2] for layer in layers))
            raise InputError(
                f"lora.target_modules: no linear layer has the name {name!r}; choose from {there}"
            )
    found = [layer for layer in layers if any(_matches(layer, name) for name in wanted)]
    if tied := [layer.name for layer in found if layer.tied]:
        raise InputError(
            f"lora.target_modules: the weight of {tied[0]} is also that of another layer (the "
            f"input embeddings, for an output head), which an adapter would not change; leave it "
            f"out"
        )
    if other := [layer.name for layer in found if not layer.plain]:
        raise InputError(
            f"lora.target_modules: the model does not use {other[0]} as a plain linear layer (a "
            f"router of experts, or a weight that Mamba's kernels read), so an adapter would not "
            f"be applied to it; leave it out"
        )
    return found


def _matches(layer: LinearLayer, name: str) -> bool:
    """True if a name in `target_modules` selects the layer, by peft's rule for lists."""
    return layer.name == name or layer.name.endswith(f".{name}")


def parameters(layers: Sequence[LinearLayer], config: LoraConfig) -> int:
    """Number of the adapters' parameters in a model with these linear layers."""
    return sum(config.rank * (x.inputs + x.outputs) for x in targets(layers, config))


class Adapters:
    """The adapters of a model, which is changed in place: its parameters are frozen and cast to the
    dtype that it computes in; the adapters' parameters are float32.

    Args:
        model: a causal LM before it is sharded, possibly on the meta device.
        config: the adapters' sizes and places.
        dtype: number type of the frozen parameters.

    Raises:
        InputError: see `check`.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig, dtype: torch.dtype) -> None:
        layers = linear_layers(model)
        check(config, layers)
        import peft  # an extra

        self._model = model
        names = list(model.state_dict())
        chosen = [layer.name for layer in targets(layers, config)]
        modules, weights = _addresses(chosen, model)
        self._config = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft divides it by the rank
            use_rslora=config.rslora,
            fan_in_fan_out=any(isinstance(model.get_submodule(n), Conv1D) for n in chosen),
            # For weights, peft knows no dropout; loaded adapters drop nothing out in any case.
            lora_dropout=0.0 if weights else config.dropout,
            target_modules=modules,
            target_parameters=weights or None,
            task_type="CAUSAL_LM",
            base_model_name_or_path=model.name_or_path,
        )
        # peft redirects names of layers to fused experts in models that it knows by their config,
        # full names too; a module without a config gets adapters where the names say.
        holder = torch.nn.ModuleDict({"model": model})
        placed = copy.copy(self._config)
        placed.target_modules = [f"model.{name}" for name in chosen]
        placed.target_parameters = None
        peft.inject_adapter_in_model(placed, holder, ADAPTER)
        check_complete(names, model)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else dtype)
        for layer in adapted_layers(model).values():
            layer.lora_dropout[ADAPTER] = _Dropout(config.dropout)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set B to 0 and draw A from U(−1/√in, 1/√in), as peft does. The random seed derives from
        the run's `seed` and the layer's name, so the values do not depend on the number of
        ranks."""
        for name, layer in adapted_layers(self._model).items():
            a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            bound = a.shape[1] ** -0.5
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            values = torch.empty(a.shape).uniform_(-bound, bound, generator=generator)
            if held := sharding.rows(a):
                start, rows = held
                rows.copy_(values[start : start + len(rows)])
            sharding.local(b).zero_()

    def save(self, folder: Path) -> None:
        """Write the adapters in peft's layout, for `peft.PeftModel.from_pretrained`. Collective:
        every rank must call it; rank 0 writes.

        Raises:
            OSError: a file cannot be written.
        """
        tensors = {}
        for name, layer in adapted_layers(self._model).items():
            for part in sorted(PARTS):
                whole = sharding.whole(getattr(layer, part)[ADAPTER].weight.detach())
                tensors[f"base_model.model.{name}.{part}.weight"] = whole.cpu().contiguous()
        if sharding.rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            self._config.save_pretrained(str(folder))


def adapted_layers(model: PreTrainedModel) -> dict[str, Any]:
    """The model's layers with an adapter, by their names."""
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}


def base_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of `model.state_dict()` without the adapters', by their names in the model
    without adapters."""
    tensors = model.state_dict(keep_vars=True)
    return {n.replace(BASE, "."): t for n, t in tensors.items() if not PARTS & {*n.split(".")}}


def check_complete(names: Sequence[str], model: PreTrainedModel) -> None:
    """Check that the weights that generators and files get have the names of the model's own.

    Args:
        names: those of the model's `state_dict` before it got adapters.
        model: with adapters.

    Raises:
        InputError: a name is missing, or there is another one.
    """
    if different := sorted({*names} ^ base_tensors(model).keys()):
        raise InputError(
            f"lora: with adapters, {type(model).__name__} would be saved without its own weights' "
            f"names ({len(different)} differ, the first is {different[0]}); choose layers by "
            f"lora.target_modules, or train all weights"
        )


@contextmanager
def check_applied(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: check by the forwards in it that the model reads no adapted weight except
    through its layer, where the adapter is added: its outputs would not be those of the merged
    weights.

    Raises:
        InputError: it does.
    """
    with _Reads(adapted_layers(model)) as reads:
        yield
    if reads.found:
        raise InputError(
            f"lora: {type(model).__name__} reads the weight of {min(reads.found)} itself, so an "
            f"adapter would not be applied to it; choose other layers by lora.target_modules"
        )


@torch.no_grad()
def check_merged(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Check by two forwards that the model computes with its merged weights what it computes with
    adapters, whose values it changes. Collective: every rank must call it.

    Args:
        model: its attention is `packed`.
        dtype: what it computes in.

    Raises:
        InputError: the logits differ.
    """
    layers = adapted_layers(model).values()
    for layer in layers:
        spread = sharding.local(layer.base_layer.weight).float().std().nan_to_num()
        _fill(layer.lora_A[ADAPTER].weight, layer.in_features**-0.5)
        _fill(layer.lora_B[ADAPTER].weight, float(spread))
    inputs = pack(short_sequences(model), model.device)
    adapted = model(**inputs).logits[0].float()
    with ExitStack() as replaced:
        for layer in layers:
            replaced.enter_context(_merged_forward(layer))
        plain = model(**inputs).logits[0].float()
    error = float(((adapted - plain).square().mean(-1).sqrt() / plain.std(-1)).median())
    if error > SAME.get(dtype, SAME[torch.bfloat16]):  # not so for NaN, of broken weights
        raise InputError(
            f"lora: with merged weights, {type(model).__name__} computes other logits than with "
            f"adapters (they differ by {error:.2g} standard deviations), so the generator would "
            f"sample from another policy; choose other layers by lora.target_modules"
        )


def _fill(parameter: torch.Tensor, size: float) -> None:
    """Fill this rank's rows with values of a size, but not with random ones: a run draws those."""
    rows = sharding.local(parameter)
    rows.copy_(torch.arange(rows.numel(), device=rows.device).cos().view_as(rows) * size)


@contextmanager
def _merged_forward(layer: Any) -> Iterator[None]:
    """Let a layer compute with its merged weights."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = merged(layer).to(x.dtype)
        return F.linear(x, weight.T if layer.fan_in_fan_out else weight, layer.base_layer.bias)

    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


class _Reads(TorchFunctionMode):
    """Context manager: which layers' own weights are used outside the layers' forwards.

    Attributes:
        found: names of these layers.
    """

    def __init__(self, layers: dict[str, Any]) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._layers, self._inside = layers, 0
        self._hooks: list[Any] = []

    def __enter__(self) -> _Reads:
        for layer in self._layers.values():
            self._hooks += [
                layer.register_forward_pre_hook(lambda *_: self._move(1)),
                layer.register_forward_hook(lambda *_: self._move(-1)),
            ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._inside and isinstance(out, torch.Tensor):  # not a dtype or a shape
            given = (*args, *(kwargs or {}).values())
            # Most operations have none, and a model has many layers.
            if used := {id(x) for x in given if isinstance(x, torch.nn.Parameter)}:
                self.found |= {
                    name for name, x in self._layers.items() if id(x.base_layer.weight) in used
                }
        return out

    def _move(self, by: int) -> None:
        self._inside += by


@torch.no_grad()
def merged(layer: Any) -> torch.Tensor:
    """W + s · B A of a layer with an adapter: [out, in], or [in, out] as GPT-2's layers store it;
    computed in float32 and sharded like W. Collective: every rank must call it, since a factor is
    gathered."""
    weight, scale = layer.base_layer.weight, layer.scaling[ADAPTER]
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    if layer.fan_in_fan_out:  # (B A)ᵀ = Aᵀ Bᵀ, whose rows are the columns of A
        start, own = sharding.rows(weight) or (0, weight)
        left, right = sharding.whole(a).T[start : start + len(own)], sharding.whole(b).T
    else:
        own, left, right = sharding.local(weight), sharding.local(b), sharding.whole(a)
    return sharding.sharded_as(weight, torch.addmm(own.to(a.dtype), left, right, alpha=scale))


@contextmanager
def disabled(model: PreTrainedModel) -> Iterator[None]:
    """Let the model compute without its adapters, as before training."""
    layers = list(adapted_layers(model).values())
    scales = [layer.scaling[ADAPTER] for layer in layers]
    for layer in layers:
        layer.scaling[ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[ADAPTER] = scale


class _Dropout(torch.nn.Dropout):
    """Dropout only where gradients are computed: the trainer's model is always in training mode."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.dropout(input, self.p, training=self.p > 0 and torch.is_grad_enabled())


def _addresses(chosen: Sequence[str], model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """How `peft.PeftModel.from_pretrained` finds the chosen layers: the modules' names, and names
    of weights for the layers whose names it would redirect to fused experts."""
    fused = any(p.dim() == 3 and ".experts." in name for name, p in model.named_parameters())
    weights = [n for n in chosen if fused and n.rpartition(".")[2] in _REDIRECTED]
    modules = [n for n in chosen if n not in weights]
    last = {name.rpartition(".")[2] for name in modules}
    meant = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in last]
    return (
        sorted(last) if len(meant) == len(modules) else modules,
        [f"{name}.weight" for name in weights],
    )
