"""Peak memory of each of several ranks: its share of weights, gradients and moments, and the unit
that is being computed. A *unit* is what FSDP gathers at once: a block, the embeddings, or the head.
"""

import gc
import json

import peft  # noqa: F401  # its modules are not part of what a trainer takes
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.allocations import measured
from tests import forked
from tests.trainer.rollouts import TEMPERATURE, batch
from tramontane.config import TrainerConfig
from tramontane.trainer import export
from tramontane.trainer.trainer import Trainer

SIZES = {
    "vocab_size": 3776,  # so the embeddings and the head are as large as a block
    "hidden_size": 320,
    "intermediate_size": 832,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
}
UNIT = 4 * (4 * 320 * 320 + 3 * 320 * 832 + 2 * 320)  # bytes of the largest unit in float32
# What a unit takes while it is computed, in multiples of its float32 weights: gathered weights, the
# gradient, and the buffers of its gather and its reduction. One of them is always float32.
COMPUTED = {"float32": 4, "bfloat16": 3}
PYTHON = 6 << 20  # bytes: modules, caches of kernels, and activations of a few tokens
WRITER = 16 << 20  # bytes that torch.distributed.checkpoint holds while it writes
# By ranks: a share depends on the number of ranks alone, and a unit on the type alone.
DTYPES = {2: "float32", 3: "bfloat16"}
# The fewest with which a second copy of the model would be seen beside what is computed.
LAYERS = {2: 9, 3: 7}
# Of updates by one trainer: none is read before an update.
SETTINGS = {
    "one microbatch": {"microbatch_tokens": 8192},
    "microbatch": {"microbatch_tokens": 48, "reduce_gradients": "microbatch"},
    "step": {"microbatch_tokens": 48},
}
ADAPTERS = {"microbatch_tokens": 48, "lora": {"rank": 1}}


def model_of(layers):
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_hidden_layers=layers))


def run(rank, ranks, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    figures = {n: (p.highest, p.at_end) for n, p in peaks(ranks, DTYPES[ranks], folder).items()}
    (folder / f"{ranks}-{rank}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def peaks(ranks, dtype, folder):
    """What this rank takes, by what is done and the setting."""
    found = {}
    some = batch(groups=ranks, size=2)  # two microbatches of 48 tokens for each rank
    common = {"ranks": ranks, "dtype": dtype, "gradient_checkpointing": True}
    config, adapters = TrainerConfig(**common), TrainerConfig(**common, **ADAPTERS)
    gc.freeze()  # collections are many, and look at what is measured alone
    make_kernels(str(folder / "model"), config, adapters, some)
    model = str(folder / f"model-{ranks}")
    with measured() as found["start"]:
        t = Trainer.load(model, config, 10)
    for name, settings in SETTINGS.items():
        t.config = config.model_copy(update=settings)
        with measured() as found[f"update, {name}"]:
            t.step(some)
    with measured() as found["logprobs"]:
        t.logprobs(some.sequences[:2], TEMPERATURE)
    with measured() as found["state"]:
        t.save_state(folder / f"{dtype}-{ranks}")
    with measured() as found["buckets"]:
        for _ in export.buckets(t.model, UNIT):
            pass
    del t  # the next trainer begins with nothing
    with measured() as found["start, adapters"]:
        t = Trainer.load(model, adapters, 10)
    with measured() as found["update, adapters"]:
        t.step(some)
    gc.unfreeze()
    return found


def make_kernels(model, config, adapters, some):
    """Do what is measured with a model of one layer: the modules and kernels that it makes for
    shapes of units and rows are kept."""
    t = Trainer.load(model, config, 10)
    for name in "one microbatch", "microbatch":  # those of a step are as long
        t.config = config.model_copy(update=SETTINGS[name])
        t.step(some)
    t.logprobs(some.sequences[:2], TEMPERATURE)
    Trainer.load(model, adapters, 10).step(some)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peaks")
    model_of(1).save_pretrained(folder / "model")
    for ranks in DTYPES:
        torch.manual_seed(0)
        model_of(LAYERS[ranks]).save_pretrained(folder / f"model-{ranks}", max_shard_size="10MB")
        mp.start_processes(run, (ranks, folder), nprocs=ranks, start_method=forked.START_METHOD)
    return folder


@pytest.mark.slow(40)
@pytest.mark.parametrize(("ranks", "dtype"), DTYPES.items())
def test_no_rank_holds_more_than_its_share_and_the_unit_it_computes(folder, ranks, dtype):
    whole = 4 * model_of(LAYERS[ranks]).num_parameters()  # bytes in float32
    share, computed = whole / ranks, COMPUTED[dtype] * UNIT
    bounds = {
        "start": 3 * share,  # weights and two moments
        # Frozen weights, and the forward that reads the head's scale, which computes every unit.
        "start, adapters": share * getattr(torch, dtype).itemsize / 4 + computed,
        "update, adapters": computed,
        "update, one microbatch": share + computed,  # gradients
        "update, microbatch": share + computed,
        "update, step": whole + computed,  # unsharded gradients until the last microbatch
        "logprobs": computed,
        "state": WRITER,  # nothing is copied
        "buckets": 2 * UNIT,
    }
    assert computed + PYTHON < whole / 2
    for rank in range(ranks):
        figures = json.loads((folder / f"{ranks}-{rank}.json").read_text())
        for name, (highest, at_end) in figures.items():
            bound = bounds.get(name) or bounds[name.partition(",")[0]]
            assert highest <= bound + PYTHON, name
            if not name.startswith("start"):
                assert at_end <= PYTHON, name
