"""Several ranks: FSDP2 over the process group, and sums across it.

Functions marked "Collective" must be called by every rank, in the same order. With one rank (no
process group, or a group of one process) every function is the identity.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from tramontane.models.weight_files import WeightFiles
from tramontane.trainer.objectives import Metrics


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def time_limit(device: torch.device) -> timedelta:
    """How long a collective of all ranks may last, which the placement has set."""
    limit: timedelta = dist.group.WORLD._get_backend(device).options._timeout  # type: ignore[union-attr]
    return limit


def device_of_rank(configured: str) -> torch.device:
    """Device of this rank. With several ranks on GPUs it is the process's current device, which its
    placement has set."""
    if ranks() > 1 and configured.startswith("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(configured)


def shard(model: PreTrainedModel, device: torch.device, dtype: str) -> None:
    """Shard parameters, gradients and optimizer state over all ranks, block by block. Collective.

    Parameters are gathered and used in `dtype`; gradients are reduced in float32. Input embeddings
    and output head are units of their own. If they are tied, they form one unit with what lies
    outside the blocks, so that the tied tensor is gathered and reduced once.

    Parameters on the meta device stay there; see `materialize`.
    """
    if ranks() == 1:
        return
    mesh = init_device_mesh(device.type, (ranks(),))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    blocks = set(model._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is not embeddings.weight:
        fully_shard(embeddings, mesh=mesh, mp_policy=policy)
        # The backward pass begins with the head.
        fully_shard(head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if device.type == "cpu":
        _gather_without_prefetch(model)


def _gather_without_prefetch(model: PreTrainedModel) -> None:
    """Gather each unit only when its backward begins. On a CPU, FSDP's prefetch of the next unit
    overlaps with nothing and only takes memory."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # An empty list would mean the default; the unit itself is gathered already.
            module.set_modules_to_backward_prefetch([module])


def plain_class(module: torch.nn.Module) -> type:
    """The module's class before it was sharded."""
    cls = type(module)
    return cls.__bases__[-1] if issubclass(cls, FSDPModule) else cls


def free_gathered(model: PreTrainedModel) -> None:
    """Free the parameters that a forward without a backward leaves gathered. Not collective."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reduce_gradients(model: PreTrainedModel, reduce: bool) -> None:
    """Set whether the next backward reduces gradients over the ranks, or adds them to this rank's
    unsharded gradients (float32, 4 bytes per parameter of the whole model). Every rank must set the
    same."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduce)


def skeleton(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Copy a model without its weights: frozen parameters of the same shapes in `dtype` on the meta
    device; `model` must not be sharded yet. Not collective."""
    parameters = {
        id(p): torch.nn.Parameter(
            torch.empty_like(p, dtype=dtype, device="meta"), requires_grad=False
        )
        for p in model.parameters()
    }
    return copy.deepcopy(model, parameters)


def materialize(model: PreTrainedModel, device: torch.device) -> None:
    """Allocate this rank's shards of the parameters on the meta device, with undefined values. Tied
    parameters stay tied, and buffers are unchanged. Not collective."""
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in made:
                made[parameter] = torch.nn.Parameter(
                    torch.empty_like(parameter, device=device), parameter.requires_grad
                )
            module._parameters[name] = made[parameter]


@torch.no_grad()
def read(tensors: Mapping[str, torch.Tensor], files: WeightFiles) -> None:
    """Fill a model's tensors from files without a `misfit`. Each rank reads only its own shards,
    one tensor at a time. Not collective."""
    for name, tensor in tensors.items():
        if name not in files:  # a tied weight's second name
            continue
        if not isinstance(tensor, DTensor):
            tensor.copy_(files.read(name))
        elif held := rows(tensor):
            start, values = held
            if count := len(values):
                values.copy_(files.read(name, start, start + count))


@torch.no_grad()
def copy_parameters(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Copy this rank's parameters between two models that are sharded alike. Not collective."""
    for a, b in zip(source.parameters(), target.parameters(), strict=True):
        local(b).copy_(local(a))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, [rows of this rank, …]. Not collective."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor to its whole shape on every rank. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rows(tensor: torch.Tensor) -> tuple[int, torch.Tensor] | None:
    """(index of the first row, rows) that this rank holds of a sharded tensor. Of an unsharded
    tensor, rank 0 has all rows and the other ranks None. Not collective."""
    if not isinstance(tensor, DTensor):
        return (0, tensor) if rank() == 0 else None
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return offset[0], tensor.to_local()


def sharded_as(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor sharded like `tensor`; `local` [rows of this rank, …] is this rank's part. Not
    collective."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def total(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Sum `tensor`, of any shape, over ranks (or apply another reduction), in place. Collective."""
    if ranks() > 1:
        dist.all_reduce(tensor, op)
    return tensor


class Averages:
    """Weighted means and maxima by name, over microbatches and ranks; every rank must add the same
    names."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}

    def add(self, metrics: Metrics) -> None:
        """Add sums with their weights."""
        for name, pair in metrics.items():
            added = torch.stack([_summable(x) for x in pair])
            self._sums[name] = self._sums[name] + added if name in self._sums else added

    def maximum(self, name: str, value: torch.Tensor) -> None:
        """Update a maximum; `name` must also be given to `add`."""
        value = _summable(value)
        self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)

    def merge(self, other: Averages) -> None:
        """Add everything that was added to `other`."""
        for name, added in other._sums.items():
            self._sums[name] = self._sums[name] + added if name in self._sums else added
        for name, value in other._maxima.items():
            self.maximum(name, value)

    def result(self) -> dict[str, float]:
        """Means by `name` and maxima by `name_max` over all ranks, except those of weight 0.
        Collective: every rank must call it."""
        names, tops = sorted(self._sums), sorted(self._maxima)
        if not names:
            return {}
        sums = total(torch.stack([self._sums[n] for n in names])).tolist()
        result = {n: s / w for n, (s, w) in zip(names, sums, strict=True) if w}
        if tops:
            maxima = total(torch.stack([self._maxima[n] for n in tops]), dist.ReduceOp.MAX)
            pairs = zip(tops, maxima.tolist(), strict=True)
            result |= {f"{n}_max": value for n, value in pairs if n in result}
        return result


def _summable(value: torch.Tensor) -> torch.Tensor:
    """The value in float64, or in float32 on Apple's GPUs, which have no float64."""
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)
