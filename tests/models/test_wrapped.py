"""Checkpoints that wrap a language model are loaded by their text half alone, whatever layout their
files have."""

import copy
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from typer.testing import CliRunner

from benchmarks.architectures.sizes import tiny_config, tiny_model
from tests import forked
from tests.models import peaks
from tramontane.cli import app
from tramontane.errors import InputError
from tramontane.models import wrapped
from tramontane.models.extract import extract
from tramontane.models.loading import empty_model, load_config, load_model
from tramontane.models.shape import load_shape
from tramontane.models.weight_files import SINGLE
from tramontane.models.wrapped import PARENT

TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 8,
}  # fmt: skip
HEAD_DIM = {"head_dim": 8}
MROPE = {
    "rope_parameters": {
        "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    }
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
GLM_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
PIXTRAL = {"model_type": "pixtral", **HEAD_DIM}
SIGLIP = {"model_type": "siglip_vision_model"}
CLIP = {"model_type": "clip_vision_model"}
# Text options, and options of the vision tower.
KINDS = {
    "mistral3": ({"model_type": "mistral", **HEAD_DIM}, VISION | PIXTRAL),
    "llava": ({"model_type": "llama"}, VISION | CLIP),
    "gemma3": (HEAD_DIM, VISION | SIGLIP),
    "gemma4": (
        HEAD_DIM | {
            "global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 300,
        },
        VISION,
    ),
    "qwen2_5_vl": (MROPE, QWEN_VISION),
    "qwen3_vl": (HEAD_DIM | MROPE, QWEN_VISION | {"deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": (HEAD_DIM | MROPE | EXPERTS, QWEN_VISION | {"deepstack_visual_indexes": [0]}),
    "qwen3_5": (HEAD_DIM | DELTA, QWEN_VISION),
    "glm4v": (MROPE, QWEN_VISION),
    "glm4v_moe": (MROPE | HEAD_DIM | GLM_EXPERTS, QWEN_VISION),
    "llama4": (
        HEAD_DIM | {"intermediate_size_mlp": 64, "num_local_experts": 4},
        VISION | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
    "internvl": ({"model_type": "qwen2"}, VISION | {"image_size": [32, 32], "patch_size": [8, 8]}),
    "idefics3": ({"model_type": "llama"}, VISION),
    # Wrappers with an output head of their own drop what the text's causal LM does after its head.
    "aya_vision": ({"model_type": "cohere2", "logit_scale": 0.25, **HEAD_DIM}, VISION | SIGLIP),
    "cohere2_vision": ({"model_type": "cohere2", "logit_scale": 0.25, **HEAD_DIM}, VISION | SIGLIP),
    "llava_next": ({"model_type": "granite", "logits_scaling": 4.0}, VISION | CLIP),
}  # fmt: skip


def config_of(kind, *, tied=False):
    text, vision = copy.deepcopy(KINDS[kind])
    return CONFIG_MAPPING[kind](
        text_config=TEXT | text | {"tie_word_embeddings": tied},
        vision_config=vision,
        tie_word_embeddings=tied,
    )


def wide(kind, **options):
    """A wrapper with wide random weights."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_of(kind, **options))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture
def saved(tmp_path):
    """Saves a wrapper; returns its folder."""

    def save(kind, **options):
        wide(kind, **options).save_pretrained(tmp_path / "parent")
        return tmp_path / "parent"

    return save


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(20, 52).view(2, 16)).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_half_computes_what_its_wrapper_does_on_text(tmp_path, kind, tied):
    whole, folder = wide(kind, tied=tied), tmp_path / "parent"
    whole.save_pretrained(folder)
    half = load_model(str(folder))
    assert not any("vision" in name or "visual" in name for name, _ in half.named_modules())
    assert half.config.tie_word_embeddings == tied
    assert load_shape(str(folder)).parameters == sum(p.numel() for p in half.parameters())

    half.save_pretrained(tmp_path / "half")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    torch.testing.assert_close(logits(again), logits(whole), atol=1e-5, rtol=1e-5)
    origin = {"model": str(folder), "revision": None}
    assert load_config(str(tmp_path / "half")).to_dict()[PARENT] == origin


def relaid(folder, prefix, head):
    """Rename the text weights in a wrapper's file."""
    weights = load_file(folder / "model.safetensors")
    table = next(n for n in weights if n.endswith("embed_tokens.weight"))
    old = table.removesuffix("embed_tokens.weight")
    for name in list(weights):
        if name.endswith("lm_head.weight"):
            weights[head] = weights.pop(name)
        elif name.startswith(old):
            weights[prefix + name.removeprefix(old)] = weights.pop(name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module", params=["mistral3", "qwen2_5_vl", "qwen3_5"])
def loaded(request, tmp_path_factory):
    """The folder of a wrapper, and what its text half computes."""
    folder = tmp_path_factory.mktemp(request.param)
    wide(request.param).save_pretrained(folder)
    return folder, logits(load_model(str(folder)))


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("model.", "lm_head.weight"),
        ("model.text_model.", "lm_head.weight"),
        ("thinker.model.", "thinker.lm_head.weight"),
    ],
)
def test_any_published_layout_is_read(loaded, tmp_path, prefix, head):
    source, expected = loaded
    folder = shutil.copytree(source, tmp_path / "parent")
    relaid(folder, prefix, head)
    assert torch.equal(logits(load_model(str(folder))), expected)


@pytest.mark.parametrize("kind", ["kimi_k25", "qianfan_ocr"])
def test_layers_by_another_name_are_read(tmp_path, kind):
    """transformers 5.23 saves these with other names than are published."""
    whole = tiny_model(kind)
    whole.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(load_model(str(tmp_path))), logits(whole))


def test_weights_by_unknown_names_are_not_called_damaged(tmp_path):
    """Cosmos 3 has its text weights at the top, and its own names for those of attention."""
    tiny_model("cosmos3_omni").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"does not read \(model.layers.0.self_attn.norm_k"):
        load_model(str(tmp_path))


def test_embeddings_by_another_name_are_not_called_damaged(tmp_path):
    tiny_model("inkling_mm_model").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"other names .*\(model.llm.embed.weight in place of"):
        load_model(str(tmp_path))


@pytest.mark.slow
def test_loading_takes_no_more_memory_than_the_text_half(tmp_path):
    """The peaks of two processes: one reads a text half from a wrapper, the other it alone."""
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    config = CONFIG_MAPPING["mistral3"](
        text_config=TEXT | wide | {"model_type": "mistral", "num_hidden_layers": 2},
        vision_config=VISION | PIXTRAL | wide | {"head_dim": 64, "num_hidden_layers": 4},
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "whole")
    extract(str(tmp_path / "whole"), tmp_path / "half")
    files = {name: (tmp_path / name / SINGLE).stat().st_size for name in ("whole", "half")}
    assert files["whole"] > 2.5 * files["half"]  # 95 MB and 35
    raised = {}
    for name in files:
        process = forked.start(peaks.of_loading, tmp_path / name, tmp_path / f"{name}.peak")
        assert forked.end(process) == 0
        raised[name] = int((tmp_path / f"{name}.peak").read_text())
    assert raised["whole"] < raised["half"] + (8 << 20)
    assert raised["half"] > files["half"] / 2  # not hidden by an earlier peak


def test_a_head_of_its_own_is_kept_though_the_config_ties_it(saved):
    """Mistral Small 3.1's config says nothing of its head, and its class ties by default."""
    folder = saved("mistral3")
    config = config_of("mistral3", tied=True)
    config.save_pretrained(folder)
    half = load_model(str(folder))
    assert not load_config(str(folder)).tie_word_embeddings
    assert not torch.equal(half.lm_head.weight, half.model.embed_tokens.weight)


def test_ranks_read_their_parts_of_a_text_half(saved):
    folder = saved("mistral3")
    built, files = empty_model(str(folder))
    expected = load_model(str(folder)).state_dict()
    assert {*built.state_dict()} == {*files.names}
    assert all(torch.equal(files.read(name), expected[name]) for name in files.names)


@pytest.mark.parametrize("way", ["load", "extract"])
@pytest.mark.parametrize("kind", ["mistral3", "gemma3", "qwen2_5_vl", "qwen3_vl", "llava"])
def test_an_unchanged_text_half_goes_back_bit_for_bit(saved, tmp_path, kind, way):
    folder = saved(kind)
    if way == "extract":
        extract(str(folder), tmp_path / "half")
    else:
        load_model(str(folder)).save_pretrained(tmp_path / "half")
    result = CliRunner().invoke(app, ["transplant", str(tmp_path / "half")])
    assert result.exit_code == 0, result.exception
    written = load_file(tmp_path / "half-whole/model.safetensors")
    before = load_file(folder / "model.safetensors")
    assert {*written} == {*before}
    assert all(torch.equal(written[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("gemma3", "final_logit_softcapping", 2.0),  # dropped
        ("gemma4", "final_logit_softcapping", 2.0),  # kept
        ("llava", "lm_head_multiplier", 4.0),  # not of this text model
    ],
)
def test_settings_after_the_head_are_those_of_the_wrapper(monkeypatch, saved, kind, key, value):
    text, vision = KINDS[kind]
    monkeypatch.setitem(KINDS, kind, (text | {key: value}, vision))
    folder = saved(kind)
    whole = AutoModelForImageTextToText.from_pretrained(folder)
    torch.testing.assert_close(logits(load_model(str(folder))), logits(whole), atol=1e-5, rtol=1e-5)


def test_a_dropped_scale_is_said(saved, caplog):
    load_config(str(saved("aya_vision")))
    assert "aya_vision's logits without the logit_scale of its text config (0.25)" in caplog.text


def test_towers_are_not_reported_and_strange_text_weights_are(saved, caplog):
    folder = saved("mistral3")
    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addHandler(caplog.handler)
    try:
        load_model(str(folder))
        assert "UNEXPECTED" not in caplog.text
    finally:
        transformers_logger.removeHandler(caplog.handler)
    weights = load_file(folder / "model.safetensors")
    prefix = next(n for n in weights if n.endswith("embed_tokens.weight")).removesuffix(
        "embed_tokens.weight"
    )
    weights[f"{prefix}layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"does not read \(model.layers.0.self_attn.q_norm.weight"):
        load_model(str(folder))


def test_a_text_half_in_another_layout_is_not_called_damaged(saved):
    folder = saved("mistral3")  # its layout as MiniMax-M3's: other names for the same weights
    weights = load_file(folder / "model.safetensors")
    weights = {name.replace(".mlp.", ".block."): tensor for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"does not read \(model.layers.0.block.down_proj.weight"):
        load_model(str(folder))


def test_a_text_half_is_found_again_only_after_a_change(saved, monkeypatch):
    folder = saved("mistral3")
    first = load_config(str(folder))
    first.vocab_size = 7  # the caller's own
    made = []
    monkeypatch.setattr(wrapped.TextHalf, "_find", lambda *args: made.append(args), raising=True)
    assert load_config(str(folder)).vocab_size == 300 and not made
    config_of("mistral3", tied=True).save_pretrained(folder)
    load_config(str(folder))
    assert made


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["mistral3", "qwen3_vl_moe", "gemma3"])
def test_an_extracted_text_half_is_an_ordinary_checkpoint(saved, tmp_path, kind, tied):
    folder = saved(kind, tied=tied)
    result = CliRunner().invoke(app, ["extract", str(folder), str(tmp_path / "half")])
    assert result.exit_code == 0, result.exception
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    torch.testing.assert_close(logits(half), logits(load_model(str(folder))), atol=1e-5, rtol=1e-5)
    assert half.config.architectures == [type(half).__name__]
    origin = {"model": str(folder), "revision": None}
    assert half.config.to_dict()[PARENT] == origin


def test_only_wrappers_have_a_text_half(tmp_path):
    with pytest.raises(InputError, match="'tiny': wraps no language model"):
        extract("tiny", tmp_path / "half")
    assert not (tmp_path / "half").exists()


def test_a_text_half_that_is_not_a_causal_lm_is_refused(tmp_path):
    CONFIG_MAPPING["mllama"]().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="mllama wraps a text half .* no causal LM"):
        load_config(str(tmp_path))


def test_a_wrapper_whose_weights_are_no_safetensors_files_is_refused_by_its_config(tmp_path):
    tiny_model("mistral3").save_pretrained(tmp_path)
    torch.save(load_file(tmp_path / SINGLE), tmp_path / "pytorch_model.bin")
    (tmp_path / SINGLE).unlink()
    with pytest.raises(InputError, match="pytorch_model.bin; load it with transformers"):
        load_config(str(tmp_path))


def config_folder(kind, folder):
    """A checkpoint of which only the config is there."""
    tiny_config(kind).save_pretrained(folder)
    return str(folder)


def test_a_tower_whose_package_is_missing_is_not_built(tmp_path):
    """Gemma 3n's towers need timm, and its text half does not."""
    config = load_config(config_folder("gemma3n", tmp_path))
    assert config.model_type == "gemma3n_text" and config.final_logit_softcapping


def test_a_scale_that_a_part_of_the_wrapper_applies_is_kept(tmp_path):
    cap = tiny_config("inkling2").text_config.final_logit_softcapping
    assert load_config(config_folder("inkling2", tmp_path)).final_logit_softcapping == cap


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("florence2", "wraps a text half .bart. for which transformers has no causal LM"),
        ("gemma4_assistant", "transformers' code of gemma4_text fails .The set of layer types"),
        ("musicgen", "transformers' config of musicgen fails .Multiple valid text configs"),
    ],
)
def test_a_wrapper_without_a_causal_lm_is_refused_in_words(kind, says, tmp_path):
    with pytest.raises(InputError, match=says):
        load_shape(config_folder(kind, tmp_path))
