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
from tramontane.trainer.trainer import Trainer

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=20,
    num_attention_heads=4,
    num_key_value_heads=4,
    pad_token_id=0,
)
UNIT = 4 * (4 * 192 * 192 + 3 * 192 * 512 + 2 * 192)  # bytes of the largest unit in float32
# What a unit takes while it is computed, in multiples of its float32 weights: gathered weights, the
# gradient, the buffers of its gather and its reduction, and the unit before in float32, reduced.
COMPUTED = {"float32": 6, "bfloat16": 4}
PYTHON = 6 << 20  # bytes: modules, caches of kernels, and activations of a few tokens
WRITER = 16 << 20  # bytes that torch.distributed.checkpoint holds while it writes
SOME = batch(groups=2)  # several microbatches of 48 tokens for each of four ranks
SETTINGS = {
    "one microbatch": {"microbatch_tokens": 8192},
    "microbatch": {"microbatch_tokens": 48, "reduce_gradients": "microbatch"},
    "adapters": {"microbatch_tokens": 48, "lora": {"rank": 1}},
    "step": {"microbatch_tokens": 48},
}


def run(rank, ranks, dtype, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{ranks}-{dtype}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    found = {}
    common = {"ranks": ranks, "dtype": dtype, "gradient_checkpointing": True}
    # Modules and kernels of the checks at load, which are kept.
    Trainer.load(str(folder / "model"), TrainerConfig(**common), 10)
    gc.freeze()  # collections are many, and look at what is measured alone
    for name, settings in SETTINGS.items():
        config = TrainerConfig(**common, **settings)
        with measured() as found[f"start, {name}"]:
            t = Trainer.load(str(folder / "model"), config, 10)
        t.step(SOME)  # makes the kernels for these shapes, which are kept
        with measured() as found[f"update, {name}"]:
            t.step(SOME)
        if name != "step":
            del t  # the next trainer begins with nothing
    t.logprobs(SOME.sequences[:2], TEMPERATURE)
    with measured() as found["logprobs"]:
        t.logprobs(SOME.sequences[:2], TEMPERATURE)
    with measured() as found["state"]:
        t.save_state(folder / f"{dtype}-{ranks}")
    with measured() as found["buckets"]:
        for _ in t.buckets(UNIT):
            pass
    figures = {name: (peak.highest, peak.at_end) for name, peak in found.items()}
    (folder / f"{ranks}-{dtype}-{rank}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peaks")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    model.save_pretrained(folder / "model", max_shard_size="10MB")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_holds_more_than_its_share_and_the_unit_it_computes(folder, ranks, dtype):
    args = ranks, dtype, folder
    mp.start_processes(run, args, nprocs=ranks, start_method=forked.START_METHOD)
    model = AutoModelForCausalLM.from_config(CONFIG)
    whole = 4 * model.num_parameters()  # bytes in float32
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
    assert computed + PYTHON < whole / 2  # so that a second copy of the model would be seen
    for rank in range(ranks):
        figures = json.loads((folder / f"{ranks}-{dtype}-{rank}.json").read_text())
        for name, (highest, at_end) in figures.items():
            bound = bounds.get(name) or bounds[name.partition(",")[0]]
            assert highest <= bound + PYTHON, name
            if not name.startswith("start"):
                assert at_end <= PYTHON, name
