"""New inputs for problems with few tests; the solutions vote on the right outputs.

Inputs are mutations of the given inputs, or proposals of a model. An input that breaks the
statement's rules does no harm if solutions fail on it or differ; if all agree on it, the test
demands more than the statement.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from tramontane.asking import Answer, Prompt, conclusion
from tramontane.types import Problem
from tramontane.verifier.format import fences

MAX_LENGTH = 10_000  # characters of a mutated or proposed input
PER_ANSWER = 10  # inputs requested per answer of a model
SHOWN, SHOWN_LENGTH = 3, 1000  # given inputs shown in a question; maximum characters of each
REQUEST = """\
Below are a programming problem and some of the inputs that programs for it are tested on. Write \
{count} other inputs. Each must be valid by the statement and in exactly the form of the given \
ones. Make them unlike each other: small and large, ordinary and at the limits of what is allowed. \
Do not solve the problem, and write no outputs. Put each input between <input> and </input>.

<problem>
{problem}
</problem>
{given}
"""
_PROPOSED = re.compile(r"<input>(.*?)</input>", re.DOTALL)
_TOKEN = re.compile(r"-?\d+(?:\.\d+)?|[^\W\d_]+")
_NAMES = {"true", "false", "null", "None", "True", "False"}
_TRIES = 20  # mutations tried per requested input


def mutations(problem: Problem, count: int) -> list[str]:
    """Given inputs with one to three numbers or words changed.

    A number stays within the range of the given inputs' numbers with at most as many digits. A word
    keeps its length, with letters from the given inputs. A number that may count something (the
    following lines, the words of a line) is not changed.
    """
    inputs = [case["input"] for case in (problem.tests or {})["cases"]]
    texts = [text for text in inputs if len(text) <= MAX_LENGTH]
    if not texts:
        return []
    tokens = [match[0] for text in texts for match in _TOKEN.finditer(text)]
    numbers = sorted({int(t) for t in tokens if re.fullmatch(r"-?\d+", t)})
    letters = sorted({c for t in tokens if t[0].isalpha() and t not in _NAMES for c in t})
    rng, seen = Random(f"inputs of {problem.id}"), set(inputs)
    found: list[str] = []
    for _ in range(_TRIES * count):
        if len(found) == count:
            break
        text = _mutated(rng, rng.choice(texts), numbers, letters)
        if text not in seen:
            seen.add(text)
            found.append(text)
    return found


class Proposal(NamedTuple):
    """Inputs proposed by a model for a problem; `fault` says why, if there are none."""

    inputs: list[str]
    fault: str


def questions(problem: Problem, count: int) -> list[Prompt]:
    """Prompts that ask a model for `count` inputs, `PER_ANSWER` in each."""
    inputs = [case["input"] for case in (problem.tests or {})["cases"]]
    shown = [text for text in inputs if len(text) <= SHOWN_LENGTH][:SHOWN]
    request = REQUEST.format(
        count=PER_ANSWER,
        problem=problem.problem,
        given="\n".join(f"<input>\n{text.rstrip()}\n</input>" for text in shown),
    )
    parts = range(-(-count // PER_ANSWER))
    return [Prompt(f"{problem.id}/inputs/{part}", request) for part in parts]


def read_inputs(problem: Problem, answers: Sequence[Answer]) -> Proposal:
    """The distinct new inputs in a model's answers, each ending with a line break.

    All text outside the input tags is ignored.
    """
    known = {tuple(case["input"].split()) for case in (problem.tests or {})["cases"]}
    found: dict[tuple[str, ...], str] = {}
    for answer in answers:
        for text in _PROPOSED.findall(conclusion(answer.text)):
            if len(blocks := fences(text)) == 1:
                text = blocks[0].body
            text = text.replace("\r\n", "\n").lstrip("\n").rstrip() + "\n"
            if (words := tuple(text.split())) and len(text) <= MAX_LENGTH and words not in known:
                found.setdefault(words, text)
    faults = [answer.fault or "nothing new between <input> and </input>" for answer in answers]
    return Proposal(list(found.values()), "" if found else faults[0])


def _mutated(rng: Random, text: str, numbers: list[int], letters: list[str]) -> str:
    places = [m for m in _TOKEN.finditer(text) if m[0] not in _NAMES]
    counts_at = _possible_counts(text)
    places = [m for m in places if not (m[0].isdigit() and int(m[0]) in counts_at(m.start()))]
    chosen = rng.sample(places, min(len(places), rng.randint(1, 3)))
    for match in sorted(chosen, key=lambda m: -m.start()):
        word = match[0]
        if word[0].isalpha():
            new = _word(rng, word, letters)
        elif "." in word:  # as many places, between 0 and twice the value
            new = f"{float(word) * 2 * rng.random():.{len(word.partition('.')[2])}f}"
        else:
            new = str(_number(rng, int(word), numbers))
        text = text[: match.start()] + new + text[match.end() :]
    return text


def _possible_counts(text: str) -> Callable[[int], set[int]]:
    """Return a function from an offset in the text to the quantities that a number there may
    count."""
    lines = text.splitlines(keepends=True)
    sizes = [len(line.split()) for line in lines]
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]

    def counts_at(place: int) -> set[int]:
        line = max((i for i, start in enumerate(starts) if start <= place), default=0)
        behind = len(text[place : starts[line] + len(lines[line])].split()) - 1
        following = sizes[line + 1 :]
        words = {len(word) for word in text[place:].split()[1:] if word.isalpha()}
        return {behind, len(following), *following, *words} - {0}

    return counts_at


def _number(rng: Random, value: int, numbers: list[int]) -> int:
    """A number next to the value, or anywhere in the range of given numbers of the same size."""
    size = len(str(abs(value)))
    similar = [n for n in numbers if len(str(abs(n))) <= size]
    low, high = similar[0], similar[-1]
    if rng.random() < 0.3:
        return min(high, max(low, value + rng.choice((-1, 1))))
    return rng.choice(similar) if rng.random() < 0.3 else rng.randint(low, high)


def _word(rng: Random, word: str, letters: list[str]) -> str:
    if len(word) > 1 and rng.random() < 0.5:
        return "".join(rng.sample(word, len(word)))
    place = rng.randrange(len(word))
    return word[:place] + rng.choice(letters) + word[place + 1 :]
