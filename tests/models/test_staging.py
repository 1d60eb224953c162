"""A version of the weights is complete and checked before any of it is used."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from tests.generator.slot_models import make_model
from tramontane.errors import InputError
from tramontane.models.staging import StagedWeights, collect
from tramontane.models.weights import Bucket, LocalWeights, Part

NORM = "model.norm.weight"
WAIT_SECONDS = 60.0


def weights_of(model: PreTrainedModel, **changed: torch.Tensor | None) -> LocalWeights:
    """The model's weights; some changed, or left out if None. A `.` is written as `__`."""
    state = {**model.state_dict(), **{k.replace("__", "."): v for k, v in changed.items()}}
    weights = LocalWeights()
    weights.add([Part.whole([n], t) for n, t in state.items() if t is not None])
    return weights


def addresses(model: PreTrainedModel) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def same(model: PreTrainedModel, other: PreTrainedModel) -> bool:
    state = other.state_dict()
    return all(torch.equal(t, state[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_fetched_version_is_used_from_its_swap_on(tied: bool, in_place: bool) -> None:
    versions = [make_model(tied=tied, seed=seed) for seed in range(5)]
    model = make_model(tied=tied)
    staged, seen = StagedWeights(model), [addresses(model)]
    for number, version in enumerate(versions[1:], start=1):
        staged.fetch(number, weights_of(version))
        assert same(model, versions[number - 1])
        assert addresses(model) == seen[-1]
        assert staged.swap(number, in_place)
        assert same(model, version)
        seen.append(addresses(model))
        assert not staged.swap(number, in_place)  # in use already
    # Two sets of tensors take turns, or one is copied to the other: no third one exists.
    expected = [seen[0], seen[0] if in_place else seen[1]]
    assert seen == [expected[number % 2] for number in range(5)]
    head = model.get_output_embeddings().weight
    assert (head is model.get_input_embeddings().weight) == tied


def test_a_newer_version_replaces_one_that_waits_for_its_swap() -> None:
    model, old, new = (make_model(seed=seed) for seed in range(3))
    staged = StagedWeights(model)
    staged.fetch(1, weights_of(old))
    staged.fetch(2, weights_of(new))
    assert not staged.swap(1, in_place=False)
    assert same(model, make_model(seed=0))
    assert staged.swap(2, in_place=False)
    assert same(model, new)


class SlowWeights(LocalWeights):
    """Weights whose second half stays away until `arrive` is set."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.begun, self.arrive = threading.Event(), threading.Event()
        self.add([Part.whole([n], p) for n, p in model.named_parameters()])

    def buckets(self, held: object = None) -> Iterator[Bucket]:
        (parts,) = super().buckets()
        yield parts[: len(parts) // 2]
        self.begun.set()
        assert self.arrive.wait(WAIT_SECONDS)
        yield parts[len(parts) // 2 :]


def test_nothing_is_swapped_while_a_newer_version_is_being_fetched() -> None:
    model, old, new = (make_model(seed=seed) for seed in range(3))
    staged, slow = StagedWeights(model), SlowWeights(new)
    staged.fetch(1, weights_of(old))
    fetching = threading.Thread(target=staged.fetch, args=(2, slow))
    fetching.start()
    assert slow.begun.wait(WAIT_SECONDS)
    assert not staged.swap(1, in_place=False)  # half of the tensors are version 2 by now
    assert not staged.swap(2, in_place=False)
    assert same(model, make_model(seed=0))
    slow.arrive.set()
    fetching.join()
    assert staged.swap(2, in_place=False)
    assert same(model, new)


@pytest.mark.parametrize("tied", [False, True])
def test_a_version_that_fails_its_check_changes_nothing_and_the_error_names_the_weight(
    tied: bool,
) -> None:
    model, new = make_model(tied=tied), make_model(tied=tied, seed=1)
    staged = StagedWeights(model)
    norm = new.state_dict()[NORM]
    nan, infinite = norm.clone(), norm.clone()
    nan[3], infinite[-1] = float("nan"), -float("inf")
    part = weights_of(new, model__norm__weight=None)
    part.add([Part((NORM,), norm.shape, 4, norm[4:])])
    wrong = {
        "unknown.*model.extra": weights_of(new, model__extra=norm),
        "missing.*model.norm.weight": weights_of(new, model__norm__weight=None),
        rf"{NORM}: shape \(1,\)": weights_of(new, model__norm__weight=torch.ones(1)),
        f"{NORM} are not finite": weights_of(new, model__norm__weight=nan),
        f"{NORM} are not": weights_of(new, model__norm__weight=infinite),
        f"{NORM} are incomplete: {len(norm) - 4} of {len(norm)}": part,
    }
    for message, weights in wrong.items():
        with pytest.raises(InputError, match=message):
            staged.fetch(1, weights)
        assert not staged.swap(1, in_place=False)
        assert same(model, make_model(tied=tied))
    staged.fetch(1, weights_of(new))  # the next good version is taken
    assert staged.swap(1, in_place=False)
    assert same(model, new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_several_ranks_make_whole_weights(dtype: torch.dtype) -> None:
    whole = {"tall": torch.randn(7, 3), "long": torch.randn(5), "scalar": torch.tensor(2.0)}
    weights, other = LocalWeights(), LocalWeights()
    for name in ("tall", "long"):
        tensor = whole[name]
        weights.add([Part((name,), tensor.shape, 0, tensor[:4])])
        other.add([Part((name,), tensor.shape, 4, tensor[4:])])
    weights.add([Part.whole(["scalar"], whole["scalar"])])
    weights.merge([other])
    targets = {name: torch.empty_like(t, dtype=dtype) for name, t in whole.items()}
    collect(weights, targets)
    for name, tensor in whole.items():
        assert torch.equal(targets[name], tensor.to(dtype))
