"""Two ranks, sharded by FSDP2 over gloo, give what one rank gives."""

import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from tests import forked
from tests.trainer import rollouts
from tests.trainer.rollouts import SUMS, equal
from tramontane.models.staging import collect
from tramontane.models.weights import CopiedWeights
from tramontane.trainer import export

pytestmark = pytest.mark.slow

batch = partial(rollouts.batch, groups=2)  # of four completions
trainer = partial(rollouts.trainer, microbatch_tokens=40)

SETTINGS = {
    "plain": {},
    "sums": {"objective": {"name": SUMS}},
    "everything": {
        "tied": False,
        "gradient_checkpointing": True,
        "objective": {
            "magistral": {
                "kl_coef": 0.1,
                "entropy_coef": 0.01,
                "importance_correction": "truncated",
            }
        },
    },
    # In the third update one rank has more microbatches than the other.
    "uneven": {"objective": {"magistral": {"kl_coef": 3.0}}},
    "adapters": {
        "tied": False,
        "gradient_checkpointing": True,
        "lora": {"rank": 3},  # not divisible by the number of ranks
        "objective": {"magistral": {"kl_coef": 0.1}},
        "learning_rate": 1e-2,
    },
}


class CountedWeights(CopiedWeights):
    """Copies, with the sizes of the buckets in which they were added."""

    def __init__(self):
        super().__init__(torch.float32)
        self.sizes = []

    def _keep(self, bucket, memory):
        super()._keep(bucket, memory)
        self.sizes.append([part.values.nbytes for part in bucket])


def check_buckets(t, weights, ranks):
    """Check that buckets hold the whole model, within the size, one at a time."""
    size = 6000  # bytes: below the largest tensor
    seen, before = {}, []
    for bucket in export.buckets(t.model, size):
        assert all(tensor() is None for tensor in before)
        tensors = {id(tensor): tensor for tensor in bucket.values()}
        assert sum(tensor.nbytes for tensor in tensors.values()) <= size or len(tensors) == 1
        seen |= {name: tensor.clone() for name, tensor in bucket.items()}
        if ranks > 1:  # gathered tensors, which only the bucket holds
            before = [weakref.ref(tensor) for tensor in tensors.values()]
        del tensors
    assert equal(seen, weights)


def check_publishing(t, weights, ranks):
    """Check that the ranks publish the whole model together, each its share, in bounded buckets."""
    limit = 6000  # bytes: below the largest tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tramontane.trainer.export.BUCKET_BYTES", limit)
        published = t.publish(CountedWeights())
    assert all(sum(sizes) <= limit or len(sizes) == 1 for sizes in published.sizes)
    shares = [published]
    if ranks > 1:
        shares = [None] * ranks
        dist.all_gather_object(shares, published)
    sizes = [sum(map(sum, share.sizes)) for share in shares]
    total = sum({t.data_ptr(): t.nbytes for t in weights.values()}.values())
    assert sum(sizes) == total
    assert max(sizes) < 1.1 * total / ranks
    shares[0].merge(shares[1:])
    made = {id(tensor): torch.empty_like(tensor) for tensor in weights.values()}
    targets = {name: made[id(tensor)] for name, tensor in weights.items()}  # tied ones are one
    collect(shares[0], targets)
    assert equal(targets, weights)


def counted_logprobs(t, sequences, ranks):
    """Log-probs of sequences, each computed by one of the ranks, which all compute some."""
    computed, forward = [], t._forward
    with pytest.MonkeyPatch.context() as patch:

        def counted(model, row, temperature):
            found = forward(model, row, temperature)
            computed.append(len(found.logprobs))
            return found

        patch.setattr(t, "_forward", counted)
        logprobs = t.logprobs(sequences, 0.8)
    everywhere = [computed]
    if ranks > 1:
        everywhere = [None] * ranks
        dist.all_gather_object(everywhere, computed)
    assert all(everywhere)
    assert sum(map(sum, everywhere)) == sum(len(sequence.token_ids) for sequence in sequences)
    return logprobs


def run(rank, ranks, folder):
    torch.set_num_threads(1)
    if ranks > 1:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    for name, settings in SETTINGS.items():
        some = partial(batch, n_minibatch=4 if name == "plain" else None)
        t = trainer(ranks=ranks, **settings)
        metrics = [t.step(some(version)) for version in range(3)]
        learned = t.learned()
        # A forward without backward leaves FSDP's root gathered: saving must work all the same.
        logprobs = counted_logprobs(t, batch(9).sequences[:3], ranks)
        t.save_state(folder / name)
        t.save_weights(folder / f"{name}-weights")
        t.save_adapters(folder / f"{name}-adapters")
        resumed = trainer(ranks=ranks, **settings)
        resumed.load_state(folder / name)
        assert resumed.step(some(3)) == t.step(some(3))
        weights = t.weights()
        assert equal(weights, resumed.weights())
        check_buckets(t, weights, ranks)
        check_publishing(t, weights, ranks)
        hidden = t.hidden_states([1, 2, 3])
        if name == "plain":
            # The rank that computes this completion is the only one with a loss that is NaN.
            spoilt = some(4)
            spoilt.groups[0][0].logprobs[0] = float("nan")
            assert t.step(spoilt)["skipped_steps"] == 1
        after_skip = t.weights()
        if rank == ranks - 1:
            figures = ([*learned.advantages], [*learned.logprobs])
            saved = (metrics, logprobs, weights, hidden, after_skip, figures)
            torch.save(saved, folder / f"{name}.pt")
    if ranks > 1:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    run(0, 1, one)
    mp.start_processes(run, (2, two), nprocs=2, start_method=forked.START_METHOD)
    return one, two


@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks_give_the_metrics_and_weights_of_one(folders, name):
    one, two = (torch.load(folder / f"{name}.pt") for folder in folders)
    for a, b in zip(one[0], two[0], strict=True):
        assert a.keys() == b.keys()
        # Each rank has budgets of its own to fill, and computes the prompts of its completions.
        for key in ("padding_fraction", "computed_tokens"):
            a.pop(key), b.pop(key)
        assert b == pytest.approx(a, rel=1e-4, abs=1e-5)
    for a, b in zip(one[1], two[1], strict=True):
        assert b == pytest.approx(a, abs=1e-4)
    for place in (2, 4):
        for n, w in one[place].items():
            torch.testing.assert_close(two[place][n], w, atol=1e-4, rtol=1e-4)
    assert len(one[5][1]) == sum(len(s.token_ids) for s in batch(2).sequences)
    for a, b in zip(one[5], two[5], strict=True):  # each rank knows a part, both have all
        assert b == pytest.approx(a, abs=1e-4)
    for a, b in zip(one[3], two[3], strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["plain", "adapters"])
def test_a_state_saved_by_two_ranks_loads_into_one(folders, name):
    t = trainer(**SETTINGS[name])
    t.load_state(folders[1] / name)
    t.step(batch(3, n_minibatch=4 if name == "plain" else None))
    _, _, weights, *_ = torch.load(folders[1] / f"{name}.pt")
    for name, tensor in t.weights().items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-4, rtol=1e-4)


def test_adapters_saved_by_two_ranks_are_those_of_one(folders):
    one, two = (load_file(f / "adapters-adapters" / "adapter_model.safetensors") for f in folders)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-4, rtol=1e-3)
