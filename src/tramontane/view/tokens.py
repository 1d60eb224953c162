"""The texts of a completion's tokens, by the tokenizer of the run."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tramontane.errors import reading
from tramontane.models.names import SHIPPED, numbered, resolve

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4  # bytes, and so tokens, of one character
CONTEXT = 2  # preceding tokens that may affect a token's spaces


class Tokens:
    """Texts of tokens, without transformers, which takes seconds to import.

    Args:
        run: the run's folder; each of its checkpoints has the tokenizer.
        model: the model that the run started from, for a run without a checkpoint.
    """

    def __init__(self, run: Path, model: str) -> None:
        self.run, self.model = run, model
        self._lock = threading.Lock()
        self._tokenizer: Any = None

    @property
    def missing(self) -> str:
        """Why token texts are not available; empty if they are."""
        if self._find() is not None:
            return ""
        return f"no tokenizer.json in a checkpoint of this run, or in the model {self.model}"

    def texts(self, token_ids: Sequence[int]) -> list[str] | None:
        """The text of each token; None without a tokenizer. A character spelled with several tokens
        is the text of the last. Joined, the texts are the decoded text.

        Raises:
            InputError: the tokenizer is damaged.
        """
        with self._lock, reading(self.run):
            if self._tokenizer is None:
                if (file := self._find()) is None:
                    return None
                from tokenizers import Tokenizer  # of the extra `view`

                with reading(file):
                    self._tokenizer = Tokenizer.from_file(str(file))
        return token_texts(self._tokenizer, token_ids)

    def text(self, token_ids: Sequence[int] | None) -> str | None:
        """The text of some tokens; None without a tokenizer or tokens. See `texts` for errors."""
        texts = self.texts(token_ids) if token_ids else None
        return None if texts is None else "".join(texts)

    def _find(self) -> Path | None:
        taken = numbered(self.run / "checkpoints")
        folders = [*(folder / "weights" for folder in taken), self.run / "sft"]
        folders.append(Path(resolve(self.model) if self.model in SHIPPED else self.model))
        files = (folder / "tokenizer.json" for folder in folders)
        return next((file for file in files if os.path.isfile(file)), None)  # of any name


def token_texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Text that each token adds to the text of those before it.

    A token is decoded together with some before it, since decoders drop a space at the beginning
    of a text.
    """
    texts: list[str] = []
    start = 0  # of the tokens that have not completed a character
    for place in range(len(token_ids)):
        context = max(0, start - CONTEXT)
        before = tokenizer.decode(list(token_ids[context:start]), skip_special_tokens=False)
        text = tokenizer.decode(list(token_ids[context : place + 1]), skip_special_tokens=False)
        added = text[len(before) :]
        last = place + 1 == len(token_ids)
        if added.endswith(REPLACEMENT) and place + 1 - start < LONGEST_CHARACTER and not last:
            texts.append("")
            continue
        texts.append(added)
        start = place + 1
    return texts
