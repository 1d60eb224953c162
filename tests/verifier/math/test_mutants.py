"""Answers one step from their reference are wrong: one token more, one digit or sign changed."""

import re

import pytest

from tramontane.verifier.math.grade import judge_answer

REFERENCES = [
    "42", "x=5", "(1,2)", r"\frac{3}{4}", r"2\sqrt{3}", "x^2+1", r"\log_2 3", r"\frac{\pi}{6}",
    "f(x)=2x+1", "3:4:5", r"\{1,2\}", r"[0,3)", "2+3i", r"90^\circ", r"15\text{ cm}", "-7y",
    r"\lfloor\sqrt{n-1}\rfloor", r"\lfloor n/10\rfloor", r"\gamma^2+1", "a_n=2^n-1", "1011_2",
    r"2\text{ hours }30\text{ minutes}", r"30^\circ 15'", r"2\frac{1}{2}", r"x<3",
    r"\binom{n}{3}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"3\pmod 7", "P(X=1)=0.4, P(X=2)=0.6",
]  # fmt: skip
# Tokens that change or spoil every answer, wherever they stand.
TOKENS = [
    r"\neg ", r"\lim ", r"\sum ", r"\dot ", r"\to ", r"\star ", "'", '"', r"^{\prime}", "_7",
]  # fmt: skip
TOKEN = re.compile(r"\\text\{[^{}]*\}|\\(?:begin|end)\{\w+\}|\\[A-Za-z]+ ?|\\.|\d+|.")


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
