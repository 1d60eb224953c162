"""What a run's summary says of the evaluations before and after it."""

from pathlib import Path
from typing import Any

import pytest

from tramontane.config import HELD_OUT, Config
from tramontane.config.section import sealed
from tramontane.evaluation.evaluate import summarize
from tramontane.run.summary import summarize_run
from tramontane.view.runs import Run

ROW = {
    "group": 0, "problem": "1 + 1?", "verdict": "right", "reward": 1.0,
    "parts": {"language": 0.0}, "reason": "",
    "thinking_tokens": 3, "tokens": 5, "answer": "2", "domain": "math", "language": "en",
    "difficulty": 1, "finish_reason": "stop",
}  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "shown"),
    [
        ({}, {"format_rate", "language_rate"}),
        ({"verifier": {"reward": {"language": 0}}}, {"format_rate"}),
        (
            {"conversation": {"reward": "last"}, "data": {"environment": "guessing"}},
            {"mean_reward"},
        ),
    ],
)
def test_rates_that_are_not_rewarded_are_not_shown(
    sections: dict[str, Any], shown: set[str], tmp_path: Path
) -> None:
    data = {"train": "rows.jsonl"} | sections.pop("data", {})
    config = Config.model_validate({"model": "tiny", "data": data} | sections)
    (tmp_path / "config.yaml").write_text(sealed(config))
    assert set(Run(tmp_path, 0).rates) == shown | {"mean_thinking_tokens"}
    measured = {when: {HELD_OUT: summarize([ROW])} for when in ("before", "after")}
    found = summarize_run([], measured, 1.0, config)
    assert found.keys() & {"format_rate", "language_rate", "mean_reward"} == shown
    assert found["mean_thinking_tokens"] == {"before": 3.0, "after": 3.0}


def test_answers_that_an_environment_judged_are_not_voted_on() -> None:
    samples = [ROW | {"answer": None, "verdict": verdict} for verdict in ("right", "wrong")]
    assert not summarize(samples).maj_at_k
    assert (
        summarize([ROW, ROW | {"answer": None, "verdict": "malformed", "text": ""}])
        .maj_at_k[2]
        .value
        == 1
    )
