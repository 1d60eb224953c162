"""Answers one step from their reference are wrong: one token more, one digit or sign changed."""

import re

import pytest

from fuzz.neighbors import REFERENCES, TOKEN, TOKENS
from tramontane.verifier.math.grade import judge_answer


def right(reference, mutants):
    found = {m for m in mutants if judge_answer(m, reference).outcome == "right"}
    return sorted(found - {reference})


@pytest.mark.parametrize("reference", REFERENCES)
def test_one_token_more_is_wrong(reference):
    parts = TOKEN.findall(reference)
    assert judge_answer(reference, reference).outcome == "right"
    mutants = [
        "".join([*parts[:place], token, *parts[place:]])
        for place in range(len(parts) + 1)
        for token in TOKENS
    ]
    assert right(reference, mutants) == []


@pytest.mark.parametrize("reference", REFERENCES)
def test_one_digit_or_sign_changed_is_wrong(reference):
    mutants = [
        f"{reference[: m.start()]}{new}{reference[m.end() :]}"
        for m in re.finditer(r"\d|[-+]", reference)
        for new in {"+": "-", "-": "+"}.get(m[0], str((int("0" + m[0].strip("+-")) + 1) % 10))
    ]
    assert right(reference, mutants) == []
