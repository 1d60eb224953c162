"""The extractive task: short articles of facts in seven languages, and questions whose answer needs
two of them.

An article holds chains of two facts, in a drawn order: someone has a key, and the key opens a room.
The question names the person and asks for the room, so that neither fact alone gives the answer,
and no question can be answered without the article. The other chains are distractors: the wrong
answers are their rooms. Everything is drawn from a seed, as in the playground.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from random import Random
from typing import Literal

from tramontane.config import LANGUAGES
from tramontane.data.playground.generate import split_of
from tramontane.data.playground.language import language as playground_language
from tramontane.data.playground.language import pick
from tramontane.data.playground.tasks import chains as article_chains
from tramontane_oversight.transcript import Question

Split = Literal["train", "test"]
FRAMES = ("keys", "trains")


def extractive_questions(
    split: Split,
    seed: int,
    levels: tuple[int, int] = (2, 4),
    languages: Sequence[str] = LANGUAGES,
    frames: Sequence[str] = FRAMES,
    phrasings: int | None = None,
) -> Iterator[Question]:
    """An endless stream of distinct questions from one split.

    A question's `choices` are the goals of all chains, the right one among them; its `metadata` has
    the chains (`playground.tasks.chains`), the right one first.

    Args:
        split: a hash of article and question determines it, as in the playground.
        seed: of the stream.
        levels: fewest and most chains in an article.
        languages: ISO 639-1 codes, drawn uniformly.
        frames: names of frames, drawn uniformly.
        phrasings: number of phrasings of every sentence that are drawn from, the first of its
            frame; None: all.
    """
    rng, seen = Random(f"extractive/{split}/{seed}"), set[str]()
    while True:
        level = levels[0] + int(rng.random() * (levels[1] - levels[0] + 1))
        question = _draw(rng, pick(rng, languages), pick(rng, frames), level, phrasings)
        canonical = f"{question.article}\n{question.text}"
        if split_of(canonical) == split and canonical not in seen:
            seen.add(canonical)
            yield question


def _draw(rng: Random, code: str, frame_name: str, level: int, phrasings: int | None) -> Question:
    lang = playground_language(code)
    frame = lang.articles[frame_name]
    chains = article_chains(rng, lang, frame, level, phrasings)
    sentences = [chain[fact] for chain in chains for fact in ("first", "second")]
    rng.shuffle(sentences)
    text = pick(rng, frame.question[:phrasings]).format(name=chains[0]["name"])
    article = lang.joiner.join(sentences)
    digest = hashlib.sha256(f"{article}\n{text}".encode()).hexdigest()[:16]
    choices = tuple(chain["goal"] for chain in chains)
    metadata = {"frame": frame_name, "level": level, "chains": chains}
    return Question(f"extractive-{digest}", text, choices, 0, article, code, metadata)
