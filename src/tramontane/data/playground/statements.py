"""The statements of sums and stories: a chain of arithmetic put into words."""

from __future__ import annotations

from random import Random

from .arithmetic import Step, chain
from .language import Language, pick

# (operator, operand) → the story's event for it.
_EVENTS = {("*", 2): "double", ("*", 3): "triple", ("/", 2): "half"}
_FRAME_OPS = {"+": "plus", "-": "minus"}


def sum_steps(rng: Random, level: int) -> list[Step]:
    return chain(rng, level)


def story_steps(rng: Random, level: int) -> list[Step]:
    """A story's chain: values of at least 2 (plurals) that are doubled, tripled or halved."""
    return chain(rng, level, low=2, factors=(2, 3), divisors=(2,))


def sum_statement(rng: Random, lang: Language, expression: str) -> str:
    return pick(rng, lang.sums).format(e=expression)


def story_statement(rng: Random, lang: Language, steps: list[Step]) -> str:
    """Opening, one event per step, question; the same wording never comes twice in a row."""
    frame = pick(rng, list(lang.frames.values()))
    feminine = rng.random() < 0.5
    item = pick(rng, frame["items"]) if "items" in frame else {}
    slots = {"name": pick(rng, lang.names["f" if feminine else "m"])}
    slots |= item if isinstance(item, dict) else {"item": item}
    sentences = [lang.fill(pick(rng, frame["opening"]), slots, feminine, steps[0][0])]
    last = ""
    for _, op, b, _ in steps:
        event = _FRAME_OPS.get(op) or _EVENTS[op, b]
        template = pick(rng, frame[event])
        if template == last:
            template = next(t for t in frame[event] if t != last)
        last = template
        sentences.append(lang.fill(template, slots, feminine, b))
    question = pick(rng, frame["question"])
    sentences.append(lang.fill(question, slots, feminine, steps[-1][3]))
    return lang.joiner.join(sentences)
