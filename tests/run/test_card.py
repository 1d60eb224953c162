"""The model card that a finished run leaves next to its weights."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from tests.runs import small_config
from tramontane.config import HELD_OUT
from tramontane.evaluation.evaluate import EvaluationResult, summarize
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.run.card import write_card
from tramontane.run.prepare import Prepared, prepare

SUMMARY = {"updates": 2, "trained_completion_tokens": 2048}


def measured(right: list[bool]) -> EvaluationResult:
    row = {"language": "en", "difficulty": 1, "domain": "math", "finish_reason": "stop"}
    row |= {
        "reward": 1.0,
        "reason": "",
        "answer": "5",
        "parts": {"language": 0.1},
        "thinking_tokens": 3,
    }
    verdicts = ["right" if yes else "wrong" for yes in right]
    return summarize(
        [
            row | {"group": n, "index": 0, "problem_id": str(n), "verdict": verdict, "tokens": 8}
            for n, verdict in enumerate(verdicts)
        ]
    )


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A folder of the user's, with a model and problems, whose path belongs in no card."""
    folder = tmp_path / "home" / "secret"
    folder.mkdir(parents=True)
    rows = [json.dumps({"problem": f"{n} + 1?", "answer": str(n + 1)}) for n in range(4)]
    (folder / "sums.jsonl").write_text("\n".join(rows) + "\n")
    load_model("tiny").save_pretrained(folder / "weights")
    load_tokenizer("tiny").save_pretrained(folder / "weights")
    return folder


def ready(private: Path, **data: object) -> Prepared:
    sources = {"train": str(private / "sums.jsonl"), "eval": str(private / "sums.jsonl")}
    config = small_config(private / "run", model=str(private / "weights"), data=sources | data)
    return prepare(config)


def test_the_card_has_figures_recipe_and_the_base_models_license(private: Path) -> None:
    base = {"license": "other", "license_name": "mine", "license_link": "https://example.org"}
    front = "".join(f"{key}: {value}\n" for key, value in base.items())
    (private / "weights" / "README.md").write_text(f"---\n{front}---\n\nA base.\n")
    results = {
        "before": {HELD_OUT: measured([True, False, False, False])},
        "after": {HELD_OUT: measured([True, True, True, False])},
    }
    text = write_card(private, ready(private), results, SUMMARY).read_text()
    assert str(private.parent) not in text and "secret" not in text

    card = ModelCard(text)
    assert {key: card.data.get(key) for key in base} == base
    assert {"grpo", "reinforcement-learning"} <= set(card.data.tags)
    [entry] = card.data.eval_results
    assert (entry.metric_value, entry.dataset_type) == (75.0, "sums.jsonl")
    assert "| before RL | 0.250 [" in text and "| after RL | 0.750 [" in text
    assert "| learning rate | 0.0001 |" in text
    assert "| reward | format 0.1, correctness 0.9, length 0.1, language 0.1 |" in text


def test_the_card_has_no_rate_that_nothing_rewards(private: Path) -> None:
    prepared = ready(private)
    config = prepared.config.model_copy(
        update={
            "data": prepared.config.data.model_copy(update={"environment": "guessing"}),
            "conversation": prepared.config.conversation.model_copy(update={"reward": "last"}),
            "verifier": prepared.config.verifier.model_copy(
                update={"reward": prepared.config.verifier.reward.alone(correctness=1.0)}
            ),
        }
    )
    results = {"after": {HELD_OUT: measured([True, True, True, False])}}
    for run, shown in ((prepared, True), (replace(prepared, config=config), False)):
        text = write_card(private, run, results, SUMMARY).read_text()
        table = [line for line in text.splitlines() if line.startswith("|")][:3]
        assert ("| format |" in table[0]) is shown
        assert len({line.count("|") for line in table}) == 1


def test_a_license_that_is_not_known_is_left_to_the_user(private: Path) -> None:
    text = write_card(private, ready(private), {}, SUMMARY).read_text()
    assert ModelCard(text).data.get("license") is None
    assert "name the license here" in text and "## Results" not in text


@pytest.mark.parametrize("system", [None, "magistral"])
@pytest.mark.parametrize("chat", [True, False])
def test_the_cards_example_runs_on_the_prompt_of_the_run(
    private: Path, system: str | None, chat: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if not chat:
        tokenizer = load_tokenizer("tiny")
        tokenizer.chat_template = None
        (private / "weights/chat_template.jinja").unlink()
        tokenizer.save_pretrained(private / "weights")
    prepared = ready(private, system_prompt=system, response_prefix="<think>")
    text = write_card(private, prepared, {}, SUMMARY).read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    code = code.replace('folder = "."', f"folder = {str(private / 'weights')!r}")
    scope: dict[str, object] = {}
    exec(code.replace("max_new_tokens=256", "max_new_tokens=4"), scope)
    assert capsys.readouterr().out.strip()
    assert scope["text"] == prepared.encoder.render("What is 6 times 7?")
    assert list(scope["inputs"]["input_ids"][0]) == prepared.encoder.encode("What is 6 times 7?")
