"""A harvest: each rule leaves out what it says, counts close, draws depend on the seed alone."""

import json
from collections import Counter
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from tests.controller.driven import verdict
from tests.runs import begun, small_config
from tramontane.cli import app
from tramontane.config.sft import SFTConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.models.loading import load_tokenizer
from tramontane.recipes.config import HarvestConfig
from tramontane.recipes.harvest import harvest
from tramontane.sft.examples import ExampleStream
from tramontane.types import Completion, Group, Problem, ThinkingTags, Verdict

WRONG = verdict(right=False)
RIGHT = verdict(right=True)
UNSCORABLE = Verdict(0.0, {}, "unscorable", "timeout")


def completion(text, tokens, finish="stop"):
    ids = [1] * tokens
    return Completion(0, 0, [1], ids, [0.0] * tokens, [0] * tokens, finish, text)


def group(number, answers):
    """A group of one problem; an answer is (text, tokens, verdict) or with a finish reason."""
    completions = [completion(text, tokens, *finish) for text, tokens, _, *finish in answers]
    for index, each in enumerate(completions):
        each.group, each.index = number, index
    problem = Problem(f"p{number}", "math", f"What is {number}?", str(number))
    return Group(number, problem, completions, [answer[2] for answer in answers])


def thought(text):
    return f"<think>{text}</think>so \\boxed{{1}}"


@pytest.fixture
def write(tmp_path):
    """Writes a finished run of the groups of each update."""

    def write(*updates, name="run", finished=True):
        folder = begun(small_config(tmp_path / name))
        for number, groups in enumerate(updates, 1):
            folder.write_rollouts(number, [(g, None) for g in groups], ["correctness"])
        if finished:
            folder.write_json("summary.json", {})
        return folder.path

    return write


def rows_of(file):
    return [json.loads(line) for line in file.open()]


def test_each_rule_leaves_out_what_it_says(write, tmp_path):
    run = write(
        [group(1, [(thought("early, short"), 10, RIGHT), (thought("early, long"), 90, RIGHT)])],
        [group(2, [(thought("a"), 40, RIGHT), (thought("b"), 40, WRONG)])],
        [group(3, [(thought("c"), 50, RIGHT), (thought("c"), 50, RIGHT)])],
        [group(4, [(thought("cut"), 60, RIGHT, "length"), (thought("d"), 60, UNSCORABLE)])],
    )
    out = tmp_path / "traces.jsonl"
    found = harvest(run, out, HarvestConfig(upsample=1.0))
    assert found.left_out == {
        "wrong": 1,
        "unscorable": 1,
        "early and short": 1,
        "same text as another": 1,
        "cut off at the length limit": 1,
    }
    assert (found.completions, found.kept, found.rows, found.problems) == (8, 3, 3, 3)
    assert found.completions == found.kept + sum(found.left_out.values())
    assert (found.early_updates, found.short_tokens) == (1, 50)  # of 40, 50, 50, 60
    rows = {row["problem_id"]: row for row in rows_of(out)}
    assert rows["p1"]["response"] == thought("early, long")
    assert rows["p1"]["prompt"] == "What is 1?"
    assert {key: row["pass_rate"] for key, row in rows.items()} == {"p1": 1, "p2": 0.5, "p3": 1}
    assert json.loads((tmp_path / "traces.summary.json").read_text()) == asdict(found)


def test_the_limit_per_problem_keeps_different_traces_by_the_seed(write, tmp_path):
    run = write([group(1, [(thought(f"way {i}"), 20, RIGHT) for i in range(30)])])
    kept = []
    for seed in (0, 0, 1):
        config = HarvestConfig(per_problem=5, seed=seed, early=0)
        found = harvest(run, tmp_path / "out.jsonl", config)
        assert found.left_out == {"over the limit per problem": 25}
        kept.append([row["response"] for row in rows_of(tmp_path / "out.jsonl")])
        assert len(set(kept[-1])) == 5
    assert kept[0] == kept[1] != kept[2]


def test_low_pass_rates_are_drawn_more_often(write, tmp_path):
    easy = [group(i, [(thought(f"{i}"), 20, RIGHT)]) for i in range(40)]
    hard = [
        group(100 + i, [(thought(f"{i}"), 20, RIGHT)] + [(thought("no"), 20, WRONG)] * 3)
        for i in range(40)
    ]
    run = write(easy + hard)
    found = harvest(run, tmp_path / "out.jsonl", HarvestConfig(upsample=3.0, early=0))
    rates = Counter(row["pass_rate"] for row in rows_of(tmp_path / "out.jsonl"))
    # A trace of pass rate 1/4 is written 1 + 2 · 3/4 = 2.5 times on average, one of 1 once.
    assert rates[1.0] == pytest.approx(40, abs=1)
    assert rates[0.25] == pytest.approx(100, abs=1)
    assert (found.kept, found.rows) == (80, 140)
    found = harvest(run, tmp_path / "out.jsonl", HarvestConfig(upsample=3.0, early=0, limit=30))
    rates = Counter(row["pass_rate"] for row in rows_of(tmp_path / "out.jsonl"))
    assert found.kept == 30
    assert rates[0.25] > 2 * rates[1.0]
    assert found.left_out["over the limit in all"] == 50


def test_sft_reads_the_traces_and_other_thinking_tags_replace_those_of_the_run(write, tmp_path):
    run = write([group(1, [(thought("work"), 20, RIGHT)])])
    out = tmp_path / "out.jsonl"
    harvest(run, out, HarvestConfig(early=0))
    raw = {"model": "tiny", "output": "none", "data": {"train": str(out)}}
    config, tokenizer = SFTConfig.model_validate(raw), load_tokenizer("tiny")
    [(_, response, *_)] = ExampleStream(config, PromptEncoder(tokenizer, config.data)).take(1)
    assert tokenizer.decode(response[:-1]) == thought("work")
    harvest(run, out, HarvestConfig(early=0), ThinkingTags("[THINK]", "[/THINK]"))
    assert rows_of(out)[0]["response"].startswith("[THINK]work[/THINK]")


def test_runs_that_cannot_be_harvested(write, tmp_path):
    out = tmp_path / "out.jsonl"
    with pytest.raises(InputError, match="not a run folder"):
        harvest(tmp_path, out)
    with pytest.raises(InputError, match="not finished; finish it with: tramontane train --resume"):
        harvest(write([], name="a", finished=False), out)
    with pytest.raises(InputError, match="recorded no rollouts"):
        harvest(write(name="b"), out)
    with pytest.raises(InputError, match=r"no trace is left to learn from \(wrong: 1\)"):
        harvest(write([group(1, [("no", 5, WRONG)])], name="c"), out)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="folder: a folder; name a file"):
        harvest(write([group(1, [(thought("a"), 5, RIGHT)])], name="d"), tmp_path / "folder")
    assert not (tmp_path / "folder.partial").exists()
    assert not out.exists()


def test_the_command_prints_the_reasons(write, tmp_path, monkeypatch):
    run = write([group(1, [(thought("a"), 20, RIGHT), (thought("b"), 30, WRONG)])])
    args = ["harvest", str(run), "early=0", "--out", str(tmp_path / "t.jsonl")]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.exception
    assert "wrong" in result.stdout
    assert "1 rows of 1 problems" in result.stdout
    assert len(rows_of(tmp_path / "t.jsonl")) == 1
