"""Weights of eight bits: products against those of the weights that they stand for, and a generator
that samples from, and records, the quantized policy."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma3TextConfig, GPT2Config

from tests.generator.slot_models import finish, make_requests, make_tokenizer
from tramontane.batches import TrainSequence
from tramontane.config import GeneratorConfig, TrainerConfig
from tramontane.errors import InputError
from tramontane.generator import Generator
from tramontane.models import int8
from tramontane.models.int8 import Int8Linear, Int8Weight, quantize
from tramontane.models.loading import load_model
from tramontane.models.quantized import named_weights
from tramontane.models.shape import load_shape, shape_of
from tramontane.models.staging import StagedWeights
from tramontane.models.weights import LocalWeights, Part
from tramontane.planning.memory import generator_weights
from tramontane.trainer import parity
from tramontane.trainer.trainer import Trainer

SAMPLE = [*range(5, 45)]
pytestmark = pytest.mark.skipif(
    not int8.is_exact(), reason="this processor has no instructions for int8"
)


def tiny():
    return load_model("tiny", torch.float32, "cpu").requires_grad_(False)


def quantized():
    model = tiny()
    quantize(model, SAMPLE)
    return model


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, Int8Linear)]


def test_a_plan_counts_what_weights_of_eight_bits_take():
    weights = {id(x): x.nbytes for x in named_weights(quantized()).values()}
    config = GeneratorConfig(weights="int8", dtype="float32")
    assert generator_weights(config, load_shape("tiny")) == sum(weights.values())


@pytest.mark.parametrize(
    "sizes",
    [
        GPT2Config(n_embd=128, n_head=2, n_layer=1, vocab_size=200),  # layers of another class
        Gemma3TextConfig(  # a head tied to embeddings that are scaled
            hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, vocab_size=200, pad_token_id=0,
        ),
        DeepseekV3Config(  # up-projections of latents
            hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32,
            qk_rope_head_dim=32, v_head_dim=32, vocab_size=200, first_k_dense_replace=1,
        ),
    ],
    ids=["gpt2", "gemma3", "deepseek"],
)  # fmt: skip
def test_a_plan_counts_in_full_what_stays_in_full(sizes):
    model = AutoModelForCausalLM.from_config(sizes, attn_implementation="packed")
    int8.quantize(model, [1, 2, 3])
    weights = {id(x): x.nbytes for x in named_weights(model).values()}
    config = GeneratorConfig(weights="int8", dtype="float32")
    assert generator_weights(config, shape_of(sizes, "sizes")) == sum(weights.values())


@pytest.mark.parametrize("rows", [(1,), (7,), (2, 33)])
def test_a_product_is_that_of_the_weights_in_use(rows):
    """In 16 bits, activations lose less than a thousandth of what weights do in 8; also where a
    channel has a thousand times the others, and in rows of zeros."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(192, 96)
    eight = Int8Linear(layer, int8._Input(torch.tensor([3, 50]), 192, 1))
    x = torch.randn(*rows, 192)
    x[..., 3] *= 1000
    x[..., 0, :] = 0
    expected = F.linear(x, eight.weight.whole(), layer.bias)
    torch.testing.assert_close(eight(x), expected, atol=2e-3, rtol=1e-4)
    assert eight(x.bfloat16()).dtype == torch.bfloat16
    error = (layer.weight - eight.weight.whole()).abs()
    assert (error <= eight.weight.scales[:, None] / 2 * 1.0001).all()
    assert not error[:, [3, 50]].any()


def test_channels_with_the_largest_products_stay_in_full():
    """Not those with the largest activations, where the weights hardly read them."""
    model, full = tiny(), tiny()
    for each in (model, full):
        block = each.model.layers[0]
        block.input_layernorm.weight[:16] *= 20
        for layer in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj):
            layer.weight[:, :16] /= 1000
            layer.weight[:, 16:32] *= 10
    quantize(model, SAMPLE)
    layer, weight = model.model.layers[0].self_attn.q_proj, full.model.layers[0].self_attn.q_proj
    by_activation = Int8Linear(weight, int8._Input(torch.arange(16), 160, 1))
    x = full.model.layers[0].input_layernorm(full.model.embed_tokens(torch.tensor(SAMPLE)))
    ours, others = ((each(x) - weight(x)).norm() for each in (layer, by_activation))
    assert ours < 0.3 * others


def test_layers_that_read_the_same_input_quantize_it_once(monkeypatch):
    model, calls = quantized(), []
    plain = int8._Input._halves
    monkeypatch.setattr(int8._Input, "_halves", lambda s, x: calls.append(x) or plain(s, x))
    model(torch.tensor([SAMPLE]))
    blocks = model.config.num_hidden_layers
    assert len(layers_of(model)) == 7 * blocks + 1  # and the head
    assert len(calls) == 4 * blocks + 1  # queries, keys and values; output; gate and up; down
    assert all(layer._read._x is None for layer in layers_of(model))  # nothing is held


def test_the_rest_of_the_model_is_in_full():
    model, full = quantized(), tiny()
    for name, tensor in full.state_dict().items():
        own = named_weights(model)[name]
        if isinstance(own, Int8Weight):
            assert 0 < (own.whole() - tensor).norm() / tensor.norm() < 0.01
        else:
            assert torch.equal(own, tensor)
    weights = named_weights(model)
    assert {type(x) for x in weights.values()} == {torch.nn.Parameter, Int8Weight}
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    rows = model.get_input_embeddings()(torch.tensor([[3, 9]]))
    torch.testing.assert_close(rows[0], weights["lm_head.weight"].whole()[[3, 9]])
    eight = [layer.weight for layer in layers_of(model)]
    numbers = sum(math.prod(w.shape) for w in eight)
    assert sum(w.nbytes for w in eight) <= 0.35 * 4 * numbers + 4 * 16 * sum(
        w.shape[0] for w in eight
    )


def test_versions_are_quantized_as_they_arrive_and_swapped():
    """In parts, as ranks hold them; a version with a number that is not finite changes nothing."""
    model = quantized()
    staged, new = StagedWeights(model), tiny().state_dict()
    for name in new:
        new[name] = new[name] * 1.1 if new[name].dim() == 2 else new[name]
    weights = LocalWeights()
    for name, tensor in new.items():
        if name == "lm_head.weight":
            continue
        names, half = (name,), len(tensor) // 2
        weights.add([Part(names, tensor.shape, 0, tensor[:half])])
        weights.add([Part(names, tensor.shape, half, tensor[half:])])
    before = {
        name: x.whole() for name, x in named_weights(model).items() if isinstance(x, Int8Weight)
    }
    staged.fetch(1, weights)
    for name, whole in before.items():
        assert torch.equal(named_weights(model)[name].whole(), whole)
    assert staged.swap(1, in_place=False)
    for name in before:
        alone = Int8Weight(new[name].shape, named_weights(model)[name].channels)
        alone.write(0, new[name])
        assert torch.equal(named_weights(model)[name].whole(), alone.whole())
    name = next(iter(before))
    after = named_weights(model)[name].whole()
    for place in (0, int(named_weights(model)[name].channels[0])):
        broken = {**new, name: new[name].clone()}
        broken[name][1, place] = math.nan
        bad = LocalWeights()
        bad.add([Part.whole([n], x) for n, x in broken.items()])
        with pytest.raises(InputError, match=name):
            staged.fetch(2, bad)
    assert torch.equal(named_weights(model)[name].whole(), after)


def test_recorded_logprobs_are_of_the_quantized_policy():
    """A trainer with the weights in use computes what the generator recorded; one with the weights
    in full does not, and the gate says how far they are apart."""
    generator = Generator(quantized(), make_tokenizer(), GeneratorConfig(dtype="float32"), 16, 90)
    generator.submit(make_requests(4, 4, seed=3, lengths=(2, 30), tokens=(20, 40)))
    sequences = [TrainSequence.of(c) for _, c in sorted(finish(generator).items())]
    config = TrainerConfig(dtype="float32", device="cpu")
    same = tiny()
    same.load_state_dict(generator.weights())
    recorded = [s.logprobs for s in sequences]
    found = parity.distance(recorded, Trainer(same, config, 1).logprobs(sequences, 1.0))
    assert found.kl < 1e-7
    found = parity.distance(recorded, Trainer(tiny(), config, 1).logprobs(sequences, 1.0))
    assert 1e-7 < found.kl < 3e-3
    assert 0.8 < found.size < 1
    parity.check_distance("generator.weights int8", found, 3e-3, 0.8)
    with pytest.raises(parity.ParityError, match=r"(?s)KL.*effective sample size.*parity_kl"):
        parity.check_distance("generator.weights int8", found, found.kl / 2, 0.8)
    with pytest.raises(parity.ParityError, match="parity_sample_size 1"):
        parity.check_distance("generator.weights int8", found, 3e-3, 1.0)


def test_distances_of_known_policies():
    mu, pi = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.25, 0.5])
    draws = [0, 0, 1, 2]  # as often as μ draws them
    found = parity.distance([[mu[i]] for i in draws], [[pi[i]] for i in draws])
    assert found.kl == pytest.approx(0.25 * math.log(2))
    assert found.size == pytest.approx(4**2 / (4 * (0.25 + 0.25 + 1 + 4)))
    assert found.largest == pytest.approx(2)
    with pytest.raises(parity.ParityError, match="nan"):
        parity.check_distance("key", parity.distance([[0.0]], [[math.nan]]), 1.0, 0.0)


@pytest.mark.parametrize("keys", [{"kind": "vllm"}, {"device": "cuda"}])
def test_where_there_is_no_int8_it_is_refused(keys):
    with pytest.raises(ValidationError, match=r"weights"):
        GeneratorConfig(**{"weights": "int8", "dtype": "float32", **keys})


def test_what_int8_would_gain_is_measured_without_a_draw_from_the_run():
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    faster = int8.speedup(64, 64)
    assert faster > 0
    assert torch.equal(torch.rand(4), wanted)
    assert int8.speedup(64, 64) == faster  # measured once: no two measurements are equal


def test_what_vllm_quantizes_is_measured_like_int8():
    vllm = {"kind": "vllm", "dtype": "bfloat16", "vllm": {"engine_args": {"quantization": "fp8"}}}
    config = GeneratorConfig(**vllm)
    assert config.quantized == "generator.vllm.engine_args quantization fp8"
    assert parity.tolerance(TrainerConfig(), config) == parity.EIGHT_BITS
    assert not GeneratorConfig(**vllm | {"kind": "slots"}).quantized
    assert not GeneratorConfig().quantized


def test_a_processor_without_int8_is_refused(monkeypatch):
    monkeypatch.setattr("tramontane.generator.generator.multiplies_int8", lambda: False)
    with pytest.raises(InputError, match="no instructions for int8"):
        Generator.load("tiny", GeneratorConfig(weights="int8", dtype="float32"), 2, 20)
