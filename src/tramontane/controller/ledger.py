"""The groups of a run, and the rules for handing them out and training on them.

Each group has exactly one `status.GroupStatus`. Nothing here waits; `pipeline` does that.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tramontane.batches import Batch
from tramontane.config import Config, PipelineConfig
from tramontane.controller.groups import Groups
from tramontane.controller.interruption import Interruption
from tramontane.controller.replay import Replay
from tramontane.controller.snapshot import FrozenGroup, Snapshot
from tramontane.controller.stages import Stages
from tramontane.controller.staleness import can_choose, choose, room
from tramontane.status import GroupStatus, Status
from tramontane.types import Completion, FilterReason, Group, Problem, SamplingParams, Verdict


class Problems(Protocol):
    """The source of problems, which also receives their verdicts; e.g. `data.curriculum`.

    `stage` is the number of the run's stage, `version` the number of updates done.
    """

    def next(self, stage: int, version: int) -> Problem | None:
        """The next problem to hand out, or None if no problem is left now."""
        ...

    def note(self, problem: Problem, verdicts: Sequence[Verdict], stage: int, version: int) -> None:
        """Record the verdicts of one group."""
        ...

    def counts(self, stage: int, version: int) -> dict[str, int]:
        """Metrics: numbers of visited, retired and resting problems."""
        ...

    def records(self) -> Iterable[dict[str, Any]]:
        """A JSON-able record of each problem visited so far; any thread may iterate over it."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class Ledger:
    """The groups of one run, and the versions at which they are generated and trained.

    Args:
        config: the whole run's; `pipeline`, `stages`, `generator.temperature` and `seed` are read.
        problems: the source of problems.
        encode: returns a problem's prompt tokens; not used for conversations, which an environment
            begins.
        replay: trajectories for the share of each batch that is not sampled.
        interruption: interrupts long thoughts; None: completions end at l_max.
    """

    def __init__(
        self,
        config: Config,
        problems: Problems,
        encode: Callable[[Problem], list[int]],
        replay: Replay | None = None,
        interruption: Interruption | None = None,
    ) -> None:
        self.stages, self.seed = Stages(config), config.seed
        self.problems, self.encode = problems, encode
        self.replay, self.interruption = replay or Replay(), interruption
        self.trained_version = 0  # updates done
        self.generator_version = 0  # weights that all generators now sample with
        self.next_version = 0  # the version that the next batch will be trained at
        self.next_group = 0
        self.groups = Groups()
        self.unfinished = 0  # completions handed out, waiting conversations included
        self.filtered: list[tuple[Group, FilterReason]] = []  # since the last update
        self._to_note: list[Group] = []  # graded, and not yet noted with `problems`
        self._no_problem_left = False  # the last answer of `problems`
        self._round_start: Snapshot | None = None  # the state before a synchronous round

    @property
    def outstanding(self) -> dict[int, Group]:
        """Groups handed out, neither batched nor filtered, by number."""
        return self.groups.outstanding

    @property
    def ready(self) -> dict[int, Group]:
        """Outstanding groups graded and kept, in order of completion."""
        return self.groups.of(GroupStatus.READY)

    @property
    def sizes(self) -> PipelineConfig:
        """Pipeline sizes of the current stage."""
        return self.stages.config.pipeline

    @property
    def sampled_groups(self) -> int:
        """Groups of each batch that are sampled; the staleness bound applies to them alone."""
        return self.stages.config.sampled_groups

    @property
    def synchronous(self) -> bool:
        """True if problems are handed out in whole rounds, so that timing has no effect."""
        return self.sizes.max_staleness == 0

    @property
    def in_mid_round(self) -> bool:
        """True while a synchronous round has ungraded groups."""
        return self.synchronous and len(self.ready) < len(self.outstanding)

    @property
    def counts(self) -> dict[str, int]:
        """Metrics of the problems; see `Problems.counts`."""
        return self.problems.counts(self.stages.number, self.trained_version)

    @property
    def exhausted(self) -> bool:
        """True if no problem is left and the outstanding groups do not fill a batch."""
        return (
            self._no_problem_left
            and len(self.ready) == len(self.outstanding)
            and not self.batch_is_complete
        )

    @property
    def stage_is_over(self) -> bool:
        """True once all batches of this stage are trained on and the generators have the weights:
        the next stage may begin, or the run may end."""
        version = self.trained_version
        if not self.generator_version == self.next_version == version:
            return False
        return self.exhausted or (version == self.stages.end and not self.stages.last)

    def begin_next_stage(self) -> str:
        """Enter the next stage; returns a readable description of the event."""
        # Groups are outstanding here only if too few problems were left for a batch.
        reason = FilterReason("left over", "too few for a batch, and no problem is left")
        for group in [*self.ready.values()]:
            self._filter(group, reason)
        self._no_problem_left = False
        return self.stages.begin_next(self.trained_version)

    def room(self) -> int:
        """Groups to hand out now."""
        if self.in_mid_round or self._no_problem_left:
            return 0
        sizes = self.sizes
        free = (sizes.n_async - self.unfinished) // sizes.group_size
        allowed = room(
            len(self.outstanding),
            generator_version=self.generator_version,
            next_version=self.next_version,
            per_batch=self.sampled_groups,
            max_staleness=sizes.max_staleness,
        )
        # A stage's last batches need no more groups than this. Groups left over at the run's end
        # are in its last checkpoint.
        useful = self.sampled_groups * (self.stages.end - self.next_version)
        return max(0, min(free, allowed, useful - len(self.outstanding)))

    def open(self, groups: int) -> list[Group]:
        """Hand out the next problems; fewer than `groups` if no more are left."""
        if self.synchronous:
            self._round_start = self._now()
        opened = []
        for _ in range(groups):
            problem = self.problems.next(self.stages.number, self.trained_version)
            if problem is None:
                self._no_problem_left = True
                break
            opened.append(self._open(problem))
        return opened

    def _open(self, problem: Problem) -> Group:
        number, self.next_group = self.next_group, self.next_group + 1
        config = self.stages.config
        prompt = [] if config.converses else self.encode(problem)
        requests = []
        for index in range(self.sizes.group_size):
            seed = _seed(self.seed, number, index)
            longest = problem.longest(config.pipeline.l_max)
            if self.interruption:
                longest = self.interruption.limit(seed)
            sampling = SamplingParams(longest, **config.generator.sampling)
            keep = self.interruption is not None
            request = Completion.requested(number, index, prompt, seed, sampling, keep_kv=keep)
            request.images = problem.images
            requests.append(request)
        deadline = self.generator_version + self.sizes.max_staleness
        group = Group(number, problem, [], [], deadline=deadline, requests=requests)
        self.groups.add(group)
        self.unfinished += len(requests)
        return group

    def turn_ended(self, completion: Completion) -> None:
        """Move on a completion that a generator has completed: its thoughts are interrupted, or its
        environment is to answer, or it has ended."""
        if self.interruption is not None:
            problem = self.outstanding[completion.group].problem
            if self.interruption.continues(completion, problem.longest(self.sizes.l_max)):
                return
        completion.move(Status.STEPPING if self.stages.config.converses else Status.ENDED)

    def take(self, completion: Completion) -> Group | None:
        """Record a completion; returns its group once the group is complete."""
        group = self.outstanding[completion.group]
        insort(group.completions, completion, key=lambda c: c.index)
        group.requests = [r for r in group.requests if r.index != completion.index]
        self.unfinished -= 1
        if group.requests:
            return None
        self.groups.move(group, GroupStatus.GRADED)
        return group

    def grade(self, group: Group, verdicts: list[Verdict]) -> FilterReason | None:
        """Keep a group if its rewards differ (paper: section 2.1); otherwise return why it is
        filtered."""
        group.verdicts = verdicts
        reason = self._filter_reason(group)
        if reason is None:
            self.groups.move(group, GroupStatus.READY)
        else:
            self._filter(group, reason)
        self._to_note.append(group)
        if not self.in_mid_round:  # within a round, the order of completion depends on timing
            for graded in sorted(self._to_note, key=lambda g: g.id):
                self.problems.note(
                    graded.problem, graded.verdicts, self.stages.number, self.trained_version
                )
            self._to_note, self._no_problem_left = [], False
        return reason

    def _filter(self, group: Group, reason: FilterReason) -> None:
        self.groups.move(group, GroupStatus.FILTERED)
        self.filtered.append((group, reason))

    def _filter_reason(self, group: Group) -> FilterReason | None:
        verdicts = group.verdicts
        unscorable = [v.reason for v in verdicts if v.verdict == "unscorable"]
        if unscorable and (self.sizes.unscorable == "drop" or len(unscorable) == len(verdicts)):
            return FilterReason("unscorable", unscorable[0])
        for c in group.completions:
            if c.ending and not c.token_ids:  # it never began
                return FilterReason("unscorable", f"{c.ending}: {c.ending_reason}")
        if self.sizes.diversity == "none":
            return None
        if self.sizes.diversity == "correctness":
            values = {v.parts["correctness"] for v in verdicts}
        else:
            values = {round(v.reward, 9) for v in verdicts}
        return FilterReason("no diversity") if len(values) == 1 else None

    @property
    def batch_is_complete(self) -> bool:
        """True if the next batch can be formed."""
        return can_choose(
            self.groups.unready, len(self.ready), self.next_version, self.sampled_groups
        )

    def choice(self) -> list[int]:
        """Groups of the next batch; empty if it cannot be formed yet."""
        ids = list(self.outstanding)
        position = {group: i for i, group in enumerate(ids)}
        chosen = choose(
            [g.deadline for g in self.outstanding.values()],
            [position[group] for group in self.ready],
            self.next_version,
            self.sampled_groups,
        )
        return [ids[i] for i in chosen or ()]

    def batch(self) -> Batch:
        """Form the next batch from the groups of `choice`, and from trajectories."""
        groups = [self.outstanding[i] for i in sorted(self.choice())]
        for group in groups:
            self.groups.move(group, GroupStatus.BATCHED)
        settings = self.stages.batch_settings
        rest = self.sizes.n_batch - len(groups) * self.sizes.group_size
        replayed = self.replay.take(self.next_version, rest, settings.n_minibatch)
        batch = Batch(self.next_version, [*groups, *replayed], settings)
        self.next_version += 1
        return batch

    def trained(self, batch: Batch) -> list[tuple[Group, FilterReason]]:
        """Drop a batch that was trained on; returns the groups filtered since the last update."""
        sampled = [group for group in batch.groups if group.sampled]
        for group in sampled:
            self.groups.move(group, GroupStatus.TRAINED)
        filtered, self.filtered = self.filtered, []
        graded = [*sampled, *(group for group, _ in filtered)]
        self.stages.trained(graded, self.next_version, len(self.outstanding))
        return filtered

    def snapshot(self) -> Snapshot:
        """The state to resume from.

        In the middle of a synchronous round this is the state before the round: repeating the whole
        round gives the same bits, unlike continuing its completions from their last tokens.
        """
        return self._round_start if self.in_mid_round and self._round_start else self._now()

    def _now(self) -> Snapshot:
        groups = [*self.groups.of(GroupStatus.BATCHED).values(), *self.outstanding.values()]
        return Snapshot(
            version=self.trained_version,
            next_group=self.next_group,
            stage=self.stages.state(),
            problems=self.problems.state(),
            groups=[FrozenGroup(group) for group in groups],
            filtered=[(FrozenGroup(group), reason) for group, reason in self.filtered],
            replay=self.replay.state(self.trained_version),
        )

    def restore(self, state: Snapshot) -> None:
        """Continue from a `snapshot`; unfinished completions continue from their last token."""
        self.trained_version = self.generator_version = self.next_version = state.version
        self.next_group = state.next_group
        self.stages.load_state(state.stage)
        self.problems.load_state(state.problems)
        self.replay.load_state(state.replay)
        self.filtered = [(group.thaw(), reason) for group, reason in state.filtered]
        self.groups = Groups()
        for group in (frozen.thaw() for frozen in state.groups):
            for request in group.requests:
                if self.stages.config.converses and request.status is not Status.OPENING:
                    request.move(Status.LOST)  # with the process of its environment
            graded = GroupStatus.READY if group.verdicts else GroupStatus.GRADED
            self.groups.add(group, GroupStatus.GENERATED if group.requests else graded)
        self.unfinished = sum(len(g.requests) for g in self.outstanding.values())


def _seed(run: int, group: int, index: int) -> int:
    """The seed of one request, a function of the run's seed and the request's place in the run."""
    return (run * 1_000_003 + group) * 65_537 + index
