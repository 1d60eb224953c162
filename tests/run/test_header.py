"""The header of a run: what is trained, on what and for which reward, before it costs anything."""

import json
from pathlib import Path
from typing import Any

import pytest

import tramontane
from tests.environments.templates import UNREAD
from tests.hybrids import make_hybrid
from tests.run import shop
from tests.runs import small_config
from tramontane.errors import InputError
from tramontane.run.header import header, model_line
from tramontane.run.prepare import prepare

ROWS = [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(12)]


def test_it_names_data_reward_objective_model_and_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {"train": str(file), "eval": str(file), "eval_overlap": "ignore"}
    lines = header(prepare(small_config(tmp_path, data=data, evaluation={"problems": 8})))
    assert lines["train"] == f"{file}, 12 rows"
    assert lines["held out"].startswith(f"{file}, 8 rows × ")
    assert lines["reward"] == (
        "format 0.1 + correctness 0.9 (math verifier) + language 0.1 + length down to −0.1"
    )
    assert lines["objective"].startswith("magistral; learning rate ")
    assert "1.6 million parameters" in lines["model"]
    assert "sampled with" not in lines["model"]
    eight = small_config(tmp_path / "run", data=data, generator={"weights": "int8"})
    assert model_line(eight).endswith("; sampled with int8 weights (generator.weights)")
    assert lines["prompt"].endswith("<|user|>What is 0 + 1?<|assistant|>")
    assert len(lines) <= 11  # twelve with the title


def test_dropped_rows_have_their_reasons(tmp_path: Path) -> None:
    train, held_out = tmp_path / "rows.jsonl", tmp_path / "eval.jsonl"
    long = {"problem": "What is 1 + 1? " + "Think. " * 200, "answer": "2"}
    train.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, long]))
    held_out.write_text(json.dumps(ROWS[3]) + "\n")
    data = {
        "train": str(train),
        "eval": str(held_out),
        "eval_overlap": "drop",
        "overlong_prompts": "drop",
        "max_prompt_tokens": 200,
    }
    line = header(prepare(small_config(tmp_path, data=data)))["train"]
    assert "1 dropped: also in the evaluation (data.eval_overlap)" in line
    assert "1 dropped: prompts above 200 tokens (data.max_prompt_tokens)" in line
    assert " 11 rows " in line


def test_columns_that_the_model_does_not_see_are_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [row | {"choices": ["a", "b"], "level": "Level 2", "split": "x"} for row in ROWS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = header(prepare(small_config(tmp_path, data={"train": str(file), "eval": None})))["train"]
    assert line.endswith("; the model does not see choices, split")


def test_rewards_and_environment_are_the_users_own() -> None:
    given: Any = {"model": "tiny", "data": ROWS, "overrides": {"pipeline.updates": 1}}
    found = tramontane.dry_run(rewards=[tramontane.Reward(shop.polite, 0.5)], **given).header
    assert "polite 0.5 (yours) + language 0.1" in found["reward"]  # beside the rows' answers
    unanswered = [{"problem": row["problem"]} for row in ROWS]
    found = tramontane.dry_run(rewards=[shop.polite], **given | {"data": unanswered}).header
    assert found["reward"] == "polite 1 (yours)"
    found = tramontane.dry_run(
        model="tiny",
        data=ROWS,
        overrides={"data.environment": f"{shop.__name__}:Shop", "conversation.reward": "sum"},
    ).header
    assert found["environment"] == "Shop; up to 8 turns"
    assert found["reward"] == "correctness 1 (the environment, sum of its turns)"


def dry_run_in(environment: type) -> Any:
    path = f"{environment.__module__}:{environment.__qualname__}"
    given = {"data.environment": path, "conversation.reward": "sum"}
    return tramontane.dry_run(model="tiny", data=ROWS, overrides=given)


def test_a_dry_run_shows_the_prompt_that_the_environment_writes() -> None:
    assert "<|user|>Sell: What is 0 + 1?<|assistant|>" in dry_run_in(shop.Market).header["prompt"]
    with pytest.raises(InputError, match="cannot begin.*the market is closed"):
        dry_run_in(shop.Closed)


def test_the_prompt_has_the_descriptions_of_tools() -> None:
    given = {"data.tools": [f"{shop.__name__}:double"]}
    found = tramontane.dry_run(model="tiny", data=ROWS, overrides=given).header
    assert found["environment"] == "tools double; up to 8 turns"
    assert "double" in found["prompt"] and "What is 0 + 1?" in found["prompt"]


def test_tools_whose_calls_cannot_be_read_are_refused_at_the_start() -> None:
    given = {"data.tools": [f"{shop.__name__}:double"], "data.chat_template": UNREAD}
    fault = r"<do>zq0qz with .*conversation\.calls.*data\.chat_template"
    with pytest.raises(InputError, match=fault):
        tramontane.dry_run(model="tiny", data=ROWS, overrides=given)
    given["conversation.calls"] = "hermes"  # what the model writes is named
    assert tramontane.dry_run(model="tiny", data=ROWS, overrides=given).header["environment"]
    del given["data.tools"]
    assert tramontane.dry_run(model="tiny", data=ROWS, overrides=given).header


def test_a_template_that_begins_a_response_behind_every_chat_is_refused_for_conversations() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    given = {"data.chat_template": template}
    assert tramontane.dry_run(model="tiny", data=ROWS, overrides=given).header
    given["data.environment"] = "guessing"
    with pytest.raises(InputError, match="begins a response behind every chat"):
        tramontane.dry_run(model="tiny", data=ROWS, overrides=given)


def test_every_shipped_config_fits_into_twelve_lines() -> None:
    for name in ("quickstart", "tools", "effort", "guessing"):
        found = tramontane.dry_run(f"configs/{name}.yaml").header
        assert 6 <= len(found) <= 11, name


def test_sizes_and_the_whole_prompt_are_for_a_verbose_display(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, one_layer: str
) -> None:
    config = small_config(tmp_path, model=one_layer, pipeline={"updates": 1, "n_batch": 8})
    tramontane.train(config, report=False)
    quiet = capsys.readouterr().out
    assert quiet.index("reading the data …") < quiet.index("loading torch")
    head = quiet[quiet.index("tramontane · ") : quiet.index("update 1/1")].splitlines()
    assert len(head) <= 12
    assert "staleness at most" not in quiet and "prompt: " in quiet


def test_a_model_with_state_says_how_its_rows_are_computed(tmp_path):
    make_hybrid("qwen3_5_text").config.save_pretrained(tmp_path)
    hybrid, dense = (
        model_line(small_config(tmp_path / "run", model=model)) for model in (str(tmp_path), "tiny")
    )
    assert hybrid.endswith("; layers with state take one sequence a row")
    assert "one sequence a row" not in dense
