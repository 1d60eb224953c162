"""A new version of the weights beside the one in use: collected and checked, then swapped in.

Collecting takes as long as the transfer and does not touch the weights in use, so a generator keeps
decoding meanwhile. Generation pauses only for the swap.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch

from tramontane.errors import InputError
from tramontane.models.host import flat, pageable, pin
from tramontane.models.quantized import QuantizedWeight, named_weights
from tramontane.models.weights import CopiedWeights, Held, LocalWeights, Part, Weights, move

Target = torch.Tensor | QuantizedWeight


def collect(weights: Weights, targets: Mapping[str, Target], held: Held | None = None) -> None:
    """Copy a version of the weights into `targets`, and check it.

    Args:
        weights: on any device, in any dtype.
        targets: a tensor by name, on any device, or a weight in eight bits, which is quantized as
            it arrives; tied names share a target, which is written once or twice.
        held: an earlier version, which may be in `targets`.

    Raises:
        InputError: names or shapes that differ from `targets` (nothing is written then), or a
            weight that is incomplete or not finite (`targets` are undefined then); the error names
            the weight.
    """
    _check_shapes(weights.shapes(), targets)
    arrived: Counter[str] = Counter()
    with torch.no_grad():
        for bucket in weights.buckets(held):
            names, extremes = list[str](), list[torch.Tensor]()
            for part in bucket:
                name, count = part.names[0], part.values.numel()
                written = _write(targets[name], part)
                if count:
                    names.append(name)
                    extremes += torch.aminmax(written)  # both are NaN if any value is
                arrived.update(dict.fromkeys(part.names, count))
            # Waits for the copies, once a bucket: the next request may free it.
            for name, finite in zip(names, _are_finite(extremes), strict=True):
                if not finite:
                    raise InputError(f"weights of {name} are not finite")
    for name, shape in weights.shapes().items():
        if arrived[name] != shape.numel():
            raise InputError(
                f"weights of {name} are incomplete: {arrived[name]} of {shape.numel()} values"
            )


def _write(target: Target, part: Part) -> torch.Tensor:
    """Write a part of a weight; returns numbers that are finite if its values are."""
    if isinstance(target, QuantizedWeight):
        return target.write(part.start, part.values)
    if target.dim():
        target = target.narrow(0, part.start, len(part.values))
    moved = move(part.values, target)
    return moved if moved.is_cuda else target


def from_state(state: Mapping[str, torch.Tensor], targets: Mapping[str, Target]) -> LocalWeights:
    """Weights given as one dictionary, for `collect`.

    Args:
        state: whole weights by name, with the shapes of `targets`; tied weights once or twice.
        targets: see `collect`, which checks the shapes; they are not written.

    Raises:
        InputError: tensors that `targets` ties differ.
    """
    first: dict[int, torch.Tensor] = {}  # by the identity of each target
    for name, target in targets.items():
        if name in state and not torch.equal(
            first.setdefault(id(target), state[name]), state[name]
        ):
            raise InputError(f"weights of {name} are tied to others but differ from them")
    weights = LocalWeights()
    weights.add([Part.whole([name], tensor) for name, tensor in state.items()])
    return weights


def _check_shapes(shapes: Mapping[str, torch.Size], targets: Mapping[str, Target]) -> None:
    if unknown := sorted(shapes.keys() - targets.keys()):
        raise InputError(f"weights unknown to the generator's model: {', '.join(unknown)}")
    for name, shape in shapes.items():
        if shape != targets[name].shape:
            raise InputError(
                f"weights of {name}: shape {tuple(shape)}, "
                f"but the generator's model has {tuple(targets[name].shape)}"
            )
    updated = {id(targets[name]) for name in shapes}
    if missing := [name for name, target in targets.items() if id(target) not in updated]:
        raise InputError(f"weights missing from the update: {', '.join(missing)}")


def _are_finite(extremes: Sequence[torch.Tensor]) -> list[bool]:
    """Whether both numbers of each pair are finite; waits for a GPU only once."""
    if not extremes:
        return []
    numbers = torch.stack([number.float() for number in extremes])
    finite: list[bool] = numbers.isfinite().view(-1, 2).all(1).tolist()
    return finite


class _Pinned:
    """A buffer that is pinned as long as this exists."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = pin(buffer, self)


class SharedMemory:
    """The memory in which another process sends weights, kept mapped and pinned here for two
    versions: they take turns in it (`HostMemory`), and mapping and pinning takes longer than
    copying."""

    def __init__(self) -> None:
        self._versions = deque[dict[int, _Pinned]](maxlen=2)  # by address

    def keep(self, weights: CopiedWeights) -> None:
        """Pin what the weights share with another process, and forget the last version but one."""
        known = {address: held for version in self._versions for address, held in version.items()}
        found: dict[int, _Pinned] = {}
        for bucket in weights.buckets():
            for part in bucket:
                memory = part.values.untyped_storage()
                address = memory.data_ptr()
                if address in known:
                    found[address] = known[address]
                elif memory.is_shared() and not part.values.is_pinned():
                    whole = torch.empty(0, dtype=torch.uint8).set_(memory)
                    found[address] = known[address] = _Pinned(whole)
        self._versions.append(found)


class StagedWeights:
    """A model's weights, and memory for their next version, which doubles the weights' memory from
    the first `fetch` on.

    `fetch` may run in one thread while the model computes in another; `swap` may not.

    Args:
        model: the tensors of its state dict, of which tied ones are one, and its weights in eight
            bits.
        on_host: the next version is in the host's pinned memory, not on the model's device; no
            effect on a CPU.
    """

    def __init__(self, model: torch.nn.Module, on_host: bool = False) -> None:
        self._names: dict[int, list[str]] = {}  # by the identity of each tensor
        self._used: dict[int, Target] = {}
        for name, target in named_weights(model).items():
            self._names.setdefault(id(target), []).append(name)
            self._used[id(target)] = target
        self._spare: dict[int, Target] = {}  # the next version of each
        self._version: int | None = None  # complete and checked in `_spare`, not yet in use
        self._used_is: str | None = None  # `Weights.version` of what is in use
        self._spare_is = ""  # and of what is complete in `_spare`
        self._shared = SharedMemory()
        self._changing = threading.Lock()  # `_version`, and which tensors are spare
        device = next(model.parameters()).device
        self._on_host = on_host and device.type != "cpu"
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Further weights that versions have from now on, by name, such as those of a vision
        tower."""
        with self._changing:
            for name, tensor in tensors.items():
                self._names[id(tensor)], self._used[id(tensor)] = [name], tensor

    @property
    def has_room(self) -> bool:
        """True if the memory of the next version is allocated."""
        return bool(self._spare)

    def fetch(self, version: int, weights: Weights) -> None:
        """Copy and check a version of the weights. It replaces a fetched version that is not in use
        yet.

        Raises:
            InputError: see `collect`. The weights in use are not affected.
        """
        with self._changing:
            held = self._newest()
            self._version = None
            if len(self._spare) < len(self._used):
                self._spare = self._rooms()
            targets = self._named(self._spare)
        # On a GPU the copies use a separate stream, so that decode steps do not wait for them.
        stream = self._stream
        if stream is not None and isinstance(weights, CopiedWeights):
            self._shared.keep(weights)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            collect(weights, targets, held)
        if stream is not None:
            stream.synchronize()
        with self._changing:
            self._version, self._spare_is = version, weights.version

    def swap(self, version: int, in_place: bool) -> bool:
        """Use a version that was fetched.

        Args:
            version: the version to use.
            in_place: copy the new values, so that the model's tensors keep their addresses;
                otherwise swap them with the spare tensors.

        Returns:
            False, with nothing changed, if the version is not available, because it is already in
            use or a newer one is being fetched.
        """
        with self._changing:
            if self._version != version:
                return False
            for key, spare in self._spare.items():
                used = self._used[key]
                copied = in_place or self._on_host
                if isinstance(used, QuantizedWeight) and isinstance(spare, QuantizedWeight):
                    used.take(spare, copied)
                    continue
                assert isinstance(used, torch.Tensor)
                assert isinstance(spare, torch.Tensor)
                if copied:
                    used.data.copy_(spare, non_blocking=self._stream is not None)
                else:
                    used.data, spare.data = spare.data, used.data
            if self._stream is not None:  # no kernel reads what the next `fetch` overwrites
                torch.cuda.current_stream(self._stream.device).synchronize()
            self._version, self._used_is = None, self._spare_is
            return True

    def _named(self, tensors: Mapping[int, Target]) -> dict[str, Target]:
        return {name: tensors[key] for key, names in self._names.items() for name in names}

    def _newest(self) -> Held | None:
        """The newest version here, unless it was loaded from files or is in eight bits."""
        version, tensors = self._used_is, self._named(self._used)
        if self._version is not None:
            version, tensors = self._spare_is, self._named(self._spare)
        plain = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}
        return Held(version, plain) if version and len(plain) == len(tensors) else None

    def _rooms(self) -> dict[int, Target]:
        parts = {
            key: x.parts if isinstance(x, QuantizedWeight) else [x.data]
            for key, x in self._used.items()
        }
        every = [part for own in parts.values() for part in own]
        if self._on_host:
            made = iter(flat(every, self._pinned))
        else:
            made = (torch.empty_like(part) for part in every)
        found: dict[int, Target] = {}
        for key, x in self._used.items():
            own = [next(made) for _ in parts[key]]
            found[key] = x.room(own) if isinstance(x, QuantizedWeight) else own[0]
        return found

    def _pinned(self, size: int) -> torch.Tensor:
        buffer = pageable(size)
        return buffer if self._stream is None else pin(buffer, self)
