"""Copies of evaluation problems among training problems."""

import gzip
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tramontane.data.similarity import (
    THRESHOLD,
    near_copies,
    numbers,
    similarity,
    spelling,
)

SHARED = Path(__file__).parents[2] / ".." / "shared" / "data"
ASKED = [
    "What is $5 + 2$?",
    "A train leaves at 9 o'clock and travels north at 60 km per hour. How far is it at noon?",
    "Find the sum of all integers $x$ with $x^2 \\leq 1{,}000$ and $x > \\dfrac12$.",
]


def test_copies_are_found_whatever_their_spelling() -> None:
    statements = [
        "What is 7 + 2?",
        "what is  5+2 ?",
        "A train leaves at 9 o'clock and travels south at 60 km per hour. How far is it at noon?",
        "A train leaves at 9 o'clock and travels north at 70 km per hour. How far is it at noon?",
        "Find the sum of all integers $x$ with $x² ≤ 1000$ and $x > \\frac{1}{2}$.",
    ]
    copies = near_copies(statements, ASKED)
    assert {place: copy.original for place, copy in copies.items()} == {1: 0, 2: 1, 4: 2}
    assert copies[1].similarity == copies[4].similarity == 1.0
    assert THRESHOLD <= copies[2].similarity < 1.0


@given(st.lists(st.text("ab 12½²x+,.", min_size=1, max_size=30), min_size=1), st.data())
def test_every_copy_that_the_index_finds_has_the_digits_of_its_original(originals, data) -> None:
    """Statements are told apart by their digits first, and no copy is lost by that."""
    statements = data.draw(st.lists(st.sampled_from(originals) | st.text("ab 12½²x+,.")))
    found = near_copies(statements, originals)
    known = set(map(spelling, originals))
    assert found.keys() >= {i for i, text in enumerate(statements) if spelling(text) in known}
    for place, copy in found.items():
        a, b = spelling(statements[place]), spelling(originals[copy.original])
        assert numbers(a) == numbers(b) and (a == b or similarity(a, b) >= THRESHOLD)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
def test_edited_copies_among_real_problems_are_found() -> None:
    with gzip.open(SHARED / "math500.jsonl.gz", "rt", encoding="utf-8") as file:
        asked = [json.loads(line)["problem"] for line in file][:200]
    rng, edited = random.Random(1), []
    for text in asked:
        letters = [i for i, c in enumerate(text) if c.isalpha() and "\\" not in text[i - 9 : i]]
        changed = rng.choice(letters) if len(text) > 120 and letters else 0
        edited.append(text[:changed] + text[changed:].replace("$", "").replace(" ", "  ", 1))
    copies = near_copies(edited, asked)
    assert len(copies) >= 0.99 * len(asked)
