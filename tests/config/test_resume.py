"""Which keys may change when a run is resumed."""

from typing import Any

import pytest

from tramontane.config import Config, differences, parse_settings
from tramontane.config.reference import Entry, walk
from tramontane.errors import InputError

STAGES: list[dict[str, Any]] = [
    {"name": "one", "until": {"updates": 2}},
    {"name": "two", "eps_high": 0.3},
]


def changes(*overrides: str, **raw: Any) -> dict[str, tuple[Any, Any, bool]]:
    before = Config.model_validate(raw)
    after = parse_settings(Config, before.model_dump(mode="json"), list(overrides), "test")
    return {c.key: (c.before, c.after, c.mark.may_change) for c in differences(before, after)}


def test_differences_are_found_at_the_keys_themselves() -> None:
    assert changes("trainer.learning_rate=1e-5", "name=run", "pipeline.l_max=300") == {
        "pipeline.l_max": (256, 300, False),
        "trainer.learning_rate": (None, 1e-5, True),
    }
    assert changes() == {}


@pytest.mark.parametrize(
    "override",
    [
        "trainer.objective.magistral.eps_high=0.3",
        "trainer.objective.magistral.eps_low=0.1",
        "trainer.microbatch_tokens=64",
        "trainer.ranks=2",
        "trainer.max_nonfinite_steps=9",
        "timeouts.batch=5",
        "generator.workers=2",
        "verifier.workers=3",
        "verifier.timeout_s=9",
        "placement.kind=ray",
        "placement.trainer.cpus=2",
        "evaluation.every=7",
        "checkpoint.keep=9",
        "pipeline.updates=7",
        "pipeline.min_kept_share=0.2",
    ],
)
def test_what_may_change(override: str) -> None:
    (may,) = [may for _, _, may in changes(override).values()]
    assert may


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "model=other",
        "data.train=other.jsonl",
        "pipeline.group_size=8",
        "pipeline.n_batch=512",
        "pipeline.max_staleness=1",
        "generator.temperature=0.7",
        "verifier.reward.length=0",
        "trainer.objective.magistral.loss_normalization=constant",
        "evaluation.temperature=1",
    ],
)
def test_what_may_not_change(override: str) -> None:
    (may,) = [may for _, _, may in changes(override).values()]
    assert not may


def test_keys_of_a_stage_are_reached_by_its_number() -> None:
    assert changes("stages.1.eps_high=0.26", stages=STAGES) == {
        "stages.1.eps_high": (0.3, 0.26, True)
    }
    assert changes("stages.0.until.updates=3", stages=STAGES) == {
        "stages.0.until.updates": (2, 3, False)
    }
    for wrong in ("stages.2.eps_high=0.3", "stages.one.eps_high=0.3", "stages.0=1"):
        with pytest.raises(InputError, match="not a section"):
            changes(wrong, stages=STAGES)


def test_every_fixed_key_has_a_reason() -> None:
    keys = [key for entry in walk(Entry("", "", Config)) for key in entry.keys]
    assert all(key.on_resume.may_change or key.on_resume.fixed_because for key in keys)
    assert "may change on resume" in next(k for k in keys if k.path == "pipeline.updates").summary
    assert "may change" not in next(k for k in keys if k.path == "pipeline.l_max").summary
