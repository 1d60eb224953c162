"""The loads of generators, against a look at all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tramontane.config import Config
from tramontane.controller.generators import FEW, POLLS_PER_SECOND, poll_seconds
from tramontane.controller.loads import Loads


@given(
    generators=st.integers(1, 6),
    notes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)), max_size=80),
)
def test_the_least_loaded_generator_is_the_first_of_those_with_fewest_requests(
    generators: int, notes: list[tuple[int, int, int]]
) -> None:
    loads, known = Loads(generators), [(0, 0)] * generators
    for place, requests, evaluating in notes:
        number = place % generators
        known[number] = requests, min(requests, evaluating)
        loads.note(number, *known[number])
        assert loads.total == sum(load for load, _ in known)
        assert loads.evaluating == sum(load for _, load in known)
        assert loads.least() == min(range(generators), key=lambda n: known[n][0])


def test_polls_of_many_generators_are_longer_and_vary_but_not_in_a_synchronous_run() -> None:
    def seconds(generators: int, bound: int) -> float:
        return poll_seconds(
            Config.model_validate(
                {
                    "pipeline": {"max_staleness": bound, "n_async": 16 * generators},
                    "generator": {"workers": generators},
                }
            )
        )

    assert seconds(FEW, 2) == seconds(10_000, 0) == 0.0
    mean = 10_000 / POLLS_PER_SECOND
    found = [seconds(10_000, 2) for _ in range(200)]
    assert all(0.5 * mean <= poll <= 1.5 * mean for poll in found)
    # Polls that began together end over about their mean length.
    assert max(found) - min(found) > 0.9 * mean
