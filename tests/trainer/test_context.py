"""Context parallelism: ranks that share rows of tokens give what one rank gives."""

import json
import random
from array import array
from datetime import timedelta
from functools import partial
from itertools import chain

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3MoeConfig,
)

import tramontane
from benchmarks.allocations import measured
from tests import forked
from tests.trainer import rollouts
from tests.trainer.rollouts import SUMS, VOCAB, completion, taught, train_batch
from tramontane.config import ObjectiveConfig, TrainerConfig
from tramontane.errors import InputError
from tramontane.models.shape import shape_of
from tramontane.tokens import AllowedTokens
from tramontane.trainer import sharding
from tramontane.trainer.context import check_sharing, exchange_of
from tramontane.trainer.trainer import Trainer

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 8}
EXPERTS = HEADS | {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS = {
    "grouped": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "window": MistralConfig(**SIZES, sliding_window=7),
    "capped": Gemma2Config(**SIZES | HEADS, sliding_window=7, query_pre_attn_scalar=8),
    "sinks": GptOssConfig(**SIZES | HEADS, num_local_experts=4, num_experts_per_tok=2),
    "experts": Qwen3MoeConfig(**SIZES | EXPERTS, num_experts=4),
}
ONE_LAYER = LlamaConfig(**SIZES | {"num_hidden_layers": 1}, tie_word_embeddings=True)
HYBRID = Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])
KL = {"magistral": {"kl_coef": 0.1, "entropy_coef": 0.01}}
# By name: the model, and the trainer's settings. Those of objectives have several microbatches even
# where groups of ranks share rows, and a model of one layer where only its outputs are shared anew.
SETTINGS = {
    **{name: (name, {"objective": KL, "microbatch_tokens": 64}) for name in MODELS},
    "everything": (
        "grouped",
        {
            "objective": {
                "magistral": {"kl_coef": 0.1, "importance_correction": "truncated"},
                "mask": {"geometric_ratio": (0.2, 5.0), "token_ratio": (0.01, 100.0)},
            },
            "gradient_checkpointing": True,
            "reduce_gradients": "microbatch",
        },
    ),
    "sequences": ("one layer", {"objective": {"name": "gspo"}}),
    "sums": ("one layer", {"objective": {"name": SUMS}}),
    "teacher": ("one layer", {"objective": {"name": "distill", "distill": {"top_k": 4}}}),
    "values": ("one layer", {"objective": {"name": "dro"}}),
    # Completions that top-p or top-k cut, some of them beside others, with every mask.
    "allowed": (
        "one layer",
        {
            "objective": {
                "magistral": {"kl_coef": 0.1, "entropy_coef": 0.01},
                "mask": {
                    "token_ratio": (0.01, 100.0),
                    "sequence_ratio": (1e-9, 1e9),
                    "geometric_ratio": (0.05, 20.0),
                    "off_policy": 2.0,
                    "token_tv": 0.5,
                    "token_kl": 1.0,
                    "truncated": True,
                },
            },
        },
    ),
    "adapters": ("window", {"objective": KL, "lora": {"rank": 3}}),
    # Rows of one completion: some parts have only a prompt, or only filler.
    "short": ("one layer", {"objective": KL, "microbatch_tokens": 1}),
}
LIMIT = timedelta(seconds=1234)
# By ranks, and how many of them share rows: each model, and heads and sinks with and without
# repeated key-value heads, where all share rows, with adapters too; each objective, where groups of
# them do.
LAYOUTS = {
    (2, 2): ("grouped", "capped", "sinks", "everything"),
    (4, 4): ("grouped", "window", "sinks", "experts", "adapters", "short"),
    (4, 2): tuple(n for n in SETTINGS if n not in {*MODELS, "adapters"} or n == "grouped"),
}
# For each layout, the setting whose state one rank continues: that of a model, or of adapters.
RESUMED = {(2, 2): "grouped", (4, 4): "adapters", (4, 2): "grouped"}


def load(folder, name, ranks=1, sharing=1):
    model, settings = SETTINGS[name]
    settings = {"learning_rate": 1e-3, "microbatch_tokens": 40} | settings
    settings["objective"] = ObjectiveConfig.model_validate(settings["objective"])
    config = TrainerConfig(ranks=ranks, context_parallel=sharing, **settings)
    return Trainer.load(str(folder / model), config, 10)


batch = partial(rollouts.batch, groups=2)  # of four completions


def teach(version=0):
    return taught(batch(version), top_k=4)


def restricted(version=0):
    """Completions of a batch; every third one was drawn from the whole vocabulary."""
    rng, found = random.Random(version), batch(version)
    for number, sequence in enumerate(found.sequences):
        if number % 3:
            sets = [
                sorted({token, *rng.sample(range(VOCAB), rng.randint(0, 11))})
                for token in sequence.token_ids
            ]
            counts = array("i", map(len, sets))
            sequence.allowed = AllowedTokens(counts, array("i", chain(*sets)))
    return found


CHANGED = {"teacher": teach, "allowed": restricted}


def resumed(folder, name, saved, ranks=1, sharing=1):
    """The weights one update after those that were saved."""
    t = load(folder, name, ranks, sharing)
    t.load_state(folder / f"{name}-{saved}")
    t.step(batch(2))
    return t.weights()


def joined(rank, ranks, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    options = {"rank": rank, "world_size": ranks, "timeout": LIMIT}
    dist.init_process_group("gloo", init_method=store, **options)


def run(rank, ranks, sharing, folder):
    if ranks > 1:
        (folder / f"{ranks}-{sharing}").mkdir(exist_ok=True)
        joined(rank, ranks, folder / f"{ranks}-{sharing}")
    for name in LAYOUTS.get((ranks, sharing), SETTINGS):
        t = load(folder, name, ranks, sharing)
        some = partial(batch, n_minibatch=4 if name == "everything" else None)
        if name in CHANGED:
            some = CHANGED[name]
        metrics = [t.step(some())]
        # As far as they were clipped: a multiple of the first moments.
        gradients = {
            n: sharding.whole(t.optimizer.state[p]["exp_avg"].detach()).clone()
            for n, p in t.model.named_parameters()
            if p.requires_grad
        }
        metrics.append(t.step(some(1)))
        learned = t.learned()
        figures = [*learned.advantages], [*learned.logprobs]
        logprobs = t.logprobs(batch(9).sequences[:3], 0.8)
        after = [t.weights()]
        if name in (RESUMED.values() if ranks == 1 else [RESUMED[ranks, sharing]]):
            t.save_state(folder / f"{name}-{ranks}-{sharing}")
            after.append(resumed(folder, name, "1-1", ranks, sharing))
        if rank == 0:
            found = metrics, gradients, (*figures, *logprobs), after
            torch.save(found, folder / f"{name}-{ranks}-{sharing}.pt")
    if ranks > 1:
        refuse_state()
        refuse_mixed_tokens()
        group = exchange_of(sharing, torch.device("cpu")).group
        assert group._get_backend(torch.device("cpu")).options._timeout == LIMIT
        dist.destroy_process_group()


def refuse_state():
    """A model whose layers carry state is refused by name."""
    model = AutoModelForCausalLM.from_config(HYBRID, attn_implementation="packed")
    ranks = dist.get_world_size()
    with pytest.raises(InputError, match="Lfm2ForCausalLM carry state .* set it to 1"):
        Trainer(model, TrainerConfig(ranks=ranks, context_parallel=ranks), 1)


def refuse_mixed_tokens():
    """A model that looks at other tokens outside of attention is refused, by what it computes."""
    model = AutoModelForCausalLM.from_config(MODELS["grouped"], attn_implementation="packed")
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: (args[0].roll(1, 1),))
    ranks = dist.get_world_size()
    with pytest.raises(InputError, match=r"looks at other tokens outside of attention; set it to"):
        Trainer(model, TrainerConfig(ranks=ranks, context_parallel=ranks), 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("context")
    for name, config in (MODELS | {"one layer": ONE_LAYER}).items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    run(0, 1, 1, folder)
    for ranks, sharing in LAYOUTS:
        args = ranks, sharing, folder
        mp.start_processes(run, args, nprocs=ranks, start_method=forked.START_METHOD)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "name"),
    [(f"{ranks}-{sharing}", n) for (ranks, sharing), names in LAYOUTS.items() for n in names],
)
def test_ranks_that_share_rows_give_what_one_gives(folder, layout, name):
    one, several = (torch.load(folder / f"{name}-{found}.pt") for found in ("1-1", layout))
    for a, b in zip(one[0], several[0], strict=True):
        for key in ("padding_fraction", "computed_tokens"):  # of each group's own budgets
            a.pop(key), b.pop(key)
        assert b == pytest.approx(a, rel=1e-4, abs=1e-5)
    assert one[1].keys() == several[1].keys()
    for n, gradient in one[1].items():
        scale = gradient.abs().max().clamp(min=1e-12)
        torch.testing.assert_close(several[1][n] / scale, gradient / scale, atol=1e-5, rtol=0)
    for a, b in zip(one[2], several[2], strict=True):
        assert b == pytest.approx(a, abs=1e-4)
    for a, b in zip(one[3], several[3], strict=False):  # not each layout resumes each
        assert_close(a, b)


def assert_close(a, b):
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "name"), [(f"{ranks}-{sharing}", n) for (ranks, sharing), n in RESUMED.items()]
)
def test_a_state_of_ranks_that_share_rows_goes_on_alone(folder, layout, name):
    _, _, _, (_, expected) = torch.load(folder / f"{name}-1-1.pt")
    assert_close(expected, resumed(folder, name, layout))


WIDE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
LONG = LlamaConfig(**WIDE, num_hidden_layers=3)


def long_batch():
    """One row of two completions that share nothing."""
    rng = random.Random(0)
    return train_batch(0, [[completion(rng, length=1000)] for _ in range(2)])


def take_memory(rank, ranks, folder):
    joined(rank, ranks, folder)
    config = TrainerConfig(ranks=ranks, context_parallel=ranks, microbatch_tokens=4096)
    # Makes the kernels for these shapes, which are kept.
    Trainer.load(str(folder / "one layer"), config, 10).step(long_batch())
    t = Trainer.load(str(folder / "model"), config, 10)
    with measured() as peak:
        t.step(long_batch())
    (folder / f"{rank}.json").write_text(json.dumps(peak.highest))
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_that_share_a_row_hold_a_share_of_its_activations(tmp_path):
    peaks = {}
    for ranks in (1, 2, 4):
        folder = tmp_path / str(ranks)
        one_layer = LlamaConfig(**WIDE, num_hidden_layers=1)
        for name, config in ("model", LONG), ("one layer", one_layer):
            AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        args = ranks, folder
        mp.start_processes(take_memory, args, nprocs=ranks, start_method=forked.START_METHOD)
        files = [folder / f"{rank}.json" for rank in range(ranks)]
        peaks[ranks] = max(json.loads(file.read_text()) for file in files)
    assert peaks[2] <= 0.6 * peaks[1]
    assert peaks[4] <= 0.35 * peaks[1]


def test_what_ranks_cannot_share_is_refused_by_name():
    with pytest.raises(InputError, match="layers of hybrid carry state .* set it to 1"):
        check_sharing(2, shape_of(HYBRID, "hybrid"))
    with pytest.raises(InputError, match="3 ranks cannot share the 4 query heads .* divisor of 4"):
        check_sharing(3, shape_of(LONG, "llama"))
    check_sharing(1, shape_of(HYBRID, "hybrid"))
    check_sharing(4, shape_of(LONG, "llama"))  # two key-value heads are repeated


def test_a_dry_run_refuses_it_too(tmp_path):
    keys = ["trainer.ranks=2", "trainer.context_parallel=2"]
    with pytest.raises(InputError, match="2 ranks cannot share the 5 query heads"):
        tramontane.dry_run("configs/quickstart.yaml", keys)
    HYBRID.save_pretrained(tmp_path)
    shape = str(tmp_path / "config.json")
    with pytest.raises(InputError, match="carry state from token to token"):
        tramontane.dry_run("configs/quickstart.yaml", keys, model_shape=shape)


def test_groups_of_ranks_divide_all_ranks():
    with pytest.raises(ValueError, match="groups of 3 ranks, and ranks is 4; set ranks to 3"):
        TrainerConfig(ranks=4, context_parallel=3)
