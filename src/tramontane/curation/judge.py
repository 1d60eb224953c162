"""The verifiers of training, for a curation: in the paper's format, ignoring length and
language."""

from __future__ import annotations

import re
from collections.abc import Sequence
from threading import Lock

from tramontane.config import RewardConfig, VerifierConfig
from tramontane.types import PAPER_TAGS, Problem, Verdict
from tramontane.verifier.math.normalize import vote
from tramontane.verifier.pool import VerifierPool

_PLAIN = re.compile(r"[+-]?\d{1,30}(?:\.\d{1,30})?")
# An answer that no rule can judge and no parser accepts, so that the verifier only parses the
# reference.
_PROBE = r"\frac{}{}"


class ReferenceJudge:
    """Checks reference answers with the math verifier, in a pool that kills hanging checks."""

    def __init__(self, config: VerifierConfig) -> None:
        reward = RewardConfig(length=0, language=0)
        self._config = config.model_copy(update={"reward": reward, "thinking_tags": PAPER_TAGS})
        self._pool: VerifierPool | None = None  # starts with the first request that needs it
        self._lock = Lock()

    @property
    def pool(self) -> VerifierPool:
        """A verifier pool whose verdicts ignore length and language."""
        with self._lock:
            if self._pool is None:
                self._pool = VerifierPool(self._config, 1, 0)
            return self._pool

    def same(self, a: str | None, b: str | None) -> bool:
        """True if two references are the same answer; False if the verifier cannot judge them."""
        if a is None or b is None or a == b:
            return a == b
        if _PLAIN.fullmatch(a) and _PLAIN.fullmatch(b):
            return vote(a) == vote(b)
        return self._verdicts([(a, b)])[0].verdict == "right"

    def faults(self, references: Sequence[str]) -> list[str]:
        """For each reference, why no answer can be judged against it; empty if it is fine."""
        hard = [i for i, text in enumerate(references) if not _PLAIN.fullmatch(text)]
        faults = [""] * len(references)
        if not hard:
            return faults
        pairs = [(references[i], p) for i in hard for p in (references[i], _PROBE)]
        verdicts = self._verdicts(pairs)
        for place, i in enumerate(hard):
            itself, other = verdicts[2 * place : 2 * place + 2]
            if itself.verdict != "right":
                faults[i] = f"not right for itself ({itself.reason})"
            elif other.verdict == "unscorable":
                faults[i] = other.reason
        return faults

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _verdicts(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        futures = [
            self.pool.score(
                Problem("", "math", "", reference),
                [(f"{PAPER_TAGS.around('-')}\\boxed{{{answer}}}", 0)],
            )
            for reference, answer in pairs
        ]
        return [future.result()[0] for future in futures]
