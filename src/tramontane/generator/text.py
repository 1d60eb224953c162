"""Completions as text, derived from the token ids, which are authoritative."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from tramontane.models.loading import token_id
from tramontane.types import Completion, ResponseText


class Detokenizer:
    """Decodes completions to the texts of responses.

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
        ids, prefix = completion.token_ids, self.response.prefix
        if ids and ids[-1] in end_ids:
            ids = ids[:-1]
        if not prefix:
            return "", self.decode(ids)
        # Some tokenizers drop the space before the first token of a text, so the text is decoded
        # together with the prompt's last token.
        last = completion.prompt_ids[-1:]
        return prefix, self.decode([*last, *ids])[len(self.decode(last)) :]
