"""Answers to Reasoning Gym's problems, by the scorer of their generator.

A problem's metadata has the `generator`, and its whole `entry` as a Python literal, which the
scorer reads. Some scorers evaluate the answer as Python, or by SymPy's parser, which does so too;
they get only what is a literal, or arithmetic without texts, attributes and functions other than
mathematical ones.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from contextlib import suppress
from functools import lru_cache
from typing import Any

from tramontane.config import VerifierConfig
from tramontane.types import Judgment, Problem
from tramontane.verifier.format import Parsed, last_box

_EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")
_MATHS = r"(?:abs|a?(?:sin|cos|tan)h?|cot|csc|sec|exp|ln|log|sqrt|factorial|sign|Integral|[a-z])"
# Texts, escapes, statements, names that Python reserves, attributes, and calls of what is not
# mathematical.
_UNSAFE = re.compile(
    rf"""["'\\;:@!`]|__|\b(?:lambda|or|and|if|else|for)\b|[\w)\]]\s*\.\s*[^\W\d]|\b(?!{_MATHS}\s*\()[^\W\d]\w*\s*\("""
)
# Texts around an answer which spoil it; a scorer that reads past one reads past any.
_AROUND = ("{} zz", "not {}", "{}, zz", "{}zz")
# Texts that `float` reads and that are not numbers: scorers that compare a distance accept them.
_NOT_FINITE = re.compile(
    r"(?<![a-z])(?:nan|inf(?:inity)?)[ij]?(?![a-z])|\de\+?\d{3}", re.IGNORECASE
)
_EXACT = {"number_sorting"}  # its scorer takes numbers that are up to 1 off
_SIGNED = re.compile(r"-?\d+(?:\.\d+)?")
_WORD = re.compile(r"[^\W\d_]+")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_TOLD = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@lru_cache
def generator(name: str) -> Any:
    """A data set of a generator's, to score with."""
    from reasoning_gym.factory import create_dataset

    return create_dataset(name, size=1, seed=0)


@lru_cache
def _evaluates(name: str) -> bool:
    return bool(_EVALUATES.search(inspect.getsource(sys.modules[type(generator(name)).__module__])))


def answer_of(text: str) -> str:
    """The answer in a text: the last box or, as Reasoning Gym asks for it, the last `<answer>`; or
    all of the text."""
    if (box := last_box(text)) is not None:
        return box.strip()
    told = _TOLD.findall(text)
    return (told[-1] if told else text).strip()


def score(name: str, entry: Any, answer: str) -> float:
    """The generator's score of an answer, from 0 to 1.

    Raises:
        Exception: any that its scorer raises.
    """
    if _evaluates(name) and not is_harmless(answer):
        return 0.0
    own = str(entry["answer"])
    if _NOT_FINITE.search(answer) and not _NOT_FINITE.search(own):
        return 0.0
    if name in _EXACT and _numbers(answer) != _numbers(own):
        return 0.0
    return min(max(float(generator(name).score_answer(answer, entry)), 0.0), 1.0)


def _numbers(text: str) -> list[float]:
    return [*map(float, _SIGNED.findall(text))]


def is_harmless(text: str) -> bool:
    """True if a text may be evaluated: a literal of Python or JSON, or arithmetic."""
    for read in (ast.literal_eval, json.loads):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            read(text.strip())
            return True
    return not _UNSAFE.search(text)


def is_alone(name: str, entry: Any, answer: str) -> bool:
    """False for an answer with text around it, if the scorer ignores such text: it has a word of
    several letters that the entry's own answer lacks, or more numbers. Own answers of one word or
    of single letters, such as sequences of moves, are compared by their letters."""
    own = entry["answer"]
    if not isinstance(own, str) or _evaluates(name):
        return True
    words, given = (_WORD.findall(text.casefold()) for text in (own, answer))
    by_letters = len(words) == 1 or max(map(len, words), default=0) == 1
    known = set("".join(words)).issuperset if by_letters else set(words).__contains__
    has_words = all(len(word) == 1 or known(word) for word in given)
    longer = answer.casefold().strip(" .!").removeprefix(own.casefold())
    if by_letters and longer and answer.casefold().startswith(own.casefold()):
        has_words = False  # unless the scorer reads on
    if has_words and len(_NUMBER.findall(answer)) <= len(_NUMBER.findall(own)):
        return True
    return not any(has_full_marks(name, entry, around.format(own)) for around in _AROUND)


def has_full_marks(name: str, entry: Any, text: str) -> bool:
    """True if the scorer gives a text full marks; False also where it raises."""
    try:
        return score(name, entry, text) >= 1
    except Exception:  # of the scorer, which reads any text
        return False


def judge(problem: Problem, parsed: Parsed, config: VerifierConfig) -> Judgment:
    """Judge an answer: right with full marks; `reward.reasoning_gym: partial` also pays a share."""
    answer = answer_of(str(parsed.extracted))
    name, entry = problem.metadata["generator"], ast.literal_eval(problem.metadata["entry"])
    try:
        share = score(name, entry, answer)
    except Exception as error:  # of the answer: the reference was scored when it was drawn
        return Judgment("wrong", f"its scorer raised {type(error).__name__}", answer)
    if share >= 1 and not is_alone(name, entry, answer):
        return Judgment("wrong", "text around the answer, which its scorer ignores", answer)
    if share >= 1:
        return Judgment("right", "", answer, 1.0)
    paid = share if config.reward.reasoning_gym == "partial" else 0.0
    return Judgment("wrong", f"not the reference: score {share:.3g}", answer, paid)
