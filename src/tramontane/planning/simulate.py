"""Discrete-event simulation of the pipeline, from the costs of its workers' work in seconds.

The ledger, and with it the staleness bound, is the real one; the workers are only clocks. The
simulation follows `controller.pipeline` and `controller.generators`: a group goes whole to the
generator with the fewest requests; generators poll, with `AHEAD` polls submitted in advance;
weights are taken between two polls; one verifier grades a group; one batch is queued and one waits
to enter the queue; sending weights overlaps with the next update.
"""

from __future__ import annotations

import gc
import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np

from tramontane.batches import Batch
from tramontane.config import Config
from tramontane.controller.generators import Loads, slots
from tramontane.controller.ledger import Ledger
from tramontane.controller.pooled_generator import AHEAD
from tramontane.tokens import floats, ints
from tramontane.types import Completion, Problem, Verdict

Array = np.ndarray
Lengths = Callable[[random.Random], int]  # draws the tokens of one completion
# Made once, as nothing changes them: the verdict on every completion, and its tokens.
RIGHT = Verdict(1.0, {}, "right")
NOTHING = ints(), floats(), ints()
PARTS = 16  # of an update, each at the speed that the trainer has when it begins


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
        generator_slowdown, trainer_slowdown: how many times longer each takes while the other
            works; 1 if they share nothing.
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
    """exp(N(μ, sigma²)) tokens, cut at `longest`; μ is such that the mean after the cut is `mean`.

    `mean` must be above 1 and below `longest`.
    """
    grid = np.array([NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(4096)])

    def excess(mu: float) -> float:
        return float(np.minimum(np.exp(mu + sigma * grid), longest).mean() - mean)

    low, high = -sigma * 10, math.log(longest) + sigma * 10
    while (mu := (low + high) / 2) not in (low, high):  # to the last bit
        low, high = (mu, high) if excess(mu) < 0 else (low, mu)
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
        self.costs, self.lengths, self.prompt_tokens = costs, lengths, prompt_tokens
        endless: Any = SimpleNamespace(
            next=lambda *_: Problem("", "math", ""), note=lambda *_: None, records=list, state=dict
        )
        self.ledger = Ledger(self.config, endless, lambda problem: [0] * prompt_tokens)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
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
        self.trainer = _Trainer(self)

    def run(self, skip: int = 3, until: int | None = None) -> Outcome:
        """Simulate all updates, or the first `until`; figures exclude the first `skip`."""
        self._settle()
        while len(self.ages) < (until or self.config.pipeline.updates):
            self.now, _, act = heapq.heappop(self._events)
            act()
            self._settle()
        return self._outcome(skip)

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        """Schedule an event `seconds` from now."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, act))

    def take(self, completion: Completion) -> None:
        """Take a finished completion; a complete group goes to the first free verifier."""
        if group := self.ledger.take(completion):
            seconds = self.costs.verify * len(group.completions)
            first = min(range(len(self.verifiers)), key=self.verifiers.__getitem__)
            self.verifiers[first] = max(self.now, self.verifiers[first]) + seconds
            verdicts = [RIGHT] * len(group.completions)
            known = self.verifiers[first] - self.now + self.costs.latency
            self.after(known, lambda: self.ledger.grade(group, verdicts))

    def trained(self, batch: Batch) -> None:
        """End an update, whose weights all generators have."""
        self.ledger.trained(batch)
        self.ledger.generator_version = batch.version + 1
        ages: Counter[int] = Counter()
        for completion in batch.completions:
            for version, n in self.versions.pop((completion.group, completion.index)).items():
                ages[batch.version - version] += n
        self.ages.append(ages)
        each = [(g.worked, g.steps, g.live_steps) for g in self.generators]
        self.ended.append(np.array([self.now, self.trainer.worked, *np.sum(each, axis=0)]))

    def _settle(self) -> None:
        """Run the steps of the pipeline's loops that a change makes possible."""
        ledger = self.ledger
        if room := ledger.room():
            for group in ledger.open(room):
                self.generators[self.loads.least()].submit(group.requests)
        for number in sorted(self.moved):
            self.generators[number].ask_for_polls()
        self.moved.clear()
        while (
            len(self.formed) < 2
            and ledger.next_version < self.config.pipeline.updates
            and ledger.batch_is_complete
        ):
            self.formed.append(ledger.batch())
        self.trainer.wake()

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


class _Worker:
    """A clock: `live` yields the seconds of each wait, or infinity to wait for `wake`."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.costs = simulation, simulation.costs
        self._waits, self._life = True, self.live()
        self._worked = self._until = 0.0

    def live(self) -> Iterator[float]:
        raise NotImplementedError

    @property
    def worked(self) -> float:
        """Seconds of work so far."""
        return self._worked - max(0.0, self._until - self.simulation.now)

    @property
    def at_work(self) -> bool:
        return self.simulation.now < self._until

    def work(self, seconds: float, pause: float = 0.0) -> float:
        """Count work that begins after a pause; returns the seconds of both."""
        self._worked += seconds
        self._until = self.simulation.now + pause + seconds
        return pause + seconds

    def wake(self) -> None:
        if self._waits:
            self._resume()

    def _resume(self) -> None:
        seconds = next(self._life)
        self._waits = math.isinf(seconds)
        if not self._waits:
            self.simulation.after(seconds, self._resume)


@dataclass
class _Decoding:
    """One request in a slot."""

    request: Completion
    length: int  # of its completion
    counted: int = 0  # tokens of it in `versions`
    versions: Counter[int] = field(default_factory=Counter)  # tokens by version

    def count(self, version: int, sampled: int) -> None:
        """Count what has been sampled since the last call, by one version."""
        if sampled > self.counted:
            self.versions[version] += sampled - self.counted
            self.counted = sampled


class _Generator(_Worker):
    """Runs the polls that `controller.generators` submits, one after another."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        super().__init__(simulation)
        self.number = number
        self.requests = 0  # unfinished requests, as known to the controller
        self.steps = self.live_steps = 0
        self.offered: Callable[[], object] | None = None  # called when new weights are taken
        self._unsent: list[Completion] = []
        self._mail: deque[list[Completion]] = deque()  # submitted polls that have not begun
        self._waiting: deque[Completion] = deque()  # for a slot
        self._decoding: list[_Decoding] = []
        self._left = self._cached = np.zeros(0)

    def submit(self, requests: list[Completion]) -> None:
        self._count(len(requests))
        self._unsent += requests

    def offer(self, taken: Callable[[], object]) -> None:
        """Offer new weights, to be taken between two polls."""
        self.offered = taken
        self.simulation.moved.add(self.number)

    def ask_for_polls(self) -> None:
        """Submit polls up to `AHEAD`, and begin the next work if the generator is free."""
        if self.requests:
            while len(self._mail) + (not self._waits) < AHEAD:
                self._mail.append(self._unsent)
                self._unsent = []
        self.wake()

    def _count(self, more: int) -> None:
        self.requests += more
        self.simulation.loads.note(self.number, self.requests, 0)
        self.simulation.moved.add(self.number)

    def live(self) -> Iterator[float]:
        version, steps = 0, self.simulation.config.generator.steps_per_call
        while True:
            if self.offered:
                yield self.work(self.costs.swap)
                for sequence, left in zip(self._decoding, self._left.tolist(), strict=True):
                    sequence.count(version, sequence.length - int(left))
                taken, self.offered = self.offered, None
                version += 1
                taken()
            elif self._mail:
                self._waiting += self._mail.popleft()
                seconds = self._admit() + self._decode(steps)
                if self.simulation.trainer.at_work:
                    yield self.work(seconds * self.costs.generator_slowdown, self.costs.poll)
                else:
                    yield self.work(seconds)
                self._finish(steps, version)
            self.simulation.moved.add(self.number)
            yield math.inf

    def _admit(self) -> float:
        """Move requests into free slots; returns the seconds of their prefill."""
        simulation, waiting = self.simulation, self._waiting
        free = slots(simulation.config) - len(self._decoding)
        requests = [waiting.popleft() for _ in range(min(free, len(waiting)))]
        if not requests:
            return 0.0
        lengths = [simulation.lengths(random.Random(r.seed)) for r in requests]
        self._decoding += [_Decoding(r, n) for r, n in zip(requests, lengths, strict=True)]
        self._left = np.append(self._left, lengths)
        self._cached = np.append(self._cached, [simulation.prompt_tokens] * len(requests))
        # Completions of a group share their prompt.
        return self.costs.prefill(simulation.prompt_tokens * len({r.group for r in requests}))

    def _decode(self, count: int) -> float:
        """Seconds of the next `count` steps, or of fewer if no sequence is left."""
        if not self._decoding:
            return 0.0
        steps, order = np.arange(count), np.argsort(self._left)
        gone = np.searchsorted(self._left[order], steps, side="right")  # before each step
        live = len(order) - gone[gone < len(order)]
        after = np.append(np.cumsum(self._cached[order][::-1])[::-1], 0.0)
        cached = after[gone[: len(live)]] + steps[: len(live)] * live
        self.steps += len(live)
        self.live_steps += int(live.sum())
        return self.costs.call + float(self.costs.decode(live, cached).sum())

    def _finish(self, steps: int, version: int) -> None:
        """End `steps` steps: count the tokens of the completions that ended, and hand them over."""
        self._left, self._cached = self._left - steps, self._cached + steps
        goes_on, done = self._left > 0, list[_Decoding]()
        if not goes_on.all():
            decoding, self._decoding = self._decoding, []
            for sequence, more in zip(decoding, goes_on.tolist(), strict=True):
                (self._decoding if more else done).append(sequence)
            self._left, self._cached = self._left[goes_on], self._cached[goes_on]
        self._count(-len(done))
        for sequence in done:
            r = sequence.request
            sequence.count(version, sequence.length)
            self.simulation.versions[r.group, r.index] = sequence.versions
            self.simulation.take(Completion(r.group, r.index, r.prompt_ids, *NOTHING, "stop"))


class _Trainer(_Worker):
    """Trains on a batch, then publishes its weights. Sending them overlaps with the next batch,
    whose weights wait until all generators have these."""

    def live(self) -> Iterator[float]:
        simulation, ranks = self.simulation, self.simulation.config.trainer.ranks
        sending: set[int] = set()  # generators without the published weights
        while True:
            while not simulation.formed:
                yield math.inf
            batch = simulation.formed.popleft()
            runs = [simulation.versions[c.group, c.index] for c in batch.completions[::ranks]]
            prompts = simulation.prompt_tokens * len(batch.groups) // ranks
            seconds = self.costs.train([run.total() for run in runs], prompts)
            for _ in range(PARTS):
                shared = any(generator.at_work for generator in simulation.generators)
                pace = self.costs.trainer_slowdown if shared else 1.0
                yield self.work(pace * seconds / PARTS)
            while sending:
                yield math.inf
            yield self.costs.publish
            simulation.ledger.trained_version += 1
            sending |= {generator.number for generator in simulation.generators}
            for generator in simulation.generators:
                taken = partial(self._taken, sending, generator.number, batch)
                simulation.after(self.costs.fetch, partial(generator.offer, taken))

    def _taken(self, sending: set[int], number: int, batch: Batch) -> None:
        sending.discard(number)
        if not sending:
            self.simulation.trained(batch)


def simulate(
    config: Config,
    costs: Costs,
    lengths: Lengths,
    prompt_tokens: int = 1,
    skip: int = 3,
    until: int | None = None,
) -> Outcome:
    """Simulate one run. Parameters as for `Simulation` and its `run`.

    Garbage is not collected meanwhile, which takes half of the time: a run makes a million objects,
    and those that it drops are not in cycles.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return Simulation(config, costs, lengths, prompt_tokens).run(skip, until)
    finally:
        if collects:
            gc.enable()
