r"""Pairs of a reference and an answer, to measure verdicts on: `mixed`, `rows` and `groups`.

Cases with known verdicts come as they are. The other references are final answers of problem sets,
and their answers are drawn as a policy would write them: the reference, another spelling of it,
another problem's answer, a digit changed.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "shared/data"
N_MIXED, N_ROWS, N_GROUPS, GROUP = 1394, 4363, 96, 16
Pair = tuple[str, str]  # reference, answer


def mixed() -> list[Pair]:
    """All cases with known verdicts, and answers to OlympiadBench and MATH."""
    files = ("olympiadbench.jsonl.gz", "math500.jsonl.gz", "math_test_minus500.jsonl.gz")
    return [*_cases(), *_drawn("mixed", *files)][:N_MIXED]


def rows() -> list[Pair]:
    """All cases with known verdicts, and answers to all sets of problems with final answers."""
    files = ("olympiadbench.jsonl.gz", "math500.jsonl.gz", "gsm8k_test.jsonl.gz")
    return [*_cases(), *_drawn("rows", *files, "math_test_minus500.jsonl.gz")][:N_ROWS]


def groups() -> list[tuple[str, list[str]]]:
    """Groups of 16 answers to one reference, most of them given several times."""
    draw = random.Random("groups")
    references = _references("olympiadbench.jsonl.gz") + _references("math500.jsonl.gz")
    chosen = draw.sample(references, N_GROUPS)
    distinct = [[_answer(r, references, draw) for _ in range(8)] for r in chosen]
    return [(r, draw.choices(some, k=GROUP)) for r, some in zip(chosen, distinct, strict=True)]


def _cases() -> Iterator[Pair]:
    for row in _read("math_verify_cases.jsonl"):
        yield row["gold_answer"], row["pred_answer"]
    for row in [*_read("verdict_failures.jsonl"), *_read("verdicts4.jsonl")]:
        if row["domain"] == "math":
            yield row["answer"], row["prediction"]


def _drawn(seed: str, *files: str) -> Iterator[Pair]:
    draw = random.Random(seed)
    for file in files:
        references = _references(file)
        for reference in references:
            yield reference, _answer(reference, references, draw)


def _references(file: str) -> list[str]:
    return [row["answer"] for row in _read(file)]


def _answer(reference: str, others: list[str], draw: random.Random) -> str:
    kind = draw.choice(["same", "spelling", "spelling", "other", "digit"])
    if kind == "spelling":
        return draw.choice(_SPELLINGS)(reference)
    if kind == "other":
        return draw.choice(others)
    digits = [m.start() for m in re.finditer(r"\d", reference)]
    if kind == "digit" and digits:
        place = draw.choice(digits)
        changed = (int(reference[place]) + 1) % 10
        return f"{reference[:place]}{changed}{reference[place + 1 :]}"
    return reference


_FRACTION = re.compile(r"\\d?frac\{(\d+)\}\{(\d+)\}")
_SPELLINGS = (
    lambda text: text.replace("\\frac", "\\dfrac"),
    lambda text: _FRACTION.sub(r"\1/\2", text),
    lambda text: text.replace("(", "\\left(").replace(")", "\\right)"),
    lambda text: text.replace("+", " + ").replace(",", ", "),
    lambda text: f"x = {text}",
    lambda text: f"{text}.0" if text.isdigit() else f"{text}.",
)


def _read(file: str) -> list[dict[str, str]]:
    content = (DATA / file).read_bytes()
    text = gzip.decompress(content) if file.endswith("gz") else content
    return [json.loads(line) for line in text.splitlines()]
