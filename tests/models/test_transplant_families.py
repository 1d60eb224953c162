"""Every wrapped family of docs/wrapped-models.md, trained by its text half and put back into its
parent as published."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from benchmarks.architectures.report import Report
from benchmarks.architectures.rows import named
from benchmarks.architectures.sizes import of_text, save, tiny_model
from tests.trainer.rollouts import batch
from tramontane.config import TrainerConfig
from tramontane.models import fp8
from tramontane.models.extract import extract
from tramontane.models.loading import load_model
from tramontane.models.transplant import transplant
from tramontane.models.weight_files import SINGLE
from tramontane.trainer import Trainer

IDS = torch.arange(5, 37).view(2, 16)
WRAPPED = [
    name
    for name, row in Report.committed().rows.items()
    if isinstance(row.get("cells", {}).get("text half"), float)
    # Not read back by transformers: findings/shieldgemma2_reload.sh; it saves no `spk_dict.pt`.
    and name not in ("shieldgemma2", "qwen2_5_omni")
]


def logprobs(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.log_softmax(-1)


def trained(folder, out):
    """Weights after an update on text, and their log-probs."""
    config = TrainerConfig(dtype="float32", device="cpu", learning_rate=1e-2)
    trainer = Trainer.load(str(folder), config, 2)
    before = logprobs(trainer.model)
    trainer.step(batch(groups=2))
    trainer.save_weights(out)
    after = logprobs(trainer.model)
    assert (after - before).abs().max() > 1e-2
    return after


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
def test_what_was_trained_computes_the_same_in_its_parent(tmp_path, name):
    row = named(name)
    parent = tiny_model(row.kind, row.changed)
    save(parent, row.kind, row.changed, str(tmp_path / "parent"))
    extract(str(tmp_path / "parent"), tmp_path / "half")
    after = trained(tmp_path / "half", tmp_path / "trained")
    transplant(str(tmp_path / "trained"), str(tmp_path / "parent"), tmp_path / "out")
    if is_whole := isinstance(parent.config, CONFIG_MAPPING[row.kind]):
        whole = of_text(type(parent).from_pretrained(tmp_path / "out", attn_implementation="eager"))
    else:  # its tower needs another package
        whole = load_model(str(tmp_path / "out"), torch.float32)
    torch.testing.assert_close(logprobs(whole), after, atol=2e-4, rtol=1e-4)
    before, written = (load_file(tmp_path / name / SINGLE) for name in ("parent", "out"))
    assert {*before} == {*written}
    kept = [name for name in before if torch.equal(before[name], written[name])]
    assert is_whole <= len(kept) < len(before)


def in_fp8(folder, block, text):
    """Store the projections of a checkpoint's text half in FP8 as published: with a scale for each
    weight (Mistral) or each block (DeepSeek, Qwen)."""
    stored = {}
    for name, weight in load_file(folder / SINGLE).items():
        if text not in name or not name.endswith("_proj.weight"):
            stored[name] = weight.bfloat16()
            continue
        grid = [1, 1] if block is None else [-(-n // block) for n in weight.shape]
        empty = torch.zeros(grid if block else [])
        stored[name], scale = fp8.quantize(weight, empty, block and [block] * 2)
        stored[f"{name}_scale_inv"] = scale
        if block is None:
            stored[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.02)
    save_file(stored, folder / SINGLE, metadata={"format": "pt"})
    settings = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic" if block else "static",
        "weight_block_size": block and [block] * 2,
        "modules_to_not_convert": ["lm_head", "vision_tower", "visual", "multi_modal_projector"],
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


@pytest.mark.parametrize(("kind", "block"), [("mistral3", None), ("qwen3_vl", 16)])
def test_the_text_half_of_a_parent_in_fp8_is_extracted_as_plain_weights(tmp_path, kind, block):
    made = tiny_model(kind)
    made.save_pretrained(tmp_path / "parent")
    in_fp8(tmp_path / "parent", block, "language_model")
    half = extract(str(tmp_path / "parent"), tmp_path / "half")
    assert "quantization_config" not in json.loads((half / "config.json").read_text())
    assert not any("scale" in name for name in load_file(half / SINGLE))
    language = AutoModelForCausalLM.from_pretrained(half, attn_implementation="eager")
    assert {p.dtype for p in language.parameters()} == {torch.float32}  # as its config says
    expected = logprobs(plain(type(made), tmp_path / "parent"))
    torch.testing.assert_close(logprobs(language), expected, atol=2e-4, rtol=1e-4)
    transplant(str(half), str(tmp_path / "parent"), tmp_path / "back")
    again, before = (load_file(tmp_path / x / SINGLE) for x in ("back", "parent"))
    assert {*again} == {*before}
    assert all(torch.equal(again[n].float(), x.float()) for n, x in before.items())


def plain(kind, folder):
    """A checkpoint in FP8 as transformers reads it, in float32."""
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config |= {"dequantize": True}
    loaded = kind.from_pretrained(folder, config=config, attn_implementation="eager")
    return loaded.float()  # transformers leaves some weights in the type of their scales


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "block"), [("mistral3", None), ("mistral3", 16), ("qwen3_vl", 16), ("gemma3", 16)]
)
def test_a_parent_in_fp8_gets_its_text_in_fp8(tmp_path, kind, block):
    """Unchanged, it keeps its bits; trained, the log-probs are those of the trained weights as far
    as eight bits say them."""
    made = tiny_model(kind)
    made.save_pretrained(tmp_path / "parent")
    in_fp8(tmp_path / "parent", block, "language_model")
    before = load_file(tmp_path / "parent" / SINGLE)
    load_model(str(tmp_path / "parent"), torch.bfloat16).save_pretrained(tmp_path / "same")
    transplant(str(tmp_path / "same"), str(tmp_path / "parent"), tmp_path / "unchanged")
    again = load_file(tmp_path / "unchanged" / SINGLE)
    for name, tensor in before.items():
        assert torch.equal(
            again[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
        )

    after = trained(tmp_path / "parent", tmp_path / "trained")
    transplant(str(tmp_path / "trained"), str(tmp_path / "parent"), tmp_path / "out")
    written = load_file(tmp_path / "out" / SINGLE)
    assert {n: (t.dtype, t.shape) for n, t in written.items()} == {
        n: (t.dtype, t.shape) for n, t in before.items()
    }
    own = load_model(str(tmp_path / "trained")).state_dict()
    back = load_model(str(tmp_path / "out")).state_dict()
    for name, weight in own.items():
        error = (back[name] - weight).norm() / weight.norm()
        assert error < 0.04, name  # three bits after the first: at most 1/16, on average less
    whole = logprobs(plain(type(made), tmp_path / "out"))
    torch.testing.assert_close(
        whole, logprobs(load_model(str(tmp_path / "out"))), atol=0.02, rtol=0.02
    )
    assert (whole - after).abs().mean() < 0.5 * (logprobs(made) - after).abs().mean()


def test_scales_in_eight_bits_are_powers_of_two():
    weight = torch.randn(40, 56) * torch.logspace(-4, 0, 40)[:, None]
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        stored, scales = fp8.quantize(weight, torch.zeros(5, 7).to(dtype), (8, 8))
        exponents = scales.view(torch.uint8).float() - 127
        whole = exponents.exp2().repeat_interleave(8, 0).repeat_interleave(8, 1)
        found = stored.float() * whole
        assert ((found - weight).abs() <= weight.abs() / 16 + whole * 2**-9).all()
