"""Traces as conversations: the model's messages, and what tools and games answer.

A call has the form of Hermes and Qwen, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, and
follows the thoughts. Like all traces they have deliberate flaws (see `Style.use`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from random import Random
from typing import TypedDict

from tramontane.config import MixtureConfig
from tramontane.errors import InputError
from tramontane.types import Message, Problem
from tramontane.verifier.code.shown import divide, of_case

from . import programs
from .arithmetic import LEVELS
from .generate import SCENES, problems
from .language import LANGUAGES, Language, language, pick
from .tasks import Call
from .traces import Style, fenced, framed, near_miss, program, sample_style, trace

DEFAULT_MIXTURE = MixtureConfig()
ATTEMPTS = 3  # most programs of a trace
LUCK = 0.15  # share of right programs among a guess's further attempts
UNPARSED = "error: the call cannot be read: not JSON"  # how `environments.calls` begins
_THOUGHTS = {"calculator": "calculator", "lookup": "notebook", "python": "python"}


class Example(TypedDict):
    """A problem, and a chat about it: the statement, then the model's messages, each followed by
    its reply; the last message is the model's."""

    problem: Problem
    messages: list[Message]


def conversation(problem: Problem, rng: Random, style: Style) -> list[Message]:
    """A trace of the given style: the model's messages, each followed by its reply. Only the last
    one has no reply, and only its format has the style's flaws."""
    lang = language(problem.language or "en")
    if problem.metadata.get("environment") == "guessing":
        return _game(problem, rng, style, lang)
    if problem.metadata.get("environment") == "repair":
        return _repaired(problem, rng, style)
    calls: list[Call] = problem.metadata.get("calls", [])
    if style.use == "needless":
        a, op, b, c = problem.metadata["steps"][0]
        calls = [Call("calculator", {"expression": f"{a} {op} {b}"}, str(c))]
    elif not calls:
        return [_said(trace(problem, rng, style))]
    messages: list[Message] = []
    thoughts: list[str] = []
    broken = style.use == "broken"
    if style.use == "wrong":
        calls = [*calls[:-1], problem.metadata["wrong"]]
    if style.manner == "ramble":
        calls = [call for call in calls for _ in range(2)]
    for call in calls if style.manner != "guess" else []:
        key = call.arguments.get("key")
        thoughts.append(lang.say(rng, _THOUGHTS[call.name], k=key))
        text = _broken(rng, call) if broken else _written(call)
        messages.append(_said(framed(Style(), lang.joiner.join(thoughts), text)))
        messages.append(Message(role="tool", content=UNPARSED if broken else call.answer))
        if broken:
            break
        thoughts = [lang.say(rng, "told", n=call.answer.rstrip(".。"))] if call.answer else []
    last = language(style.switch) if style.switch else lang
    answer = str(problem.answer)
    if style.manner != "guess" and style.use in ("right", "wrong"):
        answer = calls[-1].value or calls[-1].answer
    else:
        thoughts = thoughts or [lang.say(rng, "failed" if broken else "skip")]
        if style.manner != "guess" or not style.right:
            others = [goal for goal in problem.metadata.get("goals", ()) if goal != answer]
            answer = pick(rng, others) if others else str(near_miss(rng, int(answer)))
        thoughts.append(last.say(rng, "guess", n=answer))
    return [*messages, _said(_final(rng, style, last, thoughts, answer))]


def _game(problem: Problem, rng: Random, style: Style, lang: Language) -> list[Message]:
    """A game of guesses: work halves the range, ramble stays within it, guess forgets the hints and
    half the time the upper bound too. If work has a slip, it misunderstands one hint."""
    low, high = whole = problem.metadata["between"]  # neither is the number
    number, guesses = int(problem.answer or ""), problem.metadata["guesses"]
    slip = guesses if style.right else int(rng.random() * (guesses - 1)) + 1
    messages = list[Message]()
    for left in reversed(range(guesses)):
        if style.manner == "guess" or high - low < 2:  # nothing is left after a slip
            low, high = whole
        if style.manner == "work":
            total, n = low + high, (low + high) // 2
            middle = f"{low} + {high} = {total}, {total} / 2 = {n}"
            thought = lang.say(rng, "between", a=low, b=high, n=middle)
        else:
            width = (high - low - 1) * (2 if style.manner == "guess" else 1)
            n = low + 1 + int(rng.random() * width)
            thought = lang.say(rng, "guess", n=n)
        if n == number or not left:
            return [*messages, _said(_final(rng, style, lang, [thought], n))]
        hint = "higher" if n < number else "lower"
        if (hint == "higher") != (style.manner == "work" and left == slip):
            low = max(low, n)
        else:
            high = min(high, n)
        messages.append(_said(_final(rng, Style(), lang, [thought], n)))
        messages.append(Message(role="user", content=problem.metadata[hint]))
    raise AssertionError("a game has a last guess")


def _repaired(problem: Problem, rng: Random, style: Style) -> list[Message]:
    """Programs, each answered with a test that it fails: work then reads the answer, and corrects
    the program; guess writes another one without regard to it."""
    divided, messages = divide(problem), list[Message]()
    cases = divided.shown.tests["cases"]  # type: ignore[union-attr, index]
    thoughts, right = "", style.right
    while len(messages) < 2 * ATTEMPTS:
        said, code = program(problem, rng, replace(style, right=right))
        messages.append(_said(framed(style, thoughts + said, fenced(code, style.box))))
        if not style.box or style.tags != "ok" or (found := programs.failed(code, cases)) is None:
            return messages
        place, printed = found
        messages.append(Message(role="user", content=of_case(place + 1, cases, printed)))
        if style.manner == "guess":
            right = rng.random() < LUCK
        else:
            right, expected = True, cases[place]["output"].strip()
            thoughts = f"It should print {expected}, but it prints {printed.strip()}. "
    return messages[:-1]


def _final(rng: Random, style: Style, lang: Language, thoughts: list[str], n: int | str) -> str:
    shown = f"\\boxed{{{n}}}" if style.box else n
    return framed(style, lang.joiner.join(thoughts), lang.say(rng, "answer", x=shown))


def _said(text: str) -> Message:
    return Message(role="assistant", content=text)


def _written(call: Call) -> str:
    arguments = {"name": call.name, "arguments": call.arguments}
    return f"<tool_call>{json.dumps(arguments, ensure_ascii=False)}</tool_call>"


def _broken(rng: Random, call: Call) -> str:
    text = _written(call)
    old, new = pick(rng, (("}}<", "}<"), ('"}}', "}}"), ('": {', " {"), ('{"name": ', "")))
    return text.replace(old, new, 1)


def examples(
    seed: int,
    count: int | None = None,
    mixture: MixtureConfig = DEFAULT_MIXTURE,
    levels: tuple[int, int] = LEVELS,
    languages: Sequence[str] = LANGUAGES,
    kinds: Sequence[str] = ("sums", "stories"),
) -> Iterator[Example]:
    """`count` examples of problems of the train split, repeats allowed.

    Raises:
        InputError: kinds without solutions to learn from: those of pictures, drawn or in words.
    """
    if unsolved := sorted({*kinds} & {*SCENES}):
        raise InputError(
            f"playground kinds {', '.join(unsolved)}: there are no examples of them to learn from; "
            f"leave them out here"
        )
    rng = Random(f"examples/{seed}")
    for problem in islice(problems("train", seed, levels, languages, kinds), count):
        messages = conversation(problem, rng, sample_style(problem, rng, mixture))
        asked = Message(role="user", content=problem.problem)
        yield {"problem": problem, "messages": [asked, *messages]}
