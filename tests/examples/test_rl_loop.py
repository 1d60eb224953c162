"""The example of a synchronous loop learns."""

import math

import pytest

from examples import rl_loop

pytestmark = pytest.mark.slow


def test_the_loop_learns_within_a_few_updates(capsys: pytest.CaptureFixture[str]) -> None:
    printed = rl_loop.run(updates=3, prompts=8, held_out=12, group_size=8)
    rewards, (before, after) = printed["reward"], printed["pass@1"]
    assert len(rewards) == 3 and all(math.isfinite(r) and 0 <= r <= 1.1 for r in rewards)
    # Over four seeds the reward rose by 0.15 to 0.24 from the first update to the third.
    assert rewards[-1] > rewards[0] + 0.05
    assert after > before
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [f"update {n:2}" for n in range(1, 4)]
