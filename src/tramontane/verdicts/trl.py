"""Reward functions for TRL's `GRPOTrainer(reward_funcs=[...])` and `RLOOTrainer`.

`math`, `code`, `language` and `format` are ready to use; `reward` makes others, with settings. The
reference is the data's column `answer`, `solution` or `ground_truth`; `code` reads `tests`.
A completion that cannot be judged gets None, which TRL leaves out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tramontane.errors import InputError
from tramontane.verdicts.grader import Grader, Kind, Sample, rewards

ANSWERS = ("answer", "solution", "ground_truth")  # columns of the reference, the first one counts
Rewards = list[float | None]


def reward(kind: Kind, **options: Any) -> Callable[..., Rewards]:
    """A reward function of a kind; `options` are those of `Grader`, such as `l_max`."""
    grader = Grader(kind, **options)

    def function(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> Rewards:
        return rewards(grader.grade(samples(grader, prompts, completions, columns)))

    function.__name__ = f"tramontane_{kind}"  # TRL logs it
    return function


def async_reward(kind: Kind, **options: Any) -> Callable[..., Awaitable[Rewards]]:
    """`reward` as a coroutine, which TRL awaits together with others."""
    grader = Grader(kind, **options)

    async def function(
        prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> Rewards:
        return rewards(await grader.grade_async(samples(grader, prompts, completions, columns)))

    function.__name__ = f"tramontane_{kind}"
    return function


def samples(
    grader: Grader, prompts: Sequence[Any], completions: Sequence[Any], columns: dict[str, Any]
) -> list[Sample]:
    """A batch as samples.

    Raises:
        InputError: the data lack the column of the reference.
    """
    named = next((name for name in ANSWERS if name in columns), None)
    if named is None and grader.kind in ("math", "plain"):
        raise InputError(f"the data have none of the columns {', '.join(ANSWERS)}; add `answer`")
    size = len(completions)
    answers = columns[named] if named else [None] * size
    tests = columns.get("tests") or [None] * size
    languages = columns.get("language") or [None] * size
    tokens = columns.get("completion_ids") or [()] * size
    return [
        Sample(
            text(completions[i]),
            None if answers[i] is None else str(answers[i]),
            tests[i],
            text(prompts[i]),
            languages[i] if len(languages[i] or "") == 2 else None,
            len(tokens[i]),
        )
        for i in range(size)
    ]


def text(messages: Any) -> str:
    """The text of a prompt or completion: itself, or that of its last message."""
    return messages if isinstance(messages, str) else str(messages[-1]["content"] or "")


math = reward("math")
code = reward("code")
language = reward("language")
format = reward("format")
