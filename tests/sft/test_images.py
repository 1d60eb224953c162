"""Fine-tuning on prompts with images."""

import json
from dataclasses import replace

import pytest
import torch

from tests.vision import picture, write_wrapper
from tramontane.config.sft import SFTConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.models.image_tokens import ImageProcessor
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.models.vision import Vision
from tramontane.sft.examples import ExampleStream, read_examples
from tramontane.sft.sft import LOG, _train_batch, sft
from tramontane.trainer.head import plain_predictions
from tramontane.trainer.rows import pack_row


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictured")
    write_wrapper(folder / "model", "qwen3_vl")
    rows = []
    for number in range(4):
        picture(40 + number, 30, seed=number).save(folder / f"{number}.png")
        row = {"prompt": "Is it <image>?", "response": f"No, {number}.", "image": f"{number}.png"}
        rows.append(row)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(given, output, rows="rows.jsonl", **data):
    return SFTConfig.model_validate(
        {
            "output": str(output), "model": str(given / "model"), "max_length": 400,
            "data": {"train": str(given / rows), "system_prompt": None, **data},
            "steps": 2, "batch_tokens": 300, "microbatch_tokens": 400, "learning_rate": 1e-2,
            "warmup_steps": 0, "log_every": 1, "dtype": "float32",
        }
    )  # fmt: skip


def test_the_loss_is_that_of_responses_to_the_images(given, tmp_path):
    config = config_of(given, tmp_path / "out")
    folder = str(given / "model")
    encoder = PromptEncoder(load_tokenizer(folder), config.data, images=ImageProcessor(folder))
    examples = ExampleStream(config, encoder).take(config.batch_tokens)
    sequences = [s for group in _train_batch(examples, config).groups for s in group]
    assert len({s.images for s in sequences}) == 4
    row, half, vision = pack_row(sequences, torch.device("cpu")), load_model(folder), Vision(folder)
    with vision.entering(half, row.pictured, row.inputs) as inputs:
        seen = plain_predictions(half, replace(row, inputs=inputs), 1.0).logprobs.mean().item()
    sft(config)
    lines = [json.loads(line) for line in (tmp_path / "out" / LOG).read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(-seen, abs=1e-4)
    assert lines[1]["loss"] < lines[0]["loss"]


def test_images_are_refused_where_they_would_be_left_out(given, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "a"}], "image": "0.png"}]
    (given / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="read as text alone"):
        read_examples(config_of(given, tmp_path, "chats.jsonl"))
    row = {"prompt": "a", "response": "b", "image": "none.png"}
    (given / "broken.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match="broken.jsonl:1: image 'none.png': no such file"):
        read_examples(config_of(given, tmp_path, "broken.jsonl"))
