"""Checks that prompts fit; takes seconds for a million problems.

A token has at least one byte, so the size of the statement shows that most prompts fit. Only longer
statements are tokenized, the longest first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tramontane.errors import InputError
from tramontane.types import Message, Problem

if TYPE_CHECKING:
    from tramontane.data.prompts import PromptEncoder

FINITE_LIMIT = 1024  # tokens of a prompt from a finite source, if the config sets no limit
MAX_MEASURED = 8192  # prompts known to fit that are still tokenized, to find the longest
_UNKNOWN = 2**40  # tokens: above every limit, so that the prompt is measured
_CHUNK = 1024  # prompts tokenized at once
_SLACK = 16  # tokens that a statement may add where it meets the template
_ROOM = 1.5  # an endless source's bound, as a multiple of a sample's longest prompt


@dataclass(frozen=True)
class PromptLimit:
    """The longest accepted prompt.

    Args:
        tokens: maximum length of a prompt.
        reason: what sets the limit, and the remedy, for messages.
        room: tokens that the context leaves next to completions, for a prompt that an environment
            writes.
    """

    tokens: int
    reason: str
    room: int = sys.maxsize

    @classmethod
    def of(
        cls,
        max_prompt_tokens: int | None,
        context: int | None,
        max_tokens: int,
        tools: int = 0,
        whose: str = "the model's context",
    ) -> PromptLimit:
        """The lower of the configured limit and the space in the model's context.

        Args:
            max_prompt_tokens: as in the config; None: `FINITE_LIMIT`.
            context: the model's positions (`models.loading.context_length`) for prompt and
                completion; None: unknown, so no bound.
            max_tokens: maximum tokens of a completion.
            tools: tokens that the descriptions of tools add to every prompt.
            whose: what to call the context: a teacher's may be smaller than the model's.

        Raises:
            InputError: a completion of `max_tokens` does not fit into the context.
        """
        limit = FINITE_LIMIT if max_prompt_tokens is None else max_prompt_tokens
        if context is None or limit + max_tokens + tools <= context:
            reason = f"data.max_prompt_tokens allows {limit:,}: raise it"
            return cls(limit, reason, sys.maxsize if context is None else context - max_tokens)
        described = f" and the tools' descriptions of {tools:,}" if tools else ""
        left = context - max_tokens - tools
        if left <= 0:
            raise InputError(
                f"completions of {max_tokens:,} tokens{described} leave no room for a prompt in "
                f"{whose} of {context:,}: allow fewer tokens a completion "
                f"(pipeline.l_max in a run, else max_tokens), e.g. {context // 2:,}"
            )
        reason = (
            f"{whose} of {context:,} leaves {left:,} next to completions of "
            f"{max_tokens:,}{described}: allow fewer tokens a completion, take a model with more "
            f"context"
        )
        return cls(left, reason, context - max_tokens)

    def refusal(self, problem: Problem, tokens: int, counts: str = "") -> InputError:
        """The error for a prompt above the limit."""
        row = f"{problem.where}: " if problem.where else ""
        return InputError(
            f"{row}problem {problem.id!r}: its prompt has {tokens:,} tokens, but {self.reason}, or "
            f"leave such problems out (data.overlong_prompts: drop){counts}"
        )


@dataclass(frozen=True)
class Lengths:
    """Lengths of the prompts of a set of problems."""

    # Upper bound of the prompts within the limit, in tokens; exact for up to `MAX_MEASURED`
    # problems.
    longest: int
    overlong: dict[int, int]  # tokens of each prompt above the limit, by the problem's index


def measure_prompts(
    encoder: PromptEncoder, problems: Sequence[Problem], limit: PromptLimit
) -> Lengths:
    """Find the prompts above a limit, at any level of effort, and the longest prompt within it."""
    if encoder.levels:
        found = [measure_prompts(level, problems, limit) for level in encoder.levels.values()]
        overlong = {place: 0 for lengths in found for place in lengths.overlong}
        for place in overlong:
            overlong[place] = max(lengths.overlong.get(place, 0) for lengths in found)
        return Lengths(max(lengths.longest for lengths in found), overlong)
    if not problems:
        return Lengths(0, {})
    bounds = _bounds(encoder, problems)
    order = np.argsort(-bounds, kind="stable")
    doubtful = int((bounds > limit.tokens).sum())  # the first of `order`
    longest, overlong, measured = 0, dict[int, int](), 0
    for start in range(0, len(order), _CHUNK):
        places: list[int] = order[start : start + _CHUNK].tolist()
        bound = int(bounds[places[0]])
        if measured >= doubtful and bound <= longest:
            break
        if measured >= doubtful + MAX_MEASURED:
            longest = bound
            break
        measured += len(places)
        chunk = [problems[place] for place in places]
        ids = encoder.encode_all([p.prompt for p in chunk], [p.where for p in chunk])
        for place, tokens in zip(places, map(len, ids), strict=True):
            if tokens > limit.tokens:
                overlong[place] = tokens
            else:
                longest = max(longest, tokens)
    return Lengths(longest, overlong)


class PromptFilter:
    """Keeps the problems of a run whose prompts fit.

    Args:
        encoder: makes the prompts.
        limit: the longest accepted prompt.
        drop: drop problems whose prompt is above the limit; False: raise an error.

    Attributes:
        longest: upper bound of the prompts kept, in tokens.
        dropped: number of problems dropped.
    """

    def __init__(self, encoder: PromptEncoder, limit: PromptLimit, *, drop: bool) -> None:
        self.encoder, self.limit, self.drop = encoder, limit, drop
        self.longest, self.dropped = 0, 0

    def keep(self, problems: Sequence[Problem]) -> list[Problem]:
        """The problems of a source whose prompts fit.

        Raises:
            InputError: a prompt is above the limit and `drop` is False, or all are; the message
                names the longest one and the number of such prompts. Or the chat template refuses
                a row.
        """
        self.encoder.check_chats(problems)
        lengths = measure_prompts(self.encoder, problems, self.limit)
        self.longest = max(self.longest, lengths.longest)
        if not lengths.overlong:
            return list(problems)
        self._check(problems, lengths.overlong)
        self.dropped += len(lengths.overlong)
        return [p for place, p in enumerate(problems) if place not in lengths.overlong]

    def bound_endless(self, sample: Sequence[Problem], least: int) -> None:
        """Set the bound for the prompts of an endless source: 1.5 times the longest of a sample, at
        least `least` tokens, and at most the limit.

        Raises:
            InputError: see `keep`.
        """
        lengths = measure_prompts(self.encoder, sample, self.limit)
        self._check(sample, lengths.overlong)
        self.longest = min(
            self.limit.tokens, max(self.longest, least, int(_ROOM * lengths.longest))
        )

    def _check(self, problems: Sequence[Problem], overlong: dict[int, int]) -> None:
        """Reject overlong prompts, unless they are to be dropped and others remain."""
        if overlong and (not self.drop or len(overlong) == len(problems)):
            longest = max(overlong, key=overlong.__getitem__)
            counts = f"; {len(overlong):,} of {len(problems):,} prompts are too long"
            raise self.limit.refusal(problems[longest], overlong[longest], counts)

    def encode(self, problem: Problem) -> list[int]:
        """The prompt of a problem.

        Raises:
            InputError: it is longer than `longest`, which is possible for an endless source.
        """
        ids = self.encoder.at(problem.effort).encode(problem.prompt, problem.where)
        if len(ids) > self.limit.tokens:
            raise self.limit.refusal(problem, len(ids))
        if len(ids) > self.longest:
            raise InputError(
                f"problem {problem.id!r}: its prompt has {len(ids):,} tokens, but the first "
                f"problems of its endless source made room for only {self.longest:,}: set "
                f"data.max_prompt_tokens to {len(ids):,} or more, or leave such problems out "
                f"(data.overlong_prompts: drop)"
            )
        return ids

    def accepts(self, problem: Problem) -> bool:
        """False if a problem of an endless source must be skipped."""
        if not self.drop:
            return True
        encoders = self.encoder.levels.values() or [self.encoder]
        return all(len(e.encode(problem.prompt)) <= self.longest for e in encoders)


def _bounds(encoder: PromptEncoder, problems: Sequence[Problem]) -> np.ndarray:
    """[problems] int64, an upper bound of each prompt's tokens from the bytes of its statement."""
    empty = len(encoder.encode("?")) + _SLACK
    turn = 0  # tokens that the template may add for a message
    if any(problem.messages for problem in problems):
        chat = [Message(role=role, content="?") for role in ("user", "assistant", "user")]
        turn = len(encoder.encode(chat))

    def size(problem: Problem) -> int:
        if problem.images:  # only their processor knows
            return _UNKNOWN
        texts = [m["content"] for m in problem.messages or ()] or [problem.problem]
        return sum(len(text.encode(errors="replace")) + turn for text in texts)

    return np.fromiter(map(size, problems), np.int64, len(problems)) + empty
