"""Random lives of conversations with images, in prompts and behind turns: every log-prob is that of
the whole model's plain forward, and that of a packed row of training."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.generator.test_parking import going_on
from tests.models.test_vision import GIVEN, KINDS
from tests.pictures import uri
from tests.vision import write_wrapper
from tramontane.batches import TrainSequence
from tramontane.config import PromptConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.generator import arena, cache
from tramontane.generator.engine import SlotEngine
from tramontane.generator.graphs import run_directly
from tramontane.models import vision
from tramontane.models.image_tokens import FAMILIES, ImageProcessor
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.trainer.head import plain_predictions
from tramontane.trainer.rows import pack_row
from tramontane.types import Completion, Illustrated, SamplingParams

MAX_LEN, EOS = 400, 257
SIZES = [(40, 30), (30, 40), (28, 28), (56, 20)]
LAYOUTS = ["copied", "shared", "arena"]


@pytest.fixture(scope="module", params=FAMILIES)
def versions(request, tmp_path_factory):
    """A folder, and three versions of the whole model and of its text half."""
    folders = [tmp_path_factory.mktemp(f"{request.param}_{seed}") for seed in range(3)]
    first = write_wrapper(folders[0], request.param)
    models = [first, deepcopy(first), deepcopy(first)]
    for seed, (model, folder) in enumerate(zip(models, folders, strict=True)):
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if any(part in name for part in ("language_model", "text_model", "lm_head")):
                    parameter.add_(torch.randn_like(parameter), alpha=0.05 * seed)
        model.save_pretrained(folder)
    return str(folders[0]), models, [load_model(str(folder)) for folder in folders]


class Life:
    """Conversations that come, are cancelled, park, go on with images and fork, while weights
    change. A turn that is continued is checked as part of its continuation, which repeats it whole.

    Args:
        versions: see the fixture.
        seed: of everything.
        **options: of the engine.

    Attributes:
        ended: how many turns ended; all are checked.
        shown: how many of them followed images behind a turn.
    """

    def __init__(self, versions, seed: int, **options) -> None:
        self.folder, self.models, self.halves = versions
        self.rng, self.siblings = random.Random(seed), random.Random(seed)
        self.vision = vision.Vision(self.folder)
        config, processor = PromptConfig(system_prompt=None), ImageProcessor(self.folder)
        self.encoder = PromptEncoder(load_tokenizer(self.folder), config, images=processor)
        self.engine = SlotEngine(load_model(self.folder), 5, MAX_LEN, [EOS], **options)
        self.engine.vision = self.vision
        self.group, self.waiting, self.requests = 0, [], {}
        self.ended = self.shown = 0
        self.before: dict[tuple[int, int], Completion] = {}  # the turn that a request continues
        self.longest = 6  # tokens of a completion

    def text(self) -> tuple[list[int], list[str]]:
        """Tokens of some text with images in it, and the images."""
        sizes = [self.rng.choice(SIZES) for _ in range(self.rng.choice([0, 1, 1, 2]))]
        shown = [uri(width=w, height=h, seed=self.rng.randint(0, 3)) for w, h in sizes]
        words = "".join(self.rng.choices("abcdefgh ", k=self.rng.randint(1, 8)))
        return self.encoder.encode(Illustrated("<image>" * len(shown) + words, shown)), shown

    def arrive(self) -> None:
        self.group += 1
        prompt, shown = self.text()
        params = SamplingParams(self.rng.randint(2, self.longest))
        self.submit(
            Completion.requested(self.group, i, prompt, 7 * self.group + i, params, images=shown)
            for i in range(self.rng.randint(1, 3))
        )

    def submit(self, requests) -> None:
        requests = [replace(request, keep_kv=True) for request in requests]
        self.requests |= {(r.group, r.index): r for r in requests}
        self.engine.submit(requests)

    def step(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            for ended in self.engine.step():
                asked = self.requests[ended.group, ended.index]
                ended = replace(ended, images=asked.images, put_images=asked.put_images)
                self.before.pop((ended.group, ended.index), None)
                self.waiting.append(ended)
                self.ended += 1
                self.shown += bool(ended.put_images)

    def resume(self) -> None:
        """A turn is answered, with images or without; some conversations fork there."""
        if not self.waiting:
            return
        ended = self.waiting.pop(self.rng.randrange(len(self.waiting)))
        put, shown = self.text()
        if len(ended.prompt_ids) + len(ended.token_ids) + len(put) > MAX_LEN - 6:
            self.check(ended)
            return
        following = going_on(self.requests[ended.group, ended.index], ended, put)
        following = replace(following, put_images=[*ended.put_images, *shown])
        requests = [following]
        if self.rng.random() < 0.3:  # the same tokens, behind other images of the same sizes
            index = 100 * len(self.requests)
            requests.append(replace(following, index=index, seed=index))
            if all(len(self.vision.features(i).embedded) == self.n_tokens for i in shown):
                other = [*ended.put_images, *(uri(seed=9) for _ in shown)]
                requests[1] = replace(requests[1], put_images=other)
        self.before |= {(r.group, r.index): ended for r in requests}
        self.submit(requests)

    @property
    def n_tokens(self) -> int:
        """The number of tokens of an image of `uri`'s own size."""
        return len(self.vision.features(uri(seed=9)).embedded)

    def cancel(self) -> None:
        group = self.rng.randint(1, self.group)
        self.engine.cancel(group)
        gone = [each for each in (*self.waiting, *self.before.values()) if each.group == group]
        for ended in gone:
            self.check(ended)
        self.waiting = [each for each in self.waiting if each.group != group]
        self.before = {key: each for key, each in self.before.items() if each.group != group}

    def update(self) -> None:
        if (version := self.engine.version + 1) < len(self.halves):
            self.engine.model.load_state_dict(self.halves[version].state_dict())
            self.engine.version = version
            self.engine.recompute()

    def check(self, ended: Completion) -> None:
        """Against the whole model, unless it drew tokens of images, sounds or films, which stand
        for none and which it refuses, and against a packed row of training."""
        drawn, config = torch.tensor(ended.versions), self.models[0].config
        tokens = {getattr(config, f"{kind}_token_id", 0) for kind in ("image", "audio", "video")}
        text = tokens.isdisjoint(t for t, v in zip(ended.token_ids, drawn, strict=True) if v >= 0)
        shown, logprobs = [*ended.images, *ended.put_images], torch.tensor(ended.logprobs)
        ids, n = [*ended.prompt_ids, *ended.token_ids], len(ended.token_ids)
        for version in {v for v in ended.versions if v >= 0}:
            own = drawn == version
            if text:
                whole = self.whole(self.models[version], ids, n, shown)
                torch.testing.assert_close(logprobs[own], whole[own], atol=1e-4, rtol=0)
            sequence = TrainSequence.of(ended)
            siblings = [sequence, replace(sequence)] if self.siblings.random() < 0.5 else [sequence]
            row = pack_row(siblings, torch.device("cpu"))
            packed = self.packed(self.halves[version], row)
            for start in range(0, len(packed), n):
                found = packed[start : start + n]
                torch.testing.assert_close(logprobs[own], found[own], atol=1e-4, rtol=0)

    @torch.no_grad()
    def packed(self, half, row) -> torch.Tensor:
        if not row.pictured:
            return plain_predictions(half, row, 1.0).logprobs
        with self.vision.entering(half, row.pictured, row.inputs) as inputs:
            return plain_predictions(half, replace(row, inputs=inputs), 1.0).logprobs

    @torch.no_grad()
    def whole(self, model, ids, n: int, shown) -> torch.Tensor:
        """Log-probs of the last n tokens."""
        row = torch.tensor([ids])
        made = [self.vision.processor.inputs(image) for image in shown]
        inputs = {
            name: stacked([each[name] for each in made])
            for name in ("pixel_values", *GIVEN)
            if made and name in made[0]
        }
        if name := KINDS.get(model.config.model_type):
            inputs[name] = (row == model.config.image_token_id).int()
        found = model(input_ids=row, **inputs).logits[0, -n - 1 : -1].log_softmax(-1)
        return found.gather(1, row[0, -n:, None])[:, 0]

    def run(self) -> None:
        """All acts, in random order, while weights change, to the end."""
        acts = [self.arrive, *[self.step] * 3, *[self.resume] * 3, self.cancel]
        self.arrive()
        for act in range(30):
            self.rng.choice(acts)()
            if act % 10 == 9:
                self.arrive()
                self.step()
                self.update()
        while self.engine.unfinished:
            self.step()
        assert not self.before
        for ended in self.waiting:
            self.check(ended)


def stacked(parts) -> torch.Tensor:
    """One tensor of images of different sizes: padded at the right, as processors pad a batch."""
    if parts[0].dim() == 2:
        return torch.cat(parts)
    sizes = torch.tensor([part.shape[1:] for part in parts]).amax(0).tolist()
    return torch.cat(
        [
            torch.nn.functional.pad(
                part,
                [
                    pad
                    for size, own in zip(sizes[::-1], part.shape[:0:-1], strict=True)
                    for pad in (0, size - own)
                ],
            )
            for part in parts
        ]
    )


def options_of(layout: str, monkeypatch) -> dict[str, Any]:
    """Options of an engine whose keys and values are laid out so."""
    monkeypatch.setattr(cache, "SHARING_SLOTS", 1 if layout == "shared" else 1000)
    monkeypatch.setattr(arena, "_SHORTEST", 16)
    return {"record": run_directly} if layout == "arena" else {}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_of_a_life_is_that_of_a_plain_forward(versions, layout, monkeypatch):
    options = options_of(layout, monkeypatch)
    life = Life(versions, LAYOUTS.index(layout), prefill_tokens=250, **options)
    life.run()
    assert life.ended >= 8 and life.shown >= 3
    stats = life.engine.stats
    assert min(stats.parked_tokens, stats.recomputed_tokens) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("versions", "layout"),  # each family in one layout, each layout for several families
    [(kind, LAYOUTS[number % len(LAYOUTS)]) for number, kind in enumerate(FAMILIES)],
    indirect=["versions"],
)
def test_so_it_is_where_memory_is_short(versions, layout, monkeypatch):
    """Keys and values have room for little more than one of the longest sequences, and features for
    one image: there are fewer slots, or, in an arena, sequences wait for the ends of others."""
    options = options_of(layout, monkeypatch)
    monkeypatch.setattr(vision, "CACHED_BYTES", 1)
    free = SlotEngine(load_model(versions[0]), 1, MAX_LEN, [EOS], **options)
    one = free._decoder.size_within(1, MAX_LEN, None).positions * free._token_bytes
    room = one * 5 // 4
    life = Life(versions, LAYOUTS.index(layout), prefill_tokens=250, kv_bytes=room, **options)
    life.longest = 20
    life.run()
    assert life.ended >= 8 and life.shown >= 2
    assert life.engine.cache_bytes <= room and (life.engine.slots < 5 or layout == "arena")
    assert len(life.vision._cache) == 1
