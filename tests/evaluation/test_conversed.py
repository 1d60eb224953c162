"""Models evaluated, compared and sampled in conversations."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tramontane
from tests.evaluation.test_placed import same
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.evaluation.comparison import Measured, markdown
from tramontane.evaluation.conversed import ConversationFigures, transcript
from tramontane.evaluation.evaluate import summarize
from tramontane.evaluation.thinking import ThinkingCounter
from tramontane.models.loading import load_tokenizer
from tramontane.pages import render
from tramontane.tokens import INSERTED
from tramontane.types import Completion, TurnRecord

TALK = {"data.environment": "tests.controller.talking:Talk", "conversation.reward": "sum"}
RATES = ["format_rate"]
OPTIONS: dict[str, Any] = {"max_tokens": 48, "temperature": 0.0, "device": "cpu"}


def test_the_format_is_compared_where_it_is_rewarded() -> None:
    row = {
        "group": 0, "verdict": "right", "reward": 1.0, "parts": {"language": 0.0}, "reason": "",
        "answer": "2",
        "thinking_tokens": 3, "tokens": 5, "domain": "math", "language": "en", "difficulty": 1,
        "finish_reason": "stop",
    }  # fmt: skip
    result = summarize([row])
    for rates, shown in ((RATES, True), ([], False)):
        suite = {"tiny": Measured(result, None, 0, rates), "other": Measured(result, None, 0, [])}
        text = markdown({"sums": suite})
        page = render("evaluation/comparison.html.j2", title="", found={"sums": suite})
        assert ("| format |" in text, ">format<" in page) == (shown, shown)
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) == 1


def measured(file: Path, **settings: Any) -> tuple[Any, list[dict[str, Any]]]:
    result = tramontane.evaluate(
        "tiny", "playground:", None, TALK | settings, write_to=file, problems=3, samples=2,
        **OPTIONS,
    )  # fmt: skip
    return result, [json.loads(line) for line in file.open()]


@pytest.mark.parametrize(
    "kind",
    [
        "thread",
        pytest.param("ray", marks=pytest.mark.slow),
        pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.vllm]),
    ],
)
def test_conversations_are_evaluated(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    if kind != "thread":
        request.getfixturevalue("ray_cluster" if kind == "ray" else "vllm_environment")
    where = {"placement.kind" if kind != "vllm" else "generator.kind": kind}
    result, rows = measured(file := tmp_path / "rows.jsonl", **where)
    for row in rows:
        turns = row["turns"]
        assert row["text"] == "\n\n".join(turn["text"] for turn in turns)
        earned = sum(turn["reward"] or 0 for turn in turns)
        if row["verdict"] != "malformed":
            assert row["parts"]["correctness"] == pytest.approx(earned)  # the whole reward
        assert row["tokens"] > row["inserted_tokens"] >= 0
        answered = [m["content"] for turn in turns for m in turn["messages"]]
        assert answered == ["Go on!"] * (len(turns) - 1)
    by_problem = [[len(r["turns"]) for r in rows if r["group"] == g] for g in range(3)]
    if kind != "vllm":  # with other kernels about one token in a thousand differs
        assert all(a == b for a, b in by_problem)  # greedy, and their environments begin alike
    figures = result.conversations
    assert figures.mean_turns == sum(map(sum, by_problem)) / 6 > 1
    shown = f"| {figures.mean_turns:.2f} | 0.00 | 1.000 | |"  # calls, and those that parse
    assert shown in markdown({"games": {"tiny": Measured(result, None, 0, RATES)}})
    sums = Measured(replace(result, conversations=None), None, 0, RATES)
    games = {"tiny": Measured(result, None, 0, RATES), "sums": sums}
    suites = {"games": games, "sums": {"tiny": sums, "sums": sums}}
    pages = markdown(suites), render("evaluation/comparison.html.j2", title="", found=suites)
    assert pages[0].count("turns |") == 1 and pages[1].count(">turns<") == 1
    with pytest.raises(InputError, match="conversation"):  # other conversations are not continued
        measured(file, **where | {"conversation.turns": 2})


@pytest.mark.slow
def test_any_number_of_workers_has_the_same_conversations(tmp_path: Path) -> None:
    one = measured(tmp_path / "1.jsonl")
    two = measured(tmp_path / "2.jsonl", **{"generator.workers": 2, "conversation.workers": 2})
    assert same(one[1], two[1]) and one[0] == two[0]


@pytest.mark.slow
def test_a_prompt_is_completed_by_whole_conversations() -> None:
    texts = tramontane.generate("tiny", "What is 2 + 2?", None, TALK, n=2, **OPTIONS)
    assert len(texts) == 2
    for text in texts:
        assert text.startswith("[assistant]\n")
        assert text.splitlines()[-1] in ("[completed]", "[max_tokens]", "[context_full]")


def talked(*turns: TurnRecord, ids: list[int], versions: list[int]) -> Completion:
    return Completion(
        0, 0, [1], ids, [0.0] * len(ids), versions, "stop",
        turns=list(turns), ending="max_turns", ending_reason="2 turns",
    )  # fmt: skip


def test_thoughts_are_counted_in_every_turn() -> None:
    tokenizer = load_tokenizer("tiny")
    encoder = PromptEncoder(tokenizer)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    first, put, second = ids("<think>one two</think>a"), ids("no tags"), ids("<think>x</think>b")
    third = len(first) + len(put)
    turns = [
        TurnRecord(0, len(first), 0, "a", [{"role": "user", "content": "no tags"}], seconds=1.5),
        TurnRecord(third, third + len(second), 0, "b"),
    ]
    versions = [0] * len(first) + [INSERTED] * len(put) + [0] * len(second)
    completion = talked(*turns, ids=first + put + second, versions=versions)
    counter = ThinkingCounter(tokenizer, encoder.response)
    assert counter.count(completion) == len(ids("one two")) + len(ids("x"))
    assert transcript(completion) == (
        "[assistant]\na\n[answered in 1.5 s]\n[user]\nno tags\n[assistant]\nb\n[max_turns: 2 turns]"
    )


def test_figures_of_conversations() -> None:
    def call(name: str, error: bool) -> dict[str, Any]:
        return {"name": name, "error": error}

    turns = [{"calls": [call("add", False), call("", True)]}, {"calls": []}]
    rows = [
        {"turns": turns, "ending": "completed", "inserted_tokens": 6, "verdict": "right"},
        {"turns": turns[:1], "ending": "max_turns", "inserted_tokens": 0, "verdict": "wrong"},
        {"text": "of no conversation"},
    ]
    assert ConversationFigures.of(rows) == ConversationFigures(
        1.5, 2.0, 3.0, 0.5, 0.5, {"completed": 0.5, "max_turns": 0.5}, [0.0, 0.5]
    )
    assert ConversationFigures.of(rows[2:]) is None
