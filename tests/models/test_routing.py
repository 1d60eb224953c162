"""Recorded and replayed choices of experts."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.generator.slot_models import finish, make_model, make_requests, make_tokenizer
from tests.generator.test_attention_kinds import LATENT, SIZES
from tramontane.batches import BatchSettings, TrainBatch, TrainSequence
from tramontane.config import GeneratorConfig, TrainerConfig
from tramontane.errors import InputError
from tramontane.generator import Generator
from tramontane.models import routing
from tramontane.models.packing import pack
from tramontane.models.states import separate_states
from tramontane.tokens import INSERTED, floats, ints
from tramontane.trainer import Trainer
from tramontane.trainer.rows import joined

EXPERTS, CHOSEN = 8, 2
SPARSE = {"num_experts_per_tok": CHOSEN, "moe_intermediate_size": 16}
# Two layers with experts, and one before them where the first are dense.
GROUPS = LATENT | {
    "num_hidden_layers": 3, "n_routed_experts": EXPERTS, "n_group": 2, "first_k_dense_replace": 1,
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
# By mechanism: softmax over all or the chosen, sigmoid, groups, biases of the choice or of the
# scores, shared experts with and without a gate, dense first layers.
KINDS = {
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
    "qwen3_moe": {"num_experts": EXPERTS, "norm_topk_prob": True, **SPARSE},
    "qwen3_next": {
        "num_experts": EXPERTS, "norm_topk_prob": True, "shared_expert_intermediate_size": 16,
        **SPARSE, **DELTA,
    },
    "gpt_oss": {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
    "ernie4_5_moe": {
        "moe_num_experts": EXPERTS, "moe_k": CHOSEN, "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "num_hidden_layers": 3,
    },
    "deepseek_v2": GROUPS | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    "deepseek_v3": GROUPS,
    "glm4_moe": {
        "n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "num_hidden_layers": 3, "routed_scaling_factor": 2.5, **SPARSE,
    },
}  # fmt: skip
LAYERS = 2  # with experts
ROUTERS = ("mlp.gate", "mlp.router")


def make(kind: str, dtype=torch.float32):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SIZES | KINDS[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        for name, bias in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("e_score_correction_bias", "router.bias")):
                bias.copy_(0.2 * torch.randn_like(bias))
    separate_states(model)
    model.set_attn_implementation("packed")
    return model.to(dtype).eval()


def logits(model, ids):
    return model(**pack([ids])).logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_replay_of_a_models_own_choice_changes_nothing(kind):
    model, ids = make(kind), list(range(3, 40))
    expected = logits(copy.deepcopy(model), ids)
    expected.square().sum().backward()
    routing.prepare(model)
    logits(model, ids)
    own = routing.choices(model)
    assert own.shape == (len(ids), LAYERS, CHOSEN)
    routing.replay(model, own.flatten(1))
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forced_choice_is_the_plain_model_with_that_choice(kind):
    """Each router's scores of all other experts are made too low to be chosen; its weights of the
    forced ones are the same numbers, computed by the model's own code."""
    model, ids = make(kind), [5, 9, 44, 17, 80]
    plain = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    orders = torch.rand(len(ids), LAYERS, EXPERTS, generator=generator).argsort(-1)
    forced = orders[..., :CHOSEN]
    layers = iter(range(LAYERS))
    routers = [m for name, m in plain.named_modules() if name.endswith(ROUTERS)]
    for router in routers:
        router.register_forward_hook(_weights_of(kind, forced[:, next(layers)]))
    routing.prepare(model)
    routing.replay(model, forced.flatten(1).short())
    got, expected = logits(model, ids), logits(plain, ids)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    own = copy.deepcopy(model)
    routing.replay(own, None)
    assert (logits(own, ids) - got).abs().max() > 0.1
    for out in (got, expected):
        out.square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, atol=1e-3, rtol=1e-3, msg=name)


def _weights_of(kind, experts):
    """A hook that gives a router's output for these experts, by the papers' formulas."""

    def hook(router, inputs, output):
        scores = output[0].float()
        scores = scores.sigmoid() if kind in ("deepseek_v3", "glm4_moe") else scores.softmax(-1)
        weights = scores.gather(1, experts)
        if kind != "deepseek_v2":
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * getattr(router, "routed_scaling_factor", 1.0)
        return output[0], weights, experts

    return hook


def test_without_a_choice_the_router_chooses():
    model, ids = make("qwen3_moe"), list(range(3, 20))
    routing.prepare(model)
    expected = logits(model, ids)
    forced = routing.choices(model).flatten(1).clone()
    forced[3:] = routing.NO_CHOICE
    routing.replay(model, forced)
    assert torch.equal(logits(model, ids), expected)


def test_a_dense_model_has_no_choice():
    with pytest.raises(InputError, match="router_replay"):
        routing.prepare(make_model())


def test_a_router_in_float32():
    model = make("qwen3_moe", torch.bfloat16)
    exact = copy.deepcopy(model)
    routing.prepare(model, float32=True)
    found = {}
    gate = next(m for name, m in model.named_modules() if name.endswith("mlp.gate"))
    gate.register_forward_hook(
        lambda module, inputs, output: found.update(x=inputs[0], y=output[0])
    )
    logits(model, [5, 6, 7])
    assert found["y"].dtype == torch.float32
    weight = next(m for n, m in exact.named_modules() if n.endswith("mlp.gate")).weight
    torch.testing.assert_close(found["y"], found["x"].float() @ weight.float().T)


def sample(model, groups=3, size=4, longest=20):
    """Completions of a generator that records experts, as sequences for the trainer."""
    routing.prepare(model)
    generator = Generator(
        model, make_tokenizer(), GeneratorConfig(return_routed_experts=True), 6, 90
    )
    generator.submit(make_requests(groups, size, seed=3, lengths=(2, 30), tokens=(5, longest)))
    return [TrainSequence.of(c) for _, c in sorted(finish(generator).items())]


def trainer_of(model, **config):
    return Trainer(model, TrainerConfig(objective={"name": "sft"}, **config), 4)


@pytest.mark.parametrize("kind", KINDS)
def test_generator_and_trainer_agree_with_recorded_experts(kind):
    """In float32 the trainer's own choice is the generator's; a recorded choice is used where the
    two differ."""
    sequences = sample(make(kind), 2, 3)
    assert all(s.experts.shape == (len(s.token_ids), LAYERS * CHOSEN) for s in sequences)
    trainer = trainer_of(make(kind), router_replay=True)
    for s, found in zip(sequences, trainer.logprobs(sequences, 1.0), strict=True):
        np.testing.assert_allclose(found, s.logprobs, atol=1e-4)
    # A choice that no router would make: the expert after the chosen one.
    for s in sequences:
        s.experts = (s.experts + 1) % EXPERTS
    changed = trainer.logprobs(sequences, 1.0)
    worst = max(
        np.abs(np.array(found) - s.logprobs).max()
        for s, found in zip(sequences, changed, strict=True)
    )
    assert worst > 0.1
    for s in sequences:  # as of a run that recorded none
        s.versions = ints([-1] * len(s.token_ids))
    for s, found in zip(sequences, trainer.logprobs(sequences, 1.0), strict=True):
        np.testing.assert_allclose(found, s.logprobs, atol=1e-4)


def test_inserted_tokens_and_continued_requests_keep_their_places():
    model = make("qwen3_moe")
    routing.prepare(model)
    config = GeneratorConfig(return_routed_experts=True)
    generator = Generator(model, make_tokenizer(), config, 6, 120)
    requests = make_requests(2, 2, seed=3, lengths=(2, 30), tokens=(8, 12))
    generator.submit(requests)
    done = finish(generator)
    put = [7, 8, 9]
    again = []
    for r in requests:
        c = done[r.group, r.index]
        again.append(
            replace(
                r,
                token_ids=c.token_ids + ints(put),
                logprobs=c.logprobs + floats([0.0] * 3),
                versions=c.versions + ints([INSERTED] * 3),
                experts=c.experts,
                sampling=replace(r.sampling, max_tokens=len(c.token_ids) + 13),
            )
        )
    generator.submit(again)
    generator.step(4)
    generator.submit([])
    pending = generator.pending()
    generator.cancel_all()
    generator.submit(pending)  # as in another process, after an interruption
    trainer = trainer_of(make("qwen3_moe"), router_replay=True)
    for c in finish(generator).values():
        first = len(done[c.group, c.index].token_ids)
        assert (c.experts[first : first + 3] == routing.NO_CHOICE).all()
        assert (np.delete(c.experts, slice(first, first + 3), 0) >= 0).all()
        (found,) = trainer.logprobs([TrainSequence.of(c)], 1.0)
        drawn = np.asarray(c.versions) >= 0
        np.testing.assert_allclose(np.array(found)[drawn], np.array(c.logprobs)[drawn], atol=1e-4)


def test_a_step_with_replay_reports_the_balance():
    sequences = sample(make("qwen3_moe"))
    for threads in (1, 2):
        trainer = trainer_of(
            make("qwen3_moe"), router_replay=True, threads=threads, microbatch_tokens=64,
            gradient_checkpointing=True,
        )  # fmt: skip
        batch = TrainBatch(0, [[s] for s in sequences], BatchSettings("", 1.0, 90, len(sequences)))
        metrics = trainer.step(batch)
        assert metrics["expert_imbalance"] >= 1.0
        assert np.allclose(
            trainer.learned().logprobs, joined([s.logprobs for s in sequences]), atol=1e-4
        )


def test_balance():
    balanced = np.array([[[0], [0]], [[1], [1]]], np.int16)
    assert routing.imbalance(balanced, 2) == 1.0
    assert routing.imbalance(np.zeros((5, 2, 1), np.int16), 4) == 4.0


def test_bfloat16_differs_less_with_replay():
    """The estimate of KL(μ‖π), where generator and trainer round differently."""
    sequences = sample(make("qwen3_moe", torch.bfloat16), longest=40)
    found = {}
    for replayed in (False, True):
        trainer = trainer_of(make("qwen3_moe"), dtype="bfloat16", router_replay=replayed)
        logprobs = trainer.logprobs(sequences, 1.0)
        ratio = np.concatenate(
            [np.array(x) - s.logprobs for s, x in zip(sequences, logprobs, strict=True)]
        )
        found[replayed] = float(np.mean(np.expm1(ratio) - ratio))
    assert found[True] < found[False]
