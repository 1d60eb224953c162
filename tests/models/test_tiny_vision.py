"""The shipped model that takes images: small, known by its name, and looking at its pictures."""

from pathlib import Path
from random import Random

import pytest
import torch

from tramontane.data.playground import problems
from tramontane.data.playground.traces import Style, trace
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.models.image_tokens import ImageProcessor
from tramontane.models.loading import load_config, load_model, load_tokenizer
from tramontane.models.names import find_weights, resolve
from tramontane.models.packing import pack
from tramontane.models.transplant import parent_of
from tramontane.models.vision import Pictured, Vision
from tramontane.models.weight_files import WeightFiles

KINDS = ("drawn_sums", "drawn_bars", "drawn_tables")


def test_it_is_small():
    folder = Path(resolve("tiny_vision"))
    files = WeightFiles(folder)
    assert sum(files.read(name).numel() for name in files.names) <= 3_000_000
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8 * 2**20


def test_its_name_stands_for_it_on_every_machine():
    assert load_config("tiny_vision").text_half_of == {"model": "tiny_vision", "revision": None}
    with pytest.raises(InputError, match="did you mean 'tiny_vision'"):
        find_weights("tiny_visoin")


def test_its_answers_depend_on_what_it_sees():
    """A worked answer is likelier with its picture than with another's."""
    vision, tokenizer = Vision("tiny_vision"), load_tokenizer("tiny_vision")
    encoder = PromptEncoder(tokenizer, images=ImageProcessor("tiny_vision"))
    model = load_model("tiny_vision", torch.float32)
    some = list(problems("test", 0, (1, 2), ("en",), KINDS, count=24))

    def log_prob(problem, images):
        ids = encoder.encode(problem.prompt)
        response = tokenizer.encode(trace(problem, Random(0), Style()), add_special_tokens=False)
        row = pack([[*ids, *response]])
        prompt = Pictured(0, ids, images, len(ids) + len(response))
        with torch.no_grad(), vision.entering(model, [prompt], row) as inputs:
            logits = model(**inputs).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        return logits.gather(1, torch.tensor(response)[:, None]).sum()

    likelier = [
        log_prob(problem, problem.images) > log_prob(problem, other.images)
        for problem, other in zip(some, [*some[1:], some[0]], strict=True)
    ]
    assert sum(likelier) >= 22
    assert parent_of("tiny_vision") == "tiny_vision"
