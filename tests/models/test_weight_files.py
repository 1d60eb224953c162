"""Safetensors files written tensor by tensor and read slice by slice, against safetensors' own."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from tramontane.errors import InputError
from tramontane.models.loading import empty_model, load_model
from tramontane.models.weight_files import INDEX, SINGLE, Entry, WeightFiles, write_files

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.randn(7, 2).bfloat16(),
    "scalar": torch.tensor(5),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 4),
    "last": torch.randn(5).half(),
}
ENTRIES = {name: Entry(t.shape, t.dtype) for name, t in TENSORS.items()}


def save(folder, shard_size="5GB", **config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | config))
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def test_a_small_model_is_one_file_that_safetensors_reads(tmp_path):
    write_files(tmp_path, ENTRIES, TENSORS.items())
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    found = load_file(tmp_path / SINGLE)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_large_models_are_split_and_the_index_says_where_each_tensor_is(tmp_path):
    (tmp_path / SINGLE).write_bytes(b"of a smaller model")
    write_files(tmp_path, ENTRIES, TENSORS.items(), shard_bytes=49)  # `a` has 48
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert {path.name for path in tmp_path.iterdir()} == {*names, INDEX}
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
    for name, tensor in TENSORS.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)
    files = WeightFiles(tmp_path)
    assert torch.equal(files.read("b", 2, 5), TENSORS["b"][2:5])
    assert torch.equal(files.read("scalar"), TENSORS["scalar"])


def test_tensors_are_converted_as_they_are_written(tmp_path):
    entries = {"a": Entry(TENSORS["a"].shape, torch.bfloat16)}
    write_files(tmp_path, entries, [("a", TENSORS["a"])])
    assert torch.equal(load_file(tmp_path / SINGLE)["a"], TENSORS["a"].bfloat16())


def test_an_index_that_names_a_missing_file_is_a_clear_error(tmp_path):
    save(tmp_path, "10KB")
    next(tmp_path.glob("model-*")).unlink()
    with pytest.raises(InputError, match="incomplete, it has no file model-00001"):
        empty_model(str(tmp_path))


@pytest.mark.parametrize("shard_size", ["5GB", "10KB"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_empty_model_has_the_architecture_buffers_and_tied_weights(tmp_path, tied, shard_size):
    save(tmp_path, shard_size, tie_word_embeddings=tied)
    model, files = empty_model(str(tmp_path))
    loaded = load_model(str(tmp_path))
    assert type(model) is type(loaded) and not model.training
    assert model.config.to_dict() == loaded.config.to_dict()
    assert model.generation_config.to_dict() == loaded.generation_config.to_dict()
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    buffers = dict(model.named_buffers())
    assert buffers
    for name, buffer in loaded.named_buffers():
        assert torch.equal(buffers[name], buffer)
    for name, tensor in loaded.state_dict().items():
        if name in files:
            assert torch.equal(files.read(name), tensor)


def quantised(folder):
    save(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))


def in_another_format(folder):
    model = save(folder)
    (folder / SINGLE).unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def without_a_weight(folder):
    save(folder)
    tensors = load_file(folder / SINGLE)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / SINGLE, {"format": "pt"})


def with_both_tied_weights(folder):
    save(folder, tie_word_embeddings=True)
    tensors = load_file(folder / SINGLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / SINGLE, {"format": "pt"})


def converted(folder):
    config = MixtralConfig(**SIZES, num_local_experts=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (quantised, "they are quantised"),
        (in_another_format, "no safetensors files"),
        (without_a_weight, "there is no model.norm.weight"),
        (with_both_tied_weights, "are tied, and both are there"),
        (converted, "transformers converts the weights of MixtralForCausalLM"),
    ],
)
def test_weights_that_cannot_be_read_in_parts_are_left_to_transformers(
    tmp_path, caplog, make, reason
):
    make(tmp_path)
    with caplog.at_level(logging.WARNING, "tramontane"):
        assert empty_model(str(tmp_path)) is None
    assert reason in caplog.text and "every trainer rank loads the whole model" in caplog.text
