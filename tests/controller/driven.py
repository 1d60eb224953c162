"""A ledger without workers, for tests: each step of a run is a call."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tramontane.batches import Batch
from tramontane.config import Config
from tramontane.controller.ledger import Ledger
from tramontane.controller.snapshot import Snapshot
from tramontane.data.curriculum import Curriculum
from tramontane.run.checkpoint import PipelineCheckpoint, read_pipeline, write_pipeline
from tramontane.types import Completion, Group, Outcome, Verdict

OUTCOMES: tuple[Outcome, Outcome] = ("wrong", "right")


def config(train: Path, **sections: Any) -> Config:
    raw: dict[str, Any] = {
        "data": {"train": str(train), "eval": None},
        "pipeline": {
            "updates": 12,
            "group_size": 2,
            "n_batch": 8,
            "n_async": 16,
            "max_staleness": 2,
            "l_max": 10,
            "l_cache": 2,
        },
    }
    for name, value in sections.items():
        raw[name] = {**raw.get(name, {}), **value} if isinstance(value, dict) else value
    return Config.model_validate(raw)


class DrivenLedger:
    """A ledger driven by hand: the test decides when groups are generated, graded, trained on."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.ledger = self._new_ledger()
        self.formed: list[Batch] = []
        self.trained: list[Batch] = []
        self.filtered: Counter[str] = Counter()
        self.handed_out: dict[int, tuple[int, Any]] = {}  # by group: stage, sampling
        self.events: list[str] = []

    def _new_ledger(self) -> Ledger:
        config = self.config
        return Ledger(config, Curriculum(config.by_stage()), lambda problem: [1])

    def resume(self) -> Snapshot:
        """Go on with a new ledger, restored from this one's snapshot, which is returned."""
        with TemporaryDirectory() as folder:
            write_pipeline(Path(folder), PipelineCheckpoint(self.ledger.snapshot(), 0.0))
            state = read_pipeline(Path(folder)).snapshot
        self.ledger, self.formed = self._new_ledger(), []
        self.ledger.restore(state)
        return state

    @property
    def in_flight(self) -> int:
        return sum(len(g.requests) for g in self.ledger.outstanding.values())

    def hand_out(self) -> None:
        """Hand out all groups that may be handed out, in the next stage if this one is over."""
        ledger = self.ledger
        if ledger.stage_is_over and not ledger.stages.last:
            assert self.in_flight == 0
            self.events.append(ledger.begin_next_stage())
        if room := ledger.room():
            for group in ledger.open(room):
                self.handed_out[group.id] = ledger.stages.number, group.requests[0].sampling
        assert self.in_flight <= ledger.sizes.n_async

    def complete(self, group: int, tokens: int = 3) -> Group:
        """Finish all completions of a group, each of `tokens` tokens."""
        ledger = self.ledger
        versions = [ledger.generator_version] * tokens
        ids, logprobs = [1] * tokens, [0.0] * tokens
        wholes = [
            ledger.take(Completion(group, r.index, [1], ids, logprobs, versions, "stop"))
            for r in list(ledger.outstanding[group].requests)
        ]
        assert wholes[:-1] == [None] * (len(wholes) - 1)
        assert wholes[-1] is not None
        return wholes[-1]

    def grade(self, group: int, verdicts: list[Verdict]) -> None:
        """Finish a group, and grade it."""
        self.ledger.grade(self.complete(group), verdicts)

    def generate(self, group: int, right: list[bool], tokens: int = 3) -> None:
        """Finish a group, and grade each of its completions as right or wrong."""
        self.ledger.grade(self.complete(group, tokens), [verdict(r) for r in right])

    def form(self) -> None:
        """Form all batches that can be formed."""
        ledger = self.ledger
        while ledger.next_version < self.config.pipeline.updates and ledger.choice():
            self.formed.append(ledger.batch())

    def train(self) -> None:
        """Train on the oldest batch formed, and send its weights to the generator."""
        batch = self.formed.pop(0)
        self.ledger.trained_version += 1
        for _, reason in self.ledger.trained(batch):
            self.filtered[reason.kind] += 1
        self.ledger.generator_version = self.ledger.trained_version
        self.trained.append(batch)


def verdict(right: bool, reward: float | None = None) -> Verdict:
    """A verdict whose reward is by default that of its correctness part."""
    part = {"correctness": float(right)}
    return Verdict(part["correctness"] if reward is None else reward, part, OUTCOMES[right])


def unscorable(reason: str = "timed out") -> Verdict:
    return Verdict(0.0, {"correctness": 0.0}, "unscorable", reason)
