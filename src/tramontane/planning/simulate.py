"""Discrete-event simulation of the pipeline, from the costs of its workers.

The ledger, and with it the staleness bound, is the real one; the workers are only clocks. The
simulation follows `controller.pipeline` and `controller.generators`: a group goes whole to the
generator with the fewest requests; generators poll, with `AHEAD` polls submitted in advance;
weights are taken between two polls; one verifier grades a group; one batch is queued and one waits
to enter the queue; sending weights and writing records overlap with the next update.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tramontane.config import Config
from tramontane.controller.generators import AHEAD, Loads, slots
from tramontane.controller.ledger import Ledger
from tramontane.planning.costs import Costs, Lengths
from tramontane.types import Batch, Completion, Group, Problem, Request, Verdict, floats, ints


@dataclass(frozen=True)
class Outcome:
    """Results of a simulated run, without the first updates, in which the pipeline fills.

    Args:
        seconds_per_update, tokens_per_second: speed; tokens are trained completion tokens.
        generator_idle, trainer_idle, verifier_idle: share of the time, over all workers of a kind.
        held: part of `generator_idle` in which the staleness bound, or the end of the run, left a
            generator without work.
        utilisation: live sequences over a generator's slots, averaged over decode steps.
        staleness_mean, staleness_max: age of trained tokens, in versions.
        filtered_tokens: tokens of filtered groups over all generated tokens.
    """

    seconds_per_update: float
    tokens_per_second: float
    generator_idle: float
    held: float
    trainer_idle: float
    verifier_idle: float
    utilisation: float
    staleness_mean: float
    staleness_max: int
    filtered_tokens: float


class Simulation:
    """One run of `config.pipeline.updates` updates.

    Args:
        config: its `pipeline` sizes, numbers of workers, `steps_per_call` and seed are used.
        costs: seconds of each worker's work.
        lengths: draws the tokens of each completion, at most `l_max`, from its request's seed.
        prompt_tokens: tokens of every prompt.
        filtered: share of groups without diversity.
    """

    def __init__(
        self,
        config: Config,
        costs: Costs,
        lengths: Lengths,
        prompt_tokens: int = 1,
        filtered: float = 0.0,
    ) -> None:
        # `filtered` groups get equal rewards, so diversity must be judged by rewards.
        pipeline = config.pipeline.model_copy(update={"diversity": "rewards"})
        self.config = config.model_copy(update={"pipeline": pipeline})
        self.costs, self.lengths, self.filtered = costs, lengths, filtered
        prompt = [0] * prompt_tokens
        self.ledger = Ledger(self.config, _Endless(), lambda problem: prompt)
        self.prompt_tokens = prompt_tokens
        self.now = 0.0
        self.versions: dict[
            tuple[int, int], list[list[int]]
        ] = {}  # by (group, index): runs of tokens, [version, tokens] each
        self.ended: list[tuple[float, dict[str, float]]] = []  # time and totals of each update
        self.ages: list[dict[int, int]] = []  # trained tokens by age, for each update
        workers = config.generator.workers
        self.generators = [_Generator(self, number) for number in range(workers)]
        self.loads = Loads(workers)
        self.moved: set[int] = set()  # generators that may have something to begin
        self.verifiers = [0.0] * config.verifier.workers  # time at which each is free
        self.formed: deque[Batch] = deque()  # the queued batch, and one that waits for the queue
        self.training = _Training(self)
        self.verifying = 0.0
        self.dropped_tokens = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def run(self, skip: int = 3, until: int | None = None) -> Outcome:
        """Simulate all updates, or the first `until`; figures leave out the first `skip`."""
        self._settle()
        while len(self.ended) < (until or self.config.pipeline.updates):
            self.now, _, act = heapq.heappop(self._events)
            act()
            self._settle()
        return self._outcome(skip)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Schedule an event `seconds` from now."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, act))

    def hand_out(self) -> None:
        if room := self.ledger.room(self.loads.total):
            for group in self.ledger.open(room):
                self.generators[self.loads.least()].submit(group.requests)

    def take(self, completion: Completion) -> None:
        """Take a finished completion; a complete group goes to the first free verifier."""
        if group := self.ledger.take(completion):
            seconds = self.costs.verify * len(group.completions)
            first = min(range(len(self.verifiers)), key=self.verifiers.__getitem__)
            self.verifiers[first] = max(self.now, self.verifiers[first]) + seconds
            self.verifying += seconds
            known = self.verifiers[first] - self.now + self.costs.latency
            self.after(known, lambda: self._grade(group))

    def _grade(self, group: Group) -> None:
        alike = random.Random(group.id).random() < self.filtered
        rewards = [float(c.index > 0 and not alike) for c in group.completions]
        self.ledger.grade(group, [Verdict(reward, {}, "right") for reward in rewards])
        if alike:
            self.dropped_tokens += sum(sum(self._runs(c)) for c in group.completions)

    def _runs(self, completion: Completion) -> list[int]:
        return [n for _, n in self.versions.pop((completion.group, completion.index))]

    def _settle(self) -> None:
        """Run the steps of the pipeline's loops that a change makes possible."""
        self.hand_out()
        for number in sorted(self.moved):
            self.generators[number].go()
        self.moved.clear()
        ledger = self.ledger
        while (
            len(self.formed) < 2
            and ledger.next_version < self.config.pipeline.updates
            and ledger.batch_is_complete
        ):
            self.formed.append(ledger.batch())
        self.training.go()

    def trained(self, batch: Batch) -> None:
        """Count an update whose records are written."""
        ages: dict[int, int] = {}
        for completion in batch.completions:
            for version, n in self.versions.pop((completion.group, completion.index)):
                age = batch.version - version
                ages[age] = ages.get(age, 0) + n
        self.ages.append(ages)
        generators = self.generators
        self.ended.append(
            (
                self.now,
                {
                    "training": self.training.worked(),
                    "verifying": self.verifying,
                    "generating": sum(g.worked() for g in generators),
                    "held": sum(g.held() for g in generators),
                    "live": sum(g.live_steps for g in generators),
                    "steps": sum(g.steps for g in generators),
                    "dropped": self.dropped_tokens,
                },
            )
        )

    def _outcome(self, skip: int) -> Outcome:
        start, before = self.ended[skip - 1] if skip else (0.0, dict.fromkeys(self.ended[0][1], 0))
        end, after = self.ended[-1]
        seconds = end - start
        total = {key: after[key] - before[key] for key in after}
        ages = [(age, n) for update in self.ages[skip:] for age, n in update.items()]
        tokens = sum(n for _, n in ages)
        generators = seconds * len(self.generators)
        return Outcome(
            seconds_per_update=seconds / len(self.ages[skip:]),
            tokens_per_second=tokens / seconds,
            generator_idle=max(0.0, 1 - total["generating"] / generators),
            held=total["held"] / generators,
            trainer_idle=max(0.0, 1 - total["training"] / seconds),
            verifier_idle=1 - total["verifying"] / (seconds * len(self.verifiers)),
            utilisation=total["live"] / max(1.0, total["steps"] * slots(self.config)),
            staleness_mean=sum(age * n for age, n in ages) / tokens,
            staleness_max=max(age for age, _ in ages),
            filtered_tokens=total["dropped"] / max(1, total["live"]),
        )


@dataclass
class _Flight:
    """One request in a generator; `left` is the number of tokens still to be generated."""

    request: Request
    left: int
    versions: list[list[int]] = field(default_factory=list)  # [version, tokens] of each run


class _Generator:
    """A generator: runs the polls that `controller.generators` submits, one after another."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self.simulation, self.number = simulation, number
        self.requests = 0  # unfinished requests, as known to the controller
        self.version = 0
        self.steps = self.live_steps = 0
        self.at_work = False
        self._unsent: list[Request] = []
        self._mail: deque[list[Request]] = deque()  # submitted polls that have not begun
        self._waiting: deque[Request] = deque()  # for a slot
        self._flights: list[_Flight] = []
        self._left = self._cached = np.zeros(0)
        self._offered: Callable[[], None] | None = None  # called when new weights are taken
        self._worked, self._began = 0.0, 0.0
        self._held, self._held_since = 0.0, 0.0

    def worked(self) -> float:
        now = self.simulation.now
        return self._worked + (max(0.0, now - self._began) if self.at_work else 0.0)

    def held(self) -> float:
        return self._held + (0.0 if self.requests else self.simulation.now - self._held_since)

    def submit(self, requests: list[Request]) -> None:
        if not self.requests:
            self._held += self.simulation.now - self._held_since
        self._count(len(requests))
        self._unsent += requests

    def offer(self, taken: Callable[[], None]) -> None:
        """Offer new weights, to be taken between two polls."""
        self._offered = taken
        self.simulation.moved.add(self.number)

    def _count(self, more: int) -> None:
        """Count `more` unfinished requests."""
        self.requests += more
        self.simulation.loads.note(self.number, self.requests, 0)
        self.simulation.moved.add(self.number)

    def go(self) -> None:
        """Ask for polls, and begin the next work if the generator is free."""
        if self.requests:
            while len(self._mail) + self.at_work < AHEAD:
                self._mail.append(self._unsent)
                self._unsent = []
        if self.at_work:
            return
        if self._offered:
            self._work(self.simulation.costs.swap, self._swap)
        elif self._mail:
            self._poll(self._mail.popleft())

    def _work(self, seconds: float, then: Callable[[], None], idle: float = 0.0) -> None:
        """Pause for `idle` seconds, work for `seconds`, then call `then`."""
        self.at_work, self._began = True, self.simulation.now + idle

        def end() -> None:
            self._worked += self.simulation.now - self._began
            self.at_work = False
            self.simulation.moved.add(self.number)
            then()

        self.simulation.after(idle + seconds, end)

    def _swap(self) -> None:
        taken, self._offered = self._offered, None
        self.version += 1
        assert taken is not None
        taken()

    def _poll(self, requests: list[Request]) -> None:
        simulation, costs = self.simulation, self.simulation.costs
        self._waiting += requests
        seconds = self._admit()
        if self._flights:
            steps = np.arange(simulation.config.generator.steps_per_call)
            order = np.argsort(self._left)
            gone = np.searchsorted(self._left[order], steps, side="right")  # before each step
            live = len(order) - gone[gone < len(order)]
            after = np.append(np.cumsum(self._cached[order][::-1])[::-1], 0.0)
            cached = after[gone[: len(live)]] + steps[: len(live)] * live
            seconds += costs.call + float(costs.decode(live, cached).sum())
            self.steps += len(live)
            self.live_steps += int(live.sum())
        contended = simulation.training.at_work
        if contended:
            seconds *= costs.generator_slowdown
        self._work(seconds, self._polled, costs.poll if contended else 0.0)

    def _admit(self) -> float:
        """Move requests into free slots; returns the seconds of their prefill."""
        simulation, waiting = self.simulation, self._waiting
        free = slots(simulation.config) - len(self._flights)
        requests = [waiting.popleft() for _ in range(min(free, len(waiting)))]
        if not requests:
            return 0.0
        lengths = [simulation.lengths(random.Random(r.seed)) for r in requests]
        self._flights += [_Flight(r, n) for r, n in zip(requests, lengths, strict=True)]
        self._left = np.append(self._left, lengths)
        self._cached = np.append(self._cached, [simulation.prompt_tokens] * len(requests))
        # Completions of a group share their prompt.
        return simulation.costs.prefill(simulation.prompt_tokens * len({r.group for r in requests}))

    def _polled(self) -> None:
        simulation = self.simulation
        steps = simulation.config.generator.steps_per_call
        for flight in self._flights:
            n = min(steps, flight.left)
            flight.left -= n
            if flight.versions and flight.versions[-1][0] == self.version:
                flight.versions[-1][1] += n
            else:
                flight.versions.append([self.version, n])
        done = [f for f in self._flights if not f.left]
        self._flights = [f for f in self._flights if f.left]
        self._cached = (self._cached + steps)[self._left > steps]
        self._left = (self._left - steps)[self._left > steps]
        self._count(-len(done))
        if done and not self.requests:
            self._held_since = simulation.now
        for flight in done:
            r = flight.request
            simulation.versions[r.group, r.index] = flight.versions
            empty = ints(), floats(), ints()
            simulation.take(Completion(r.group, r.index, r.prompt_ids, *empty, "stop"))


class _Training:
    """The trainer: trains on a batch, then publishes its weights. Sending them and writing records
    overlap with the next batch, whose weights wait until both are done."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.batch: Batch | None = None
        self.at_work = False
        self._left = 0.0  # seconds of work left of the update, at full speed
        self._pace, self._since = 1.0, 0.0
        self._worked = 0.0
        self._turn = 0
        self._following = False  # the previous update is being sent or recorded
        self._due = False  # True if weights wait until that is done

    def worked(self) -> float:
        return self._worked

    def go(self) -> None:
        """Begin the next batch, or adapt the end of the current one to the trainer's speed."""
        simulation = self.simulation
        if self.batch is None and simulation.formed:
            self.batch = simulation.formed.popleft()
            runs = [simulation.versions[c.group, c.index] for c in self.batch.completions]
            ranks = simulation.config.trainer.ranks
            lengths = [sum(n for _, n in versions) for versions in runs[::ranks]]
            prompts = simulation.prompt_tokens * len(self.batch.groups) // ranks
            self._left = simulation.costs.train(lengths, prompts)
            self.at_work, self._since, self._pace = True, simulation.now, 0.0
        if not self.at_work:
            return
        contended = any(g.at_work for g in simulation.generators)
        pace = 1 / simulation.costs.trainer_slowdown if contended else 1.0
        if pace == self._pace:
            return
        self._pass()
        self._pace = pace
        self._turn += 1
        turn = self._turn
        simulation.after(self._left / pace, lambda: self._end(turn))

    def _pass(self) -> None:
        passed = self.simulation.now - self._since
        self._left -= passed * self._pace
        self._worked += passed
        self._since = self.simulation.now

    def _end(self, turn: int) -> None:
        if turn == self._turn:  # the pace did not change meanwhile
            self._pass()
            self.at_work = False
            self._due = True
            if not self._following:
                self._publish()

    def _publish(self) -> None:
        self._due, self._following = False, True
        self.simulation.after(self.simulation.costs.publish, self._send)

    def _send(self) -> None:
        simulation, batch = self.simulation, self.batch
        assert batch is not None
        self.batch = None
        simulation.ledger.trained_version += 1
        waiting = len(simulation.generators)

        def taken() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                simulation.ledger.trained(batch)
                simulation.ledger.generator_version = batch.version + 1
                simulation.after(simulation.costs.record, lambda: self._recorded(batch))

        for generator in simulation.generators:
            simulation.after(simulation.costs.fetch, partial(generator.offer, taken))

    def _recorded(self, batch: Batch) -> None:
        self._following = False
        self.simulation.trained(batch)
        if self._due:
            self._publish()


class _Endless:
    """An endless source of identical problems."""

    def next(self, stage: int, version: int) -> Problem:
        return Problem("", "math", "")

    def note(
        self, problem: Problem, verdicts: Sequence[Verdict], stage: int, version: int
    ) -> None: ...

    def counts(self, stage: int, version: int) -> dict[str, int]:
        return {}

    def records(self) -> list[dict[str, Any]]:
        return []

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None: ...


def simulate(
    config: Config,
    costs: Costs,
    lengths: Lengths,
    prompt_tokens: int = 1,
    skip: int = 3,
    until: int | None = None,
    filtered: float = 0.0,
) -> Outcome:
    """Simulate one run. Parameters as for `Simulation` and its `run`."""
    return Simulation(config, costs, lengths, prompt_tokens, filtered).run(skip, until)
