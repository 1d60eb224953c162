"""Special tokens in the texts of rows and tools, which reach the model as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from tramontane.errors import InputError
from tramontane.types import ThinkingTags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Marks:
    """Special tokens in the texts of messages, each replaced by its number between two `char`."""

    char: str
    found: list[str] = field(default_factory=list)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


class SpecialTokens:
    """Keeps the special tokens in given texts apart from those that the chat template writes: marks
    stand for them while the template renders, and are encoded as the text that was given.

    Args:
        tokenizer: the model's.
        tags: the thinking tags, which system and assistant messages may hold as tokens.
        allowed: leave the special tokens in all texts as they are (`allow_special_tokens`).
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tags: ThinkingTags, *, allowed: bool = False
    ) -> None:
        self.tokenizer, self.tags, self.allowed = tokenizer, tags, allowed

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """The special tokens that the tokenizer recognizes in a text."""
        added = {str(t) for t in self.tokenizer.added_tokens_decoder.values() if t.special}
        return _any_of(added | {*self.tokenizer.all_special_tokens})

    @cached_property
    def _added(self) -> re.Pattern[str]:
        """The special tokens, and all other tokens that were added to the vocabulary."""
        added = {str(t) for t in self.tokenizer.added_tokens_decoder.values()}
        return _any_of(added | {*self.tokenizer.all_special_tokens})

    def boundary(self, text: str, place: int) -> int:
        """The place, or the start of the added token around it."""
        inside = (m for m in self._added.finditer(text) if m.start() < place < m.end())
        return min((match.start() for match in inside), default=place)

    def found_in(self, text: str) -> bool:
        """True if a text holds special tokens that are to be encoded as text."""
        return not self.allowed and self._special.search(text) is not None

    def mark(self, text: str, role: str, marks: Marks, kept: Sequence[str] = ()) -> str:
        """The text of a message with a mark in place of each special token, so that the template's
        own remain recognizable (`encode`).

        Thinking tags of system and assistant messages stay, and the tokens `kept`. In a tool's
        answer, all tokens that the tokenizer added to its vocabulary are replaced, e.g. those
        around a call of a tool.
        """
        if self.allowed:
            return text

        def replaced(match: re.Match[str]) -> str:
            if match[0] in kept or (role in ("system", "assistant") and match[0] in self.tags):
                return match[0]
            marks.found.append(match[0])
            return f"{marks.char}{len(marks.found) - 1}{marks.char}"

        return (self._added if role == "tool" else self._special).sub(replaced, text)

    def encode(self, text: str, marks: Marks) -> list[int]:
        """Token ids of a rendered text with marks; the tokens that they replace are encoded as
        text. The whole text is encoded as usual, and only the tokens of these places are replaced.

        Raises:
            InputError: there are marks, and the tokenizer cannot encode such tokens as text.
        """
        pieces = re.split(f"{marks.char}([0-9]+){marks.char}", text)
        if len(pieces) == 1:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not self.tokenizer.is_fast:
            raise InputError(
                f"a prompt holds special tokens of the model ({self._special.pattern}), which its "
                f"tokenizer cannot encode as text; remove them, or set allow_special_tokens"
            )
        text, spans = "", []
        for number, piece in enumerate(pieces):
            if number % 2:
                piece = marks.found[int(piece)]
                spans.append((len(text), len(text) + len(piece)))
            text += piece
        whole = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = []
        place = 0  # of the first span that does not end before the token
        for token, (start, end) in zip(whole["input_ids"], whole["offset_mapping"], strict=True):
            while place < len(spans) and spans[place][1] <= start:
                place += 1
            if place < len(spans) and spans[place][0] < end:
                ids += self._as_text(text[start:end])
            else:
                ids.append(token)
        return ids

    def _as_text(self, text: str) -> list[int]:
        """Tokens of a text without those added to the vocabulary, special or not."""
        backend = self.tokenizer.backend_tokenizer
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        pieces = [text]
        if backend.pre_tokenizer is not None:
            pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for piece in pieces for token in backend.model.tokenize(piece)]
