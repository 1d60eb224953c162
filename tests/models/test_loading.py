"""Packed forwards against transformers' own sdpa forward, and checkpoints that loading refuses."""

import copy
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AddedToken,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from benchmarks.architectures.sizes import tiny_model
from tramontane.config import TrainerConfig
from tramontane.data.tokenizer import train_tokenizer
from tramontane.errors import InputError
from tramontane.models import loading, packing
from tramontane.models.loading import check_files, load_model, load_tokenizer
from tramontane.models.packing import pack
from tramontane.models.shape import load_shape
from tramontane.models.weight_files import SINGLE
from tramontane.trainer.trainer import Trainer

torch.set_num_threads(1)

VOCAB = 96
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Widely distributed weights: attention is far from uniform, and a wrong mask or position shows.
    "initializer_range": 0.3,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "llama-mha": LlamaConfig(**SIZES | {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "mistral": MistralConfig(**SIZES, sliding_window=5),
    "mistral-full": MistralConfig(**SIZES, sliding_window=None),
    "qwen3": Qwen3Config(**SIZES, head_dim=12),
}
LENGTHS = {"mixed": (7, 19, 1, 12), "equal": (9, 9, 9), "single": (17,)}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(FAMILIES[request.param]).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def models(checkpoint):
    """The model of a checkpoint as it is loaded here, and with transformers' own attention."""
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="sdpa")
    return load_model(checkpoint), plain


def sequences(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def loss_of(logits):
    """A loss that weighs every logit differently, so that no two errors cancel."""
    weights = torch.sin(torch.arange(logits.numel(), dtype=logits.dtype)).view_as(logits)
    return (torch.log_softmax(logits, -1) * weights).sum()


@pytest.mark.parametrize("short", [512, 40, 4])  # plain products; the fused kernel above SHORT
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_rows_equal_separate_ones(models, lengths, short, monkeypatch):
    monkeypatch.setattr(packing, "SHORT", short)
    rows = sequences(LENGTHS[lengths])
    packed, plain = map(copy.deepcopy, models)
    got = packed(**pack(rows)).logits[0]
    want = torch.cat([plain(torch.tensor([row])).logits[0] for row in rows])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    loss_of(got).backward()
    loss_of(want).backward()
    for (name, a), (_, b) in zip(packed.named_parameters(), plain.named_parameters(), strict=True):
        scale = b.grad.abs().max()
        torch.testing.assert_close(a.grad / scale, b.grad / scale, atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize("short", [512, 40, 4])
def test_sequences_that_continue_another_equal_whole_ones(models, short, monkeypatch):
    """Two prompts, each computed once: logits and gradients are those of prompt + completion."""
    monkeypatch.setattr(packing, "SHORT", short)
    monkeypatch.setattr(packing, "SPLIT_COST", 60)  # several blocks per prompt
    first, second, *completions = sequences((9, 2, 14, 13, 3, 1, 40, 6))
    families = [(first, completions[:4]), (second, completions[4:])]
    rows, continues, wanted = [], [], []
    for prompt, completions in families:
        rows.append(prompt)
        continues.append(None)
        parent = len(rows) - 1
        rows += completions
        continues += [parent] * len(completions)
        wanted += [(prompt, c) for c in completions]
    packed, plain = (copy.deepcopy(model).double() for model in models)
    logits = packed(**pack(rows, continues=continues)).logits[0]
    parts = [
        part
        for part, context in zip(logits.split([len(r) for r in rows]), continues, strict=True)
        if context is not None
    ]
    got, want = 0.0, 0.0
    for (prompt, completion), part in zip(wanted, parts, strict=True):
        whole = plain(torch.tensor([prompt + completion])).logits[0, len(prompt) :]
        torch.testing.assert_close(part, whole, atol=1e-5, rtol=1e-5)
        got, want = got + loss_of(part), want + loss_of(whole)
    got.backward()
    want.backward()
    for (name, a), (_, b) in zip(packed.named_parameters(), plain.named_parameters(), strict=True):
        scale = b.grad.abs().max()
        torch.testing.assert_close(a.grad / scale, b.grad / scale, atol=1e-5, rtol=0, msg=name)


def test_a_rectangle_needs_no_packing(models):
    ids = torch.tensor(sequences((11, 11, 11)))
    packed, plain = models
    got = packed(ids, use_cache=False).logits
    torch.testing.assert_close(got, plain(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_neighbor_changes_nothing(models):
    model, _ = models
    first, second, other = sequences((8, 13, 13))
    logits = model(**pack([first, second])).logits[0, :8]
    assert torch.equal(logits, model(**pack([first, other])).logits[0, :8])


def test_bfloat16_stays_near_float32(checkpoint, models):
    inputs = pack(sequences((7, 19, 12)))
    exact = models[0](**inputs).logits.log_softmax(-1)
    rough = load_model(checkpoint, torch.bfloat16)(**inputs).logits
    assert rough.dtype == torch.bfloat16
    assert (rough.float().log_softmax(-1) - exact).abs().mean() < 0.1


def test_pack_lays_rows_one_after_the_other():
    packed = pack([[5, 6, 7], [8], [9, 10]])
    assert packed["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert packed["packing"].lengths == [3, 1, 2]


# Checkpoints that loading refuses


@pytest.fixture
def broken(tmp_path):
    """An intact checkpoint with its tokenizer, for the test to damage."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | {"vocab_size": 320})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    train_tokenizer(["1 + 1 = 2"], 512).save_pretrained(tmp_path)
    load_model(str(tmp_path))
    load_tokenizer(str(tmp_path))
    return tmp_path


def test_a_missing_model(tmp_path):
    for name in (str(tmp_path / "none"), str(tmp_path), "./none", "a/b/c"):
        empty = r"no checkpoint \(config\.json\) in folder"
        message = empty if Path(name).is_dir() else "no such folder"
        with pytest.raises(InputError, match=message):
            load_model(name)
        with pytest.raises(InputError, match=message):
            load_tokenizer(name)


@pytest.mark.parametrize("kept", [0.5, 0.001, 0])
def test_truncated_weights(broken, kept):
    file = broken / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(InputError, match=r"model\.safetensors: damaged, not a safetensors file"):
        load_model(str(broken))


def test_a_missing_tensor_is_refused(broken):
    file = broken / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(broken))


def test_tied_embeddings_are_not_missing(tmp_path):
    AutoModelForCausalLM.from_config(FAMILIES["llama-mha"]).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    load_model(str(tmp_path))


def test_weights_of_another_size(broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(
        InputError, match=r"has the shape \[32, 48\], and the config says \[32, 64\]"
    ):
        load_model(str(broken))


@pytest.mark.parametrize("config", ["{ not JSON", "{}", '{"model_type": "none_such"}'])
def test_a_broken_config(broken, config):
    (broken / "config.json").write_text(config)
    with pytest.raises(InputError, match="cannot be loaded"):
        load_model(str(broken))


def test_missing_weights(broken):
    (broken / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no weights \(model\*\.safetensors\) in folder \S+$"):
        load_model(str(broken))


class Payload:
    """Makes a file where it is unpickled."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self):
        return open, (str(self.ran), "w")


@pytest.mark.parametrize("kind", ["pickle", "model", "tokenizer"])
def test_a_checkpoint_s_own_code_never_runs(broken, kind):
    ran = broken / "ran"
    if kind == "pickle":
        (broken / "model.safetensors").unlink()
        torch.save({"lm_head.weight": Payload(ran)}, broken / "pytorch_model.bin")
    else:
        (broken / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
        file = broken / ("config.json" if kind == "model" else "tokenizer_config.json")
        auto = {"AutoConfig": "evil.A", "AutoModelForCausalLM": "evil.A", "AutoTokenizer": "evil.A"}
        other = {"model_type": "evil"} if kind == "model" else {"tokenizer_class": "Evil"}
        settings = json.loads(file.read_text()) | other
        file.write_text(json.dumps(settings | {"auto_map": auto}))
    with pytest.raises(InputError, match="cannot be loaded"):
        (load_tokenizer if kind == "tokenizer" else load_model)(str(broken))
    assert not ran.exists()


def test_a_tokenizer_without_eos(broken):
    whole = load_tokenizer(str(broken))
    for file in broken.glob("tokenizer*"):
        file.unlink()
    PreTrainedTokenizerFast(tokenizer_object=whole.backend_tokenizer).save_pretrained(broken)
    with pytest.raises(InputError, match=r"no EOS token.*set `eos_token` in its tokenizer_config"):
        load_tokenizer(str(broken))


def test_a_damaged_tokenizer(broken):
    file = broken / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InputError, match="cannot be loaded"):
        load_tokenizer(str(broken))


def test_context_length(broken):
    assert loading.context_length(loading.load_config(str(broken))) == 256
    shutil.rmtree(broken)
    with pytest.raises(InputError, match="no such folder"):
        loading.load_config(str(broken))


def test_a_config_that_changes_on_disk_is_read_again(tmp_path: Path) -> None:
    """And what a caller changes in its own is in no other's."""
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    first = loading.load_own_config(str(tmp_path))
    first.vocab_size = first.rope_parameters["rope_theta"] = 7
    again = loading.load_own_config(str(tmp_path))
    assert again.vocab_size == VOCAB and again.rope_parameters["rope_theta"] != 7
    LlamaConfig(**SIZES | {"vocab_size": 95}).save_pretrained(tmp_path)
    assert loading.load_own_config(str(tmp_path)).vocab_size == 95


def test_two_threads_that_load_at_once_both_get_tied_heads(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(lambda _: load_model(str(tmp_path)), range(8)))
    assert all(m.lm_head.weight is m.model.embed_tokens.weight for m in loaded)


def grown(folder, text, special, template=None):
    """The tokenizer of a folder with one more token, which the model does not know."""
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens([AddedToken(text, special=special)], special_tokens=special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def test_a_vocabulary_too_small_for_the_tokenizer(broken):
    size = grown(broken, "<new>", special=False)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"vocab_size": size - 1}))
    with pytest.raises(
        InputError, match=rf"lacks 1 of these, up to {size - 1:,} \('<new>'\).*resize"
    ):
        load_tokenizer(str(broken))
    (broken / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    load_tokenizer(str(broken))


def test_a_special_token_that_nothing_writes_may_be_unknown(broken):
    size = grown(broken, "<image>", special=True)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"vocab_size": size - 1}))
    tokenizer = load_tokenizer(str(broken))
    tokenizer.chat_template = "<image>{{ messages[0].content }}"
    tokenizer.save_pretrained(broken)
    with pytest.raises(InputError, match="'<image>'"):
        load_tokenizer(str(broken))


def test_adapters_alone_are_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"no checkpoint .* but adapters; name the `weights`"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("params.json", r"its maker's own layout \(params.json\); download config.json and"),
        ("model-Q4_K_M.gguf", "but GGUF files; download the model that they were made of"),
    ],
)
def test_another_layout_is_named_with_its_remedy(tmp_path, file, says):
    (tmp_path / file).write_text("{}")
    with pytest.raises(InputError, match=says):
        load_model(str(tmp_path))


@pytest.mark.parametrize("load", [check_files, load_model])
def test_a_config_without_weights_is_refused_before_they_are_read(tmp_path, load):
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / SINGLE).rename(tmp_path / "consolidated.safetensors")
    with pytest.raises(InputError, match=r"no weights .* maker's own layout \(consolidated\*"):
        load(str(tmp_path))


def save_quantized(folder, kind, block):
    """A tiny checkpoint in FP8 as published: a scale for each weight (Mistral) or block (DeepSeek).
    Returns the weights that it stands for."""
    tiny_model(kind).save_pretrained(folder)
    plain, stored, meant = load_file(folder / SINGLE), {}, {}
    for name, weight in plain.items():
        if weight.dim() != 2 or not name.endswith("_proj.weight"):
            stored[name] = weight.bfloat16()
            continue
        height, width = weight.shape
        size = block or max(height, width)
        scales = torch.linspace(1e-3, 1e-2, -(-height // size) * -(-width // size))
        scales = scales.view(-(-height // size), -1) if block else scales[0].bfloat16()
        whole = scales.float().expand(1, 1) if not block else scales
        whole = whole.repeat_interleave(size, 0).repeat_interleave(size, 1)[:height, :width]
        stored[name] = (weight / whole).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        meant[name] = stored[name].float() * whole
    save_file(stored, folder / SINGLE, metadata={"format": "pt"})
    scheme = {"quant_method": "fp8", "activation_scheme": "dynamic" if block else "static"}
    edit_config(folder, quantization_config=scheme | {"weight_block_size": block and [block] * 2})
    return meant


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(("kind", "block"), [("ministral3", None), ("qwen3", 16)])
def test_weights_in_eight_bits_are_read_as_what_they_stand_for(kind, block, tmp_path):
    meant = save_quantized(tmp_path, kind, block)
    model = load_model(str(tmp_path))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    own = model.state_dict()
    for name, weight in meant.items():
        torch.testing.assert_close(own[name], weight, rtol=1e-2, atol=0)  # scales in bfloat16
    Trainer.load(str(tmp_path), TrainerConfig(), 1).save_weights(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("load", [check_files, load_model])
def test_weights_in_eight_bits_without_known_scales_are_refused(tmp_path, load):
    """transformers would read the 8-bit numbers as the weights."""
    save_quantized(tmp_path, "ministral3", None)
    check_files(str(tmp_path))
    stored = load_file(tmp_path / SINGLE)
    renamed = {name.replace("weight_scale_inv", "weight_scale"): x for name, x in stored.items()}
    save_file(renamed, tmp_path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"there is no \S+_proj.weight_scale_inv \(nor that of 27"):
        load(str(tmp_path))


def test_experts_in_eight_bits_are_saved_by_their_published_names(tmp_path):
    save_quantized(tmp_path, "deepseek_v3", 16)
    names = set(load_file(tmp_path / SINGLE))
    Trainer.load(str(tmp_path), TrainerConfig(), 1).save_weights(tmp_path / "out")
    assert {n for n in names if "_scale" not in n} == set(load_file(tmp_path / "out" / SINGLE))


def test_weights_whose_quantization_cannot_be_undone_are_refused(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    for load in (load_model, load_shape):  # a plan and a dry run read the shape alone
        with pytest.raises(InputError, match="quantized by 'gptq', which cannot be undone"):
            load(str(tmp_path))
