"""Objectives whose inputs are gathered from all ranks: two ranks over gloo give what one gives."""

import copy
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests import forked
from tests.trainer import rollouts
from tests.trainer.rollouts import equal, taught
from tramontane.trainer import sharding

pytestmark = pytest.mark.slow

batch = partial(rollouts.batch, groups=2)  # of four completions
# What ranks gather for an objective comes after all blocks: one is enough.
trainer = partial(rollouts.trainer, microbatch_tokens=40, layers=1)

OBJECTIVES = {
    "spo": {"name": "spo", "spo": {"initial_value": "importance"}},
    "dro": {"name": "dro"},
    "dro_untied": {"name": "dro"},
    "dro_policy": {"name": "dro", "dro": {"form": "policy"}},
    "jepo": {"name": "jepo", "jepo": {"supervised_coef": 1.0}},
    "distill": {"name": "distill", "distill": {"discount": 1}},
    "distill_top": {"name": "distill", "distill": {"top_k": 5}},
}


@cache
def scored(version):
    return taught(batch(version), top_k=5)


def rewarded(version):
    """A batch whose second group learns from given answers, in place of completions of four tokens
    and more."""
    found = copy.deepcopy(scored(version))
    for sequence in found.groups[1]:
        sequence.target = 2 if len(sequence.token_ids) > 3 else 0
        sequence.replaced = 1 if sequence.target else 0
    return found


def make(name, ranks):
    return trainer(tied=name != "dro_untied", ranks=ranks, objective=OBJECTIVES[name])


def run(rank, ranks, folder):
    torch.set_num_threads(1)
    if ranks > 1:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    for name in OBJECTIVES:
        t = make(name, ranks)
        metrics = [t.step(rewarded(version)) for version in range(3)]
        learned = t.learned()
        t.save_state(folder / name)
        resumed = make(name, ranks)
        resumed.load_state(folder / name)
        assert resumed.step(rewarded(3)) == t.step(rewarded(3))
        weights = t.weights()
        assert equal(weights, resumed.weights())
        network = {}
        if t._values:
            parameters = t._values.model.named_parameters()
            network = {name: sharding.whole(p.detach()) for name, p in parameters}
        if rank == ranks - 1:
            figures = ([*learned.advantages], [*learned.logprobs])
            torch.save((metrics, weights, network, figures), folder / f"{name}.pt")
    if ranks > 1:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    run(0, 1, one)
    mp.start_processes(run, (2, two), nprocs=2, start_method=forked.START_METHOD)
    return one, two


@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_ranks_give_what_one_gives(folders, name):
    one, two = (torch.load(folder / f"{name}.pt") for folder in folders)
    for a, b in zip(one[0], two[0], strict=True):
        for key in ("padding_fraction", "computed_tokens"):  # each rank fills budgets of its own
            a.pop(key), b.pop(key)
        assert b == pytest.approx(a, rel=1e-3, abs=1e-4)
    for before, after in zip(one[1:3], two[1:3], strict=True):
        for key, values in before.items():
            torch.testing.assert_close(after[key], values, atol=1e-4, rtol=1e-3)
    assert len(one[2]) == len(two[2])
    assert bool(one[2]) == (name in ("dro", "dro_untied"))
    for a, b in zip(one[3], two[3], strict=True):
        assert b == pytest.approx(a, abs=1e-3, nan_ok=True)


def test_a_value_network_saved_by_two_ranks_loads_into_one(folders):
    t = make("dro", 1)
    t.load_state(folders[1] / "dro")
    t.step(rewarded(3))
    _, weights, network, _ = torch.load(folders[1] / "dro.pt")
    for key, values in t.weights().items():
        torch.testing.assert_close(values, weights[key], atol=1e-4, rtol=1e-3)
    for key, values in t._values.model.named_parameters():
        torch.testing.assert_close(values.detach(), network[key], atol=1e-4, rtol=1e-3)
