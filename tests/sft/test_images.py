"""Fine-tuning on prompts with images."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.generator.test_image_lives import Life
from tests.pictures import picture, uri
from tests.vision import write_wrapper
from tramontane.config.sft import SFTConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.models.image_tokens import ImageProcessor
from tramontane.models.images import content_of
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


@pytest.mark.parametrize("kind", ["mistral3", "qwen3_vl", "gemma4"])
def test_chats_are_learned_with_their_images(tmp_path, kind):
    """In turns, as parts, by the row's field and by their own data; in the order of their places.
    The log-probs are those of the whole model."""
    whole = write_wrapper(tmp_path / "model", kind)
    picture(40, 30, seed=1).save(tmp_path / "1.png")
    mine = {"type": "image_url", "image_url": {"url": uri(width=30, height=40, seed=2)}}
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "One?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
        {"role": "user", "content": [{"type": "text", "text": "And"}, mine, mine | {}]},
        {"role": "assistant", "content": "No."},
    ]
    messages[2]["content"].append({"type": "text", "text": "?"})
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages, "image": "1.png"}))
    config, folder = config_of(tmp_path, tmp_path / "out"), str(tmp_path / "model")
    encoder = PromptEncoder(load_tokenizer(folder), config.data, images=ImageProcessor(folder))
    # This template forks a conversation at each turn.
    first_turn, example = sorted(ExampleStream(config, encoder).epoch, key=lambda e: len(e.images))
    assert len(first_turn.images) == 1
    shown = [content_of(image) for image in (*example.images, *example.put_images)]
    first, second = uri(width=40, height=30, seed=1), uri(width=30, height=40, seed=2)
    assert shown == [content_of(image) for image in (first, second, second)]
    assert "No." in encoder.tokenizer.decode(example.response)
    [[sequence]] = _train_batch([example], config).groups
    half, vision = load_model(folder), Vision(folder)
    row = pack_row([sequence], torch.device("cpu"))
    with torch.no_grad(), vision.entering(half, row.pictured, row.inputs) as inputs:
        found = plain_predictions(half, replace(row, inputs=inputs), 1.0).logprobs
    ids, n = [*example.prompt, *example.response], len(example.response)
    life = SimpleNamespace(vision=vision)
    expected = Life.whole(life, whole, ids, n, [first, second, second])  # type: ignore[arg-type]
    own = torch.tensor(list(sequence.versions)) >= 0
    if len(found) == own.sum():
        expected = expected[own]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_images_are_refused_where_they_would_be_left_out(given, tmp_path):
    said, asked = {"role": "assistant", "content": "b"}, {"role": "user", "content": "a"}
    for messages, more, message in (
        ([asked, said, asked, said], {"image": "0.png"}, "its images have no place"),
        ([asked, said | {"content": [{"type": "image"}]}], {"image": "0.png"}, "no place"),
        ([asked, said], {"picture": uri()}, "field 'picture' holds an image"),
        ([asked | {"content": "<image><image>"}, said], {"image": "0.png"}, "1 image for 2 places"),
    ):
        (given / "chats.jsonl").write_text(json.dumps({"messages": messages} | more) + "\n")
        with pytest.raises(InputError, match=message):
            read_examples(config_of(given, tmp_path, "chats.jsonl"))
    row = {"prompt": "a", "response": "b", "image": "none.png"}
    (given / "broken.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match="broken.jsonl:1: image 'none.png': no such file"):
        read_examples(config_of(given, tmp_path, "broken.jsonl"))
