"""The memory table against closed formulas, and refusals whose remedies work."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.allocations import measured
from tests import forked
from tests.trainer import rollouts
from tramontane.config import Config, TrainerConfig
from tramontane.config.device import number_type
from tramontane.errors import InputError
from tramontane.generator.cache import lane_capacities
from tramontane.models.attention import PACKED
from tramontane.models.packing import pack
from tramontane.models.shape import DTYPE_BYTES, ModelShape, load_shape, shape_of
from tramontane.planning import fit
from tramontane.planning.fit import RunMemory, Worker, run_memory
from tramontane.planning.gpus import GIB
from tramontane.planning.memory import (
    Lengths,
    Memory,
    generator_memory,
    staged_memory,
)
from tramontane.planning.remedies import with_key
from tramontane.planning.trainer_memory import (
    Completions,
    block_activations,
    offloaded_memory,
    reference_memory,
    trainer_memory,
)
from tramontane.tokens import AllowedTokens, ints
from tramontane.trainer.trainer import Trainer

LENGTHS = Lengths(prompt=2048, completion=36864)
# 40 layers of hidden size 5,120 (32 heads and 8 key-value heads of 128, MLP of 32,768) and a
# vocabulary of 131,072.
PARAMETERS = 23_572_403_200
BLOCK, HEAD = 555_755_520, 131_072 * 5120


@pytest.fixture(scope="module")
def small() -> ModelShape:
    return load_shape("mistral-small-24b")


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


def rank_memory(stage: Config, shape: ModelShape, lengths: Lengths) -> Memory:
    return trainer_memory(stage.trainer, shape, lengths, Completions.of(stage))


def offloaded(stage: Config, shape: ModelShape) -> float:
    return offloaded_memory(stage.trainer, shape, LENGTHS, Completions.of(stage)).total


# Lengths of a prompt and its completions, and how far the formula may lie above what is kept: it
# counts scores of the prompt at full length, and a mask for each completion.
LAYOUTS = {
    "one sequence": (16, [48], 1.02),
    "shared prompt": (32, [64, 64, 64, 64], 1.04),
    "long sequence": (64, [576], 1.02),
    "long, shared prompt": (128, [512, 512], 1.3),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_activations_are_what_autograd_keeps_of_a_block(dtype: str, layout: str) -> None:
    """What the formula adds for a second block, against the tensors that a real block saves."""
    prompt, completions, above = LAYOUTS[layout]
    llama = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation=PACKED,
    )  # fmt: skip
    model = LlamaForCausalLM(llama).to(getattr(torch, dtype))
    parts = [prompt + completions[0]] if len(completions) == 1 else [prompt, *completions]
    continues = [None] + [0] * (len(parts) - 1)
    block, packed = model.model.layers[0], pack([range(n) for n in parts], continues=continues)
    hidden = torch.randn(1, sum(parts), 64).to(getattr(torch, dtype)).requires_grad_()
    del packed["input_ids"]
    rotary = model.model.rotary_emb(hidden, packed["position_ids"])
    ours = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *rotary]}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Integers are places in the row, the same for all blocks.
        if tensor.is_floating_point() and storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = block(hidden, position_embeddings=rotary, **packed)
    assert out.requires_grad
    stage = config(trainer={"dtype": dtype, "microbatch_tokens": sum(parts)})
    one, two = (
        rank_memory(
            stage, replace(shape_of(llama, ""), layers=layers), Lengths(prompt, max(completions))
        ).activations
        for layers in (1, 2)
    )
    assert 0.98 * sum(kept.values()) <= two - one <= above * sum(kept.values())


def test_a_batch_smaller_than_a_microbatch_takes_its_own_memory(small: ModelShape) -> None:
    """Four completions of 200 tokens fill no microbatch of the default size."""
    lengths = Lengths(prompt=100, completion=100)
    shape = replace(small, vocabulary=262_144)
    by_default = config(trainer={"dtype": "bfloat16", "microbatch_tokens": 16384}).trainer
    filled = by_default.model_copy(update={"microbatch_tokens": 4 * lengths.longest})
    found = trainer_memory(by_default, shape, lengths, Completions(4))
    assert found == trainer_memory(filled, shape, lengths, Completions(4))
    full = trainer_memory(by_default, shape, lengths, Completions(1000))
    for part in ("activations", "logits"):
        assert getattr(found, part) < 0.25 * getattr(full, part)


def write_masks(dtype: str, file: Path) -> None:
    """What a step takes without masks and with those of 1,000 tokens, and what the formula says."""
    llama = LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    keys = {"dtype": dtype, "microbatch_tokens": 8192, "gradient_checkpointing": True}
    lengths, rng, taken, said = Lengths(8, 120), random.Random(0), [], []
    for allowed in (0, 1000):
        policy = LlamaForCausalLM._from_config(llama, attn_implementation=PACKED)
        trainer = Trainer(policy, TrainerConfig.model_validate(keys), 10)
        group = [
            replace(rollouts.completion(rng, [1] * 8, 120, reward=float(i % 2)), allowed=masks)
            for i in range(16)
            for masks in [AllowedTokens(ints([allowed] * 120), ints(range(allowed)) * 120)]
        ]
        trainer.step(rollouts.train_batch(0, [group]))  # makes the kernels, which are kept
        with measured() as peak:
            trainer.step(rollouts.train_batch(0, [group]))
        taken.append(peak.highest)
        minibatch = Completions(16, 16, allowed)
        said.append(trainer_memory(trainer.config, shape_of(llama, ""), lengths, minibatch).total)
    file.write_text(json.dumps([taken, said]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampling_masks_are_counted(dtype: str, tmp_path: Path) -> None:
    """In a process of its own: to read malloc's accounting takes the longer, the more pieces of
    memory are free in a process."""
    assert forked.end(forked.start(write_masks, dtype, tmp_path / "bytes.json")) == 0
    taken, said = json.loads((tmp_path / "bytes.json").read_text())
    assert taken[1] - taken[0] <= said[1] - said[0] <= 1.15 * (taken[1] - taken[0])


def test_a_group_has_its_prompt_once_and_threads_without_work_take_nothing() -> None:
    """Four completions of two prompts: one microbatch, for one of eight threads."""
    llama = LlamaConfig(hidden_size=64, intermediate_size=160, num_hidden_layers=4, vocab_size=96)
    shape, lengths = shape_of(llama, ""), Lengths(prompt=400, completion=64)
    keys = {"microbatch_tokens": 16384, "threads": 8}
    pipeline = {"n_batch": 4, "n_async": 4, "group_size": 2}
    found = rank_memory(config(trainer=keys, pipeline=pipeline), shape, lengths)
    alone = config(trainer=keys | {"threads": 1}, pipeline=pipeline)
    assert found == rank_memory(alone, shape, lengths)
    exact = config(trainer={"microbatch_tokens": 2 * 400 + 4 * 64, "threads": 1}, pipeline=pipeline)
    assert found == rank_memory(exact, shape, lengths)


def test_one_rank_holds_everything(small: ModelShape) -> None:
    exact = rank_memory(config(), small, LENGTHS)
    assert exact.weights == 4 * PARAMETERS
    assert exact.optimizer == 8 * PARAMETERS
    assert exact.gradients == 4 * PARAMETERS + 4 * HEAD  # the last: a gradient that is being added
    half = rank_memory(config(trainer={"dtype": "bfloat16"}), small, LENGTHS)
    assert half.weights == 6 * PARAMETERS  # and a copy to compute in
    assert half.gradients == 4 * PARAMETERS + 6 * HEAD
    assert half.optimizer == exact.optimizer
    both = rank_memory(config(trainer={"dtype": "bfloat16", "threads": 2}), small, LENGTHS)
    assert both.gradients == 2 * half.gradients
    assert both.weights == half.weights


def test_ranks_share_weights_gradients_and_moments(small: ModelShape) -> None:
    keys = {"dtype": "bfloat16", "ranks": 32, "device": "cuda", "reduce_gradients": "microbatch"}
    stage = config(trainer=keys)
    found = rank_memory(stage, small, LENGTHS)
    assert found.optimizer == 8 * PARAMETERS / 32
    # The head, and the last block as it is gathered ahead; the head's gradient and its reduction.
    assert found.weights == 4 * PARAMETERS / 32 + 2 * (HEAD + BLOCK)
    assert found.gradients == 4 * PARAMETERS / 32 + 6 * HEAD
    assert reference_memory(stage.trainer, small).weights == 2 * PARAMETERS / 32


def test_ranks_that_share_rows_share_their_activations(small: ModelShape) -> None:
    keys = {"dtype": "bfloat16", "ranks": 32, "device": "cuda", "reduce_gradients": "microbatch"}
    alone = rank_memory(config(trainer=keys), small, LENGTHS)
    found = rank_memory(config(trainer=keys | {"context_parallel": 4}), small, LENGTHS)
    assert found.activations == pytest.approx(alone.activations / 4, rel=1e-3)
    assert (found.weights, found.gradients) == (alone.weights, alone.gradients)
    assert found.optimizer == alone.optimizer
    # Beyond the number of key-value heads, each rank has copies.
    few = replace(small, kv_heads=2)
    copied = rank_memory(config(trainer=keys | {"context_parallel": 4}), few, LENGTHS)
    as_many = replace(small, kv_heads=4)
    assert copied == rank_memory(config(trainer=keys | {"context_parallel": 4}), as_many, LENGTHS)


def test_gradients_reduced_once_a_step_are_kept_whole(small: ModelShape) -> None:
    """With several microbatches on a rank; a single one is reduced at once."""
    keys = {"dtype": "bfloat16", "ranks": 32, "device": "cuda", "reduce_gradients": "step"}
    found = rank_memory(config(trainer=keys), small, LENGTHS)
    assert found.gradients == 4 * PARAMETERS + 6 * HEAD
    keys["microbatch_tokens"] = 256 // 32 * LENGTHS.longest
    assert config().pipeline.minibatch == 256
    found = rank_memory(config(trainer=keys), small, LENGTHS)
    assert found.gradients == 4 * PARAMETERS / 32 + 6 * HEAD


def test_adapters_alone_have_float32_weights_gradients_and_moments(small: ModelShape) -> None:
    adapters = 40 * 8 * (2 * (5120 + 4096) + 2 * (5120 + 1024) + 3 * (5120 + 32768))
    keys = {"dtype": "bfloat16", "lora": {"rank": 8}}
    found = rank_memory(config(trainer=keys), small, LENGTHS)
    assert found.weights == 2 * PARAMETERS + 6 * adapters
    assert found.optimizer == 8 * adapters
    assert found.gradients == 4 * adapters + 6 * 8 * 32768
    several = {"ranks": 32, "device": "cuda", "reduce_gradients": "microbatch"}
    shared = config(trainer=keys | several)
    ranks = rank_memory(shared, small, LENGTHS)
    assert ranks.weights == (2 * PARAMETERS + 4 * adapters) / 32 + 2 * (HEAD + BLOCK)
    assert ranks.optimizer == 8 * adapters / 32
    assert ranks.gradients == 4 * adapters / 32 + 6 * adapters / 40
    # The reference is the trainer's own model without its adapters.
    assert reference_memory(shared.trainer, small).total == 0
    stages = [config(trainer=keys | {"objective": {"magistral": {"kl_coef": 0.1}}})]
    names = [w.name for load in run_memory(stages, small, [LENGTHS]).loads for w in load.workers]
    assert "reference" not in names


def test_a_value_network_is_a_second_trained_model_without_logits(small: ModelShape) -> None:
    stage = config(trainer={"dtype": "bfloat16", "objective": {"name": "dro"}})
    workers = [w for load in run_memory([stage], small, [LENGTHS]).loads for w in load.workers]
    memory = {worker.name: worker.memory for worker in workers}
    policy, network = memory["trainer rank"], memory["value network"]
    assert network.optimizer == policy.optimizer
    assert network.activations == policy.activations
    assert policy.logits > network.logits == 0
    assert "reference" in memory


def test_a_teacher_has_weights_and_logits_and_no_optimizer(small: ModelShape) -> None:
    tiny, trainer = load_shape("tiny"), {"objective": {"name": "distill"}}
    teachers = {"model": "tiny", "domains": {"code": "mistral-small-24b"}, "dtype": "bfloat16"}
    stage = config(trainer=trainer, teacher=teachers, pipeline={"diversity": "none"})
    workers = [w for load in run_memory([stage], small, [LENGTHS]).loads for w in load.workers]
    first, second = (w.memory for w in workers if w.name == "teacher")
    assert first.weights == 2 * tiny.parameters and second.weights == 2 * PARAMETERS
    assert first.logits == 36864 * tiny.vocabulary * 2
    assert first.optimizer == first.gradients == 0
    stage = config(trainer=trainer, teacher=teachers | {"ranks": 4}, pipeline={"diversity": "none"})
    loads = run_memory([stage], small, [LENGTHS]).loads
    _, sharded = (w for load in loads for w in load.workers if w.name == "teacher")
    gathered = sharded.memory.weights - second.weights / 4
    assert sharded.number == 4 and 0 < gathered < second.weights / 5


def test_a_judge_that_is_no_endpoint_has_a_place(small: ModelShape) -> None:
    def judges(**keys: Any) -> list[Worker]:
        domains = {"open": {"verifier": "judge"}}
        stage = config(verifier={"judge": {"workers": 2} | keys, "domains": domains})
        loads = run_memory([stage], small, [LENGTHS]).loads
        return [w for load in loads for w in load.workers if w.name == "judge"]

    model = {"path": "mistral-small-24b", "device": "cpu", "dtype": "bfloat16"}
    asked = {"rubric": ["It is true."], "max_tokens": 1024}
    [few] = judges(checkpoint=model | {"slots": 1}, **asked)
    [many] = judges(checkpoint=model | {"slots": 1, "max_prompt_tokens": 3072}, **asked)
    assert (few.number, few.device, few.memory.weights) == (2, "cpu", 2 * PARAMETERS)
    token = small.kv_bytes_per_token("bfloat16")
    assert (
        2048 * token <= few.memory.cache < many.memory.cache and many.memory.cache >= 4096 * token
    )
    [reward] = judges(reward_model={"path": "tiny", "device": "cpu", "max_tokens": 100})
    tiny, size = load_shape("tiny"), DTYPE_BYTES[number_type("cpu").dtype]
    assert reward.memory.weights == size * (tiny.parameters + 2 * tiny.hidden)  # a head of 2 labels
    assert reward.memory.activations == 16 * 100 * size * (3 * 160 + 3 * 448)
    assert not judges(endpoint={"url": "http://localhost", "model": "m"}, **asked)


def test_checkpointing_keeps_the_input_of_each_block_and_what_attends(small: ModelShape) -> None:
    """In bfloat16 on a GPU: no term grows with the square of the length."""
    keys = {"dtype": "bfloat16", "device": "cuda", "microbatch_tokens": 40960}
    plain = rank_memory(config(trainer=keys), small, LENGTHS)
    keys["gradient_checkpointing"] = True
    saved = rank_memory(config(trainer=keys), small, LENGTHS)
    block = 16 * 5120 + 4 * (4096 + 1024) + 4 * 32 + 8 * 32768
    assert block_activations(small, "bfloat16") == block
    kept = 2 * 5120 + 32 * (2 * 128 + 4)  # and attention's output, with a float32 number a head
    assert plain.activations - saved.activations == 40960 * (39 * block - 40 * kept)
    # A longer sequence is a microbatch of its own, and costs in proportion.
    long = rank_memory(config(trainer=keys), small, Lengths(2048, 79872))
    assert long.activations == 2 * saved.activations


def test_full_checkpointing_keeps_no_output_of_attention(small: ModelShape) -> None:
    keys = {"dtype": "bfloat16", "device": "cuda", "microbatch_tokens": 40960}
    kept, full = (
        rank_memory(config(trainer=keys | {"gradient_checkpointing": way}), small, LENGTHS)
        for way in (True, "full")
    )
    assert kept.activations - full.activations == 40960 * 40 * 32 * (2 * 128 + 4)


def test_offload_moves_the_inputs_of_blocks_to_the_host(small: ModelShape) -> None:
    keys = {"dtype": "bfloat16", "device": "cuda", "microbatch_tokens": 40960}
    keys |= {"gradient_checkpointing": True}
    saved = rank_memory(config(trainer=keys), small, LENGTHS)
    assert offloaded(config(trainer=keys), small) == 0
    keys |= {"activation_offload": True}
    found = rank_memory(config(trainer=keys), small, LENGTHS)
    inputs = 40960 * 2 * 5120  # of a block
    attention = 40960 * 32 * (2 * 128 + 4)  # its output, and a float32 number of each head
    assert saved.activations - found.activations == 38 * inputs + 40 * attention
    assert offloaded(config(trainer=keys), small) == 40 * inputs


def test_what_is_taken_in_turn_counts_once() -> None:
    """One rank on a CPU with tied embeddings, in float32: of the head, the last block and the
    embeddings, which come one after the other, only the one that takes most counts."""
    llama = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=160, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    shape, tokens = shape_of(llama, ""), 16 + 2 * 32
    found = rank_memory(config(trainer={"microbatch_tokens": tokens}), shape, Lengths(16, 32))
    head, matrix = 1000 * 64, 64 * 160
    block = tokens * (2 * 12 * 64 + 8 * (64 + 32) + 4 * 4 + 16 * 160)
    block += 2 * 4 * (2 * 16) * 32  # the prompt's keys and values, for each completion
    block += 4 * 4 * 48 * tokens  # scores
    kept, norm = 3 * block, 12 * 64 * tokens + 4 * 64 * 64
    # The logits, all of the vocabulary three times more, and the gradient of the head's input.
    logits = 64 * 1000 * 4 + 64 * 1000 * 16 + 8 * 64 * 64
    moments = {
        "head": 4 * head + norm + logits,
        "block": 4 * head + 4 * matrix + 2 * 4 * tokens * (160 + 64),
        "embeddings": 2 * 4 * head - kept,
    }
    assert max(moments, key=lambda name: moments[name]) == "head"
    assert found.total == 16 * shape.parameters + kept + moments["head"]
    assert found.logits == logits
    assert found.gradients == 4 * shape.parameters + 2 * 4 * head


def test_logits_of_a_large_vocabulary_are_never_whole(small: ModelShape) -> None:
    keys = {"dtype": "bfloat16", "device": "cuda", "microbatch_tokens": 40960}
    logits = rank_memory(config(trainer=keys), small, LENGTHS).logits
    assert logits < 40960 * 131_072 * 2 / 4
    # 128 MiB kept; 1,024 entries of the vocabulary at once; the gradient of the head's input.
    assert logits == (128 << 20) + 36864 * 1024 * 14 + 6 * 36864 * 5120


@pytest.mark.parametrize("staging", ["device", "host"])
def test_keys_and_values_take_what_the_weights_leave(small: ModelShape, staging: str) -> None:
    keys = {"dtype": "bfloat16", "device": "cuda", "staging": staging, "slots": 1024}
    stage = config(
        generator=keys | {"gpu_memory_utilization": 0.9}, pipeline={"n_async": 2048, "l_max": 36864}
    )
    found = generator_memory(stage, small, LENGTHS, 141 * GIB)
    assert found.weights == (4 if staging == "device" else 2) * PARAMETERS
    token = 2 * 40 * 8 * 128 * 2
    staged = staged_memory(stage.generator, small).total
    assert found.weights + staged == 4 * PARAMETERS
    # All of the share: weights, prefills, steps, what recordings keep, keys and values.
    assert 0.99 * 0.9 * 141 * GIB < found.total <= 0.9 * 141 * GIB
    assert found.cache >= LENGTHS.longest * token
    # Without room for a single sequence, its keys and values are needed all the same.
    short = generator_memory(stage, small, LENGTHS, 40 * GIB)
    assert short.cache == LENGTHS.longest * (token + 12)


def test_steps_of_a_gpu_sort_a_part_of_the_logits_and_are_recorded(small: ModelShape) -> None:
    """1,024 rows and a vocabulary of 131,072: logits of bfloat16, and 2^24 of them in float32,
    sorted; once for recordings (of 45 sizes, each with top-p and without), once to warm up."""
    keys = {"dtype": "bfloat16", "device": "cuda", "slots": 1024}
    sizes = {"n_async": 1024, "n_batch": 1024, "l_max": 1024, "l_cache": 0}
    step = 1024 * 131_072 * 2 + 2**24 * 48
    for graphs, expected in ((True, 2 * step + 2 * 45 * 8 * 2**20), (False, step)):
        stage = config(generator=keys | {"cuda_graphs": graphs}, pipeline=sizes)
        found = generator_memory(stage, small, Lengths(64, 1024))
        assert found.logits == expected
        assert found.reused == min(step, found.activations)


def test_lanes_hold_what_passes_through_them() -> None:
    """On a CPU: 64 slots of 256 tokens, in lanes of 256, 160, 96, 64 and 32."""
    stage = config(pipeline={"n_async": 64, "l_max": 192}, generator={"prefill_tokens": 512})
    tiny, lengths = load_shape("tiny"), Lengths(64, 192)
    found = generator_memory(stage, tiny, lengths)
    positions = 64 * sum(lane_capacities(64, 256)) + 4 * 64
    assert found.cache == 5120 * positions + 64 * 256 * 12
    assert found.weights == 2 * 4 * tiny.parameters
    # Lanes of 160 and 256 hold no completion of 96 tokens; prompts of 160 have prefixes of 160.
    found = generator_memory(stage, tiny, Lengths(160, 96))
    assert found.cache == 5120 * (64 * (32 + 64 + 96) + 4 * 160) + 64 * 256 * 12
    assert found.activations == 5120 * 64 * 64  # all move from the lane of 64 to that of 96


GENERATOR = {"dtype": "bfloat16", "device": "cuda"}
TRAINER = {
    "dtype": "bfloat16",
    "device": "cuda",
    "microbatch_tokens": 40960,
    "ranks": 32,
    "reduce_gradients": "microbatch",
}


def table(gpu: str | None = "h100", model: str = "mistral-small-24b", **sections: Any) -> RunMemory:
    sections = {"generator": GENERATOR, "placement": {"kind": "ray"}} | sections
    return run_memory([config(**sections)], load_shape(model), [LENGTHS], gpu)


def overrides(refusal: str) -> list[list[tuple[str, Any]]]:
    """The alternatives that a refusal offers, each a list of keys and values."""
    _, _, advice = refusal.rpartition(": set ")
    return [
        [(key, yaml.safe_load(value)) for key, value in re.findall(r"([\w.]+)=(\S+) \(now", choice)]
        for choice in advice.split(" or ")
    ]


@pytest.mark.parametrize(
    ("trainer", "keys"),
    [
        ({"ranks": 8, "gradient_checkpointing": True}, {"trainer.ranks"}),
        ({"ranks": 64}, {"trainer.gradient_checkpointing"}),
        ({"ranks": 64, "gradient_checkpointing": True, "reduce_gradients": "step"},
         {"trainer.reduce_gradients"}),
        ({"ranks": 2, "dtype": "float32"}, {"trainer.dtype", "trainer.ranks"}),
        ({"ranks": 32, "gradient_checkpointing": True, "microbatch_tokens": 1 << 17},
         {"trainer.microbatch_tokens"}),
    ],
)  # fmt: skip
def test_what_a_refusal_advises_is_enough(trainer: dict[str, Any], keys: set[str]) -> None:
    sections = {"pipeline": {"n_batch": 1024, "n_async": 2048}, "trainer": TRAINER | trainer}
    found = table(**sections)
    (refusal,) = (r for r in found.refusals if "trainer rank" in r)
    assert re.match(
        r"GPU of each trainer rank \(h100\) has 79.1 GiB, and trainer rank need", refusal
    )
    choices = overrides(refusal)
    assert keys <= {key for choice in choices for key, _ in choice}
    for choice in choices:
        changed = config(generator=GENERATOR, placement={"kind": "ray"}, **sections)
        for key, value in choice:
            changed = with_key(changed, key, value)
        after = run_memory([changed], load_shape("mistral-small-24b"), [LENGTHS], "h100")
        assert not any("trainer rank" in r for r in after.refusals)


def test_a_run_that_nothing_makes_fit_is_refused() -> None:
    found = table("8", trainer=TRAINER | {"gradient_checkpointing": True})
    (refusal,) = (r for r in found.refusals if "trainer rank" in r)
    assert "lower pipeline.l_max, or take devices with more memory" in refusal


def test_without_a_gpu_the_table_has_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fit, "machine_memory", lambda: 256 * GIB)
    found = table(None, trainer=TRAINER)
    assert not found.refusals
    *gpus, machine = found.verdicts()
    assert all(line.endswith("its memory is not known") for line in gpus)
    assert "fits in" in machine


def test_a_gpu_is_a_name_or_a_size() -> None:
    by_name, by_size = (table(gpu, trainer=TRAINER).loads[0] for gpu in ("H100", "79.1"))
    assert by_name.capacity == by_size.capacity == pytest.approx(79.1 * GIB)
    with pytest.raises(InputError, match="--gpu tpu: unknown GPU; choose from a100"):
        table("tpu")


def test_workers_of_one_device_are_added_up() -> None:
    """Each generator and each rank has a GPU of its own, and a generator may share it with one."""
    settings = config(generator={"device": "cuda", "workers": 2}, trainer={"device": "cuda"})
    shape = load_shape("tiny")
    shared, other, machine = run_memory([settings], shape, [Lengths(64, 192)], "h100").loads
    assert shared.names == "trainer rank and generator"
    assert other.names == "generator"
    workers = sum(worker.memory.total for worker in shared.workers)
    assert shared.needed - shared.overhead == pytest.approx(workers)
    assert machine.names == "controller and verifier"
    settings = config(generator={"device": "cuda"}, trainer={"device": "cuda", "ranks": 4})
    first, others, _ = run_memory([settings], shape, [Lengths(64, 192)], "h100").loads
    assert first.device.startswith("cuda:0 ")
    assert others.device.startswith("each of cuda:1 to cuda:3 ")
    assert others.names == "trainer rank"
