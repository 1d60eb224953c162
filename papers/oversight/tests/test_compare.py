"""Comparisons: every kind of participant, the folder, and a comparison that is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import tramontane
from tramontane import InputError
from tramontane.types import PAPER_TAGS, Completion
from tramontane_oversight.agents import LocalAgent, letter_probability, open_agents
from tramontane_oversight.compare import compare_protocols
from tramontane_oversight.config import ModelConfig, OversightConfig
from tramontane_oversight.transcript import Call, Question, Transcript
from tramontane_oversight.wording import load_wording

CONCURRENCY = 4
SIMULATED = {
    "judge": {"simulated": {"accuracy": 0.9}},
    "agent": {"simulated": {"persuasiveness": {"right": 0.9, "wrong": 0.6}}},
}
ALL = ("direct", "direct_article", "consultancy", "debate", "open_consultancy", "open_debate")


def config(out: Path, limit: int = 12, **keys: Any) -> OversightConfig:
    return OversightConfig.model_validate(
        {
            "out": str(out),
            "questions": {"limit": limit, "extractive": {"languages": ["en", "de"]}},
            "models": SIMULATED,
            "arms": {name: {"protocol": name, "rounds": 2} for name in ALL},
        }
        | keys
    )


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_comparison_writes_figures_transcripts_and_a_page(tmp_path: Path) -> None:
    ended: list[int] = []
    found = compare_protocols(config(tmp_path / "out"), lambda done, total: ended.append(done))
    assert ended == list(range(1, 12 * 6 + 1))
    figures = json.loads((tmp_path / "out/figures.json").read_text())
    assert list(figures["arms"]) == list(ALL)
    assert len(figures["paired_tests"]) == 15
    page = (tmp_path / "out/oversight.html").read_text()
    assert all(name in page for name in ALL) and "Elo ratings" in page
    assert "turns without words" not in page and ">unknown</th>" not in page
    for name in ALL:
        kept = rows(tmp_path / "out" / name / "transcripts.jsonl")
        assert [Transcript.from_dict(row) for row in kept] == found.transcripts[name]
        assert (tmp_path / "out" / name / "transcripts.md").read_text().count("**Verdict:**") == 12
    # All arms see the same questions with their answers in the same order.
    assert len({tuple(t.question.id for t in arm) for arm in found.transcripts.values()}) == 1


def test_a_folder_of_other_settings_is_refused_and_new_arms_are_added(tmp_path: Path) -> None:
    first = config(tmp_path, arms={"debate": {"protocol": "debate"}})
    before = compare_protocols(first).transcripts["debate"]
    with pytest.raises(InputError, match=r"replies\.jsonl was made with different arm; name"):
        compare_protocols(config(tmp_path, arms={"debate": {"protocol": "debate", "rounds": 1}}))
    arms = {"debate": {"protocol": "debate"}, "direct": {"protocol": "direct"}}
    assert compare_protocols(config(tmp_path, arms=arms)).transcripts["debate"] == before


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    """The names are the same, but not what is in the files."""
    questions, words = tmp_path / "rows.jsonl", tmp_path / "words.yaml"
    questions.write_text('{"question": "?", "choices": ["x", "y"], "answer": 0}\n')
    words.write_text(yaml.safe_dump(load_wording("brief").model_dump()))
    asked = config(
        tmp_path / "out",
        questions={"source": str(questions)},
        wording=str(words),
        arms={"direct": {"protocol": "direct"}},
    )
    compare_protocols(asked)
    compare_protocols(asked)
    for file in (questions, words):
        before = file.read_text()
        file.write_text(before.replace("?", "!"))
        with pytest.raises(InputError, match=r"replies\.jsonl was made with different files; name"):
            compare_protocols(asked)
        file.write_text(before)


def test_a_folder_without_replies_takes_corrected_settings(tmp_path: Path) -> None:
    questions = tmp_path / "rows.jsonl"
    asked = config(
        tmp_path / "out",
        questions={"source": str(questions)},
        arms={"direct": {"protocol": "direct"}},
    )
    for content, message in ((None, "no such file"), ('{"question": 1}', "choices")):
        if content:
            questions.write_text(content)
        with pytest.raises(InputError, match=message):
            compare_protocols(asked)
    questions.write_text('{"question": "?", "choices": ["x", "y"], "answer": 0}\n')
    assert compare_protocols(asked).figures["direct"].n == 1


def test_a_checkpoint_that_was_trained_again_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(Path(tramontane.__file__).with_name("tiny_base"), model)
    judge = tiny(max_tokens=2)
    judge["checkpoint"] |= {"path": str(model)}
    arms = {"direct": {"protocol": "direct"}}
    asked = config(tmp_path / "out", 2, models={"judge": judge}, arms=arms)
    compare_protocols(asked)
    compare_protocols(asked)
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(InputError, match=r"replies\.jsonl was made with different weights; name"):
        compare_protocols(asked)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("settings.json", "not the record of replies.jsonl, or damaged"),
        ("replies.jsonl", "jsonl:3: "),
    ],
)
def test_a_damaged_file_of_the_folder_is_named(name: str, message: str, tmp_path: Path) -> None:
    asked = config(tmp_path, arms={"direct": {"protocol": "direct"}})
    compare_protocols(asked)
    file = tmp_path / "direct" / name
    lines = file.read_text().splitlines()
    lines[2] = "{"
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=message):
        compare_protocols(asked)


def test_ratings_are_of_debates_before_the_same_judge(tmp_path: Path) -> None:
    models = SIMULATED | {"expert": {"simulated": {"accuracy": 0.99, "blind_accuracy": 0.99}}}
    debate = {"protocol": "debate", "rounds": 1}
    arms = {
        "one": debate,
        "open": debate | {"protocol": "open_debate"},
        "expert": debate | {"judge": "expert"},
        "longer": debate | {"rounds": 2},
        "direct": {"protocol": "direct"},
    }
    found = compare_protocols(config(tmp_path, 300, models=models, arms=arms)).elo
    assert [ratings.arms for ratings in found] == [("one", "open"), ("expert",), ("longer",)]
    gaps = [r.sides[0]["agent, right"].value - r.sides[0]["agent, wrong"].value for r in found]
    assert gaps[1] > gaps[0] + 300 and gaps[1] > gaps[2] + 300


def test_turns_without_words_and_questions_without_answer_are_counted(
    tmp_path: Path, one_layer: str
) -> None:
    file = tmp_path / "rows.jsonl"
    asked = [{"question": str(n), "choices": ["x", "y"], "answer": n or None} for n in range(2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in asked))
    settings = config(
        tmp_path / "out",
        questions={"source": str(file)},
        models={
            "judge": tiny(one_layer),
            "agent": tiny(one_layer, max_tokens=1, response_prefix="<think>"),
        },
        arms={"debate": {"protocol": "debate", "rounds": 1}},
        wording="brief",
    )
    found = compare_protocols(settings).figures["debate"]
    assert (found.n, found.unknown, found.unfinished) == (1, 1, 0)
    assert found.silent_turns == 1
    page = (tmp_path / "out/oversight.html").read_text()
    assert "turns without words" in page and ">unknown</th>" in page


@pytest.mark.parametrize(
    "line", ['["x", 0, "t", 1, null]', '{"a": 1}', "not json", '{"question": 1}']
)
def test_a_file_that_holds_no_transcripts_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "replies.jsonl"
    file.write_text(line + "\n")
    arms = {"few_shot": {"protocol": "direct", "examples": {"file": str(file)}}}
    with pytest.raises(InputError, match=r"replies\.jsonl:1: "):
        compare_protocols(config(tmp_path / "out", arms=arms))


def same_samples(protocol: str, **numbers: int) -> dict[str, Any]:
    greedy = {"endpoint": {"url": "http://127.0.0.1:1/v1", "model": "m"}, "temperature": 0}
    return {
        "models": {"judge": greedy, "agent": greedy},
        "arms": {"x": {"protocol": protocol, **numbers}},
    }


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"arms": {"x": {"protocol": "debate", "agent": "agnet"}}}, "did you mean 'agent'"),
        ({"arms": {"x": {"protocol": "direct", "agent": "agnet"}}}, "did you mean 'agent'"),
        ({"arms": {"figures.json": {"protocol": "direct"}}}, "rename the arm"),
        ({"models": {"judge": {}}}, "give one of simulated, checkpoint and endpoint"),
        ({"questions": {"extractive": {"languages": []}}}, "languages"),
        ({"questions": {"extractive": {"frames": []}}}, "frames"),
        (same_samples("debate", best_of=4), "models.agent.temperature"),
        (same_samples("direct", judge_samples=3), "models.judge.temperature"),
        ({"arms": {}}, "at least one arm"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(
    tmp_path: Path, keys: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **keys)


# ------------------------------------------------------------------------------- an endpoint


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    """A model behind a server in another process, and the log of its requests."""
    log = tmp_path / "requests.jsonl"
    command = [sys.executable, str(Path(__file__).with_name("server.py")), str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        asked = {"url": url, "model": "m", "concurrency": CONCURRENCY, "backoff_s": 0.01}
        yield {"endpoint": asked}, log
        process.kill()


def test_discussions_over_http(endpoint: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    model, log = endpoint
    models = {"judge": model, "agent": model}
    found = compare_protocols(config(tmp_path / "out", limit=4, models=models)).transcripts
    # Calls of a discussion: consultancy 2 arguments, 1 question, 1 verdict; debate 4 and 1.
    replies = {name: len(rows(tmp_path / "out" / name / "replies.jsonl")) for name in ALL}
    assert replies == {
        "direct": 4, "direct_article": 4, "consultancy": 16, "debate": 20,
        "open_consultancy": 20, "open_debate": 24,
    }  # fmt: skip
    assert len(rows(log)) == 88
    assert len({seed for seed, _ in rows(log)}) == 88
    for name in ALL:
        for t in found[name]:
            assert t.verdict is not None and not t.fault
            assert t.probability == (t.verdict == 0)  # no log-probs: certain
            for turn in t.turns:
                if turn.side is not None:
                    assert "hm" in turn.response and "hm" not in turn.text
                    assert "<v_passage>" in turn.text and "<u_passage>made up<" in turn.text
    blind = [prompt for _, prompt in rows(log) if "You are the judge of which" in prompt]
    assert sum("Article:" in prompt for prompt in blind) == 4  # direct_article alone


def test_a_judge_reads_worked_examples_of_an_earlier_arm(
    endpoint: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    earlier = config(tmp_path / "earlier", 3, arms={"debate": {"protocol": "debate"}})
    shown = compare_protocols(earlier).transcripts["debate"]
    model, log = endpoint
    examples = {"file": str(tmp_path / "earlier/debate/transcripts.jsonl"), "count": 2}
    arms = {"few_shot": {"protocol": "direct", "examples": examples}}
    compare_protocols(config(tmp_path / "out", 3, models={"judge": model}, arms=arms))
    prompts = [prompt for _, prompt in rows(log)]
    # Three questions, of which the first two are also examples, and not shown to themselves.
    assert sorted(prompt.count("\n---\n") for prompt in prompts) == [1, 1, 2]
    assert all(shown[2].question.text in prompt for prompt in prompts if prompt.count("---") == 2)
    missing = {"few_shot": {"protocol": "direct", "examples": {"file": "no.jsonl"}}}
    with pytest.raises(InputError, match="no such file"):
        compare_protocols(config(tmp_path / "x", 3, models={"judge": model}, arms=missing))


def test_a_discussion_that_cannot_be_finished_is_named_and_left_out(
    endpoint: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    file = tmp_path / "questions.jsonl"
    asked = [{"question": text, "choices": ["x", "y"], "answer": 0} for text in ("one", "BROKEN")]
    file.write_text("".join(json.dumps(row) + "\n" for row in asked))
    model, _ = endpoint
    found = compare_protocols(
        config(
            tmp_path / "out",
            questions={"source": str(file)},
            models={"judge": model},
            arms={"direct": {"protocol": "direct"}},
        )
    )
    assert found.figures["direct"].unfinished == 1 and found.figures["direct"].n == 1
    broken = next(t for t in found.transcripts["direct"] if t.fault)
    assert broken.question.text == "BROKEN" and "HTTP 400" in broken.fault


def test_an_arm_that_cannot_be_judged_leaves_the_others_their_figures(
    endpoint: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    model, log = endpoint
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "?", "choices": ["x", "y"], "answer": 0, "article": "BROKEN"}')
    arms = {name: {"protocol": name} for name in ("direct", "direct_article")}
    keys = {"models": {"judge": model}, "arms": arms, "questions": {"source": str(file)}}
    with pytest.raises(InputError, match=r"'direct_article': none of 1 .*HTTP 400.*other arms"):
        compare_protocols(config(tmp_path / "out", **keys))
    figures = json.loads((tmp_path / "out/figures.json").read_text())
    assert list(figures["arms"]) == ["direct"] and "HTTP 400" in figures["faults"]["direct_article"]
    assert "HTTP 400" in (tmp_path / "out/oversight.html").read_text()
    asked = len(rows(log))
    with pytest.raises(InputError, match="HTTP 400"):  # the same command tries it again
        compare_protocols(config(tmp_path / "out", **keys))
    assert len(rows(log)) == asked  # and what was answered is not asked again


def test_a_server_that_refuses_everything_is_not_asked_again(
    endpoint: tuple[dict[str, Any], Path],
) -> None:
    model, _ = endpoint
    model["endpoint"] |= {"url": model["endpoint"]["url"] + "/REFUSED"}
    agent = open_agents({"judge": ModelConfig.model_validate(model)}, load_wording("brief"))[
        "judge"
    ]
    question = Question("q", "?", ("x", "y"), 0)
    agent.submit(0, "k", Call("judge", "judge", question), ())
    with pytest.raises(InputError, match="401"):
        agent.poll(60)
    with pytest.raises(InputError, match="401"):
        agent.submit(1, "k", Call("judge", "judge", question), ())


@pytest.mark.slow
def test_a_killed_comparison_goes_on_and_asks_nothing_twice(
    endpoint: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    model, log = endpoint
    models = {"judge": model, "agent": model}
    arms = {name: {"protocol": name, "rounds": 2} for name in ("consultancy", "open_debate")}
    whole = compare_protocols(config(tmp_path / "whole", 10, models=models, arms=arms))
    needed = len(rows(log))
    log.write_text("")
    killed = config(tmp_path / "killed", 10, models=models, arms=arms)
    file = tmp_path / "oversight.yaml"
    file.write_text(yaml.safe_dump(killed.model_dump(mode="json")))
    command = [sys.executable, "-m", "tramontane", "oversight", str(file)]
    for enough in (15, 40):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while not log.exists() or log.read_text().count("\n") < enough:
                assert process.poll() is None, "ended before it was killed"
                time.sleep(0.002)
            os.kill(process.pid, signal.SIGKILL)
            settled(log)
    recorded = sum(journaled(tmp_path / "killed" / name / "replies.jsonl") for name in arms)
    sent = len(rows(log))
    assert 0 < recorded < needed
    assert compare_protocols(killed).transcripts == whole.transcripts
    assert len(rows(log)) == sent + needed - recorded  # what no journal had


def journaled(file: Path) -> int:
    return file.read_text().count("\n") if file.is_file() else 0


def settled(log: Path) -> None:
    """Wait until the server has answered what a killed client had sent."""
    before = -1
    while (now := log.read_text().count("\n")) != before:
        before = now
        time.sleep(0.3)


# ------------------------------------------------------------------------- the slot engine


def tiny(path: str = "tiny", **keys: Any) -> dict[str, Any]:
    checkpoint = {"path": path, "slots": 8, "max_prompt_tokens": 700}
    return {"checkpoint": checkpoint, "max_tokens": 12, "temperature": 1.0} | keys


def test_a_checkpoint_plays_all_roles_in_one_generator(tmp_path: Path, one_layer: str) -> None:
    models = {
        "judge": tiny(one_layer, seed=1),
        "agent": tiny(one_layer, max_tokens=16),
        "picker": tiny(one_layer),
    }
    arms = {"debate": {"protocol": "debate", "rounds": 2, "best_of": 2, "preference": "picker"}}
    settings = config(tmp_path / "a", 3, models=models, arms=arms, wording="brief")
    agents = open_agents(settings.models, load_wording("brief"))
    local = [agent for agent in agents.values() if isinstance(agent, LocalAgent)]
    assert len(local) == 3 and len({id(agent.generator) for agent in local}) == 1
    first = compare_protocols(settings).transcripts["debate"]
    assert all(len(t.turns) == 4 and not t.fault and t.tokens > 0 for t in first)
    assert all(len(turn.rejected) == 1 for t in first for turn in t.turns)
    # Killed after half of its replies: they are kept, and only the rest is sampled.
    replies = tmp_path / "b/debate/replies.jsonl"
    replies.parent.mkdir(parents=True)
    shutil.copy(tmp_path / "a/debate/settings.json", replies.parent)
    lines = (tmp_path / "a/debate/replies.jsonl").read_bytes().splitlines(keepends=True)
    replies.write_bytes(b"".join(lines[: len(lines) // 2]) + b'["cut off')
    again = config(tmp_path / "b", 3, models=models, arms=arms, wording="brief")
    assert all(not t.fault for t in compare_protocols(again).transcripts["debate"])
    kept = replies.read_bytes().splitlines(keepends=True)
    assert kept[: len(lines) // 2] == lines[: len(lines) // 2]
    asked = [sorted(tuple(json.loads(line)[:2]) for line in file) for file in (kept, lines)]
    assert asked[0] == asked[1]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("vllm_environment")
def test_a_checkpoint_plays_the_same_roles_in_vllm(tmp_path: Path) -> None:
    replies = {}
    arms = {name: {"protocol": name, "rounds": 1} for name in ("direct_article", "debate")}
    for kind in ("slots", "vllm"):
        model = tiny(temperature=0, max_tokens=24)
        model["checkpoint"]["kind"] = kind
        models = {"judge": model, "agent": model}
        found = compare_protocols(
            config(tmp_path / kind, 8, models=models, arms=arms, wording="brief")
        )
        assert all(not t.fault for arm in found.transcripts.values() for t in arm)
        replies[kind] = [
            text
            for arm in found.transcripts.values()
            for t in arm
            for text in (*(turn.response for turn in t.turns), *t.responses)
        ]
    # Greedy, but other kernels: a token in a thousand is another.
    equal = sum(a == b for a, b in zip(replies["slots"], replies["vllm"], strict=True))
    assert len(replies["vllm"]) == 8 * (1 + 3) and equal > 8 * (1 + 3) / 2


def test_a_prompt_that_is_too_long_is_a_fault(tmp_path: Path) -> None:
    model = tiny()
    model["checkpoint"] = model["checkpoint"] | {"max_prompt_tokens": 5}
    settings = config(tmp_path, 2, models={"judge": model}, arms={"direct": {"protocol": "direct"}})
    with pytest.raises(InputError, match=r"none of 2 discussions .* longer than 5"):
        compare_protocols(settings)


@pytest.mark.parametrize(
    "text", ["Answer: B", "<think>A or B?</think>\nSo \\boxed{B}.", "B", "é — Answer: B."]
)
def test_the_probability_of_the_letter_is_that_of_its_token(text: str) -> None:
    from tramontane.models.loading import load_tokenizer

    tokenizer = load_tokenizer("tiny")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    places = [i for i in range(len(ids)) if "B" in tokenizer.decode(ids[i : i + 1])]
    logprobs = [-0.25 if i == places[-1] else -3.0 for i in range(len(ids))]
    completion = Completion(0, 0, [], ids, logprobs, [0] * len(ids), "stop", text)
    assert letter_probability(completion, tokenizer, PAPER_TAGS) == pytest.approx(0.7788, abs=1e-4)
    silent = Completion(0, 0, [], [], [], [], "stop")
    assert letter_probability(silent, tokenizer, PAPER_TAGS) is None
