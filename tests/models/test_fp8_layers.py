"""Weights in E4M3: products against those of the numbers that they stand for, a generator that
samples from, and records, the quantized policy, and what it would do on a GPU."""

import math

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from tests.fake_cuda import Launches, fake_cuda
from tests.generator.slot_models import finish, make_requests, make_tokenizer
from tests.generator.test_on_a_gpu import SIZES
from tramontane.config import GeneratorConfig
from tramontane.errors import InputError
from tramontane.generator import Generator, fusion
from tramontane.generator.engine import SlotEngine
from tramontane.generator.graphs import run_directly
from tramontane.models import fp8_layers
from tramontane.models.fp8 import LARGEST, STORED
from tramontane.models.fp8_layers import Fp8Product, Fp8Weight, quantize, quantize_rows
from tramontane.models.loading import load_model
from tramontane.models.packing import pack
from tramontane.models.products import ProductPart
from tramontane.models.quantized import QuantizedWeight, named_weights
from tramontane.models.shape import load_shape, shape_of
from tramontane.models.staging import StagedWeights, from_state
from tramontane.models.weights import LocalWeights, Part
from tramontane.planning.memory import generator_weights
from tramontane.trainer import parity

SAMPLE = [*range(5, 45)]


def tiny():
    return load_model("tiny", torch.float32, "cpu").requires_grad_(False)


def quantized():
    model = tiny()
    quantize(model, SAMPLE)
    return model


def eight(model):
    return {k: x for k, x in named_weights(model).items() if isinstance(x, QuantizedWeight)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_the_numbers_in_use(dtype, bias):
    """Also of rows that are zeros, and where one channel has a thousand times the others."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(192, n, bias, dtype=dtype) for n in (96, 64)]
    product = Fp8Product(layers)
    x = torch.randn(2, 5, 192, dtype=dtype)
    x[..., 3] *= 1000
    x[0, 0] = 0
    values, scales = quantize_rows(x.flatten(0, -2))
    assert values.dtype == STORED
    assert (values.float().abs().amax(1)[1:] == LARGEST).all()
    used = (values.float() * scales).unflatten(0, (2, 5))
    for place, (layer, weight) in enumerate(zip(layers, product.weights, strict=True)):
        found = ProductPart(layer, weight, product, place)(x)
        expected = F.linear(used, weight.whole(), layer.bias.float() if bias else None)
        assert found.dtype == dtype
        exact = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found.float(), expected, atol=exact, rtol=exact)
        # Three bits behind the point, and what is below the smallest of a row.
        error, full = (weight.whole() - layer.weight).abs(), layer.weight.abs()
        assert (error <= full / 16 * 1.001 + weight.parts[1] * 2**-9).all()
    assert product._input is None  # nothing is held


def test_a_number_that_is_not_finite_is_seen_in_its_rows_scale():
    for bad in (math.nan, math.inf):
        x = torch.ones(3, 64)
        x[1, 5] = bad
        assert quantize_rows(x)[1].isfinite().flatten().tolist() == [True, False, True]


def test_head_embeddings_and_norms_stay_in_full():
    model, full = quantized(), tiny()
    found = eight(model)
    blocks = model.config.num_hidden_layers
    assert len(found) == 7 * blocks
    for name, tensor in full.state_dict().items():
        own = named_weights(model)[name]
        if isinstance(own, Fp8Weight):
            assert 0 < (own.whole() - tensor).norm() / tensor.norm() < 0.04
        else:
            assert torch.equal(own, tensor)
    products = {id(m._product) for m in model.modules() if isinstance(m, ProductPart)}
    assert len(products) == 4 * blocks  # queries, keys and values; output; gate and up; down


@pytest.mark.parametrize("config", ["tiny", Qwen2Config(**SIZES | {"hidden_size": 128})], ids=str)
def test_a_plan_counts_what_the_weights_take(config):
    if config == "tiny":
        model, shape = quantized(), load_shape("tiny")
    else:
        config.intermediate_size = 200  # no multiple of 16
        model = AutoModelForCausalLM.from_config(config, attn_implementation="packed")
        quantize(model, [1, 2, 3])
        shape = shape_of(config, "sizes")
        assert not any("mlp" in name for name in eight(model))
    weights = {id(x): x.nbytes for x in named_weights(model).values()}
    settings = GeneratorConfig(weights="fp8", dtype="float32", device="cpu")
    assert generator_weights(settings, shape) == sum(weights.values())


def test_versions_are_quantized_as_they_arrive_and_swapped():
    """In parts, as ranks hold them; the version in use stays until the swap, and a version with a
    number that is not finite changes nothing."""
    model, new = quantized(), tiny().state_dict()
    staged = StagedWeights(model)
    new = {name: x * 1.1 for name, x in new.items() if name != "lm_head.weight"}
    weights = LocalWeights()
    for name, tensor in new.items():
        half = len(tensor) // 2
        weights.add([Part((name,), tensor.shape, 0, tensor[:half])])
        weights.add([Part((name,), tensor.shape, half, tensor[half:])])
    before = {name: x.whole() for name, x in eight(model).items()}
    staged.fetch(1, weights)
    assert all(torch.equal(eight(model)[name].whole(), x) for name, x in before.items())
    assert staged.swap(1, in_place=True)
    for name in before:
        values, scales = quantize_rows(new[name])
        assert torch.equal(eight(model)[name].whole(), values.float() * scales)
    name = next(iter(before))
    after = eight(model)[name].whole()
    broken = {**new, name: new[name].clone()}
    broken[name][1, 4] = math.nan
    with pytest.raises(InputError, match=name):
        staged.fetch(2, from_state(broken, named_weights(model)))
    assert torch.equal(eight(model)[name].whole(), after)


def test_recorded_logprobs_are_of_the_quantized_policy():
    """Also after weights that came in flight: a forward of the quantized model computes what was
    recorded, one in full does not, and the gate says how far they are apart."""
    config = GeneratorConfig(weights="fp8", dtype="float32", device="cpu")
    generator = Generator(quantized(), make_tokenizer(), config, 16, 90)
    assert generator._engine.needs_fixed_addresses  # its weights are views
    new = {name: x * 1.01 for name, x in tiny().state_dict().items()}
    for state in (None, new):
        if state:
            generator.update_weights(1, state)
        generator.submit(make_requests(4, 4, seed=3, lengths=(2, 30), tokens=(20, 40)))
        done = [c for _, c in sorted(finish(generator).items())]
        full = tiny()
        if state:
            full.load_state_dict(state)
        recorded = [list(c.logprobs) for c in done]
        ours, theirs = (logprobs_of(model, done) for model in (generator.model, full))
        # Other shapes round sums otherwise, which moves a few activations to the next of E4M3.
        near, far = (parity.distance(recorded, each).kl for each in (ours, theirs))
        assert near < 1e-4 and near < far / 50
        assert far < 1e-2


@torch.inference_mode()
def logprobs_of(model, completions):
    """By a packed forward, without the engine."""
    rows = [[*c.prompt_ids, *c.token_ids] for c in completions]
    logits = model(**pack(rows, "cpu")).logits[0].float().log_softmax(-1)
    found = []
    for c, row in zip(completions, logits.split([*map(len, rows)]), strict=True):
        predicted = row[len(c.prompt_ids) - 1 : -1]
        found.append(predicted.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0].tolist())
    return found


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "vllm"}, "quantization: fp8"),
        ({"device": "mps"}, "NVIDIA"),
        ({"device": "cuda", "dtype": "float32"}, "bfloat16"),
    ],
)
def test_where_there_is_no_fp8_it_is_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        GeneratorConfig(**{"weights": "fp8", "dtype": "bfloat16", **keys})
    assert GeneratorConfig(weights="fp8", dtype="bfloat16", device="cuda:1").quantized


def test_older_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 6))
    with pytest.raises(InputError, match=r"capability 8\.9 and above, and cuda:1 has 8\.6"):
        fp8_layers.check_device(torch.device("cuda:1"))


# --- on a GPU that there is not

WIDE = SIZES | {"hidden_size": 128, "intermediate_size": 256}


def on_gpu(fp8: bool, layers: int = 2):
    with torch.device("cuda"):
        config = Qwen3Config(**WIDE | {"num_hidden_layers": layers, "head_dim": 32})
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="packed"
        ).eval()
    if fp8:
        quantize(model, [1, 2, 3])
    else:
        fusion.merge_products(model)
    return model


def kernels_of_a_step(fp8: bool, layers: int):
    with fake_cuda():
        engine = SlotEngine(on_gpu(fp8, layers), 8, 130, [2], record=run_directly)
        engine.submit(make_requests(3, 2, temperature=0.7))
        for _ in range(2):
            with Launches() as launches:
                engine.step()
            assert launches.waits == ["_to_copy between CPU and GPU"]  # as in full
    return launches.kernels


def test_a_step_waits_as_rarely_as_in_full():
    """And has one kernel more a product, if what makes an input's values and scales is compiled to
    one; here, uncompiled, it is `QUANTIZING`."""
    layer = {}
    for fp8 in (False, True):
        one, two = (kernels_of_a_step(fp8, layers) for layers in (1, 2))
        layer[fp8] = two - one
    assert layer[True]["_scaled_mm"] == 4
    assert layer[False].total() + 4 * QUANTIZING >= layer[True].total()


QUANTIZING = 7  # to float32, absolute values, maximum, bound, scale, quotient, to E4M3


@pytest.mark.parametrize("staging", ["device", "host"])
def test_a_version_is_quantized_on_the_gpu_and_swapped_without_a_read(staging, monkeypatch):
    with fake_cuda(), torch.no_grad():
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        model = on_gpu(True)
        staged = StagedWeights(model, on_host=staging == "host")
        staged._stream = None
        weight = next(iter(eight(model).values()))
        room = staged._rooms()[id(weight)]
        where = {part.device.type for part in room.parts}
        assert where == {"cuda" if staging == "device" else "cpu"}
        rows = torch.zeros(32, 128, device="cuda", dtype=torch.float32)
        with Launches() as launches:
            scales = room.write(0, rows)
            weight.take(room, in_place=True)
        assert scales.is_cuda
    assert [wait for wait in launches.waits if staging == "device"] == []
