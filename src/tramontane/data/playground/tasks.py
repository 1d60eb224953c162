"""Problems that need a tool, and a game of several turns, in the playground's languages.

Their numbers are too long for mental arithmetic (`long_sums`, `sessions`), are looked up in a
notebook (`lookups`; in `articles`, the answer is in words), or are found by asking (`guessing`).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from .arithmetic import Step, apply, expression
from .language import Frame, Language, pick

# By level, from 1.
DIGITS = (3, 3, 4, 4, 5, 6, 7, 8)  # of the numbers of long sums
LONG_STEPS = (2, 3, 2, 3, 3, 3, 4, 4)
FACTOR_DIGITS = (2, 2, 2, 3, 3, 4, 4, 5)
HOPS = (2, 2, 2, 2, 3, 3, 4, 4)  # entries of a look-up, the number included
CHAINS = (2, 2, 3, 3, 4, 5, 6, 8)  # of an article, two facts each
ENTRIES = (4, 6, 8, 10, 12, 14, 16, 20)  # of the notebook
NUMBERED = range(10, 100)  # the things in articles
NUMBERS = (7, 7, 15, 15, 31, 31, 63, 63)  # to guess among: halves always have a middle

_EXPRESSIONS: tuple[tuple[str, Callable[[int, int], int]], ...] = (
    ("n % {m}", lambda n, m: n % m),
    ("sum(map(int, str(n)))", lambda n, m: sum(map(int, str(n)))),
    ("len(str(n * {m}))", lambda n, m: len(str(n * m))),
    ("int(max(str(n // {m})))", lambda n, m: int(max(str(n // m)))),
    ("n // {m} % 1000", lambda n, m: n // m % 1000),
)


class Task(NamedTuple):
    """A drawn problem."""

    canonical: str  # what decides its split (see `generate.split_of`)
    # statement, answer: as in a `Problem`.
    statement: str
    answer: str
    # What its tool or environment needs; its `calls`, those that solve it, in order; and a `wrong`
    # call that may be made instead of the last one.
    metadata: dict[str, Any]
    hidden: str = ""  # what determines the answer besides the statement


class Call(NamedTuple):
    """A call of a tool, and its `answer`, which states `value`, by default the whole answer."""

    name: str
    arguments: dict[str, str]
    answer: str
    value: str = ""


def draw(rng: Random, kind: str, lang: Language, level: int) -> Task:
    return _DRAW[kind](rng, lang, level)


def _number(rng: Random, digits: int) -> int:
    return int(10 ** (digits - 1) * (1 + 9 * rng.random()))


def _long_sum(rng: Random, lang: Language, level: int) -> Task:
    """A chain of long numbers, with at most one product."""
    value, ops, steps = _number(rng, DIGITS[level - 1]), "++--*", list[Step]()
    for _ in range(LONG_STEPS[level - 1]):
        op = pick(rng, ops)
        b = _number(rng, FACTOR_DIGITS[level - 1] if op == "*" else DIGITS[level - 1])
        if op == "*":
            ops = "+-"
        elif b > value:
            op = "+"
        steps.append((value, op, b, apply(value, op, b)))
        value = steps[-1][3]
    formula = expression(steps)
    a, op, b, _ = steps[-1]
    slipped = [*steps[:-1], (a, op, b // 10, apply(a, op, b // 10))]  # a digit was forgotten
    calls = [Call("calculator", {"expression": formula}, str(value))]
    wrong = Call("calculator", {"expression": expression(slipped)}, str(slipped[-1][3]))
    return Task(
        formula,
        pick(rng, lang.sums).format(e=formula),
        str(value),
        {"steps": steps, "expression": formula, "calls": calls, "wrong": wrong},
    )


def _lookup(rng: Random, lang: Language, level: int) -> Task:
    """A chain of a notebook's entries that ends in a number, among other entries."""
    keys: dict[str, None] = {}
    while len(keys) < ENTRIES[level - 1]:
        keys[f"{pick(rng, 'ABCDEFGHKLMNPRSTUVXYZ')}{10 + int(rng.random() * 90)}"] = None
    names = list(keys)
    chain, others = names[: HOPS[level - 1]], names[HOPS[level - 1] :]
    value = str(_number(rng, 2 + level // 3))
    facts = {name: str(_number(rng, 2 + level // 3)) for name in others}
    facts |= dict(zip(chain, [*chain[1:], value], strict=True))
    calls = [Call("lookup", {"key": name}, facts[name]) for name in chain]
    wrong = Call("lookup", {"key": others[0]}, facts[others[0]])
    return Task(
        f"{chain} {value}",
        pick(rng, lang.tools["lookups"]).format(k=chain[0]),
        value,
        {"facts": dict(sorted(facts.items())), "calls": calls, "wrong": wrong},
        hidden=value,
    )


def chains(
    rng: Random, lang: Language, frame: Frame, count: int, phrasings: int | None = None
) -> list[dict[str, Any]]:
    """`count` pairs of facts of an article: each a `name`, a `first` sentence, which leads from it
    to a number `n`, a `second` one, which leads from there to a `goal`. Only the first `phrasings`
    of each sentence are drawn from; None: all."""
    names = rng.sample([*lang.names["m"], *lang.names["f"]], count)
    numbers, goals = rng.sample(NUMBERED, count), rng.sample(frame.goals, count)
    return [
        {
            "name": name,
            "n": n,
            "goal": goal,
            "first": pick(rng, frame.first[:phrasings]).format(name=name, n=n),
            "second": pick(rng, frame.second[:phrasings]).format(n=n, goal=goal),
        }
        for name, n, goal in zip(names, numbers, goals, strict=True)
    ]


def _article(rng: Random, lang: Language, level: int) -> Task:
    """A question that two sentences of an article answer, which are entries of a notebook."""
    frame = pick(rng, [*lang.articles.values()])
    asked, other, *more = chains(rng, lang, frame, CHAINS[level - 1])
    found = [asked, other, *more]
    facts = {chain["name"]: chain["first"] for chain in found}
    facts |= {str(chain["n"]): chain["second"] for chain in found}
    question = pick(rng, frame.question).format(name=asked["name"])

    def opened(chain: dict[str, Any]) -> Call:
        return Call("lookup", {"key": str(chain["n"])}, chain["second"], chain["goal"])

    facts = dict(sorted(facts.items()))
    return Task(
        f"{question} {facts}",
        pick(rng, lang.tools["articles"]).format(q=question),
        asked["goal"],
        {
            "facts": facts,
            "goals": [chain["goal"] for chain in found],
            "calls": [Call("lookup", {"key": asked["name"]}, asked["first"]), opened(asked)],
            "wrong": opened(other),
        },
        hidden=str(facts),
    )


def _session(rng: Random, lang: Language, level: int) -> Task:
    """A power, and something about it that needs a computer."""
    base, exponent = 3 + int(rng.random() * 10 * level), 7 + int(rng.random() * 6 * level)
    modulus = _number(rng, 2 + level // 3)
    code, n = f"n = {base} ** {exponent}", base**exponent
    text, of = pick(rng, _EXPRESSIONS)
    wanted, answer = text.format(m=modulus), str(of(n, modulus))
    return Task(
        f"{code}; {wanted}",
        pick(rng, lang.tools["sessions"]).format(c=code, e=wanted),
        answer,
        {
            "calls": [Call("python", {"code": code}, ""), Call("python", {"code": wanted}, answer)],
            "wrong": Call("python", {"code": "n % 10"}, str(n % 10)),
        },
    )


def _guessing(rng: Random, lang: Language, level: int) -> Task:
    """A number to be found by halving: with one guess fewer, halving would not always find it."""
    count = NUMBERS[level - 1]
    low = int(rng.random() * 20 * level)
    high, guesses = low + count + 1, count.bit_length()
    statement = pick(rng, lang.tools["guessing"]).format(a=low, b=high, k=guesses)
    hints = {name: lang.tools[name] for name in ("higher", "lower", "unread")}
    metadata = {"environment": "guessing", "between": [low, high], "guesses": guesses}
    number = str(low + 1 + int(rng.random() * count))
    canonical = f"{number} between {low} and {high}"
    return Task(canonical, statement, number, metadata | hints, hidden=number)


_DRAW: dict[str, Callable[[Random, Language, int], Task]] = {
    "long_sums": _long_sum,
    "lookups": _lookup,
    "articles": _article,
    "sessions": _session,
    "guessing": _guessing,
}
KINDS = tuple(_DRAW)
