"""Discrete-event simulation of the pipeline, from the costs of its workers' work in seconds.

The ledger, and with it the staleness bound, is the real one; the workers are only clocks. The
simulation follows `controller.pipeline` and `controller.generators`: a group goes whole to the
generator with the fewest requests; generators poll, with `AHEAD` polls submitted in advance;
weights are taken between two polls; one verifier grades a group; one batch is queued and one waits
to enter the queue; sending weights overlaps with the next update.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from tramontane.batches import Batch
from tramontane.config import Config
from tramontane.controller.generators import AHEAD, Loads, slots
from tramontane.controller.ledger import Ledger
from tramontane.types import Completion, Group, Problem, Request, Verdict, floats, ints

Array = np.ndarray
Lengths = Callable[[random.Random], int]  # draws the tokens of one completion


@dataclass(frozen=True)
class Costs:
    """Seconds of each worker's work.

    Args:
        decode: seconds of one generator's decode steps: a function from live sequences and their
            cached tokens in total (float arrays [steps]) to a float array [steps].
        prefill: seconds of one admission, from its prompt tokens.
        train: seconds of an update, from the lengths of one rank's completions and the tokens of
            their prompts, each prompt counted once for its group.
        publish: time that the trainer takes to publish its weights.
        fetch: time that published weights take to arrive in a generator, which decodes meanwhile.
        swap: pause of each generator for new weights.
        verify: time of one completion on one verifier.
        latency: time from a group's last token until its verdicts count, without `verify`: calls
            and queues.
        call: time of each poll of a generator without its decode steps: messages.
        poll: time between two polls of a generator while the trainer works; the generator stands
            still, since calls wait for a core.
        generator_slowdown, trainer_slowdown: how many times longer each takes
            while the other works; 1 if they share nothing.
    """

    decode: Callable[[Array, Array], Array]
    prefill: Callable[[int], float]
    train: Callable[[Sequence[int], int], float]
    publish: float = 0.0
    fetch: float = 0.0
    swap: float = 0.0
    verify: float = 0.0
    latency: float = 0.0
    call: float = 0.0
    poll: float = 0.0
    generator_slowdown: float = 1.0
    trainer_slowdown: float = 1.0


def lognormal(mean: float, longest: int, sigma: float) -> Lengths:
    """exp(N(μ, sigma²)) tokens, cut at `longest`, with μ such that the mean after it is `mean`.

    `mean` must be above 1 and below `longest`.
    """
    grid = np.array([NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(4096)])
    low, high = -sigma * 10, math.log(longest) + sigma * 10
    for _ in range(60):
        mu = (low + high) / 2
        if np.minimum(np.exp(mu + sigma * grid), longest).mean() < mean:
            low = mu
        else:
            high = mu
    return lambda rng: max(1, min(longest, round(rng.lognormvariate(mu, sigma))))


@dataclass(frozen=True)
class Outcome:
    """Results of a simulated run, without the first updates, in which the pipeline fills.

    Args:
        seconds_per_update, tokens_per_second: speed; tokens are trained completion tokens.
        generator_idle, trainer_idle: share of the time, over all generators, and of the trainer.
        utilization: live sequences over a generator's slots, averaged over decode steps.
        staleness_mean, staleness_max: age of trained tokens, in versions.
    """

    seconds_per_update: float
    tokens_per_second: float
    generator_idle: float
    trainer_idle: float
    utilization: float
    staleness_mean: float
    staleness_max: int


class Simulation:
    """One run of `config.pipeline.updates` updates.

    Args:
        config: its `pipeline` sizes, numbers of workers, `steps_per_call` and seed are used.
        costs: seconds of each worker's work.
        lengths: draws the tokens of each completion, at most `l_max`, from its request's seed.
        prompt_tokens: tokens of every prompt.
    """

    def __init__(
        self, config: Config, costs: Costs, lengths: Lengths, prompt_tokens: int = 1
    ) -> None:
        pipeline = config.pipeline.model_copy(update={"diversity": "none"})
        self.config = config.model_copy(update={"pipeline": pipeline})
        self.costs, self.lengths = costs, lengths
        prompt = [0] * prompt_tokens
        self.ledger = Ledger(self.config, _Endless(), lambda problem: prompt)
        self.prompt_tokens = prompt_tokens
        self.now = 0.0
        # By (group, index) of a finished completion: its tokens by the version that sampled them.
        self.versions: dict[tuple[int, int], Counter[int]] = {}
        self.ended: list[Array] = []  # totals at the end of each update, as in `trained`
        self.ages: list[Counter[int]] = []  # trained tokens by age, for each update
        workers = config.generator.workers
        self.generators = [_Generator(self, number) for number in range(workers)]
        self.loads = Loads(workers)
        self.moved: set[int] = set()  # generators that may have something to begin
        self.verifiers = [0.0] * config.verifier.workers  # time at which each is free
        self.formed: deque[Batch] = deque()  # the queued batch, and one that waits for the queue
        self.training = _Training(self)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def run(self, skip: int = 3, until: int | None = None) -> Outcome:
        """Simulate all updates, or the first `until`; figures leave out the first `skip`."""
        self._settle()
        while len(self.ages) < (until or self.config.pipeline.updates):
            self.now, _, act = heapq.heappop(self._events)
            act()
            self._settle()
        return self._outcome(skip)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Schedule an event `seconds` from now."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, act))

    def take(self, completion: Completion) -> None:
        """Take a finished completion; a complete group goes to the first free verifier."""
        if group := self.ledger.take(completion):
            seconds = self.costs.verify * len(group.completions)
            first = min(range(len(self.verifiers)), key=self.verifiers.__getitem__)
            self.verifiers[first] = max(self.now, self.verifiers[first]) + seconds
            known = self.verifiers[first] - self.now + self.costs.latency
            self.after(known, lambda: self._grade(group))

    def _grade(self, group: Group) -> None:
        self.ledger.grade(group, [Verdict(1.0, {}, "right") for _ in group.completions])

    def _settle(self) -> None:
        """Run the steps of the pipeline's loops that a change makes possible."""
        ledger = self.ledger
        if room := ledger.room():
            for group in ledger.open(room):
                self.generators[self.loads.least()].submit(group.requests)
        for number in sorted(self.moved):
            self.generators[number].go()
        self.moved.clear()
        while (
            len(self.formed) < 2
            and ledger.next_version < self.config.pipeline.updates
            and ledger.batch_is_complete
        ):
            self.formed.append(ledger.batch())
        self.training.go()

    def trained(self, batch: Batch) -> None:
        """Count an update whose weights all generators have."""
        ages: Counter[int] = Counter()
        for completion in batch.completions:
            for version, n in self.versions.pop((completion.group, completion.index)).items():
                ages[batch.version - version] += n
        self.ages.append(ages)
        each = [(g.worked(), g.steps, g.live_steps) for g in self.generators]
        self.ended.append(np.array([self.now, self.training.worked, *np.sum(each, axis=0)]))

    def _outcome(self, skip: int) -> Outcome:
        totals = self.ended[-1] - (self.ended[skip - 1] if skip else 0.0)
        seconds, training, generating, steps, live = totals.tolist()
        ages: Counter[int] = sum(self.ages[skip:], Counter())
        tokens = ages.total()
        return Outcome(
            seconds_per_update=seconds / len(self.ages[skip:]),
            tokens_per_second=tokens / seconds,
            generator_idle=max(0.0, 1 - generating / (seconds * len(self.generators))),
            trainer_idle=max(0.0, 1 - training / seconds),
            utilization=live / max(1.0, steps * slots(self.config)),
            staleness_mean=sum(age * n for age, n in ages.items()) / tokens,
            staleness_max=max(ages),
        )


@dataclass
class _Flight:
    """One request in a generator; `left` is the number of tokens still to be generated."""

    request: Request
    left: int
    versions: Counter[int] = field(default_factory=Counter)  # tokens by version


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

    def worked(self) -> float:
        now = self.simulation.now
        return self._worked + (max(0.0, now - self._began) if self.at_work else 0.0)

    def submit(self, requests: list[Request]) -> None:
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
            flight.versions[self.version] += n
        done = [f for f in self._flights if not f.left]
        self._flights = [f for f in self._flights if f.left]
        self._cached = (self._cached + steps)[self._left > steps]
        self._left = (self._left - steps)[self._left > steps]
        self._count(-len(done))
        for flight in done:
            r = flight.request
            simulation.versions[r.group, r.index] = flight.versions
            empty = ints(), floats(), ints()
            simulation.take(Completion(r.group, r.index, r.prompt_ids, *empty, "stop"))


class _Training:
    """The trainer: trains on a batch, then publishes its weights. Sending them overlaps with the
    next batch, whose weights wait until all generators have these."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.batch: Batch | None = None
        self.at_work = False
        self.worked = 0.0  # seconds
        self._left = 0.0  # seconds of work left of the update, at full speed
        self._pace, self._since = 1.0, 0.0
        self._turn = 0
        self._sending = False  # the previous update's weights
        self._due = False  # True if weights wait until that is done

    def go(self) -> None:
        """Begin the next batch, or adapt the end of the current one to the trainer's speed."""
        simulation = self.simulation
        if self.batch is None and simulation.formed:
            self.batch = simulation.formed.popleft()
            runs = [simulation.versions[c.group, c.index] for c in self.batch.completions]
            ranks = simulation.config.trainer.ranks
            lengths = [versions.total() for versions in runs[::ranks]]
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
        self.worked += passed
        self._since = self.simulation.now

    def _end(self, turn: int) -> None:
        if turn == self._turn:  # the pace did not change meanwhile
            self._pass()
            self.at_work = False
            self._due = True
            if not self._sending:
                self._publish()

    def _publish(self) -> None:
        self._due, self._sending = False, True
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
                self._sent(batch)

        for generator in simulation.generators:
            simulation.after(simulation.costs.fetch, partial(generator.offer, taken))

    def _sent(self, batch: Batch) -> None:
        self._sending = False
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
) -> Outcome:
    """Simulate one run. Parameters as for `Simulation` and its `run`."""
    return Simulation(config, costs, lengths, prompt_tokens).run(skip, until)
