"""A completion's end and its text: EOS tokens, stop tokens, stop texts, and decoding.

Decoding the text of every sequence after every token would cost more than the decode step. A stop
text can only be complete after a token whose own text holds its end. A table over the vocabulary
marks these tokens, on the device, and the last tokens of a sequence are decoded and searched only
after such a token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tramontane.models.loading import token_id, vocabulary
from tramontane.types import Completion, ResponseText

_PARTIAL = "\N{REPLACEMENT CHARACTER}"  # a token with part of a character's bytes decodes to this


class Detokenizer:
    """Decodes completions to the texts of responses; the token ids are authoritative.

    Special tokens are removed, except thinking tags: in some tokenizers (Magistral 1.2) the tags
    are special tokens, and without them every response would be malformed.

    Args:
        tokenizer: the model's.
        response: thinking tags, and the beginning of every response.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, response: ResponseText) -> None:
        self.tokenizer, self.response = tokenizer, response
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        shown = {token_id(tokenizer, tag) for tag in response.tags}
        self._hidden = (special | set(tokenizer.all_special_ids)) - shown

    def decode(self, token_ids: Collection[int]) -> str:
        """The text of tokens, without the special ones."""
        visible = [token for token in token_ids if token not in self._hidden]
        text = self.tokenizer.decode(visible, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def parts(self, completion: Completion, end_ids: Collection[int] = ()) -> tuple[str, str]:
        """(prefix, text of the sampled tokens) of a response.

        Args:
            completion: its prompt ends with the prefix.
            end_ids: tokens that end a completion; one at the end is omitted from the text.
        """
        ids, prefix = completion.token_ids, self._prefix(completion.prompt_ids)
        if ids and ids[-1] in end_ids:
            ids = ids[:-1]
        if not prefix:
            return "", self.decode(ids)
        # Some tokenizers drop the space before the first token of a text, so the text is decoded
        # together with the prompt's last token.
        last = completion.prompt_ids[-1:]
        return prefix, self.decode([*last, *ids])[len(self.decode(last)) :]

    def _prefix(self, prompt_ids: list[int]) -> str:
        """The beginning of the response at the end of a prompt."""
        known = (self.response.prefix, *self.response.others)
        if len(known) == 1:
            return known[0]
        longest = max(len(prefix.encode()) for prefix in known)  # a token has at least one byte
        end = str(self.tokenizer.decode(prompt_ids[-longest:], clean_up_tokenization_spaces=False))
        return max((prefix for prefix in known if end.endswith(prefix)), key=len, default=known[0])


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
        tokenizer = detokenizer.tokenizer
        pieces: list[str] = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        ending = [n for n, piece in enumerate(pieces[:vocab]) if self._may_end(piece, ends)]
        self.may_end[ending] = True

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


class Endings:
    """Everything that ends a completion of a model, except its length.

    Args:
        model: for its generation config's EOS tokens and its vocabulary size.
        tokenizer: for its EOS token and the texts.
        stop: `generator.stop`.
        response: thinking tags, and the beginning of every response.

    Attributes:
        ids: tokens that end a completion.
        texts: finds the texts that end a completion; None if there are none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str | int],
        response: ResponseText,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, response)
        stop_ids, texts = _split_stops(tokenizer, stop)
        self.ids = _eos_ids(model, tokenizer) | stop_ids
        self.texts = StopTexts(self._detokenizer, texts, vocabulary(model)) if texts else None

    def text(self, completion: Completion) -> str:
        """The text of a response, without the stop that ended it."""
        prefix, text = self._detokenizer.parts(completion, self.ids)
        return prefix + (self.texts.cut(text) if self.texts else text)


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """EOS tokens of the tokenizer and of the generation config; chat models have several."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    listed = configured if isinstance(configured, list) else [configured]
    return {t for t in [tokenizer.eos_token_id, *listed] if t is not None}


def _split_stops(
    tokenizer: PreTrainedTokenizerBase, stop: Sequence[str | int]
) -> tuple[set[int], list[str]]:
    """(token ids, texts) of `generator.stop`; a text that is a special token is the token."""
    ids, texts = {s for s in stop if isinstance(s, int)}, list[str]()
    added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
    for text in (s for s in stop if isinstance(s, str)):
        if text in added:
            ids.add(added[text])
        else:
            texts.append(text)
    return ids, texts
