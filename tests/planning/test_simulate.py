"""The simulated pipeline: closed forms for its times, and its invariants at any sizes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.costs import DecodeCurve, TrainCurve, geometric
from tramontane.config import Config
from tramontane.planning.simulate import Costs, Lengths, Simulation, lognormal, simulate
from tramontane.status import GroupStatus

STEP, TOKEN = 0.01, 1e-3


def config(generators: int = 1, verifiers: int = 1, **pipeline: Any) -> Config:
    sizes = {"updates": 12, "n_async": 32, "n_batch": 32, "group_size": 8, "l_cache": 0}
    return Config.model_validate(
        {
            "data": {"train": "playground:"},
            "pipeline": sizes | pipeline,
            "generator": {"workers": generators},
            "verifier": {"workers": verifiers},
        }
    )


def costs(step: float = STEP, token: float = TOKEN, **more: float) -> Costs:
    return Costs(
        lambda live, cached: np.full(len(live), step), lambda tokens: 0.0, TrainCurve(token), **more
    )


def constant(tokens: int) -> Lengths:
    return lambda rng: tokens


def test_a_synchronous_update_takes_the_sum_of_all_work() -> None:
    """64 decode steps in polls of 8, then 4 groups graded in turn, then 32 × 64 + 4 × 10 tokens
    trained on, then weights."""
    sums = costs(publish=0.2, fetch=0.1, swap=0.2, verify=0.001, call=0.002)
    sizes = config(max_staleness=0, updates=99)  # far from its end, where work runs out
    found = simulate(sizes, sums, constant(64), prompt_tokens=10, until=12)
    work = 64 * STEP + 8 * 0.002 + 32 * 0.001 + (32 * 64 + 4 * 10) * TOKEN + 0.2 + 0.3
    assert found.seconds_per_update == pytest.approx(work)
    assert found.tokens_per_second == pytest.approx(32 * 64 / work)
    assert found.generator_idle == pytest.approx(1 - (64 * STEP + 8 * 0.002 + 0.2) / work)
    assert found.trainer_idle == pytest.approx(1 - (32 * 64 + 4 * 10) * TOKEN / work)
    assert (found.staleness_max, found.utilization) == (0, 1.0)


def test_only_a_synchronous_run_waits_for_latency() -> None:
    """A batch in transit occupies no worker: a pipeline that runs ahead has other batches."""
    late, paid = costs(latency=0.4), costs()
    synchronous = config(max_staleness=0, updates=99)
    there = simulate(synchronous, paid, constant(64), until=12)
    found = simulate(synchronous, late, constant(64), until=12)
    assert found.seconds_per_update == pytest.approx(there.seconds_per_update + 0.4)
    ahead = config(updates=400, n_async=128, max_staleness=8)
    there = simulate(ahead, paid, constant(64), skip=20, until=40)
    found = simulate(ahead, late, constant(64), skip=20, until=40)
    assert found.seconds_per_update == pytest.approx(there.seconds_per_update, rel=0.01)


@pytest.mark.parametrize(("step", "token"), [(0.01, 1e-4), (0.01, 1e-3), (0.05, 1e-3)])
def test_an_asynchronous_update_takes_the_longer_of_both_works(step: float, token: float) -> None:
    sizes = config(updates=400, max_staleness=8)  # far from its end, where work runs out
    found = simulate(sizes, costs(step, token), constant(64), skip=20, until=40)
    generating, training = 64 * step, (32 * 64 + 4) * token
    # Whole updates in 20.
    assert found.seconds_per_update == pytest.approx(max(generating, training), rel=0.03)
    if generating > training:
        assert found.generator_idle == pytest.approx(0)
        assert found.trainer_idle == pytest.approx(1 - training / generating, abs=0.03)
    else:
        assert found.trainer_idle == pytest.approx(0)
        assert found.generator_idle == pytest.approx(1 - generating / training, abs=0.03)


def test_generators_share_the_work_and_no_queue_of_weights_forms() -> None:
    one = simulate(config(n_async=64, max_staleness=4, updates=30), costs(token=1e-5), constant(64))
    two = simulate(
        config(2, n_async=64, max_staleness=4, updates=30),
        costs(step=STEP / 2, token=1e-5),
        constant(64),
    )
    assert two.seconds_per_update == pytest.approx(one.seconds_per_update / 2, rel=0.05)


def test_generator_and_trainer_slow_each_other_down() -> None:
    slow = costs(generator_slowdown=2.0, trainer_slowdown=3.0)
    alone = simulate(config(max_staleness=0), slow, constant(64))
    # In turn, the two never work at the same time.
    assert alone.seconds_per_update == pytest.approx(64 * STEP + (32 * 64 + 4) * TOKEN)
    slowed = simulate(config(max_staleness=8, updates=60), slow, constant(64), until=20)
    free = simulate(config(max_staleness=8, updates=60), costs(), constant(64), until=20)
    assert free.seconds_per_update < slowed.seconds_per_update
    assert slowed.seconds_per_update <= 3.001 * (32 * 64 + 4) * TOKEN


def test_completions_wait_for_a_slot() -> None:
    """With half as many slots as completions in flight, a round takes twice as many steps."""
    sizes = config(max_staleness=0)
    sizes.generator.slots = 16
    found = simulate(sizes, costs(), constant(64))
    assert found.seconds_per_update == pytest.approx(2 * 64 * STEP + (32 * 64 + 4) * TOKEN)
    assert found.utilization == pytest.approx(1.0)


def test_decode_steps_cost_by_live_sequences_and_cached_tokens() -> None:
    """Lengths 8 and 24 in one group: 8 steps of both, 16 of one alone, each cached token a µs."""
    seen: list[tuple[float, float]] = []
    curve = DecodeCurve((1, 2), (0.1, 0.3), (1e-6, 1e-6))

    def decode(live: np.ndarray, cached: np.ndarray) -> np.ndarray:
        seen.extend(zip(live.tolist(), cached.tolist(), strict=True))
        return curve(live, cached)

    sizes = {"n_async": 2, "n_batch": 2, "group_size": 2, "max_staleness": 0, "updates": 2}
    lengths = iter([8, 24] * 2)
    paid = Costs(decode, lambda tokens: 0.0, TrainCurve(0))
    found = simulate(config(**sizes), paid, lambda rng: next(lengths), prompt_tokens=5, skip=1)
    expected = [(2.0, 2 * (5.0 + s)) for s in range(8)] + [(1.0, 5.0 + s) for s in range(8, 24)]
    assert seen == expected * 2
    cached = sum(c for _, c in expected)
    assert found.seconds_per_update == pytest.approx(8 * 0.3 + 16 * 0.1 + 1e-6 * cached)


@settings(max_examples=60, deadline=None)
@given(
    generators=st.integers(1, 3),
    verifiers=st.integers(1, 2),
    groups_in_flight=st.integers(3, 12),
    groups_per_batch=st.integers(1, 6),
    bound=st.integers(0, 4),
    longest=st.integers(1, 120),
    token=st.sampled_from([0.0, 1e-4, 1e-2]),
)
@example(2, 1, 3, 5, 1, 1, 0.0)  # one of two generators has two of three groups
def test_no_group_is_lost_and_no_token_older_than_the_bound(
    generators: int,
    verifiers: int,
    groups_in_flight: int,
    groups_per_batch: int,
    bound: int,
    longest: int,
    token: float,
) -> None:
    sizes = {
        "updates": 8,
        "n_async": 4 * groups_in_flight,
        "n_batch": 4 * groups_per_batch,
        "group_size": 4,
        "max_staleness": bound,
    }
    work = costs(token=token, verify=0.01, fetch=0.01, swap=0.01)
    lengths = geometric(0.03, longest)
    run = Simulation(config(generators, verifiers, **sizes), work, lengths, 3)
    forget = run.ledger.trained

    def count(batch: Any) -> Any:
        trained.extend(g.id for g in batch.groups)
        return forget(batch)

    trained: list[int] = []
    run.ledger.trained = count  # type: ignore[method-assign]
    found = run.run(skip=0)
    ledger = run.ledger
    pending = set(ledger.outstanding) | set(ledger.groups.of(GroupStatus.BATCHED))
    assert sorted([*trained, *pending]) == list(range(ledger.next_group))
    assert len(trained) == 8 * groups_per_batch
    assert 0 <= found.staleness_mean <= found.staleness_max <= bound
    assert 0 < found.utilization <= 1
    for share in (found.generator_idle, found.trainer_idle):
        assert 0 <= share <= 1
    tokens = found.tokens_per_second * found.seconds_per_update * 8
    drawn = [lengths(random.Random(_seed(group, i))) for group in trained for i in range(4)]
    assert tokens == pytest.approx(sum(drawn))


def _seed(group: int, index: int) -> int:
    from tramontane.controller.ledger import _seed as seed

    return seed(0, group, index)


def test_lengths_have_the_given_mean_and_maximum() -> None:
    rng = random.Random(0)
    draw = lognormal(300, 1000, 0.8)
    drawn = [draw(rng) for _ in range(20_000)]
    assert max(drawn) == 1000 and np.mean(drawn) == pytest.approx(300, rel=0.02)
    draw = geometric(0.02, 100)
    drawn = [draw(rng) for _ in range(20_000)]
    assert (min(drawn), max(drawn)) == (1, 100)
    assert np.mean(drawn) == pytest.approx((1 - 0.98**100) / 0.02, rel=0.02)
