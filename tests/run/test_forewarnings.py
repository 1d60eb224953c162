"""Valid settings that are hardly what was meant are warned of before a run."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

import tramontane
from tests.runs import small_config
from tramontane.config import Config
from tramontane.config.sft import SFTConfig
from tramontane.controller.generators import slots
from tramontane.planning import remedies
from tramontane.run import forewarnings
from tramontane.run.prepare import prepare


def warned(tmp_path: Path, rows: int = 12, **sections: Any) -> str:
    file = tmp_path / "rows.jsonl"
    lines = [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(rows)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"train": str(file), "eval": None} | sections.pop("data", {})
    return "\n".join(prepare(small_config(tmp_path, data=data, **sections)).warnings)


def test_an_ordinary_run_has_no_warning(tmp_path: Path) -> None:
    assert warned(tmp_path) == ""


def test_references_that_no_answer_can_equal(tmp_path: Path) -> None:
    file = tmp_path / "prose.jsonl"
    told = "First add the two numbers, then you will see what comes out of it."
    answers = ["2", "So we add them up. The answer is \\boxed{3}.", told, "4"]
    rows = [{"problem": f"{n} + 1?", "answer": answer} for n, answer in enumerate(answers)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = warned(tmp_path, data={"train": str(file)})
    assert "1 of 4 reference answers" in found and "prose.jsonl:3" in found
    assert found.count("equaled word for word") == 1
    held_out = warned(tmp_path, data={"eval": str(file)})
    assert "data 'held_out': 1 of 4 reference answers" in held_out


def test_rows_that_contradict_each_other(tmp_path: Path) -> None:
    file = tmp_path / "twice.jsonl"
    pairs = [("1 + 1?", "2"), ("1 + 2?", "3"), ("1 + 1?", "3"), ("1 + 2?", "3"), ("2 + 2?", "4")]
    file.write_text("".join(json.dumps({"problem": p, "answer": a}) + "\n" for p, a in pairs))
    found = warned(tmp_path, data={"train": str(file)})
    assert "1 of 5 rows repeat a problem with another answer" in found
    assert "twice.jsonl:1 ('2')" in found and "twice.jsonl:3 ('3')" in found


def test_a_single_row(tmp_path: Path) -> None:
    assert "has a single problem" in warned(tmp_path, rows=1)
    (file := tmp_path / "same.jsonl").write_text('{"problem": "1 + 1?", "answer": "2"}\n' * 40)
    assert "has a single problem" in warned(tmp_path, data={"train": str(file)})


def written(tmp_path: Path, statements: list[str], answer: str = "{n}") -> str:
    file = tmp_path / "written.jsonl"
    rows = [{"problem": s, "answer": answer.format(n=n)} for n, s in enumerate(statements)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return warned(tmp_path, data={"train": str(file)})


def test_a_reference_that_all_rows_share(tmp_path: Path) -> None:
    sums = [f"What is {n} + 1?" for n in range(12)]
    assert "all 12 problems have the same reference answer, 42" in written(tmp_path, sums, "42")
    assert written(tmp_path, sums[:4], "42") == ""


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ('[{{"role": "user", "content": "{n} + 1?"}}]', "a chat written as text"),
        ("[{{'content': '{n} + 1?', 'role': 'user'}}]", "a chat written as text"),  # pandas' CSV
        ("<|user|>{n} + 1?<|assistant|>", "special tokens of the model"),
    ],
)
def test_statements_that_are_rendered_twice(tmp_path: Path, statement: str, what: str) -> None:
    found = written(tmp_path, [statement.format(n=n) for n in range(6)])
    assert f"6 of 6 problems hold {what}, the first at" in found and "written.jsonl:1" in found
    assert written(tmp_path, [f"Is [{n}] a list of roles?" for n in range(6)]) == ""


def test_greedy_samples_that_are_all_alike(tmp_path: Path) -> None:
    found = warned(tmp_path, evaluation={"temperature": 0, "samples": 4})
    assert "evaluation.samples 4: at temperature 0" in found
    assert warned(tmp_path, evaluation={"temperature": 0, "samples": 1}) == ""
    assert "generator.top_k 1: only the likeliest" in warned(tmp_path, generator={"top_k": 1})
    assert warned(tmp_path, generator={"top_k": 2}) == ""


def test_a_split_of_a_file(tmp_path: Path) -> None:
    assert "data.split 'dev' has no effect" in warned(tmp_path, data={"split": "dev"})


def test_an_evaluation_on_the_training_problems(tmp_path: Path) -> None:
    data = {"eval": str(tmp_path / "rows.jsonl")}
    assert "the evaluation has no other problems (12)" in warned(tmp_path, data=data)


def test_a_learning_rate_far_above_the_usual(tmp_path: Path) -> None:
    text = warned(tmp_path, trainer={"learning_rate": 0.03})
    assert "trainer.learning_rate 0.03 is 100 times the 0.0003 that is usual" in text
    assert warned(tmp_path, trainer={"learning_rate": 1e-3}) == ""


def test_a_reward_without_a_part(tmp_path: Path) -> None:
    none = {"reward": dict.fromkeys(("format", "correctness", "language", "length"), 0)}
    assert "verifier.reward: every weight is 0" in warned(tmp_path, verifier=none)
    learnt_otherwise = {"objective": {"name": "sft"}}
    assert "verifier.reward" not in warned(tmp_path, verifier=none, trainer=learnt_otherwise)


def test_a_domain_that_nothing_judges(tmp_path: Path) -> None:
    domains = {"open": {"format": "none"}}
    found = warned(tmp_path, verifier={"domains": domains}, data={"domain": "open"})
    assert "nothing judges the answers of domain 'open'" in found


def test_a_warm_up_longer_than_the_run(tmp_path: Path) -> None:
    text = warned(tmp_path, trainer={"warmup_updates": 50}, pipeline={"updates": 20})
    assert "trainer.warmup_updates 50: training ends after 20 (pipeline.updates)" in text


def test_fine_tuning_is_warned_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = SFTConfig.model_validate(
        {"output": str(tmp_path / "out"), "model": "tiny", "steps": 2, "learning_rate": 1.0,
         "batch_tokens": 512, "microbatch_tokens": 512}
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        tramontane.sft(config)
    assert "warmup_steps 100: training ends after 2 (steps)" in caplog.text
    assert "learning_rate 1 is 1,000 times" in caplog.text


def test_slots_are_no_more_than_can_be_in_flight(tmp_path: Path) -> None:
    sizes = {"n_async": 20_000, "n_batch": 256, "group_size": 16, "max_staleness": 2}
    assert slots(Config.model_validate({"pipeline": sizes})) == 768
    text = warned(tmp_path, pipeline={"n_async": 20_000, "n_batch": 8, "group_size": 4})
    assert "pipeline.n_async 20,000: only 16 completions can be in flight" in text


def test_conversations_that_the_machine_has_no_threads_or_files_for() -> None:
    sizes = {"n_async": 4096, "n_batch": 4096, "group_size": 16, "max_staleness": 0}
    data = {"tools": ["calculator"]}
    config = Config.model_validate({"pipeline": sizes, "data": data})
    limits = {"threads (ulimit -u)": 8000.0, "open files (ulimit -Hn)": math.inf}
    (warning,) = forewarnings._conversations(config, limits)
    assert "4,096 conversations at once" in warning and "8,192 threads (ulimit -u)" in warning
    config = Config.model_validate(
        {"pipeline": sizes, "data": data, "conversation": {"workers": 2}}
    )
    assert not [*forewarnings._conversations(config, limits)]
    (warning,) = forewarnings._conversations(config, {"open files (ulimit -Hn)": 1024.0})
    assert "4,096 open files (ulimit -Hn)" in warning and "conversation.workers 2" in warning
    assert not [*forewarnings._conversations(Config.model_validate({"pipeline": sizes}), limits)]


def test_no_remedy_is_a_number_type_that_is_slower_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAMONTANE_CPU_DTYPE", "float32")
    stages = [Config.model_validate({"generator": {"device": "cpu"}, "trainer": {"device": "cpu"}})]
    workers = ("generator", "trainer rank")
    fits = remedies.remedies(stages, 512, workers, lambda changed: True)
    assert "dtype" not in fits and "generator.slots" in fits
    monkeypatch.setenv("TRAMONTANE_CPU_DTYPE", "bfloat16")
    stages[0] = Config.model_validate({"generator": {"device": "cpu", "dtype": "float32"}})
    assert "generator.dtype=bfloat16" in remedies.remedies(stages, 512, workers, lambda _: True)
