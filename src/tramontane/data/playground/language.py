"""The words of a playground language, read from `templates/<code>.yaml`.

Adding such a file adds a language. Templates have three kinds of slots: `{n}` and other names are
filled in, the gender of the story's name selects from `[he|she]`, and the count `n` selects from
`<a|b|c>`, by the file's `plural` rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from random import Random
from typing import Any, TypeVar

from tramontane.config.yaml_text import read_own

T = TypeVar("T")

# The paper's languages (section 2.2.4), the default of every function in the playground.
LANGUAGES = ("en", "fr", "es", "it", "de", "zh", "ru")

_BY_GENDER = re.compile(r"\[([^|\]]*)\|([^\]]*)\]")
_BY_COUNT = re.compile(r"<([^>]*)>")


def _east_slavic(n: int) -> int:
    """0: one (1, 21, …), 1: few (2–4, 22–24, …), 2: many (0, 5–20, …), by CLDR's plural rules."""
    if n % 10 == 1 and n % 100 != 11:
        return 0
    return 1 if n % 10 in (2, 3, 4) and n % 100 not in (12, 13, 14) else 2


PLURALS: dict[str, Callable[[int], int]] = {"same": lambda n: 0, "east_slavic": _east_slavic}


@dataclass(frozen=True)
class Frame:
    """The sentences of an article about one kind of things, in one language."""

    # Phrasings of the first fact, with {name} and {n}; the first one begins with the name.
    first: list[str]
    # Phrasings of the second fact, with {n} and {goal}; the first one ends with the goal.
    second: list[str]
    question: list[str]  # phrasings of the question, with {name}
    goals: list[str]  # answers, in the form that the second fact needs


@dataclass(frozen=True)
class Language:
    """The words of one language."""

    plural: str  # name of the rule for `<one|few|many>`, a key of `PLURALS`
    joiner: str  # text between two sentences (empty in Chinese)
    sums: list[str]  # statements around an expression `{e}`
    names: dict[str, list[str]]  # first names by gender, `m` and `f`
    # For each kind of story its opening, its events by operation, and its question.
    frames: dict[str, dict[str, Any]]
    trace: dict[str, Any]  # wordings of solutions (see `traces`)
    # The sentences of articles, by the kind of things that they are about.
    articles: dict[str, Frame]
    tools: dict[str, Any]  # statements and messages of tasks for tools (see `tasks`)
    drawings: dict[str, str]  # questions about pictures, by kind (see `drawings`)
    shapes: dict[str, str]  # names of the shapes in them

    def fill(self, template: str, slots: Mapping[str, Any], feminine: bool, n: int) -> str:
        text: str = template.format(n=n, **slots)
        if "[" in text:
            text = _BY_GENDER.sub(r"\2" if feminine else r"\1", text)
        if "<" in text:
            form = PLURALS[self.plural](n)
            text = _BY_COUNT.sub(lambda m: m[1].split("|")[form], text)
        return text

    def say(self, rng: Random, what: str, **slots: Any) -> str:
        """A random wording of the trace entry `what`, filled in."""
        wordings: list[str] = self.trace[what]
        return pick(rng, wordings).format(**slots)


def pick(rng: Random, options: Sequence[T]) -> T:
    """Like `rng.choice`, but three times as fast: streaming spends most of its time on choices."""
    return options[int(rng.random() * len(options))]


@lru_cache
def language(code: str) -> Language:
    """The language of `templates/<code>.yaml`."""
    words = read_own((files(__package__) / "templates" / f"{code}.yaml").read_bytes())
    articles = {name: Frame(**frame) for name, frame in words.pop("articles").items()}
    return Language(articles=articles, **words)
