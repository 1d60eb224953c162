"""Sizes of a run, and warnings, before it starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.runs import small_config
from tramontane.config.device import dtype_warnings
from tramontane.errors import InputError
from tramontane.run.input import RunInput, read_input
from tramontane.run.prepare import prepare, resolved


@pytest.mark.parametrize(
    ("devices", "named"),
    [
        ({}, []),
        ({"generator": "cuda"}, ["generator.dtype"]),
        ({"generator": "cuda:1", "trainer": "cuda"}, ["generator.dtype", "trainer.dtype"]),
    ],
)
def test_float32_on_a_gpu_is_warned_of(tmp_path: Path, devices: dict, named: list[str]) -> None:
    """The default there is bfloat16."""
    given = {name: {"device": device} for name, device in devices.items()}
    assert not dtype_warnings(small_config(tmp_path, **given))
    given = {name: {"device": device, "dtype": "float32"} for name, device in devices.items()}
    warnings = dtype_warnings(small_config(tmp_path, **given))
    assert len(warnings) == bool(named)
    assert all(name in warnings[0] for name in named)


@pytest.mark.parametrize(
    ("generator", "slots", "mib"),
    [
        ({}, 32, 72),  # each of 32 slots in lanes of 352 and 112, of 5 KiB a position
        ({"slots": 4}, 4, 9),
        ({"kv_cache_mib": 50}, 22, 50),
        ({"kv_cache_mib": 50, "slots": 4}, 4, 9),
    ],
)
def test_slots_follow_from_the_memory_limit(
    tmp_path: Path, generator: dict, slots: int, mib: int
) -> None:
    sizes = {"n_async": 32}
    lines = resolved(prepare(small_config(tmp_path, pipeline=sizes, generator=generator)))
    assert lines["generators"] == f"1 × {slots} slots"
    assert (
        lines["KV cache"] == f"{mib} MiB at most (5.0 KiB a token, lanes of all lengths, each full)"
    )


def test_learning_rates_by_the_models_size_are_shown_and_recorded(tmp_path: Path) -> None:
    prepared = prepare(
        small_config(tmp_path, trainer={"learning_rate": None}, cold_start={"steps": 1})
    )
    lines, config = resolved(prepared), prepared.config
    assert config.trainer.learning_rate == pytest.approx(3e-4)
    assert lines["learning rate"] == "0.0003, as is usual for 1.6 million parameters"
    assert config.cold_start is not None and config.cold_start.learning_rate == 1e-3
    assert "1.6 million" in lines["learning rate of the cold start"]
    given = prepare(small_config(tmp_path, trainer={"learning_rate": 5e-5}))
    assert resolved(given)["learning rate"] == "5e-05"


def test_compiling_without_a_compiler_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match=r"compile is true.*no-such-compiler"):
        prepare(small_config(tmp_path, trainer={"compile": True}))


def test_a_context_too_small_for_the_tools_is_refused_at_the_start(tmp_path: Path) -> None:
    """The tiny base has room for 1,024 tokens."""
    sizes = {"pipeline": {"l_max": 900}, "data": {"train": "playground:", "tools": ["calculator"]}}
    with pytest.raises(InputError, match="the tools' descriptions of"):
        prepare(small_config(tmp_path, **sizes))
    prepare(small_config(tmp_path, pipeline={"l_max": 900}))


def rows(path: Path, statements: list[str]) -> str:
    path.write_text("".join(json.dumps({"problem": s, "answer": "1"}) + "\n" for s in statements))
    return str(path)


STATEMENT = "A train leaves at 9 and travels north at 60 km per hour. How far is it at noon?"
TRAINED = [STATEMENT.replace("north", "south"), "What is 2 - 1?", "What is 5 - 4?"]


def overlap(tmp_path: Path, choice: str, trained: list[str] = TRAINED) -> RunInput:
    train = rows(tmp_path / "train.jsonl", trained)
    evaluated = rows(tmp_path / "eval.jsonl", ["What is 5 - 3?", STATEMENT, "what is 2 - 1 ?"])
    data = {"train": train, "eval": evaluated, "eval_overlap": choice, "playground": {}}
    return read_input(small_config(tmp_path, data=data))


def statements(given: RunInput) -> list[str]:
    (stream,) = given.problems.streams
    return [problem.problem for problem in stream.problems or ()]


def test_training_problems_that_are_evaluation_problems_are_warned_of(tmp_path: Path) -> None:
    given = overlap(tmp_path, "warn")
    (warning,) = given.warnings
    assert "2 of 3 training problems are also evaluation problems" in warning
    assert re.search(r"train\.jsonl:1 and \S*eval\.jsonl:2 \(similarity 0\.\d\d\)", warning)
    assert "data.eval_overlap to `drop`" in warning
    assert statements(given) == TRAINED
    assert prepare(small_config(tmp_path), given).warnings[0] == warning
    assert not overlap(tmp_path, "ignore").warnings


def test_training_problems_that_are_evaluation_problems_are_dropped_or_refused(
    tmp_path: Path,
) -> None:
    given = overlap(tmp_path, "drop")
    assert statements(given) == TRAINED[2:]
    assert "dropped from training" in given.warnings[0]
    with pytest.raises(InputError, match="2 of 3 training problems are also.*or give other data"):
        overlap(tmp_path, "refuse")
    with pytest.raises(InputError, match="2 of 2 .*none is left"):
        overlap(tmp_path, "drop", TRAINED[:2])
