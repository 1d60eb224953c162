"""Attention that is more than a softmax over a layer's own keys: latent attention, layers
that share keys and values, attention sinks, capped scores and chunks; and a model whose class says
nothing of it. In the engine, and packed in training, against transformers' own eager forward."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma4TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    StableLmConfig,
)

from tests.generator.slot_models import (
    EOS,
    VOCAB,
    finish,
    make_requests,
    plain_logprobs,
)
from tests.generator.test_parking import converse
from tests.generator.test_states import Life, check_kept
from tramontane.errors import InputError
from tramontane.generator import cache
from tramontane.generator.engine import SlotEngine
from tramontane.generator.forward import check_steps, examine_model
from tramontane.generator.fusion import compile_blocks
from tramontane.generator.graphs import run_directly
from tramontane.models import attention
from tramontane.models.packing import pack

WINDOW = 7
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
BOTH = ["sliding_attention", "full_attention"]
KINDS = {
    "latent": (DeepseekV3Config, LATENT),
    "shared": (
        Gemma4TextConfig,
        {
            "num_hidden_layers": 4,
            "layer_types": BOTH * 2,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 2,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "sinks": (
        GptOssConfig,
        {
            "layer_types": BOTH,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "capped": (
        Gemma2Config,
        {"layer_types": BOTH, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0},
    ),
    # Its class does not say that it supports the interface that its layers use.
    "unannounced": (StableLmConfig, {"use_parallel_residual": True, "qk_layernorm": True}),
    "chunked": (
        Llama4TextConfig,
        {
            "attention_chunk_size": 4,
            "floor_scale": 3,
            "attn_scale": 1.0,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "no_rope_layers": [1, 0],
        },
    ),
}


def make_kind(kind: str, seed: int = 0, **changed):
    """A model with wide weights, so that a wrong key, sink or cap shows."""
    config_class, extra = KINDS[kind]
    torch.manual_seed(seed)
    config = config_class(**SIZES | extra | changed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.3)
    return model.eval()


@pytest.mark.parametrize("layout", ["prefixes shared", "prefixes copied", "arena"])
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_a_plain_forward(kind, layout, monkeypatch):
    monkeypatch.setattr(cache, "SHARING_SLOTS", 1 if layout == "prefixes shared" else 1000)
    model = make_kind(kind)
    engine = SlotEngine(
        copy.deepcopy(model).requires_grad_(False),
        slots=6,
        max_len=90,
        eos_ids=[EOS],
        prefill_tokens=64,
        record=run_directly if layout == "arena" else None,
    )
    requests = make_requests(4, 3, seed=3, lengths=(1, 40), tokens=(5, 25))
    engine.submit(requests)
    done = finish(engine).values()
    for c, expected in zip(done, plain_logprobs(model, done), strict=True):
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("record", [None, run_directly])
@pytest.mark.parametrize("kind", KINDS)
def test_parked_conversations_continue(kind, record):
    model = make_kind(kind)
    engine = SlotEngine(copy.deepcopy(model), slots=8, max_len=90, record=record)
    done = converse(engine).values()
    for c, expected in zip(done, plain_logprobs(model, done), strict=True):
        drawn = [i for i, version in enumerate(c.versions) if version >= 0]
        got = torch.tensor(c.logprobs)[drawn]
        torch.testing.assert_close(got, expected[drawn], atol=1e-4, rtol=0)
    assert engine.stats.parked_tokens


@pytest.mark.parametrize("short", [512, 8])  # by plain products, and by chunks of queries
@pytest.mark.parametrize("kind", KINDS)
def test_packed_gradients_are_those_of_each_sequence_alone(kind, short, monkeypatch):
    monkeypatch.setattr("tramontane.models.packing.SHORT", short)
    monkeypatch.setattr(attention, "_QUERY_CHUNK", 5)
    model = make_kind(kind)
    packed = copy.deepcopy(model)
    packed.set_attn_implementation(attention.PACKED)
    attention.note_rows(packed)
    generator = torch.Generator().manual_seed(1)
    prompt, *rest = (
        torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (6, 3, 19, 9, 1)
    )
    # Two sequences continue the first.
    logits = packed(**pack([prompt, *rest], continues=[None, None, 0, 0, None])).logits[0]
    parts = logits.split([len(prompt), *map(len, rest)])
    alone = [prompt, rest[0], prompt + rest[1], prompt + rest[2], rest[3]]
    plain = [model(torch.tensor([ids]), use_cache=False).logits[0] for ids in alone]
    plain = [out[-len(part) :] for out, part in zip(plain, parts, strict=True)]
    weights = [torch.randn(part.shape, generator=generator) for part in parts]
    for outs in (parts, plain):
        sum((out * w).sum() for out, w in zip(outs, weights, strict=True)).backward()
    for part, out in zip(parts, plain, strict=True):
        torch.testing.assert_close(part, out, atol=1e-4, rtol=1e-4)
    for (name, p), q in zip(packed.named_parameters(), model.parameters(), strict=True):
        if q.grad is not None:
            bound = 1e-3 * float(q.grad.abs().max()) + 1e-5
            assert float((p.grad - q.grad).abs().max()) < bound, name


def test_layers_that_share_keys_are_cached_once():
    model = make_kind("shared")
    layout, _ = examine_model(model, 32)
    own = 2 * 2 * (2 * 8)  # two layers, keys and values, of two heads
    assert layout.token_bytes == own * 4


def test_layers_that_compute_otherwise_for_one_token_are_refused():
    model = make_kind("unannounced")
    examine_model(model, 32)
    check_steps(model)
    layer = model.model.layers[1].mlp
    layer.register_forward_hook(lambda _, args, out: out * (2 if out.shape[1] == 1 else 1))
    with pytest.raises(InputError, match="other logits in decode steps than in a forward"):
        check_steps(model)


@pytest.mark.parametrize("layout", ["prefixes shared", "prefixes copied", "arena", "tight arena"])
@pytest.mark.parametrize("kind", ["latent", "chunked"])
def test_every_token_of_a_life_is_that_of_a_plain_forward(kind, layout, monkeypatch):
    monkeypatch.setattr(cache, "SHARING_SLOTS", 1 if layout == "prefixes shared" else 1000)
    options = {"record": run_directly} if "arena" in layout else {}
    if layout == "tight arena":  # extents of 16 positions grow, move and run short
        monkeypatch.setattr("tramontane.generator.arena._SHORTEST", 16)
        options["kv_bytes"] = 200 * examine_model(make_kind(kind), 32)[0].token_bytes
    versions = [make_kind(kind, seed).requires_grad_(False) for seed in range(3)]
    life = Life(versions, seed=9, **options)
    life.whole()
    assert (life.engine.stats.preemptions > 0) == (layout == "tight arena")


def test_latents_are_cached_once_for_all_heads():
    layout, _ = examine_model(make_kind("latent"), 32)
    assert layout.token_bytes == 4 * SIZES["num_hidden_layers"] * (12 + 4)


@pytest.mark.parametrize("record", [None, run_directly])
def test_kept_latents_are_those_of_earlier_weights(record):
    """The newest weights make keys and values from them, as with transformers' own cache."""
    check_kept(*(make_kind("latent", seed).requires_grad_(False) for seed in (0, 1)), record=record)


def test_a_compiled_block_attends_to_latents():
    """Also where it meets a prefill first; its parts differ from those of other attention."""
    found = []
    for compiled in (False, True):
        model = make_kind("latent", first_k_dense_replace=0).requires_grad_(False)
        engine = SlotEngine(model, 6, 90, [EOS], record=run_directly)
        if compiled:
            compile_blocks(model, "eager")
        engine.submit(make_requests(2, 3, seed=3, lengths=(1, 40), tokens=(5, 45)))
        found.append(finish(engine))
    for key, completion in found[0].items():
        logprobs = [torch.tensor(done[key].logprobs) for done in found]
        torch.testing.assert_close(*logprobs, atol=1e-5, rtol=0)
        assert completion.token_ids == found[1][key].token_ids
