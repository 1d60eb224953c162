"""Conversations in the page and in the report."""

import json
import shutil
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the page is not installed: 'tramontane-rl[view]'")

from tests.view.pages import HOSTILE, Page, make_run, served
from tests.view.test_report import chart_titles
from tramontane.evaluation.conversed import conversation_row
from tramontane.models.loading import load_tokenizer
from tramontane.run.folder import RunFolder
from tramontane.tokens import INSERTED, EarlierSequence
from tramontane.types import (
    Completion,
    Ending,
    Group,
    Message,
    Problem,
    ToolCall,
    TrainedFigures,
    TurnRecord,
    Verdict,
)
from tramontane.view import details, report
from tramontane.view.answers import answers
from tramontane.view.runs import Run
from tramontane.view.summary import summary

UPDATE = 6
TURNS = (
    "<think>Too long for the head.</think>\n<tool_call>…</tool_call>",
    "The tool says 7.",
    f"\\boxed{{7}} {HOSTILE}",
)
FORKED = 1  # the index of the conversation whose last turn has a sequence of its own


def conversation(index: int) -> Completion:
    """Three turns: one with two calls, one that an environment answers, and the last."""
    tokenizer = load_tokenizer("tiny")
    ids = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in TURNS]
    put = ids[1][:3]
    first, second, third = ids
    calls = [
        ToolCall("calculator", {"expression": "3 + 4"}, "7", seconds=0.25),
        ToolCall("", {}, "error: the call cannot be read: not JSON", error=True),
    ]
    messages: list[Message] = [{"role": "tool", "content": call.answer} for call in calls]
    n = len(first) + len(put)
    said: list[Message] = [{"role": "user", "content": HOSTILE}]
    turns = [
        TurnRecord(0, len(first), 0, TURNS[0], messages, calls, None, 0.5),
        TurnRecord(n, n + len(second), 0, TURNS[1], said, seconds=2),
    ]
    tokens = first + put + second
    versions = [4] * len(first) + [INSERTED] * len(put) + [5] * len(second)
    ending: Ending = "completed" if index else "max_turns"
    text = "\n\n".join(TURNS)
    if index == FORKED:
        earlier = [EarlierSequence([1], tokens, [-0.5] * len(tokens), versions)]
        turns.append(TurnRecord(0, len(third), 1, TURNS[2], reward=1.0))
        return Completion(
            90, index, [1, 2], third, [-0.25] * len(third), [6] * len(third), "stop", text,
            turns=turns, ending=ending, earlier=earlier,
        )  # fmt: skip
    start = len(tokens) + len(put)
    turns.append(TurnRecord(start, start + len(third), 0, TURNS[2], reward=0.0))
    tokens += put + third
    versions += [INSERTED] * len(put) + [6] * len(third)
    return Completion(
        90, index, [1], tokens, [-0.5] * len(tokens), versions, "stop", text,
        turns=turns, ending=ending, ending_reason="3 turns were answered" if index == 0 else "",
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = make_run(tmp_path_factory.mktemp("runs") / "talks", updates=2)
    completions = [conversation(i) for i in range(3)]
    verdicts = [Verdict(float(i), {"correctness": float(i)}, "right") for i in range(3)]
    group = Group(90, Problem("p", "math", "What is 3 + 4?", "7"), completions, verdicts)
    logprobs = [p + 0.1 for c in completions for s in c.sequences for p in s.logprobs]
    group.learned = TrainedFigures(array("d", [-1.0, 0.0, 1.0]), array("f", logprobs))
    plain = replace(completions[0], group=91, turns=[], ending=None, ending_reason="")
    alone = Group(91, group.problem, [plain], verdicts[:1])
    folder.write_rollouts(UPDATE, [(group, None), (alone, None)], ["correctness"])
    folder.log(
        {
            "update": UPDATE,
            "turns": 3.0,
            "endings": {"completed": 0.5, "max_turns": 0.5},
            "waited_for": {"calculator": 1.5},
        }
    )
    return folder


@pytest.fixture(scope="module")
def page(run: RunFolder) -> Iterator[Page]:
    with served(run.path) as found:
        yield found


def test_conversations_are_found_by_ending_and_tool(page: Page) -> None:
    facets = page.get("facets", run=0)
    assert facets["tool"] == {"calculator": 3}
    assert {k: n for k, n in facets["ending"].items() if k != "None"} == {
        "completed": 2,
        "max_turns": 1,
    }
    found = page.get("rollouts", run=0, ending="max_turns,context_full")
    assert [(r["group"], r["index"]) for r in found["rows"]] == [(90, 0)]
    assert [r["ending"] for r in found["rows"]] == ["max_turns"]
    # A list says that the problem is the row's: its environment may have asked something else.
    [group] = page.get("rollouts", run=0, ending="max_turns", by="group")["rows"]
    assert group["ending"] == "max_turns"
    found = page.get("rollouts", run=0, tool="calculator", ending="completed")
    assert [(r["group"], r["index"]) for r in found["rows"]] == [(90, 1), (90, 2)]
    assert page.get("rollouts", run=0, tool="calc")["rows"] == []
    rows = page.get("metrics", run=0, offset=0, mark=0)["rows"]
    assert rows[-1]["endings.max_turns"] == 0.5 and "endings" not in rows[-1]


def test_a_conversation_begins_with_the_prompt_that_the_model_read(run: RunFolder) -> None:
    found, tokens = Run(run.path, 0), Run(run.path, 0).tokens
    for row in range(3):  # also the forked one, whose last sequence has another prompt
        assert details.rollout(found, UPDATE, row)["prompt"] == tokens.text([1])
    assert details.rollout(found, UPDATE, 3)["prompt"] is None


def test_an_evaluation_s_conversations_are_shown_turn_by_turn(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", updates=1)
    said = conversation(0)
    row = {
        "group": 0, "problem_id": "p", "problem": "What is 3 + 4?", "reference": "7", "index": 0,
        "language": "en", "domain": "math", "difficulty": 1, "text": said.text,
        "tokens": 9, "verdict": "right", "reward": 1.0,
        "thinking_tokens": 3, "finish_reason": "stop", "reason": "", "answer": "7", "parts": {},
        **conversation_row(said),
    }  # fmt: skip
    (folder.path / "evaluation_before.jsonl").write_text(json.dumps(row) + "\n")
    run = Run(folder.path, 0)
    [sample] = summary(run)["samples"]
    [(when, end)] = sample["ends"]
    assert (when, end["prompt"]) == ("before", run.tokens.text([1]))
    assert [turn["text"] for turn in end["turns"]] == [turn.text for turn in said.turns]
    assert end["turns"][1]["messages"][0]["content"] == HOSTILE
    [answer] = [a for a in answers(run, "p")["rows"] if a["source"] == "before"]
    assert answer["prompt"] == end["prompt"] and len(answer["turns"]) == 3


def test_endings_and_waits_are_plotted(run: RunFolder) -> None:
    titles = chart_titles(report.answers(Run(run.path, 0)))
    found = ["Turns and calls", "Endings", "Trainer's waits for steps"]
    assert [title for title in titles if title in found] == found


def test_every_turn_has_its_own_tokens(page: Page) -> None:
    for row in range(3):
        found = page.get("rollout", run=0, update=UPDATE, row=row)
        assert ["".join(turn["tokens_text"]).strip() for turn in found["turns"]] == [
            text.strip() for text in TURNS
        ]
        for turn, version in zip(found["turns"], (4, 5, 6), strict=True):
            assert set(turn["versions"]) == {version}
            count = len(turn["token_ids"])
            assert count == turn["end"] - turn["start"] == len(turn["logprobs"])
            own = row != FORKED or version == 6  # those of earlier sequences are not recorded
            assert turn["log_ratios"] == (pytest.approx([0.1] * count, abs=1e-5) if own else None)
        assert found["versions"] == [4, 5, 6] and found["token_ids"] == []
        call = found["turns"][0]["calls"][0]
        assert (call["name"], call["answer"], call["seconds"]) == ("calculator", "7", 0.25)
        assert json.loads(call["arguments"]) == {"expression": "3 + 4"}
    plain = page.get("rollout", run=0, update=UPDATE, row=3)
    assert plain["turns"] is None and len(plain["token_ids"]) == len(plain["versions"]) > 0


def test_a_report_shows_the_start_of_long_conversations(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = details.rollout(Run(run.path, 0), UPDATE, 0)["turns"]
    first = len(whole[0]["token_ids"])
    monkeypatch.setattr(report, "MAX_COMPLETION", first + 2)
    found = report.answers(Run(run.path, 0))[f"rollout?row=0&update={UPDATE}"]
    assert [len(turn["token_ids"]) for turn in found["turns"]] == [first, 2, 0]
    assert [turn["left_out"] for turn in found["turns"]] == [
        0, len(whole[1]["token_ids"]) - 2, len(whole[2]["token_ids"]),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_a_conversation_is_shown_on_any_width(page: Page, width: int, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab: Any = browser.new_page(viewport={"width": width, "height": 900})
        tab.set_default_timeout(60_000)
        problems: list[str] = []
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(f"{page.address}#rollout?run=0&update={UPDATE}&row={FORKED}")
        tab.wait_for_selector(".message.model >> nth=2")
        heads = [text.replace("\n", " ") for text in tab.locator(".message b").all_inner_texts()]
        assert heads == [
            "prompt",
            "model",
            "calculator",
            "a call that cannot be read",
            "model",
            "user",
            "model",
        ]
        assert tab.locator(".message.failed").count() == 1
        assert HOSTILE in tab.inner_text(".message.answer >> nth=3")
        assert "a new sequence" in tab.inner_text(".message.model >> nth=2")
        assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        tab.screenshot(path=tmp_path / "conversation.png", full_page=True)
        tab.goto(f"{page.address}#rollouts?run=0&tool=calculator")
        tab.wait_for_selector("table.rows tbody tr >> nth=2")
        assert "3 of" in tab.inner_text(".count")
        tab.screenshot(path=tmp_path / "rollouts.png")
        browser.close()
        assert problems == []
