"""Drills: meaningless facts to repeat in a different order, which teach a tiny model to look up.

An answer to a generated question has two lookups in thirty tokens, which a model can guess half
right from the two choices; a drill has one in six tokens, and none can be guessed. Its sentences
have the forms of the questions' facts, with names, numbers and goals at any position, so that only
the preceding words determine what follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

from tramontane.data.playground.language import language as playground_language
from tramontane.data.playground.language import pick
from tramontane.oversight.extractive.generate import NUMBERS, load_frames

FACTS = range(2, 9)  # in a drill
PROMPT = "{facts}\nAgain?"

_TWO_SLOTS = re.compile(r"(.*?)\{\w+\}(.*)\{\w+\}(.*)")


class _Form(NamedTuple):
    """A sentence with two places: the text before, between and after them."""

    before: str
    between: str
    after: str


@lru_cache
def _forms(code: str) -> list[_Form]:
    """The first phrasings of a language's facts, and a bare pair."""
    sentences = [s for f in load_frames(code).values() for s in (f.first[0], f.second[0])]
    matches = [_TWO_SLOTS.fullmatch(sentence) for sentence in sentences]
    found = [_Form(*match.groups()) for match in matches if match]
    return [*found, _Form("", ": ", found[1].after)]


@lru_cache
def _things(code: str) -> list[list[str]]:
    """The names, the numbers and the goals of a language."""
    names = playground_language(code).names
    goals = [goal for frame in load_frames(code).values() for goal in frame.goals]
    return [[*names["m"], *names["f"]], [str(n) for n in NUMBERS], goals]


def drills(seed: int, count: int, languages: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`count` pairs of a prompt with facts, and the facts in another order.

    The first places of a drill's facts differ. Half of the drills have a single sentence form, so
    that the first place alone determines the second; in the others, the form has to be looked up
    too.

    Args:
        seed: of all that is drawn.
        count: number of drills.
        languages: ISO 639-1 codes, drawn uniformly.
    """
    rng = Random(f"oversight drills/{seed}")
    for _ in range(count):
        code = pick(rng, languages)
        forms, things = _forms(code), _things(code)
        form = pick(rng, forms) if rng.random() < 0.5 else None
        places = rng.sample(pick(rng, things), pick(rng, FACTS))
        facts = []
        for first in places:
            before, between, after = form or pick(rng, forms)
            facts.append(f"{before}{first}{between}{pick(rng, pick(rng, things))}{after}")
        joiner = playground_language(code).joiner
        prompt = PROMPT.format(facts=joiner.join(facts))
        rng.shuffle(facts)
        yield prompt, joiner.join(facts)
