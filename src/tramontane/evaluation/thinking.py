"""Counts the thinking tokens of completions from their token ids, without retokenizing text."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tramontane.types import Completion, ResponseText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tramontane.data.prompts import PromptEncoder


class Place(NamedTuple):
    """Positions of a tag's first token and of the token after its last."""

    first: int
    after: int


class TagFinder:
    """Finds a tag among token ids, whether it is one token or spelled with several.

    Every spelling of the tag has a token with a given character of the tag, so only the
    surroundings of such tokens are decoded.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tag: str) -> None:
        self._tokenizer, self._tag = tokenizer, tag
        self._reach = len(tag.encode())  # a tag has at most this many tokens
        # Vocabularies spell non-ASCII characters as bytes, and white space with special characters.
        # Punctuation is rarer than letters.
        marks = sorted((c for c in tag if c.isascii() and not c.isspace()), key=str.isalnum)
        pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        marked = [not marks or piece is None or marks[0] in piece for piece in pieces]
        # The last is for ids beyond the tokenizer's: vocabularies of models are often padded.
        self._marked = np.array([*marked, False])

    def find(self, ids: NDArray[np.int32], start: int) -> Place | None:
        """The first occurrence of the tag at or after `start`."""
        marked = self._marked[np.minimum(ids[start:], len(self._marked) - 1)]
        for i in start + np.flatnonzero(marked):
            low, high = max(start, int(i) - self._reach), min(len(ids), int(i) + self._reach)
            if not self._has_tag(ids[low:high]):
                continue
            while self._has_tag(ids[low : high - 1]):
                high -= 1
            while self._has_tag(ids[low + 1 : high]):
                low += 1
            return Place(low, high)
        return None

    def _has_tag(self, ids: NDArray[np.int32]) -> bool:
        return self._tag in str(self._tokenizer.decode(ids.tolist()))


class ThinkingCounter:
    """Counts the tokens between the thinking tags of a completion.

    A missing opening tag is assumed at the start, a missing closing tag at the end. Without either
    tag there are no thoughts. Tags, the part of a response in the prompt, and special tokens at the
    end of a completion do not count.

    Args:
        tokenizer: the tokenizer of the model that sampled the tokens.
        response: thinking tags, and the beginning of every response.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, response: ResponseText) -> None:
        tags = response.tags
        before, opening, begun = response.prefix.partition(tags.opening)
        self._is_opened = bool(opening)
        self._is_over = tags.closing in (begun if opening else before)
        self._opening, self._closing = (TagFinder(tokenizer, tag) for tag in tags)
        self._special = {*tokenizer.all_special_ids} - {
            tokenizer.convert_tokens_to_ids(tag) for tag in tags
        }

    def count(self, completion: Completion) -> int:
        """Number of thinking tokens of a completion, or of all turns of a conversation."""
        if not completion.turns:
            return self._count(completion.token_ids)
        sequences = [sequence.token_ids for sequence in completion.sequences]
        return sum(self._count(sequences[t.sequence][t.start : t.end]) for t in completion.turns)

    def _count(self, token_ids: array[int]) -> int:
        if self._is_over:
            return 0
        ids = np.array(token_ids, dtype=np.int32)
        while len(ids) and int(ids[-1]) in self._special:
            ids = ids[:-1]
        opening = None if self._is_opened else self._opening.find(ids, 0)
        start = opening.after if opening else 0
        closing = self._closing.find(ids, start)
        if opening is None and closing is None and not self._is_opened:
            return 0
        return (closing.first if closing else len(ids)) - start


def thinking_counters(encoder: PromptEncoder) -> dict[str | None, ThinkingCounter]:
    """The counter for completions at each level of effort; None: for those without a level. Levels
    whose responses begin alike share a counter."""
    encoders = {None: encoder} | encoder.levels
    prefixes = {name: each.response.prefix for name, each in encoders.items()}
    counters = {
        prefix: ThinkingCounter(encoder.tokenizer, ResponseText(encoder.tags, prefix))
        for prefix in {*prefixes.values()}
    }
    return {name: counters[prefix] for name, prefix in prefixes.items()}
