"""Trajectories from files and earlier runs: what is read, what is refused, and runs on them."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.runs import SMALL, small_config
from tramontane.config import Config, parse_settings
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.models.loading import load_tokenizer
from tramontane.run.changes import open_run
from tramontane.run.folder import RunFolder
from tramontane.run.rollouts import read_run
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.run.trajectories import load_trajectories
from tramontane.tokens import ELSEWHERE, INSERTED, EarlierSequence, floats, ints
from tramontane.types import Completion, Group, Message, Problem, ToolCall, TurnRecord, Verdict
from tramontane.verifier.pool import VerifierPool

ROWS: list[dict[str, Any]] = [
    {"prompt": "1 + 1 = ?", "response": "<think>2</think> \\boxed{2}", "reward": 1, "answer": "2"},
    {"prompt": "1 + 1 = ?", "response": "<think>3</think> \\boxed{3}", "reward": 0, "answer": "2"},
    {"prompt": "2 + 1 = ?", "response": "<think>3</think> \\boxed{3}", "reward": 0.5},
    {"prompt": "2 + 2 = ?", "response": "<think>5</think> \\boxed{5}", "reward": 0.25},
]
BY_IMPORTANCE = {"name": "spo", "spo": {"initial_value": "importance"}}
OFFLINE = {"group_size": 1, "n_batch": 2, "n_async": 2, "diversity": "none"}


def write(tmp_path: Path, *rows: Any) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


def offline(tmp_path: Path, *sources: str, pipeline: Any = None, **settings: Any) -> Config:
    return small_config(
        tmp_path / "run",
        data={"trajectories": {"sources": sources} | settings},
        pipeline=OFFLINE | (pipeline or {}),
        generator={"workers": 0},
    )


def load(config: Config) -> list[Group]:
    encoder = PromptEncoder(load_tokenizer("tiny"), config.data)
    return list(load_trajectories(config, encoder, 1024).replay()._groups)


def test_a_file_of_responses(tmp_path: Path) -> None:
    config = offline(tmp_path, write(tmp_path, *ROWS), pipeline={"group_size": 2})
    found = load(config)
    assert [len(g.completions) for g in found] == [2, 1, 1]
    assert [[v.reward for v in g.verdicts] for g in found] == [[1, 0], [0.5], [0.25]]
    tokenizer = load_tokenizer("tiny")
    for group in found:
        for completion in group.completions:
            assert completion.token_ids[-1] == tokenizer.eos_token_id
            assert set(completion.versions) == {ELSEWHERE}
            assert all(math.isnan(logprob) for logprob in completion.logprobs)
            text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            assert text == completion.text
            assert completion.prompt_ids == PromptEncoder(tokenizer, config.data).encode(
                group.problem.prompt
            )
    assert found[0].problem.answer == "2"


@pytest.mark.parametrize(
    ("thumb", "reward"), [(True, 1), (False, 0), ("up", 1), ("down", 0), ("👍", 1), (-0.5, -0.5)]
)
def test_thumbs_are_rewards(tmp_path: Path, thumb: Any, reward: float) -> None:
    """In the layout of preference sets with one completion a row (KTO)."""
    row = {
        "prompt": [{"role": "user", "content": "Hello?"}],
        "completion": [{"role": "assistant", "content": "Hello!"}],
        "label": thumb,
    }
    (group,) = load(offline(tmp_path, write(tmp_path, row)))
    assert group.verdicts[0].reward == reward
    assert group.completions[0].text == "Hello!"


def test_recorded_tokens_and_log_probs_are_kept(tmp_path: Path) -> None:
    row = ROWS[0] | {"token_ids": [5, 6, 7], "logprobs": [-0.5, -1, -2]}
    ((completion,),) = [g.completions for g in load(offline(tmp_path, write(tmp_path, row)))]
    assert list(completion.token_ids) == [5, 6, 7]
    assert list(completion.logprobs) == [-0.5, -1, -2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "response": "y"}, "no reward: give a number"),
        ({"prompt": "x", "response": "y", "reward": "maybe"}, r"no reward: .*found 'maybe'"),
        ({"prompt": "x", "response": "y", "reward": float("nan")}, "no reward"),
        ({"prompt": "x", "reward": 1}, "no text in field 'response'"),
        ({"response": "y", "reward": 1}, "no text in field 'problem'.*data.trajectories.fields"),
        (ROWS[0] | {"token_ids": [1, 2.5]}, "token_ids must be whole numbers from 0 to"),
        (ROWS[0] | {"token_ids": [10**6]}, "token_ids must be whole numbers from 0 to"),
        (ROWS[0] | {"token_ids": [1], "logprobs": [0, 0]}, "as many numbers as token_ids"),
        (ROWS[0] | {"token_ids": [1], "logprobs": [0.5]}, "token_ids, of at most 0"),
        (ROWS[0] | {"token_ids": [1], "logprobs": [-math.inf]}, "token_ids, of at most 0"),
        ({"prompt": "x", "response": "y", "reward": 10**400}, "no reward"),
        ({"prompt": "x", "response": "y\ud800", "reward": 1}, "half of a surrogate pair"),
        (ROWS[0] | {"logprobs": [0, 0]}, "logprobs without the token_ids"),
        ("text", "a str; every line must hold one JSON object"),
    ],
)
def test_a_bad_row_is_refused_with_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(InputError, match=rf"rows\.jsonl:2: .*{message}"):
        load(offline(tmp_path, write(tmp_path, ROWS[0], row)))


def talked(index: int) -> Completion:
    """A conversation of two turns, in one sequence or in two."""
    tokenizer = load_tokenizer("tiny")
    first, put, second = (
        ints(tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in ("<think>a</think> Call!", "The tool says 2.", "<think>b</think> \\boxed{2}")
    )
    call = ToolCall("add", {"a": 1, "b": [1]}, "2", seconds=0.5)
    answer: Message = {"role": "tool", "content": "2"}
    turns = [TurnRecord(0, len(first), 0, "<think>a</think> Call!", [answer], [call])]
    text = "<think>a</think> Call!\n\n<think>b</think> \\boxed{2}"
    if index:
        logprobs, old = floats([-1.0] * len(first)), ints([3] * len(first))
        earlier = [EarlierSequence([7, 8], first, logprobs, old)]
        turns.append(TurnRecord(0, len(second), 1, "<think>b</think> \\boxed{2}", reward=1.0))
        ids, versions, prompt = second, [4] * len(second), [7, 8, 9]
    else:
        start, earlier, prompt = len(first) + len(put), [], [7, 8]
        turns.append(
            TurnRecord(start, start + len(second), 0, "<think>b</think> \\boxed{2}", reward=1.0)
        )
        ids = first + put + second
        versions = [3] * len(first) + [INSERTED] * len(put) + [4] * len(second)
    return Completion(
        5, index, prompt, ids, floats([-0.5] * len(ids)), ints(versions), "stop", text,
        turns=turns, ending="completed", earlier=earlier,
    )  # fmt: skip


def test_conversations_of_an_earlier_run(tmp_path: Path) -> None:
    """Their prompts, turns and sequences are those recorded, and a forked one is of its group."""
    completions = [talked(0), talked(1)]
    verdicts = [Verdict(float(i), {"correctness": float(i)}, "right") for i in range(2)]
    group = Group(5, Problem("p", "math", "1 + 1?", "2"), completions, verdicts)
    folder = RunFolder(tmp_path / "earlier")
    folder.rollouts.mkdir(parents=True)
    folder.write_rollouts(1, [(group, None)], ["correctness"])
    config = offline(tmp_path, str(tmp_path / "earlier"), pipeline={"group_size": 2})
    (found,) = load(config)
    for read, written in zip(found.completions, completions, strict=True):
        assert (read.text, read.ending, read.turns) == (written.text, "completed", written.turns)
        for one, other in zip(read.sequences, written.sequences, strict=True):
            assert one.prompt_ids == other.prompt_ids
            assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
            assert list(one.versions) == [
                INSERTED if v == INSERTED else ELSEWHERE for v in other.versions
            ]
    longest = len(talked(0).token_ids)
    short = offline(
        tmp_path, str(tmp_path / "earlier"), pipeline={"l_max": longest - 1, "l_cache": 0}
    )
    assert [g.completions[0].turns for g in load(short)] == [completions[1].turns]


def test_weights_by_the_sampling_policy_need_its_log_probs(tmp_path: Path) -> None:
    config = offline(tmp_path, write(tmp_path, *ROWS))
    by_importance = {"trainer": {"objective": BY_IMPORTANCE}, "verifier": {"reward": {}}}
    config = Config.model_validate(config.model_dump() | by_importance)
    with pytest.raises(InputError, match=r"have no logprobs of the policy .* initial_value"):
        load(config)


def test_rewards_are_filtered_and_standardized(tmp_path: Path) -> None:
    source = write(tmp_path, *ROWS)
    kept = load(offline(tmp_path, source, min_reward=0.25, max_reward=0.5))
    assert [g.verdicts[0].reward for g in kept] == [0.5, 0.25]
    rewards = [g.verdicts[0].reward for g in load(offline(tmp_path, source, standardize=True))]
    assert sum(rewards) == pytest.approx(0)
    assert sum(r * r for r in rewards) == pytest.approx(len(rewards))
    with pytest.raises(InputError, match="none of 4 trajectories has a reward within"):
        load(offline(tmp_path, source, min_reward=2))


@pytest.mark.slow
def test_regraded_rewards_are_those_of_the_verifiers(tmp_path: Path) -> None:
    """However the rows are rewarded."""
    graded = [row | {"answer": row.get("answer", "4")} for row in ROWS]
    source = write(tmp_path, *graded)
    config = offline(tmp_path, source, pipeline={"n_batch": 4, "n_async": 4}, regrade=True)
    train(config, QuietScreen())
    rows = {row["text"]: row for row in read_run(tmp_path / "run") if row["update"] == 1}
    assert [rows[row["response"]]["verdict"] for row in ROWS] == ["right", *["wrong"] * 3]
    assert [rows[row["response"]]["reward"] for row in ROWS] == pytest.approx([1.0, 0.1, 0.1, 0.1])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"data": {"trajectories": {"sources": ["x"], "share": 0.1}, "train": "a"}},
            r"data\.trajectories\.share: share 0\.1 of a batch of 2 groups is less than half",
        ),
        (
            {
                "data": {"train": "a", "trajectories": {"sources": ["x"], "share": 0.5}},
                "generator": {"workers": 0},
            },
            r"generator\.workers: workers 0: completions are sampled for training",
        ),
        (
            {"data": {"trajectories": {"sources": ["x"], "min_reward": 2, "max_reward": 1}}},
            r"data\.trajectories\.min_reward: min_reward 2 is above max_reward 1: swap them",
        ),
        (
            {
                "data": {"trajectories": {"sources": ["x"], "behavior": "refreshed"}},
                "trainer": {"objective": BY_IMPORTANCE},
            },
            r"data\.trajectories\.behavior: .*initial_value: importance.*; write recorded",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    sections: dict[str, Any], message: str
) -> None:
    raw = {name: SMALL.get(name, {}) | keys for name, keys in sections.items()}
    with pytest.raises(InputError, match=message):
        parse_settings(Config, SMALL | raw, [], "run.yaml")


def test_a_problem_that_cannot_be_graded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rows\.jsonl: problem 'rows.jsonl-3' has no answer"):
        load(offline(tmp_path, write(tmp_path, *ROWS), regrade=True))


@pytest.mark.slow
def test_an_offline_run_has_no_generator_and_repeats_bit_for_bit(tmp_path: Path) -> None:
    source = write(tmp_path, *ROWS)
    losses = []
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
        config = offline(tmp_path / name, source)
        result = train(config, QuietScreen())
        assert result.finished
        metrics = RunFolder(result.run_dir).metrics()
        losses.append([m["loss"] for m in metrics])
        workers = (result.run_dir / "workers.jsonl").read_text()
        assert "generator" not in workers
        assert all(m["staleness_histogram"] == {} for m in metrics)
        assert all(m["trajectories"] == 2 for m in metrics)
        assert "reward" not in metrics[0]
        assert result.summary["staleness"] is None
        assert result.summary["trained_completion_tokens"] > 0
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_rollouts_of_a_run_are_half_of_the_next_ones_batches(
    tmp_path: Path, one_layer: str
) -> None:
    synchronous = small_config(tmp_path / "first", model=one_layer, pipeline={"max_staleness": 0})
    first = train(synchronous, QuietScreen()).run_dir
    rows = list(read_run(first))
    versions = {max(row["versions"]) for row in rows}
    assert versions == {0, 1}
    source = {"sources": [str(first)], "share": 0.5, "max_version": 0, "behavior": "refreshed"}
    sections = {"model": one_layer, "data": {"trajectories": source}}
    config = small_config(tmp_path / "second", checkpoint={"every": 1}, **sections)
    train(config, QuietScreen())
    second = list(read_run(tmp_path / "second"))
    replayed = [row for row in second if row["group"] < 0]
    assert len(replayed) == 2 * 8
    known = {row["text"]: row for row in rows if max(row["versions"]) == 0}
    for row in replayed:
        assert row["reward"] == known[row["text"]]["reward"]
        assert row["token_ids"] == known[row["text"]]["token_ids"]
        assert set(row["versions"]) == {ELSEWHERE}
    # The first batch's are refreshed by the weights that sampled them.
    for row in replayed:
        if row["update"] == 1:
            assert row["logprobs"] == pytest.approx(known[row["text"]]["logprobs"], abs=1e-3)
    for metrics in RunFolder(tmp_path / "second").metrics():
        assert metrics["trajectories"] == 8
        assert metrics["groups_kept"] == 2
    # What a run replayed is not its own: a third run finds only what the second sampled.
    third = config.model_copy(
        update={"data": config.data.model_copy(update={"trajectories": None})}
    )
    assert third.sampled_groups == 2
    folder, resumed = open_run(tmp_path / "second", ["pipeline.updates=3"])
    train(resumed, QuietScreen(), folder)
    assert len(RunFolder(tmp_path / "second").metrics()) == 3


def test_rows_of_files_of_one_name_are_regraded_by_their_own_problems(tmp_path: Path) -> None:
    """Rows without an id are numbered, with the file's name."""
    sources = []
    for answer in ("2", "3"):
        (tmp_path / answer).mkdir()
        row = {"prompt": f"{answer} = ?", "response": f"<think>.</think> \\boxed{{{answer}}}"}
        sources.append(write(tmp_path / answer, row | {"answer": answer, "reward": 0}))
    config = offline(tmp_path, *sources, regrade=True)
    encoder = PromptEncoder(load_tokenizer("tiny"), config.data)
    found = load_trajectories(config, encoder, 1024)
    pipeline = config.pipeline
    with VerifierPool(config.verifier, pipeline.l_max, pipeline.l_cache) as pool:
        asyncio.run(found.regrade(pool))
    assert [item.verdict.verdict for item in found.items] == ["right", "right"]
