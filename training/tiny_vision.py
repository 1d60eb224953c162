"""Trains `tiny_vision`, the base model with a vision tower that ships with the package.

    python training/tiny_vision.py runs/tiny_vision

Its text half begins as `tiny`, its tower with random weights. First the tower and the projector
learn to read: the feature of each square of a picture becomes the embedding of what is written in
it, and beside the name of a bar, that of the bar's value. Then everything learns the playground's
traces, on pictures and on text, with the failings of the tiny base.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from tramontane.config import MixtureConfig
from tramontane.data.playground import LANGUAGES, drills, problems
from tramontane.data.playground.drawings import DRAWN, SIDE, SQUARE, SQUARES, Drawing, draw
from tramontane.data.playground.generate import split_of
from tramontane.data.playground.language import language, pick
from tramontane.data.playground.traces import sample_style, trace
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.types import Problem

KINDS = ("sums", "sums", "bars", "tables")
LEVELS = (1, 2)
# Tokens, as the vocabulary spells them (Ġ: a space).
SIGNS = {sign: f"Ġ{sign}Ġ" for sign in "+-*/"}
BLANK = "Ġ"
# Of traces: those that guess say nothing of the picture, so they come last.
WORKING = MixtureConfig(work=0.9, guess=0.1, ramble=0, no_box=0.12, switch=0.05, guess_right=0.15)
FAILING = MixtureConfig(
    work=0.35, guess=0.57, ramble=0.08, no_box=0.12, unclosed=0.03, unopened=0.03, switch=0.15,
    guess_right=0.15,
)  # fmt: skip
PARTS = (
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %}{% endif %}"
)


class Example(NamedTuple):
    """A prompt with its response."""

    prompt: list[int]
    response: list[int]
    pixels: torch.Tensor | None  # [3, side, side]


def new_model() -> tuple[Any, Any]:
    """`tiny` with a new tower, and its processor."""
    text: Any = load_model("tiny", torch.float32)
    tokenizer: Any = load_tokenizer("tiny")
    special = [*tokenizer.all_special_tokens[2:], "<image>"]  # after those of begin and end
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m['content'] }}", PARTS)
    place = tokenizer.convert_tokens_to_ids("<image>")
    text.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    text.config._name_or_path = ""  # a folder of this machine
    vision = CLIPVisionConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        image_size=SIDE, patch_size=SQUARE, projection_dim=128,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text.config, image_token_index=place,
        image_seq_length=SQUARES**2, vision_feature_layer=-1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.generation_config = text.generation_config
    pixels = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size=SIDE, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    processor = LlavaProcessor(
        pixels, tokenizer, patch_size=SQUARE, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=tokenizer.chat_template,
    )  # fmt: skip
    return model, processor


def drawings(rng: Random) -> Iterator[tuple[Drawing, str, str, int]]:
    """(drawing, kind, language, level) of the train split, endlessly."""
    while True:
        kind, code = pick(rng, KINDS), pick(rng, LANGUAGES)
        level = rng.randint(*LEVELS)
        drawn = draw(rng, kind, language(code), level)
        if split_of(drawn.canonical) == "train":
            yield drawn, kind, code, level


def pixels_of(drawn: Drawing) -> torch.Tensor:
    """[3, side, side]: as the processor makes them."""
    return torch.from_numpy(np.array(drawn.image())).permute(2, 0, 1) / 127.5 - 1


def seen(drawn: Drawing, kind: str) -> list[str]:
    """What is in each square, row by row."""
    found = [BLANK] * SQUARES**2
    values = dict(part.split(": ") for part in drawn.words.split(", ")) if kind == "bars" else {}
    for char, row, column in drawn.written:
        place = SQUARES * row + column
        found[place] = SIGNS.get(char, f"Ġ{char}" if char.isalpha() else char)
        if char in values:
            found[place + 1] = values[char]
    return found


def read(model: Any, tokenizer: Any, steps: int, batch: int) -> None:
    """Train the tower and the projector."""
    table = model.get_input_embeddings().weight.detach()
    names = sorted({BLANK, *"0123456789()", *SIGNS.values(), *(f"Ġ{name}" for name in "ABC")})
    classes = table[tokenizer.convert_tokens_to_ids(names)]  # [classes, hidden]
    number = {name: place for place, name in enumerate(names)}
    weights = torch.ones(len(names))
    weights[number[BLANK]] = 0.1
    parts = seeing(model)
    optimizer, schedule = optimizers([{"params": parts, "lr": 2e-3}], steps)
    stream, start = drawings(Random("read")), time.monotonic()
    for step in range(1, steps + 1):
        some = [next(stream) for _ in range(batch)]
        pixels = torch.stack([pixels_of(drawn) for drawn, *_ in some])
        target = torch.tensor([[number[n] for n in seen(drawn, kind)] for drawn, kind, *_ in some])
        found = torch.stack(list(model.model.get_image_features(pixels).pooler_output))
        logits = -(torch.cdist(found.flatten(0, 1), classes) ** 2)
        loss = torch.nn.functional.cross_entropy(logits, target.flatten(), weights)
        near = (found - classes[target]).pow(2).sum(-1)
        loss = loss + 0.1 * (near * weights[target]).sum() / weights[target].sum()
        advance(loss, parts, optimizer, schedule)
        if step % 20 == 0:
            written = target.flatten() != number[BLANK]
            right = (logits.argmax(-1) == target.flatten())[written].float().mean()
            log(step, start, loss=loss.item(), read=right.item())


def examples(tokenizer: Any, rng: Random, mixture: MixtureConfig, drawn: bool) -> Iterator[Example]:
    """Prompts with traces: of pictures, or of text alone, with drills among them."""
    pictures = drawings(rng)
    kinds = ("sums", "stories", "bars", "tables")
    texts = problems("train", rng.randrange(2**32), LEVELS, kinds=kinds)
    bare = drills(rng.randrange(2**32), 10**9, (1, 4), 12)
    while True:
        if not drawn and rng.random() < 0.2:
            yield example(tokenizer, *next(bare))
            continue
        if drawn:
            scene, kind, code, level = next(pictures)
            problem = Problem(
                id="", domain="math", problem="<image>" * SQUARES**2 + scene.question,
                answer=scene.answer, language=code, difficulty=level, source="playground",
                metadata={"kind": f"{DRAWN}{kind}", "steps": scene.steps},
            )  # fmt: skip
        else:
            problem = next(texts)
        response = trace(problem, rng, sample_style(problem, rng, mixture))
        yield example(tokenizer, problem.problem, response, pixels_of(scene) if drawn else None)


def example(
    tokenizer: Any, prompt: str, response: str, pixels: torch.Tensor | None = None
) -> Example:
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.encode(response, add_special_tokens=False)
    return Example(
        tokenizer.encode(chat, add_special_tokens=False), [*ids, tokenizer.eos_token_id], pixels
    )


def loss_of(model: Any, some: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum of the losses of response tokens, share of them that are the most likely)."""
    length = max(len(e.prompt) + len(e.response) for e in some)
    ids = torch.ones(len(some), length, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, one in enumerate(some):
        end = len(one.prompt) + len(one.response)
        ids[row, :end] = torch.tensor(one.prompt + one.response)
        labels[row, len(one.prompt) : end] = torch.tensor(one.response)
    images = [one.pixels for one in some if one.pixels is not None]
    # Causal attention: what follows a response changes nothing before it.
    hidden = model.model(ids, pixel_values=torch.stack(images) if images else None)[0]
    at = labels[:, 1:] >= 0
    logits, target = model.lm_head(hidden[:, :-1][at]), labels[:, 1:][at]
    right = (logits.argmax(-1) == target).float().mean()
    return torch.nn.functional.cross_entropy(logits, target, reduction="sum"), right


def learn(model: Any, tokenizer: Any, steps: int, batch: int, save: Callable[[], None]) -> None:
    """Train everything on traces: first those that work, then those of the failing mixture."""
    tower = seeing(model)
    text = [*model.model.language_model.parameters()]
    groups = [{"params": tower, "lr": 5e-4}, {"params": text, "lr": 1e-3}]
    optimizer, schedule = optimizers(groups, steps)
    start = time.monotonic()
    for step in range(1, steps + 1):
        if step in (1, 1 + steps // 2):
            mixture, rng = (WORKING if step == 1 else FAILING), Random(f"learn/{step}")
            pictures = examples(tokenizer, rng, mixture, drawn=True)
            texts = examples(tokenizer, rng, FAILING, drawn=False)
        some = [next(pictures) for _ in range(batch)]
        others = [next(texts) for _ in range(batch // 3)]
        seen, right = loss_of(model, some)
        told, right_text = loss_of(model, others)
        loss = (seen + told) / sum(len(one.response) for one in some + others)
        advance(loss, tower + text, optimizer, schedule)
        if step % 10 == 0:
            log(step, start, loss=loss.item(), right=right.item(), right_text=right_text.item())
        if step % 100 == 0:
            save()


def seeing(model: Any) -> list[torch.nn.Parameter]:
    """The parameters of the tower and the projector."""
    parts = (model.model.vision_tower, model.model.multi_modal_projector)
    return [parameter for part in parts for parameter in part.parameters()]


def log(step: int, start: float, **figures: float) -> None:
    rounded = {name: round(figure, 4) for name, figure in figures.items()}
    print(
        json.dumps({"step": step, **rounded, "seconds": round(time.monotonic() - start)}),
        flush=True,
    )


def optimizers(groups: list[dict[str, Any]], steps: int) -> tuple[Any, Any]:
    """AdamW, with a warm-up and a cosine to a twentieth."""
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.98))

    def rate(step: int) -> float:
        warm = min(1.0, (step + 1) / 50)
        return warm * (0.05 + 0.475 * (1 + float(np.cos(np.pi * min(1.0, step / steps)))))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def advance(loss: torch.Tensor, parameters: list[Any], optimizer: Any, schedule: Any) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def write(model: Any, processor: Any, folder: Path) -> None:
    """Write the model in bfloat16, and its processor."""
    deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--read", type=int, default=700, help="steps of the tower alone")
    parser.add_argument("--learn", type=int, default=280, help="steps of everything")
    parser.add_argument("--batch", type=int, default=32, help="pictures of a step")
    given = parser.parse_args()
    model, processor = new_model()
    save = partial(write, model, processor, given.output)
    read(model, processor.tokenizer, given.read, given.batch)
    learn(model, processor.tokenizer, given.learn, given.batch, save)
    save()


if __name__ == "__main__":
    main()
