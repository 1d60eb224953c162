"""The endless stream of training problems, which a checkpoint can leave and enter anywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice
from random import Random
from typing import Any

from tramontane.config import DataConfig
from tramontane.data import playground
from tramontane.data.files import shuffled
from tramontane.data.load import check_fields, generated, gym_problems, load_problems
from tramontane.errors import InputError
from tramontane.types import Problem

# Generated problems are drawn so many at once, each block from a seed of its own: entering the
# stream anywhere costs one block, and memory never holds more.
BLOCK = 64


class ProblemStream:
    """Problems without end, in an order that the seed alone decides.

    Files and datasets (and generated sources under `data.limit`) are gone through again and
    again, each time in a new order if `data.shuffle` says so. Generated sources never end.

    Args:
        config: where problems come from; `split` is the one trained on.
        seed: of the order, and of what is generated.

    Attributes:
        problems: all of a finite source, in the source's order; None for an endless one.

    Raises:
        InputError: as `load_problems`, before anything is handed out.
    """

    def __init__(self, config: DataConfig, seed: int) -> None:
        check_fields(config.fields)
        self.config, self.seed = config, seed
        self._scheme, self._name = generated(config.train)
        self.problems: list[Problem] | None = None
        if not self._scheme or config.limit is not None:
            self.problems = load_problems(
                config.train,
                fields=config.fields,
                split=config.split,
                limit=config.limit,
                playground=config.playground,
                playground_split="train",
                seed=seed,
            )
        self._handed_out = 0
        self._block: tuple[int, Sequence[Problem]] = (-1, ())
        self._fingerprint = self._digest()
        self._epoch(0)  # a source that cannot be drawn from says so now

    @property
    def epoch(self) -> int:
        """How often the source was gone through; 0 for ever where it has no end."""
        return self._handed_out // len(self.problems) if self.problems else 0

    @property
    def position(self) -> int:
        """How many problems of this epoch were handed out."""
        return self._handed_out % len(self.problems) if self.problems else self._handed_out

    def next(self) -> Problem:
        """The next problem."""
        size = len(self.problems) if self.problems else BLOCK
        number, index = divmod(self._handed_out, size)
        self._handed_out += 1
        return self._epoch(number)[index]

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON can hold it."""
        return {"handed_out": self._handed_out, "data": self._fingerprint}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            InputError: the state is of other data, another order or another seed.
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
        if self._block[0] != number:
            self._block = (number, self._draw(number))
        return self._block[1]

    def _draw(self, number: int) -> Sequence[Problem]:
        seed = Random(f"{self.seed}/{number}").getrandbits(31)
        config = self.config
        if self.problems is not None:
            return shuffled(self.problems, seed) if config.shuffle else self.problems
        if self._scheme == "reasoning_gym":
            drawn = gym_problems(self._name, "train", seed)
        else:
            world = config.playground
            drawn = playground.problems("train", seed, world.levels, world.languages, world.kinds)
        return list(islice(drawn, BLOCK))

    def _digest(self) -> str:
        config, digest = self.config, hashlib.sha256()
        if self.problems is None:
            digest.update(f"{config.train} {config.playground.model_dump_json()}".encode())
        for problem in self.problems or ():
            digest.update(f"{problem.id}\n{problem.problem}\n".encode())
        digest.update(f"{self.seed} {config.shuffle}".encode())
        return digest.hexdigest()[:16]
