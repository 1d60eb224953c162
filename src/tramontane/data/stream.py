"""The endless stream of training problems, with a position that checkpoints save and restore."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from random import Random
from typing import Any

from tramontane.config import BUILT_IN, DataConfig, DomainConfig
from tramontane.data import playground
from tramontane.data.files import shuffled
from tramontane.data.load import check_fields, generated, gym_problems, load_problems
from tramontane.errors import InputError
from tramontane.types import Problem

# Generated problems are drawn in blocks, each from a separate seed: resuming at any position draws
# only one block.
BLOCK = 64  # problems
KEPT = 4  # blocks in memory: the start of a run measures the prompts of the first four repeatedly
MAX_SKIPPED = 100 * BLOCK  # consecutive problems that do not fit; then a source is useless


class ProblemStream:
    """An endless stream of problems; the seed alone determines their order.

    Files and datasets (and generated sources with `data.limit`) are repeated, with `data.shuffle`
    in a new order each time. Other generated sources never repeat.

    Args:
        config: the source (`train`) and its settings.
        seed: seed of the order, and of generated problems.
        domains: the known domains (`verifier.domains`).

    Attributes:
        problems: all problems of a finite source, in the source's order; None for an endless one.
        dropped: number of the source's problems that the run leaves out, by reason.
        accepts: returns False for problems of an endless source to skip.

    Raises:
        InputError: see `load_problems`; before any problem is handed out.
    """

    def __init__(
        self, config: DataConfig, seed: int, domains: Mapping[str, DomainConfig] = BUILT_IN
    ) -> None:
        check_fields(config.fields)
        self.config, self.seed = config, seed
        self._scheme, self._name = generated(config.train)
        self.problems: list[Problem] | None = None
        if not self._scheme or config.limit is not None:
            self.problems = load_problems(
                config.train,
                config,
                split="train",
                limit=config.limit,
                seed=seed,
                domains=domains,
            )
        self.dropped: dict[str, int] = {}
        self.accepts: Callable[[Problem], bool] = lambda problem: True
        self._handed_out = 0
        self._blocks: dict[int, Sequence[Problem]] = {}
        self._fingerprint = self._digest()
        self._epoch(0)  # raises here if nothing can be drawn from the source

    @property
    def epoch(self) -> int:
        """Number of complete passes over the source; always 0 for an endless source."""
        return self._handed_out // len(self.problems) if self.problems else 0

    @property
    def position(self) -> int:
        """Number of problems handed out in this epoch."""
        return self._handed_out % len(self.problems) if self.problems else self._handed_out

    def next(self) -> Problem:
        """The next problem.

        Raises:
            InputError: `MAX_SKIPPED` consecutive problems of an endless source are not accepted.
        """
        size = len(self.problems) if self.problems else BLOCK
        for _ in range(MAX_SKIPPED):
            number, index = divmod(self._handed_out, size)
            self._handed_out += 1
            problem = self._epoch(number)[index]
            if self.problems is not None or self.accepts(problem):
                return problem
        raise InputError(
            f"data {self.config.train!r}: none of {MAX_SKIPPED:,} problems has a prompt that fits; "
            f"raise data.max_prompt_tokens"
        )

    def keep(self, problems: list[Problem], why: str) -> None:
        """Restrict a finite source to some of its problems, before the first is handed out; `why`
        says in a few words what is wrong with the others."""
        assert self.problems is not None
        self.dropped[why] = self.dropped.get(why, 0) + len(self.problems) - len(problems)
        self.problems = problems
        self._blocks.clear()
        self._fingerprint = self._digest()

    def state(self) -> dict[str, Any]:
        """The position in the stream, in JSON types."""
        return {"handed_out": self._handed_out, "data": self._fingerprint}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`.

        Raises:
            InputError: the state belongs to different data, order or seed.
        """
        if state["data"] != self._fingerprint:
            raise InputError(
                f"data {self.config.train!r} is not what the checkpoint was written with (another "
                f"source, seed or setting under data, or the rows have changed): restore it, or "
                f"start a new run"
            )
        self._handed_out = state["handed_out"]

    def _epoch(self, number: int) -> Sequence[Problem]:
        """The problems of epoch `number`, or of block `number` of an endless source."""
        if number not in self._blocks:
            if len(self._blocks) == (KEPT if self.problems is None else 1):
                del self._blocks[next(iter(self._blocks))]
            self._blocks[number] = self._draw(number)
        return self._blocks[number]

    def _draw(self, number: int) -> Sequence[Problem]:
        seed = Random(f"{self.seed}/{number}").getrandbits(31)
        config = self.config
        if self.problems is not None:
            return shuffled(self.problems, seed) if config.shuffle else self.problems
        if self._scheme == "reasoning_gym":
            drawn = gym_problems(self._name, "train", seed)
        else:
            settings = config.playground
            drawn = playground.problems(
                "train", seed, settings.levels, settings.languages, settings.kinds
            )
        return list(islice(drawn, BLOCK))

    def _digest(self) -> str:
        config, digest = self.config, hashlib.sha256()
        if self.problems is None:
            digest.update(f"{config.train} {config.playground.model_dump_json()}".encode())
        for problem in self.problems or ():
            digest.update(f"{problem.id}\n{problem.prompt}\n".encode())
        digest.update(f"{self.seed} {config.shuffle}".encode())
        return digest.hexdigest()[:16]
