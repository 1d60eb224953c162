"""Sizes of models from their configs alone."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.architectures.rows import named
from benchmarks.architectures.sizes import tiny_config
from tramontane.errors import InputError
from tramontane.generator.forward import examine_model
from tramontane.models import loading
from tramontane.models.cached import cache_argument
from tramontane.models.shape import KNOWN_SHAPES, load_shape, shape_of


def closed_form(sizes: dict[str, int]) -> tuple[int, int, int]:
    """Parameters of a Mistral model with an untied head: in total, of a block, and outside."""
    hidden, width = sizes["hidden_size"], sizes["head_dim"]
    heads = 2 * sizes["num_attention_heads"] + 2 * sizes["num_key_value_heads"]
    block = hidden * (width * heads + 3 * sizes["intermediate_size"]) + 2 * hidden
    outside = 2 * sizes["vocab_size"] * hidden + hidden
    return sizes["num_hidden_layers"] * block + outside, block, outside


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mistral-small-24b", 23.57),
        ("mistral-large-123b", 122.61),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.1-405b", 405.85),
    ],
)
def test_known_shapes_have_the_published_parameters(name: str, billions: float) -> None:
    shape = load_shape(name)
    assert (shape.parameters, shape.block, shape.outside) == closed_form(KNOWN_SHAPES[name])
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert shape.matrix == shape.hidden * shape.intermediate
    assert not shape.tied


def test_no_model_is_built_while_another_thread_loads_one() -> None:
    """Each would restore the default number type that the other had set."""
    config = loading.load_config("tiny")
    with ThreadPoolExecutor(1) as pool:
        with loading.LOADING:
            found = pool.submit(shape_of, config, "not counted before")
            with pytest.raises(TimeoutError):
                found.result(0.5)
        assert found.result(60).parameters == load_shape("tiny").parameters


def test_tied_weights_count_once(tmp_path: Path) -> None:
    """By a folder, by its config.json, and by name; no weights are there."""
    config = AutoConfig.from_pretrained("src/tramontane/tiny_base")
    config.save_pretrained(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    shape = load_shape(str(tmp_path))
    model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.outside == 2048 * 160 + 160
    assert shape.tied
    assert shape.layers * shape.block + shape.outside == shape.parameters
    same = [load_shape(str(tmp_path / "config.json")), load_shape("tiny")]
    assert {s.parameters for s in same} == {shape.parameters}
    # 2 (K, V) · 4 layers · 5 heads · 32 · 4 bytes
    assert shape.kv_bytes_per_token("float32") == 5120 == 2 * shape.kv_bytes_per_token("bfloat16")


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        load_shape(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(InputError, match="not a causal LM"):
        load_shape(str(tmp_path))


# Heads of other widths, latents, layers that attend to others' keys, states, and code that reads
# numbers, which a model without memory does not have.
CACHED = (
    "qwen3", "deepseek_v3", "mistral4", "minicpm3", "gemma4_text, shared keys and values",
    "gpt_oss", "qwen3_5_text", "jamba", "falcon_h1", "lfm2", "mamba2", "mistral3", "gpt2", "opt",
    "gemma3n_text", "longcat_flash",
)  # fmt: skip


@pytest.mark.parametrize("name", CACHED)
def test_a_generator_keeps_what_is_counted_without_memory(name):
    row = named(name)
    config = tiny_config(row.kind, row.changed).get_text_config()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layout, _ = examine_model(model.eval(), 16)
    shape = shape_of(config, name)
    assert shape.kv_bytes_per_token("float32") == layout.token_bytes
    assert shape.state_bytes("float32") == layout.state_bytes
    assert 2 * shape.state_bytes("bfloat16") == layout.state_bytes
    assert shape.cached.kept_heads in {heads for _, heads, _ in layout.shapes} or not layout.shapes


def test_layers_may_choose_different_numbers_of_experts():
    """As in Hunyuan-A13B's published config."""
    config = tiny_config("hunyuan_v1_moe", {"moe_topk": [1, 2, 1, 2]})
    one = tiny_config("hunyuan_v1_moe", {"moe_topk": 1})
    assert shape_of(config, "a").intermediate == 2 * shape_of(one, "b").intermediate


def before_5_24(input_ids, past_key_values=None): ...


def mamba_before_5_24(input_ids, cache_params=None): ...


def since_5_24(input_ids, cache=None): ...


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (before_5_24, "past_key_values"),
        (mamba_before_5_24, "cache_params"),
        (since_5_24, "cache"),
    ],
)
def test_the_cache_is_given_by_the_name_that_a_release_of_transformers_has_for_it(forward, name):
    assert cache_argument(forward) == name
