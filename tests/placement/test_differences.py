"""Other machines fetch what changed between two versions of the weights, and have every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runs import small_config
from tramontane.config import TrainerConfig
from tramontane.errors import InputError
from tramontane.models.differences import Difference
from tramontane.models.loading import load_model
from tramontane.models.staging import StagedWeights
from tramontane.models.weights import Weights
from tramontane.placement.place import check
from tramontane.trainer.trainer import Trainer

GAPS = st.sampled_from([0, 1, 2, 253, 254, 255, 256, 509, 510, 511, 765, 1000])
BITS = st.sampled_from([0, -(1 << 15), 1, 0x3F80, 0x7F80, 0x7FC0, -1])  # zeros, 1, ∞, NaNs


@given(
    changed=st.lists(st.tuples(GAPS, BITS), max_size=12),
    tail=GAPS,
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_a_difference_gives_every_bit_of_the_new_values(
    changed: list[tuple[int, int]], tail: int, dtype: torch.dtype
) -> None:
    old = torch.arange(sum(gap + 1 for gap, _ in changed) + tail).to(torch.int16)
    new, place = old.clone(), -1
    for gap, bits in changed:
        place += gap + 1
        new[place] = bits
    difference = Difference.between(old.view(dtype), new.view(dtype))
    applied = old.clone()
    difference.apply(applied.view(dtype))
    assert torch.equal(applied, new)
    count = int((old != new).sum())
    assert difference.nbytes <= 3 * count + len(old) / 255


def test_a_difference_of_a_tensor_without_dimensions_or_values() -> None:
    for old, new in [(torch.tensor(1.0), torch.tensor(2.0)), (torch.empty(0, 3),) * 2]:
        applied = old.half()
        Difference.between(old.half(), new.half()).apply(applied)
        assert torch.equal(applied, new.half())


class Reader:
    """A generator's weights, in an actor."""

    def __init__(self) -> None:
        self.model = load_model("tiny", torch.bfloat16)
        self.staged = StagedWeights(self.model)

    def fetch(self, number: int, weights: Weights, in_place: bool | None) -> None:
        self.staged.fetch(number, weights)
        if in_place is not None:
            assert self.staged.swap(number, in_place)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.float() for name, tensor in self.model.state_dict().items()}


@pytest.mark.slow
def test_another_machine_needs_only_what_changed(ray_cluster: Any) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from tramontane.placement.stored import DifferenceWeights

    node = ray_cluster.add_node(num_cpus=1, object_store_memory=200 << 20)
    there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    actor: Any = ray.remote(num_cpus=1)(Reader)
    near, far = actor.remote(), actor.options(scheduling_strategy=there).remote()
    trainer, random = Trainer.load("tiny", TrainerConfig(), 5), torch.Generator().manual_seed(0)

    def publish(share: float) -> DifferenceWeights:
        """Change a share of the values, and publish them as a trainer's process does."""
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter[torch.rand(parameter.shape, generator=random) < share] *= -1.5
        weights = trainer.publish(DifferenceWeights(torch.bfloat16))
        assert isinstance(weights, DifferenceWeights)
        return weights

    def without_whole(weights: DifferenceWeights) -> DifferenceWeights:
        """The same weights, readable only as changes."""
        fewer = DifferenceWeights(torch.bfloat16)
        fewer.version, fewer._shapes = weights.version, weights._shapes
        nothing = ray.put([])
        fewer._stored = [bucket._replace(whole=nothing) for bucket in weights._stored]
        return fewer

    def check(number: int, share: float, whole: bool, in_place: bool | None) -> None:
        weights = publish(share)
        ray.get(near.fetch.remote(number, weights, in_place))
        if not whole:
            weights = without_whole(weights)
        ray.get(far.fetch.remote(number, weights, in_place))
        if in_place is None:
            return
        for reader in (near, far):
            arrived = ray.get(reader.weights.remote())
            for name, tensor in trainer.model.state_dict().items():
                assert torch.equal(arrived[name], tensor.bfloat16().float()), name

    check(1, 0.03, whole=True, in_place=False)  # it has a file's
    check(2, 0.03, whole=False, in_place=False)
    check(3, 0.03, whole=False, in_place=None)  # fetched, and overwritten before it was used
    check(4, 0.03, whole=False, in_place=True)
    check(5, 0.03, whole=False, in_place=False)
    publish(0.03)
    publish(0.0)
    check(8, 0.03, whole=False, in_place=False)  # two versions behind
    check(9, 0.9, whole=True, in_place=False)  # as large as the weights
    check(10, 0.03, whole=False, in_place=False)
    for _ in range(9):
        publish(0.001)
    check(20, 0.001, whole=True, in_place=False)  # too far behind
    ray_cluster.remove_node(node)


@pytest.mark.parametrize("generator", [{"dtype": "float32"}, {"weights": "int8"}])
def test_weights_whose_differences_are_none_are_refused(tmp_path: Path, generator: Any) -> None:
    placement = {"kind": "ray", "weights": "differences"}
    with pytest.raises(InputError, match=r"generator\.dtype to bfloat16"):
        check(small_config(tmp_path, placement=placement, generator=generator))
    check(small_config(tmp_path, placement=placement, generator={"dtype": "bfloat16"}))
