"""A language model in its multimodal parent: the text path computes the language model's logits,
and all other weights keep their bits."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    Mistral3Config,
    MistralConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
)
from typer.testing import CliRunner

from tramontane.cli import app
from tramontane.errors import InputError
from tramontane.models.transplant import text_names, transplant
from tramontane.models.weight_files import WeightFiles

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def mistral3(tie_word_embeddings=False, **text):
    vision = {"model_type": "pixtral", "head_dim": 8, **VISION}
    return Mistral3Config(
        tie_word_embeddings=tie_word_embeddings,
        vision_config=vision, text_config={"model_type": "mistral", **TEXT, "head_dim": 8, **text},
        image_token_index=10,
    )  # fmt: skip


def llava(tie_word_embeddings=False, **text):
    vision = {"model_type": "clip_vision_model", "projection_dim": 16, **VISION}
    return LlavaConfig(
        tie_word_embeddings=tie_word_embeddings,
        vision_config=vision, text_config={"model_type": "llama", **TEXT, **text},
        image_token_index=10,
    )  # fmt: skip


def qwen(tie_word_embeddings=False, **text):
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2,
        "out_hidden_size": 32, "patch_size": 8,
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    return Qwen2_5_VLConfig(
        tie_word_embeddings=tie_word_embeddings,
        vision_config=vision,
        text_config={**TEXT, "rope_parameters": rope, **text},
    )


def gemma(tie_word_embeddings=False, **text):
    vision = {"model_type": "siglip_vision_model", **VISION}
    return Gemma3Config(
        tie_word_embeddings=tie_word_embeddings,
        vision_config=vision, text_config={**TEXT, "head_dim": 8, **text},
        mm_tokens_per_image=4, image_token_index=10, boi_token_index=11, eoi_token_index=12,
    )  # fmt: skip


FAMILIES = {
    "mistral3": (mistral3, lambda **t: MistralConfig(**{**TEXT, "head_dim": 8, **t})),
    "llava": (llava, lambda **t: LlamaConfig(**{**TEXT, **t})),
    "qwen": (qwen, lambda **t: Qwen2Config(**{**TEXT, **t})),
    "gemma": (gemma, lambda **t: Gemma3TextConfig(**{**TEXT, "head_dim": 8, **t})),
}


@pytest.fixture
def save(tmp_path):
    """Saves a model of a config with random weights; returns its folder."""

    def save(auto, config, name, seed, **options):
        torch.manual_seed(seed)
        model = auto.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.to(options.pop("dtype", torch.float32)).save_pretrained(tmp_path / name, **options)
        return str(tmp_path / name)

    return save


def pair(save, family, parent_options=None, **text):
    make_parent, make_text = FAMILIES[family]
    parent = save(AutoModelForImageTextToText, make_parent(**text), "parent", 1,
                  **(parent_options or {}))  # fmt: skip
    return save(AutoModelForCausalLM, make_text(**text), "lm", 2), parent


def bits(folder):
    files = WeightFiles(folder)
    return {n: files.read(n).view(-1).view(torch.uint8).numpy().tobytes() for n in files.names}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_text_path_is_the_language_model_and_the_rest_keeps_its_bits(
    save, tmp_path, family, tied
):
    lm, parent = pair(save, family, {"max_shard_size": "40kB"}, tie_word_embeddings=tied)
    found = transplant(lm, parent, tmp_path / "out")

    before, after = bits(tmp_path / "parent"), bits(tmp_path / "out")
    text = {name for name in before if before[name] != after[name]}
    assert len(text) == found.replaced
    assert found.kept == len(before) - len(text) > 0
    assert not any("vision" in name or "visual" in name or "projector" in name for name in text)
    files = sorted(path.name for path in (tmp_path / "parent").iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files
    assert len([name for name in files if name.endswith(".safetensors")]) > 1

    ids = torch.arange(20, 52).view(2, 16)
    language = AutoModelForCausalLM.from_pretrained(lm).eval()
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    old = AutoModelForImageTextToText.from_pretrained(parent).eval()
    with torch.no_grad():
        logits, multimodal = language(ids).logits, whole(input_ids=ids).logits
        assert not torch.allclose(old(input_ids=ids).logits, logits, atol=1e-2)
    torch.testing.assert_close(multimodal, logits, atol=1e-5, rtol=1e-5)


def test_a_parent_in_bfloat16_rounds(save, tmp_path):
    lm, parent = pair(save, "llava", {"dtype": torch.bfloat16})
    found = transplant(lm, parent, tmp_path / "out")
    assert found.rounded == found.replaced == len(WeightFiles(tmp_path / "lm").names)
    weights, language = (
        load_file(tmp_path / "out/model.safetensors"),
        load_file(f"{lm}/model.safetensors"),
    )
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(weights[f"language_model.{name}"], language[name].bfloat16())


def test_a_tied_head_is_written_into_a_parent_with_a_head(save, tmp_path):
    parent = save(AutoModelForImageTextToText, llava(tie_word_embeddings=False), "parent", 1)
    lm = save(AutoModelForCausalLM, FAMILIES["llava"][1](tie_word_embeddings=True), "lm", 2)
    transplant(lm, parent, tmp_path / "out")
    weights = load_file(tmp_path / "out/model.safetensors")
    embeddings = weights["language_model.model.embed_tokens.weight"]
    assert torch.equal(weights["language_model.lm_head.weight"], embeddings)


def test_refusals(save, tmp_path):
    lm, parent = pair(save, "llava")

    def other(name, **text):
        return save(AutoModelForCausalLM, FAMILIES["llava"][1](**text), name, 3)

    def refused(model, message, **options):
        with pytest.raises(InputError, match=message):
            transplant(model, options.pop("parent", parent), tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    refused(other("a", vocab_size=310), r"has the shape \[310, 32\], and the parent's .* \[300, 32")
    refused(
        other("b", num_hidden_layers=1), r"no counterpart of the parent's .*language_model.*lay"
    )
    refused(other("c", num_hidden_layers=3), r"the parent has no counterpart of model.layers.2")
    refused(other("d", rms_norm_eps=1e-3), "rms_norm_eps is 0.001 in the language model and 1e-06")
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    refused(
        other("e", rope_parameters=linear), "rope is .*linear.* in the language model and .*def"
    )
    refused(lm, "it has no text weights", parent=lm_without_embeddings(tmp_path, lm))
    refused(str(tmp_path / "none"), "no such folder")
    refused(lm, "the parent has no counterpart", maps={"model.": "text."})
    tied = save(AutoModelForImageTextToText, llava(tie_word_embeddings=True), "tied", 1)
    refused(lm, "the parent ties its head to the embeddings", parent=tied)
    damaged = tmp_path / "damaged"
    shutil.copytree(parent, damaged)
    content = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(content[:-8])
    refused(
        lm,
        "damaged/model.safetensors: damaged, .*not fully covered",
        parent=str(damaged),
    )
    for header in (b"[1]", b'{"a": {"dtype": "F32"}}', b'{"a": 3}', b"{"):
        content = len(header).to_bytes(8, "little") + header
        (damaged / "model.safetensors").write_bytes(content)
        refused(lm, "damaged/model.safetensors: damaged, not a safe", parent=str(damaged))
    for index in ('{"weight_map": {"a"', "{}", "[]", '{"weight_map": 3}'):
        (damaged / "model.safetensors.index.json").write_text(index)
        refused(
            lm,
            "model.safetensors.index.json: damaged, not a safetensors index",
            parent=str(damaged),
        )
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(InputError, match="not empty"):
        transplant(lm, parent, tmp_path / "full")


def test_settings_that_are_on_in_one_model_alone(save, tmp_path):
    parent = save(AutoModelForImageTextToText, gemma(), "parent", 1)
    make = FAMILIES["gemma"][1]
    for name, text in enumerate(
        ({"final_logit_softcapping": 30.0}, {"query_pre_attn_scalar": 64},
         {"layer_types": ["full_attention"] * 2}),
    ):  # fmt: skip
        lm = save(AutoModelForCausalLM, make(**text), f"lm{name}", 2)
        with pytest.raises(InputError, match=f"{next(iter(text))} is .* in the parent: the text"):
            transplant(lm, parent, tmp_path / "out")


def lm_without_embeddings(tmp_path, lm):
    folder = tmp_path / "bare"
    shutil.copytree(lm, folder)
    weights = load_file(folder / "model.safetensors")
    kept = {n: w for n, w in weights.items() if "embed" not in n}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("model.text_model.", "lm_head.weight"),
        ("model.", "lm_head.weight"),
    ],
)
def test_names_map_behind_any_prefix(prefix, head):
    stems = ["embed_tokens.weight", "layers.0.mlp.up_proj.weight", "norm.weight"]
    vision = ["vision_tower.layers.0.mlp.up_proj.weight", "model.mm_projector.weight"]
    language = [*(f"model.{stem}" for stem in stems), "lm_head.weight"]
    mapping, found = text_names(language, [*vision, *(prefix + stem for stem in stems), head])
    assert found == prefix
    assert mapping == {**{prefix + stem: f"model.{stem}" for stem in stems}, head: "lm_head.weight"}


def test_the_command(save, tmp_path):
    lm, parent = pair(save, "mistral3")
    args = [
        "transplant",
        lm,
        parent,
        str(tmp_path / "out"),
        "--map",
        "model.=language_model.model.",
    ]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.exception
    assert "under 'language_model.model.'" in result.stdout
    result = CliRunner().invoke(app, [*args[:3], str(tmp_path / "again"), "--map", "x"])
    assert "write it as PREFIX=PREFIX" in str(result.exception)
