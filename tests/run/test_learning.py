"""A short run of the whole loop on the shipped base model learns."""

from pathlib import Path

import pytest

from tests.runs import small_config
from tramontane.run.folder import RunFolder
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train

pytestmark = pytest.mark.slow


ENGINES = ["slots", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_short_run_raises_every_reward(
    tmp_path: Path, engine: str, request: pytest.FixtureRequest
) -> None:
    if engine == "vllm":
        request.getfixturevalue("vllm_environment")
    config = small_config(
        tmp_path,
        data={"playground": {"levels": [1, 3], "languages": ["en", "fr", "de", "ru"]}},
        pipeline={
            "updates": 10,
            "n_async": 96,
            "n_batch": 96,
            "group_size": 16,
            "max_staleness": 0,  # repeatable: a test must not hang on timing
            "l_max": 160,
        },
        trainer={"learning_rate": 6e-4, "dtype": "bfloat16"},
        generator={"kind": engine},
    )
    train(config, QuietScreen())
    metrics = RunFolder(tmp_path).metrics()

    def mean(key: str, updates: slice) -> float:
        rows = metrics[updates]
        return sum(row[key] for row in rows) / len(rows)

    first, last = slice(0, 3), slice(-3, None)
    # With seeds 0 and 1 a run of this size gained 0.38 and 0.28.
    assert mean("pass_rate", last) > mean("pass_rate", first) + 0.15
    assert mean("format_rate", last) > mean("format_rate", first)
    assert mean("thinking_tokens", last) > mean("thinking_tokens", first)
    assert metrics[0]["mismatch_age_0"] < 0.02
