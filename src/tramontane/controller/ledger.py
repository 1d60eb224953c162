"""What became of every problem handed out, and which of them may be handed out or trained on next.

Each group is in one place: outstanding (in generators, before verifiers, or ready), batched,
trained on, or filtered with a reason. Nothing here waits; `pipeline` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tramontane.config import Config, PipelineConfig
from tramontane.controller.groups import OpenGroup, pack, unpack
from tramontane.controller.stages import Stages
from tramontane.controller.staleness import choose, room
from tramontane.types import Batch, Completion, Group, Problem, Request, SamplingParams, Verdict

HOPELESS = 64  # groups in a row without a verdict, after which a run gives up


class Problems(Protocol):
    """Where problems come from, and who learns what became of each; `data.curriculum` is one."""

    def next(self, stage: int, version: int) -> Problem | None: ...

    def note(
        self, problem: Problem, verdicts: Sequence[Verdict], stage: int, version: int
    ) -> None: ...

    def counts(self, stage: int, version: int) -> dict[str, int]: ...

    def records(self) -> Iterable[dict[str, Any]]: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class Ledger:
    """The groups of one run, and the versions at which they are generated and trained.

    Args:
        config: `pipeline` and the seed are used here.
        problems: where the next comes from.
        encode: a problem's prompt tokens.
    """

    def __init__(
        self, config: Config, problems: Problems, encode: Callable[[Problem], list[int]]
    ) -> None:
        self.stages, self.seed = Stages(config), config.seed
        self.problems, self.encode = problems, encode
        self.trained_version = 0  # updates done
        self.generator_version = 0  # the weights that all generators sample with now
        self.next_version = 0  # the version that the next batch will be trained at
        self.next_group = 0
        self.outstanding: dict[int, OpenGroup] = {}  # handed out, neither batched nor filtered
        self.ready: list[int] = []  # of those, graded and kept, in order of completion
        self.batched: dict[int, OpenGroup] = {}  # in a batch that is not trained yet
        self.filtered: list[tuple[OpenGroup, str]] = []  # since the last update, with the reason
        self._graded: list[OpenGroup] = []  # of which `problems` was not told yet
        self._dry = False  # there was no problem left when last asked
        self._round: dict[str, Any] = {}  # the state before a synchronous round

    @property
    def sizes(self) -> PipelineConfig:
        """Of the stage that the run is in."""
        return self.stages.config.pipeline

    @property
    def synchronous(self) -> bool:
        """Problems are handed out in whole rounds, so that timing decides nothing."""
        return self.sizes.max_staleness == 0

    @property
    def in_mid_round(self) -> bool:
        return self.synchronous and len(self.ready) < len(self.outstanding)

    @property
    def counts(self) -> dict[str, int]:
        """Of problems, by their standing."""
        return self.problems.counts(self.stages.number, self.trained_version)

    @property
    def exhausted(self) -> bool:
        """No problem is left, and what was handed out makes no batch."""
        return self._dry and len(self.ready) == len(self.outstanding) and not self.choice()

    @property
    def stage_is_over(self) -> bool:
        """All batches of this stage are trained on, and generators have the weights: the next
        may begin (after the last, the run is at its end)."""
        version = self.trained_version
        if self.batched or not self.generator_version == self.next_version == version:
            return False
        return self.exhausted or (version == self.stages.end and not self.stages.last)

    def move_on(self) -> str:
        """Enter the next stage; returns what happened, for people."""
        for group in self.outstanding.values():  # there are some only where no problem is left
            self.filtered.append((group, "left over: too few for a batch, and no problem is left"))
        self.outstanding, self.ready, self._dry = {}, [], False
        return self.stages.move_on(self.trained_version)

    def room(self, in_flight: int) -> int:
        """Groups to hand out now, with so many completions in flight."""
        if self.in_mid_round or self._dry:
            return 0
        sizes = self.sizes
        free = (sizes.n_async - in_flight) // sizes.group_size
        allowed = room(
            len(self.outstanding),
            self.generator_version,
            self.next_version,
            sizes.groups_per_batch,
            sizes.max_staleness,
        )
        # A stage's last batches need no more than this; of the run's last, what is left over is in
        # the last checkpoint.
        useful = sizes.groups_per_batch * (self.stages.end - self.next_version)
        return max(0, min(free, allowed, useful - len(self.outstanding)))

    def open(self, groups: int) -> list[OpenGroup]:
        """Hand out the next problems; fewer where no more are left."""
        if self.synchronous:
            self._round = self._state()
        opened = []
        for _ in range(groups):
            problem = self.problems.next(self.stages.number, self.trained_version)
            if problem is None:
                self._dry = True
                break
            opened.append(self._open(problem))
        return opened

    def _open(self, problem: Problem) -> OpenGroup:
        number, self.next_group = self.next_group, self.next_group + 1
        prompt = self.encode(problem)
        config = self.stages.config
        sampling = SamplingParams(config.pipeline.l_max, config.generator.temperature)
        requests = [
            Request(number, i, prompt, _seed(self.seed, number, i), sampling)
            for i in range(self.sizes.group_size)
        ]
        deadline = self.generator_version + self.sizes.max_staleness
        group = self.outstanding[number] = OpenGroup(number, problem, deadline, requests)
        return group

    def take(self, completion: Completion) -> OpenGroup | None:
        """Note a completion; returns its group once that is whole."""
        group = self.outstanding[completion.group]
        group.completions[completion.index] = completion
        group.requests = [r for r in group.requests if r.index != completion.index]
        return None if group.requests else group

    def ungraded(self) -> list[OpenGroup]:
        """Groups that are whole and have no verdicts."""
        return [g for g in self.outstanding.values() if not g.requests and not g.verdicts]

    def grade(self, group: OpenGroup, verdicts: list[Verdict]) -> None:
        """Keep a group if it can teach anything (paper: section 2.1, diversity).

        Raises:
            RuntimeError: the verifiers have judged nothing for long.
        """
        group.verdicts = verdicts
        reason = self._why_filtered(verdicts)
        if reason is None:
            self.ready.append(group.id)
        else:
            del self.outstanding[group.id]
            self.filtered.append((group, reason))
        self._graded.append(group)
        if not self.in_mid_round:  # in a round, timing decides the order
            for done in sorted(self._graded, key=lambda g: g.id):
                self.problems.note(
                    done.problem, done.verdicts, self.stages.number, self.trained_version
                )
            self._graded, self._dry = [], False
        reasons = [why for _, why in self.filtered[-HOPELESS:]]
        if len(reasons) == HOPELESS and all(why.startswith("unscorable") for why in reasons):
            raise RuntimeError(f"the last {HOPELESS} groups were all {reasons[-1]}")

    def _why_filtered(self, verdicts: list[Verdict]) -> str | None:
        unscorable = [v.reason for v in verdicts if v.verdict == "unscorable"]
        if unscorable and (self.sizes.unscorable == "drop" or len(unscorable) == len(verdicts)):
            return f"unscorable: {unscorable[0]}"
        if self.sizes.diversity == "none":
            return None
        if self.sizes.diversity == "correctness":
            values = {v.parts["correctness"] for v in verdicts}
        else:
            values = {round(v.reward, 9) for v in verdicts}
        return "no diversity" if len(values) == 1 else None

    def choice(self) -> list[int]:
        """The groups of the next batch; none where it cannot be formed yet."""
        ids = list(self.outstanding)
        position = {group: i for i, group in enumerate(ids)}
        chosen = choose(
            [g.deadline for g in self.outstanding.values()],
            [position[group] for group in self.ready],
            self.next_version,
            self.sizes.groups_per_batch,
        )
        return [ids[i] for i in chosen or ()]

    def batch(self) -> Batch:
        """Form the next batch, of the groups of `choice`."""
        groups = [self.outstanding.pop(i) for i in sorted(self.choice())]
        self.batched.update((g.id, g) for g in groups)
        self.ready = [i for i in self.ready if i not in self.batched]
        settings = self.stages.batch_settings
        batch = Batch(self.next_version, [g.group() for g in groups], settings)
        self.next_version += 1
        return batch

    def trained(self, batch: Batch) -> list[tuple[Group, str]]:
        """Forget a batch that was trained on; returns what was filtered since the one before."""
        for group in batch.groups:
            del self.batched[group.id]
        filtered, self.filtered = [(g.group(), why) for g, why in self.filtered], []
        seen = [*batch.groups, *(group for group, _ in filtered)]
        self.stages.trained(seen, self.next_version, len(self.outstanding))
        return filtered

    def snapshot(self) -> dict[str, Any]:
        """Everything that a resumed run needs besides the trainer's own state: JSON-able.

        Of a synchronous round under way, the state before it: begun again as a whole, it gives the
        same bits, which completions continued from their last token would not.
        """
        return self._round if self.in_mid_round else self._state()

    def _state(self) -> dict[str, Any]:
        groups = [*self.batched.values(), *self.outstanding.values()]
        return {
            "version": self.trained_version,
            "next_group": self.next_group,
            "stage": self.stages.state(),
            "problems": self.problems.state(),
            "groups": [pack(group) for group in groups],
            "filtered": [[pack(group), why] for group, why in self.filtered],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `snapshot`; completions begun go on from their last token."""
        version = state["version"]
        self.trained_version = self.generator_version = self.next_version = version
        self.next_group = state["next_group"]
        self.stages.load_state(state["stage"])
        self.problems.load_state(state["problems"])
        self.filtered = [(unpack(row), why) for row, why in state["filtered"]]
        self.outstanding = {row["id"]: unpack(row) for row in state["groups"]}
        self.ready = [g.id for g in self.outstanding.values() if g.verdicts]


def _seed(run: int, group: int, index: int) -> int:
    """A request's seed depends on nothing but its place in the run."""
    return (run * 1_000_003 + group) * 65_537 + index
