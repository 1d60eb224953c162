import json

import pytest
from typer.testing import CliRunner

from tramontane.cli import app
from tramontane.config.sft import SFTConfig
from tramontane.errors import InputError
from tramontane.run.fine_tuning import dry_run

SHORT = {"prompt": "What is 1 + 2?", "response": "<think>1 + 2 = 3</think>\\boxed{3}"}
LONG = {"prompt": "What is 1 + 2?", "response": "3 " * 200}


def config_of(folder, rows, **changes):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"model": "tiny", "output": str(folder / "out"), "data": {"train": str(file)}}
    return SFTConfig.model_validate({**settings, "steps": 6, "batch_tokens": 100, **changes})


@pytest.mark.filterwarnings("ignore:of 5 responses")
def test_it_says_what_is_learned_and_what_is_left_out(tmp_path):
    found = dry_run(config_of(tmp_path, [SHORT] * 4 + [LONG], max_length=100))
    assert "1.6 million parameters" in found.header["model"]
    assert found.header["train"].endswith(
        "rows.jsonl, 5 rows; 1 left out, longer than 100 tokens (max_length), 4 learned"
    )
    assert found.header["learning rate"].startswith("0.001, as is usual for 1.6 million parameters")
    learned = found.header["example"].partition("⟦")[2]
    assert learned == SHORT["response"] + "</s>⟧"
    (warning,) = found.warnings
    assert warning.startswith("warmup_steps")
    assert not found.memory.refusals
    assert not (tmp_path / "out").exists()


def test_of_a_conversation_only_what_the_model_wrote_is_marked(tmp_path):
    asked, said = {"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "3"}
    found = dry_run(config_of(tmp_path, [{"messages": [asked, said, asked, said]}]))
    text = found.header["example"]
    assert text.count("⟦3</s>⟧") == 2
    assert "1 + 2?" in text.rpartition("⟧<")[2].partition("⟦")[0]


def test_a_machine_that_is_too_small_is_told_with_the_keys_to_change(tmp_path, monkeypatch):
    monkeypatch.setattr("tramontane.planning.fit.machine_memory", lambda: 2**28)
    (refusal,) = dry_run(config_of(tmp_path, [SHORT])).memory.refusals
    assert "lower microbatch_tokens" in refusal


def test_the_folder_of_an_earlier_result_is_refused(tmp_path):
    config = config_of(tmp_path, [SHORT])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(InputError, match="holds a checkpoint already"):
        dry_run(config)


def test_the_command_prints_it_and_trains_nothing(tmp_path):
    config = config_of(tmp_path, [SHORT])
    file = tmp_path / "own.yaml"
    file.write_text(f"model: tiny\noutput: {config.output}\ndata: {{train: {config.data.train}}}\n")
    ran = CliRunner().invoke(app, ["sft", str(file), "--dry-run"])
    assert ran.exit_code == 0, ran.output
    assert "⟦<think>1 + 2 = 3</think>" in ran.stdout
    assert "trainer rank" in ran.stdout
    assert not (tmp_path / "out").exists()
