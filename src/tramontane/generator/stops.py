"""Texts that end a completion (`generator.stop`), found while its tokens are sampled.

Decoding the text of every sequence after every token would cost more than the decode step. A stop
text can only be complete after a token whose own text holds its end. A table over the vocabulary
marks these tokens, on the device, and the last tokens of a sequence are decoded and searched only
after such a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from tramontane.generator.text import Detokenizer

_PARTIAL = "\N{REPLACEMENT CHARACTER}"  # a token with part of a character's bytes decodes to this


class StopTexts:
    """Finds the stop texts in a completion.

    Args:
        detokenizer: decodes the completions.
        texts: at least one text, none empty.
        vocab: size of the model's vocabulary, which may exceed the tokenizer's.

    Attributes:
        may_end: [V] bool on the CPU, True for each token whose text may hold the end of a stop
            text.
        tail: number of last tokens that are enough to hold any stop text that ends in the last
            token.
    """

    def __init__(self, detokenizer: Detokenizer, texts: Sequence[str], vocab: int) -> None:
        self.texts, self._detokenizer = tuple(texts), detokenizer
        # A token has at least one byte; a few more tokens, since the first may hold part of a
        # character.
        self.tail = max(len(text.encode()) for text in texts) + 4
        self.may_end = torch.zeros(vocab, dtype=torch.bool)
        ends = [text[-n:] for text in texts for n in range(1, len(text))]
        self.may_end[
            [
                token
                for token, piece in enumerate(_pieces(detokenizer.tokenizer))
                if token < vocab and self._may_end(piece, ends)
            ]
        ] = True

    def found(self, token_ids: list[int]) -> bool:
        """True if the text of these tokens contains a stop text."""
        text = self._detokenizer.decode(token_ids)
        return any(stop in text for stop in self.texts)

    def cut(self, text: str) -> str:
        """The text up to the first stop text."""
        places = [place for stop in self.texts if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    def _may_end(self, piece: str, ends: list[str]) -> bool:
        if _PARTIAL in piece:
            return True
        # Some tokenizers drop the leading space of a token that is decoded alone.
        return any(
            any(stop in text for stop in self.texts) or any(text.startswith(end) for end in ends)
            for text in (piece, f" {piece}")
        )


def _pieces(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each token, decoded alone."""
    pieces: list[str] = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return pieces
