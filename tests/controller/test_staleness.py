"""The staleness bound as a property: any order of completion, any speed of trainer and filter."""

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tramontane.controller import staleness
from tramontane.controller.staleness import can_choose, choose, room


def test_room_is_one_batch_when_synchronous() -> None:
    assert room(0, generator_version=3, next_version=3, per_batch=4, max_staleness=0) == 4
    assert room(1, generator_version=3, next_version=3, per_batch=4, max_staleness=0) == 3
    # The batch for version 3 is formed: nothing more until the generator holds version 4.
    assert room(0, generator_version=3, next_version=4, per_batch=4, max_staleness=0) == 0


def test_due_groups_come_first_and_the_rest_in_order_of_completion() -> None:
    # Group 0 is due at version 5 and last to complete; 1, 2, 3 completed before it.
    assert choose([5, 6, 6, 6], ready=[1, 2, 3], version=5, per_batch=2) is None
    assert choose([5, 6, 6, 6], ready=[3, 1, 2, 0], version=5, per_batch=2) == [3, 0]
    # Nothing is due: the first to complete go, long or short.
    assert choose([7, 7, 7, 7], ready=[3, 1, 2, 0], version=5, per_batch=2) == [3, 1]


def test_what_is_left_fits_into_the_batches_before_its_deadline() -> None:
    # Three groups due by version 6, two per batch: one of them must go into the batch at 5.
    assert choose([6, 6, 6, 9], ready=[3, 0], version=5, per_batch=2) == [3, 0]
    assert choose([6, 6, 6, 9, 9], ready=[3, 4], version=5, per_batch=2) is None
    # Three are due by version 7, one per batch; two, with different deadlines, are complete.
    assert choose([6, 7, 7, 9], ready=[3, 1, 0], version=5, per_batch=1) == [1]


def test_a_batch_can_be_formed_if_all_incomplete_groups_fit_into_later_batches() -> None:
    # At version 5 with two per batch: 2 groups due at 6 can be left behind, and 4 due by 7.
    for unready, formed in [({6: 2, 7: 2}, True), ({6: 2, 7: 3}, False), ({5: 1}, False)]:
        assert can_choose(unready, ready=2, version=5, per_batch=2) is formed
    assert not can_choose({}, ready=1, version=5, per_batch=2)


class Example:
    """The worked example of `staleness`: two groups per batch, a bound of one version."""

    def __init__(self) -> None:
        self.v = self.g = 0
        self.outstanding: dict[str, int] = {}  # group → deadline
        self.ready: list[str] = []
        self.rows: list[str] = []

    def note(self, event: str) -> None:
        """Add a row for the state as it is now, with the number of groups that `room` admits."""
        groups = room(
            len(self.outstanding),
            generator_version=self.g,
            next_version=self.v,
            per_batch=2,
            max_staleness=1,
        )
        listed = " ".join(name + "⁰¹²"[d] for name, d in self.outstanding.items()) or "-"
        formula = f"2·({self.g}+1−{self.v}+1) − {len(self.outstanding)} = {groups}"
        self.rows.append(f"{self.v}  {self.g}  {event:<27}  {listed:<11}  {formula}")

    def hand_out(self, names: str) -> None:
        self.outstanding |= dict.fromkeys(names, self.g + 1)

    def batch(self) -> str | None:
        names = list(self.outstanding)
        ready = [names.index(name) for name in self.ready]
        chosen = choose(list(self.outstanding.values()), ready, self.v, 2)
        if chosen is None:
            return None
        taken = [names[i] for i in chosen]
        for name in taken:
            del self.outstanding[name]
            self.ready.remove(name)
        self.v += 1
        return ", ".join(taken)


def test_the_worked_example_of_the_docstring_is_true() -> None:
    run = Example()
    run.note("the run begins")
    run.hand_out("ABCD")
    run.note("A, B, C, D are handed out")
    run.ready = ["D"]
    assert run.batch() is None
    run.ready = ["D", "B"]
    assert run.batch() == "D, B"
    run.note("D, B complete: batch 0")
    run.g = 1
    run.note("weights 1 arrive")
    run.hand_out("EF")
    run.note("E, F are handed out")
    run.ready = ["E", "F", "C"]
    assert run.batch() is None
    run.note("E, F, C complete: no batch")
    run.ready.append("A")
    assert run.batch() == "C, A"
    run.note("A completes: batch 1 = C, A")
    lines = [line.strip() for line in (staleness.__doc__ or "").splitlines()]
    assert [line for line in lines if line[:1].isdigit()] == run.rows


@settings(max_examples=300, deadline=None)
@given(
    per_batch=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    lag=st.integers(0, 2),
    choices=st.lists(st.integers(0, 10**6), min_size=50, max_size=400),
)
def test_bound_holds_and_nothing_deadlocks(
    per_batch: int, max_staleness: int, lag: int, choices: list[int]
) -> None:
    """A whole run with arbitrary completion order, filtering and trainer lag."""
    generator_version = next_version = 0
    outstanding: dict[int, int] = {}  # group → deadline
    started: dict[int, int] = {}  # group → version of its first token
    ready: list[int] = []
    born = 0

    def admits() -> bool:
        groups = room(
            len(outstanding),
            generator_version=generator_version,
            next_version=next_version,
            per_batch=per_batch,
            max_staleness=max_staleness,
        )
        return groups > 0

    for choice in choices:
        while admits():
            outstanding[born] = generator_version + max_staleness
            started[born] = generator_version
            born += 1
        unfinished = [g for g in outstanding if g not in ready]
        if unfinished:
            group = unfinished[choice % len(unfinished)]
            if choice % 5 == 0:
                del outstanding[group]  # filtered
            else:
                ready.append(group)
        ids = list(outstanding)
        position = {g: i for i, g in enumerate(ids)}
        chosen = choose(
            list(outstanding.values()), [position[g] for g in ready], next_version, per_batch
        )
        if chosen is not None:
            assert len(set(chosen)) == per_batch
            for i in chosen:
                assert next_version - started[ids[i]] <= max_staleness
                del outstanding[ids[i]]
            ready = [g for g in ready if g in outstanding]
            next_version += 1
        elif not unfinished and not ready:
            # Nothing to wait for: only new weights can help, and they must.
            assert generator_version < next_version
        if len(ready) == len(outstanding) and chosen is None:
            generator_version = next_version
        generator_version = max(generator_version, next_version - lag)


@given(
    deadlines=st.lists(st.integers(3, 8), max_size=30),
    order=st.randoms(use_true_random=False),
    per_batch=st.integers(1, 5),
)
def test_a_batch_can_be_chosen_exactly_if_every_due_group_fits(
    deadlines: list[int], order: Random, per_batch: int
) -> None:
    """Counts of incomplete groups by deadline say the same as the choice among all groups. The
    choice leaves no more groups behind than later batches can take, and goes by completion."""
    version = 3
    deadlines = [
        max(deadline, version + place // per_batch)  # as the admission rule has them
        for place, deadline in enumerate(sorted(deadlines))
    ]
    ready = order.sample(range(len(deadlines)), order.randint(0, len(deadlines)))
    unready = Counter(d for i, d in enumerate(deadlines) if i not in ready)
    chosen = choose(deadlines, ready, version, per_batch)
    assert (chosen is not None) == can_choose(unready, len(ready), version, per_batch)
    if chosen is None:
        return
    assert len(chosen) == per_batch
    assert chosen == [group for group in ready if group in chosen]
    for deadline in deadlines:
        kept = sum(d <= deadline for i, d in enumerate(deadlines) if i not in chosen)
        assert kept <= per_batch * (deadline - version)
