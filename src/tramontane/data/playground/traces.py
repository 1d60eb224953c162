"""Traces: the completions that the tiny base model is pre-trained on, with deliberate flaws.

A correct trace is `<think>THOUGHTS</think>`, a line break, and one sentence that ends in
`\\boxed{N}`: the format of Magistral's system prompt (section 2.2.1 of the paper). A trace's
`Style` says what it gets right or wrong, and a `MixtureConfig` how often. The flaws are
independent, so that every reward axis has something to teach.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from tramontane.config import MixtureConfig
from tramontane.types import Problem

from .arithmetic import Step, apply, chain
from .language import LANGUAGES, Language, language, pick

Manner = Literal["work", "guess", "ramble"]
Tags = Literal["ok", "unclosed", "unopened"]
Use = Literal["right", "broken", "wrong", "ignored", "needless"]
DRILL_PROMPT = "Practise mental arithmetic."
# Shares of the traces with tools that make a wrong call, and that ignore the tool's answer.
WRONG_CALL, IGNORED_ANSWER = 0.2, 0.1


@dataclass(frozen=True)
class Style:
    """The properties of one trace."""

    # `work` shows the steps, `guess` skips them, `ramble` doubts and repeats them.
    manner: Manner = "work"
    box: bool = True  # the answer is in `\boxed{}` (a program: in a fenced block)
    tags: Tags = "ok"  # `ok`, or the closing or the opening thinking tag is missing
    # The language that the trace changes to midway and answers in; None: no change.
    switch: str | None = None
    right: bool = True  # the final answer is right; otherwise, with `work`, one step has a slip
    # How a trace that works uses tools: `right`; with a `broken` or `wrong` call; its answer is
    # `ignored`; or the call was `needless`. Only the first leads to the answer.
    use: Use = "right"


def trace(problem: Problem, rng: Random, style: Style) -> str:
    """A completion of the given style."""
    if problem.domain == "code":
        thoughts, code = program(problem, rng, style)
        return framed(style, thoughts, fenced(code, style.box))
    return framed(style, *_words(problem, rng, style))


def framed(style: Style, thoughts: str, answer: str) -> str:
    """A completion of these two parts, with the style's tags."""
    opening = "" if style.tags == "unopened" else "<think>"
    closing = "" if style.tags == "unclosed" else "</think>"
    return f"{opening}{thoughts}{closing}\n{answer}"


def _words(problem: Problem, rng: Random, style: Style) -> tuple[str, str]:
    """(thoughts, answer) for a sum or a story."""
    first = language(problem.language or "en")
    second = language(style.switch) if style.switch else first
    steps: list[Step] = [(a, op, b, c) for a, op, b, c in problem.metadata["steps"]]
    if style.manner == "guess":
        n = steps[-1][3] if style.right else near_miss(rng, steps[-1][3])
        sentences = [first.say(rng, "skip"), second.say(rng, "guess", n=n)]
        turn = 1
    else:
        if not style.right:
            steps = slip(rng, steps)
        n = steps[-1][3]
        rounds = 1 if style.manner == "work" else 3 + int(rng.random() * 3)
        turn = 1 + int(rng.random() * (len(steps) - 1))
        sentences = _worked(rng, first, steps[:turn], 0, len(steps))
        sentences += _worked(rng, second, steps[turn:], turn, len(steps))
        for _ in range(rounds - 1):
            sentences.append(second.say(rng, "doubt"))
            sentences += _worked(rng, second, steps, 0, len(steps))
        sentences.append(second.say(rng, "conclude", n=n))
    # Where two languages meet, a space separates the Latin sentence from the Chinese one.
    halves = [first.joiner.join(sentences[:turn]), second.joiner.join(sentences[turn:])]
    thoughts = (first.joiner if first is second else " ").join(halves)
    return thoughts, second.say(rng, "answer", x=f"\\boxed{{{n}}}" if style.box else n)


def _worked(rng: Random, lang: Language, steps: list[Step], start: int, total: int) -> list[str]:
    """One sentence per step; `steps` begin at index `start` of a chain of `total` steps."""
    sentences = []
    for i, (a, op, b, c) in enumerate(steps, start):
        place = "first" if i == 0 else "last" if i == total - 1 else "next"
        connective = pick(rng, lang.trace[place])
        equation = f"{a} {op} {b} = {c}"
        sentences.append(lang.trace["step"].format(c=connective, o=lang.trace[op], e=equation))
    return sentences


def near_miss(rng: Random, n: int) -> int:
    """A plausible wrong value: off by up to 10, or with one digit changed; never negative."""
    if rng.random() < 0.5:
        miss = abs(n + pick(rng, (-1, 1)) * (1 + int(rng.random() * 10)))
    else:
        digits = list(str(n))
        digits[int(rng.random() * len(digits))] = pick(rng, "123456789")
        miss = int("".join(digits))
    return miss if miss != n else n + 1


def slip(rng: Random, steps: list[Step]) -> list[Step]:
    """The chain with one wrong result; the later steps continue correctly from it."""
    for _ in range(16):
        place = int(rng.random() * len(steps))
        a, op, b, c = steps[place]
        wrong = [*steps[:place], (a, op, b, near_miss(rng, c))]
        for _, op, b, _ in steps[place + 1 :]:
            a = wrong[-1][3]
            wrong.append((a, op, b, apply(a, op, b)))
        # Later steps must stay valid: no negative value, no division with a remainder.
        if all(c >= 0 and (op != "/" or c * b == a) for a, op, b, c in wrong[place + 1 :]):
            return wrong
    a, op, b, c = steps[-1]
    return [*steps[:-1], (a, op, b, near_miss(rng, c))]


def program(problem: Problem, rng: Random, style: Style) -> tuple[str, str]:
    """(thoughts, program), always in English; `switch` is ignored."""
    lang = language("en")
    plan, solution = problem.metadata["plan"], problem.metadata["solution"]
    code = solution if style.right else pick(rng, problem.metadata["wrong"])
    if style.manner == "guess":
        thoughts = "I will just write the program."
    else:
        rounds = 1 if style.manner == "work" else 3 + int(rng.random() * 3)
        thoughts = plan
        for _ in range(rounds - 1):
            thoughts += f" {lang.say(rng, 'doubt')} {plan}"
    return thoughts, code


def fenced(code: str, box: bool) -> str:
    """A program as an answer, in a fenced block if `box`."""
    return f"```python\n{code}```" if box else code


def sample_style(problem: Problem, rng: Random, mixture: MixtureConfig) -> Style:
    """A style drawn from the mixture; each flaw is drawn independently."""
    roll = rng.random() * (mixture.work + mixture.guess + mixture.ramble)
    manner: Manner = "work"
    if roll >= mixture.work:
        manner = "guess" if roll < mixture.work + mixture.guess else "ramble"
    right = True
    if manner == "guess":
        right = rng.random() < mixture.guess_right
    elif manner == "work":
        right = rng.random() >= mixture.slip
    roll = rng.random()
    tags: Tags = "ok"
    if roll < mixture.unclosed + mixture.unopened:
        tags = "unclosed" if roll < mixture.unclosed else "unopened"
    return Style(
        manner=manner,
        box=rng.random() >= mixture.no_box,
        tags=tags,
        switch=_sample_switch(problem, rng, mixture),
        right=right,
        use=_sample_use(problem, rng, mixture),
    )


def _sample_use(problem: Problem, rng: Random, mixture: MixtureConfig) -> Use:
    if "calls" not in problem.metadata:
        may_call = mixture.needless_call and "steps" in problem.metadata
        return "needless" if may_call and rng.random() < mixture.needless_call else "right"
    roll = rng.random()
    shares: tuple[tuple[Use, float], ...] = (
        ("broken", mixture.broken_call),
        ("wrong", WRONG_CALL),
        ("ignored", IGNORED_ANSWER),
    )
    for use, share in shares:
        if roll < share:
            return use
        roll -= share
    return "right"


def _sample_switch(problem: Problem, rng: Random, mixture: MixtureConfig) -> str | None:
    english = problem.language == "en"
    if rng.random() >= mixture.switch * (0.25 if english else 1.0) or problem.domain == "code":
        return None
    if not english and rng.random() < 0.8:
        return "en"
    return pick(rng, [code for code in LANGUAGES if code not in ("en", problem.language)])


def drills(
    seed: int, count: int, levels: tuple[int, int], equations: int
) -> Iterator[tuple[str, str]]:
    """`count` pairs of a prompt and `equations` shuffled steps from chains of the given levels.

    Drills teach a tiny model to add before it reads stories: a worked trace has one equation per 25
    tokens or so, and two thirds of the traces have none; a drill has one per 12. They are not
    problems and are never graded.
    """
    rng = Random(f"drills/{seed}")
    for _ in range(count):
        steps: list[Step] = []
        while len(steps) < equations:
            steps += chain(rng, rng.randint(*levels))
        rng.shuffle(steps)
        yield DRILL_PROMPT, " ".join(f"{a} {op} {b} = {c}." for a, op, b, c in steps[:equations])
