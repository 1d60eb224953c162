"""When long thoughts are interrupted, and how their completions continue."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tramontane.config import InterruptionConfig
from tramontane.types import Completion


def thought_limit(config: InterruptionConfig, seed: int) -> int:
    """Number of tokens after which the thoughts of the request with this seed are interrupted."""
    return Random(seed).randint(*config.after)


class Interruption:
    """Interruption of long thoughts, as ScaleRL does it (arXiv 2510.13786): decides when, and how a
    completion continues.

    A completion whose thoughts are still open at a random length is stopped. A fixed sentence and
    the closing thinking tag are appended, and it continues to an answer as an ordinary unfinished
    request, so generators need no support for it. The appended tokens have the version `INSERTED`
    and are not learned from.

    Args:
        config: lengths in tokens.
        inserted: tokens of the sentence and the closing thinking tag.
        closing: the closing thinking tag, which ends the thoughts in a completion's text.
    """

    def __init__(self, config: InterruptionConfig, inserted: Sequence[int], closing: str) -> None:
        self._config, self._inserted, self._closing = config, inserted, closing

    def limit(self, seed: int) -> int:
        """`thought_limit` of the request with this seed."""
        return thought_limit(self._config, seed)

    def continues(self, completion: Completion, l_max: int) -> bool:
        """Continue a completion that was stopped at its limit; False for one that has ended.
        Nothing is appended if the thoughts are already closed.

        Args:
            completion: with its text; its `max_tokens` is `limit(seed)` before an interruption.
            l_max: longest completion allowed, in tokens.
        """
        limit = self.limit(completion.seed)
        if completion.finish_reason != "length" or completion.sampling.max_tokens != limit:
            return False
        put = [] if self._closing in completion.text else list(self._inserted)
        longest = min(l_max, limit + len(put) + self._config.answer_tokens)
        completion.put_in(put[: longest - limit - 1], longest)  # at least one token is sampled
        completion.keep_kv = False
        return True
