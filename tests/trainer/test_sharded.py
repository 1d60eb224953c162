"""Several ranks: each reads, holds, trains and writes its shards, and never the whole model."""

import time
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

from tests import forked
from tests.trainer import rollouts
from tests.trainer.rollouts import VOCAB, equal
from tramontane.config import ObjectiveConfig, TrainerConfig
from tramontane.models.loading import load_model
from tramontane.models.weight_files import INDEX
from tramontane.trainer import lora, sharding
from tramontane.trainer.trainer import Trainer

pytestmark = pytest.mark.slow  # its ranks are processes of their own

batch = partial(rollouts.batch, groups=2)  # of four completions

SIZES = {
    "vocab_size": VOCAB,  # not divisible by the number of ranks
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}
MODELS = {
    "tied": (LlamaConfig(**SIZES, tie_word_embeddings=True), torch.float32, "5GB"),
    "untied": (LlamaConfig(**SIZES), torch.bfloat16, "20KB"),  # in several files
    "qwen3": (Qwen3Config(**SIZES, head_dim=8), torch.float32, "20KB"),
}
GPT2 = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128)
ADAPTED = [("untied", "float32"), ("untied", "bfloat16"), ("gpt2", "float32")]
UNITS = {"tied": 3, "untied": 5, "qwen3": 5}  # what FSDP gathers and reduces at once


class Operations(TorchDispatchMode):
    """Counts operations by name, collectives among them."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **kwargs or {})


def load(path, ranks, **settings):
    settings = {"learning_rate": 1e-3, "microbatch_tokens": 40} | settings
    objective = ObjectiveConfig.model_validate({"magistral": {"kl_coef": 0.1}})
    return Trainer.load(str(path), TrainerConfig(ranks=ranks, objective=objective, **settings), 10)


def gathered(tensors):
    return {name: sharding.whole(tensor.detach()) for name, tensor in tensors}


def gradients(t):
    """The first step's gradients, as far as they were clipped: a multiple of the first moments."""
    moments = [(n, t.optimizer.state[p]["exp_avg"]) for n, p in t.model.named_parameters()]
    return gathered(moments)


def run(rank, ranks, folder):
    torch.set_num_threads(1)
    if ranks > 1:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    for name in MODELS:
        found = {}
        for reduce in ("step", "microbatch"):
            t = load(folder / name, ranks, reduce_gradients=reduce)
            check_start(t, folder / name, ranks)
            with Operations() as operations:
                metrics = t.step(batch())
            found[reduce] = metrics, gradients(t), operations.counts
        check_background_save(t, folder / name, folder / f"{name}-state", ranks)
        t.save_weights(folder / f"{name}-saved", torch.bfloat16)
        weights = t.weights()
        if rank == 0:
            torch.save((found, weights), folder / f"{name}-{ranks}.pt")
    train_adapters(rank, ranks, folder)
    if ranks > 1:
        dist.destroy_process_group()


def train_adapters(rank, ranks, folder):
    """One step of adapters on a frozen model that is read in shards."""
    found = {}
    for name, dtype in ADAPTED:
        t = load(folder / name, ranks, dtype=dtype, lora={"rank": 3})
        frozen = [p for p in t.model.parameters() if not p.requires_grad]
        assert {p.dtype for p in frozen} == {getattr(torch, dtype)}
        started = t.weights()
        metrics = t.step(batch())
        moments = {
            n: t.optimizer.state[p]["exp_avg"]
            for n, p in t.model.named_parameters()
            if p.requires_grad
        }
        found[name, dtype] = started, metrics, gathered(moments.items()), t.weights()
        assert t.optimizer.state.keys().isdisjoint(frozen)
        check_merged(t, stored_transposed=name == "gpt2")
    if rank == 0:
        torch.save(found, folder / f"adapters-{ranks}.pt")


def check_merged(t, stored_transposed):
    """Check that the weights are those of the layers with their adapters added."""
    weights = t.weights()
    for name, layer in lora.adapted_layers(t.model).items():
        factors = layer.lora_B["default"], layer.lora_A["default"], layer.base_layer
        b, a, w = (sharding.whole(x.weight.detach()).float() for x in factors)
        change = layer.scaling["default"] * b @ a
        expected = w + (change.T if stored_transposed else change)
        torch.testing.assert_close(weights[f"{name}.weight"], expected, atol=1e-6, rtol=0)


def check_start(t, path, ranks):
    """Check that the trainer and its reference begin with the checkpoint's weights, in shards."""
    loaded = load_model(str(path))
    assert equal(t.weights(), dict(loaded.state_dict()))
    reference = gathered(t._reference.named_parameters())
    assert equal(reference, {n: p.detach() for n, p in loaded.named_parameters()})
    assert not any(p.requires_grad for p in t._reference.parameters())
    for name, buffer in loaded.named_buffers():
        for model in (t.model, t._reference):
            assert torch.equal(dict(model.named_buffers())[name], buffer)
    if ranks > 1:
        for p in [*t.model.parameters(), *t._reference.parameters()]:
            rows = -(-p.shape[0] // ranks)
            assert sharding.local(p).shape[0] <= rows


def check_background_save(t, model, folder, ranks):
    """Check that a state is that of the moment of its saving, though training goes on."""
    before = t.weights()
    t.save_state(folder, wait=False)
    t.step(batch(1))
    while not t.state_saved():
        time.sleep(0.001)  # the writer's
    again = load(model, ranks, reduce_gradients=t.config.reduce_gradients)
    again.load_state(folder)
    assert equal(again.weights(), before) and not equal(t.weights(), before)
    again.step(batch(1))
    assert equal(again.weights(), t.weights())
    if ranks > 1:
        (folder / "file").touch()
        with pytest.raises(OSError, match="Not a directory|File exists"):
            t.save_state(folder / "file" / "state")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    for name, (config, dtype, shard_size) in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        model.save_pretrained(folder / name, max_shard_size=shard_size)
    AutoModelForCausalLM.from_config(GPT2).save_pretrained(folder / "gpt2")
    run(0, 1, folder)
    mp.start_processes(run, (2, folder), nprocs=2, start_method=forked.START_METHOD)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_sharded_start_step_and_gradients_equal_those_of_one_rank(folder, name):
    (one, _), (two, _) = (torch.load(folder / f"{name}-{ranks}.pt") for ranks in (1, 2))
    for reduce in ("step", "microbatch"):
        metrics, expected, _ = one["step"]
        found, moments, _ = two[reduce]
        for key in ("loss", "grad_norm", "kl_reference"):
            assert found[key] == pytest.approx(metrics[key], rel=1e-6, abs=1e-7)
        for n, gradient in expected.items():
            scale = gradient.abs().max()
            torch.testing.assert_close(moments[n] / scale, gradient / scale, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_reduced_once_per_optimizer_step_or_microbatch(folder, name):
    found, _ = torch.load(folder / f"{name}-2.pt")
    reduced = {
        when: sum(n for op, n in counts.items() if "reduce_scatter" in op)
        for when, (_, _, counts) in found.items()
    }
    assert reduced["step"] == UNITS[name]
    assert reduced["microbatch"] > UNITS[name] and reduced["microbatch"] % UNITS[name] == 0


@pytest.mark.parametrize("name", MODELS)
def test_saved_weights_load_with_transformers_and_here(folder, name):
    _, weights = torch.load(folder / f"{name}-2.pt")
    rounded = {n: w.bfloat16() for n, w in weights.items()}
    saved = folder / f"{name}-saved"
    assert equal(dict(AutoModelForCausalLM.from_pretrained(saved).state_dict()), rounded)
    assert equal(dict(load_model(str(saved), torch.bfloat16).state_dict()), rounded)
    assert not (saved / INDEX).exists()


@pytest.mark.parametrize(("name", "dtype"), ADAPTED)
def test_sharded_adapters_start_and_step_as_on_one_rank(folder, name, dtype):
    limit = {"float32": 1e-6, "bfloat16": 0.1}[dtype]
    one, two = (torch.load(folder / f"adapters-{ranks}.pt")[name, dtype] for ranks in (1, 2))
    assert equal(one[0], two[0])
    assert equal(one[0], dict(load_model(str(folder / name)).state_dict()))
    assert two[1]["grad_norm"] == pytest.approx(one[1]["grad_norm"], rel=limit)
    assert one[2].keys() == two[2].keys()
    for key, gradient in one[2].items():
        scale = gradient.abs().max().clamp(min=1e-12)  # A has no gradient yet
        torch.testing.assert_close(two[2][key] / scale, gradient / scale, atol=limit, rtol=0)
    changed = [key for key in one[3] if not torch.equal(one[3][key], one[0][key])]
    assert len(changed) == 2 * {"untied": 7, "gpt2": 4}[name]
