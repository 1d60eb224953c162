"""Levels of effort: who is asked for which, what reaches the template, and which limits apply."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tramontane
from tests.controller.driven import DrivenLedger, config
from tests.data.chat_templates import make_tokenizer
from tests.environments.templates import tokenizer_of
from tests.runs import small_config
from tramontane.config import Config, EffortConfig, PromptConfig, VerifierConfig, parse_settings
from tramontane.data.curriculum import Curriculum
from tramontane.data.lengths import PromptLimit, measure_prompts
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.worker import EnvironmentWorker
from tramontane.errors import InputError
from tramontane.evaluation.settings import settings_for
from tramontane.evaluation.thinking import thinking_counters
from tramontane.generator.endings import Detokenizer
from tramontane.journals import read_log
from tramontane.models.loading import load_tokenizer
from tramontane.run.folder import RunFolder
from tramontane.run.input import read_input
from tramontane.run.rollouts import read_run
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.types import Completion, Problem
from tramontane.verifier.reward import grade
from tramontane.view.summary import accuracy_over_tokens

LOW = {"phrase": "Effort: low.", "l_max": 6, "l_cache": 4, "length": 0.5, "share": 3.0}
LEVELS: dict[str, Any] = {"low": LOW, "high": {"phrase": "Effort: high."}}
SUM = Problem("sum", "math", "What is 2 + 3?", "5", language="en")


def levels_of(train: Path | str, **data: Any) -> Curriculum:
    return Curriculum(config(Path(train), data={"train": str(train), **data}).by_stage())


def drawn(problems: Curriculum, n: int) -> list[str | None]:
    found = [problems.next(0, 0) for _ in range(n)]
    return [problem.effort for problem in found if problem]


@given(
    st.lists(st.floats(0.2, 5.0), min_size=1, max_size=4),
    st.integers(0, 300),
    st.sampled_from(["playground:", "forty"]),
)
@settings(max_examples=15, deadline=None)
def test_groups_are_drawn_by_shares_and_a_resumed_run_draws_the_same(
    forty: Path, shares: list[float], place: int, source: str
) -> None:
    effort = {f"e{i}": {"phrase": f"Effort {i}.", "share": s} for i, s in enumerate(shares)}
    train = str(forty) if source == "forty" else source
    whole = levels_of(train, effort=effort)
    all_of_them = drawn(whole, 600)
    counts = Counter(all_of_them)
    for i, share in enumerate(shares):
        p = share / sum(shares)
        assert abs(counts[f"e{i}"] - 600 * p) <= 5 * (600 * p * (1 - p)) ** 0.5 + 1
    cut, resumed = levels_of(train, effort=effort), levels_of(train, effort=effort)
    drawn(cut, place)
    resumed.load_state(cut.state())
    assert drawn(resumed, 50) == all_of_them[place : place + 50]


def test_a_stage_draws_from_the_levels_that_it_names(forty: Path) -> None:
    stages = [
        {"name": "short", "until": {"updates": 1}, "data": {"train_effort": "low"}},
        {"name": "both"},
    ]
    problems = Curriculum(config(forty, data={"effort": LEVELS}, stages=stages).by_stage())
    first = [problem.effort for _ in range(30) if (problem := problems.next(0, 0))]
    later = [problem.effort for _ in range(30) if (problem := problems.next(1, 1))]
    assert {*first} == {"low"} and {*later} == {"low", "high"}


def test_each_level_has_its_lengths_in_requests_and_after_a_checkpoint(forty: Path) -> None:
    run = DrivenLedger(config(forty, data={"effort": LEVELS}))
    run.hand_out()
    run.resume()
    groups = [*run.ledger.outstanding.values()]
    limits = {(g.problem.effort, r.sampling.max_tokens) for g in groups for r in g.requests}
    assert limits == {("low", 6), ("high", 10)}


def test_the_length_penalty_is_the_levels() -> None:
    data = config(Path("x"), data={"effort": LEVELS}).data
    low, high = data.at_efforts([SUM], ["low", "high"])
    text = r"<think>Two and three make five.</think>\boxed{5}"

    def penalty(problem: Problem, n_tokens: int) -> float:
        return grade(problem, text, n_tokens, VerifierConfig(), 100, 20).parts["length"]

    # low: from 2 tokens to 6, up to 0.5; high: the run's, from 80 to 100, up to 0.1
    assert [penalty(low, n) for n in (2, 3, 6, 90)] == [0, -0.125, -0.5, -0.5]
    assert [penalty(high, n) for n in (6, 80, 90)] == pytest.approx([0, 0, -0.05])


def switchable() -> PromptEncoder:
    levels = {
        "low": EffortConfig(chat_template_kwargs={"enable_thinking": False}),
        "high": EffortConfig(phrase="Think hard."),
    }
    return PromptEncoder(make_tokenizer("qwen3"), PromptConfig(), None, levels)


def test_a_templates_variable_reaches_it_and_the_responses_begin_as_it_wrote_them() -> None:
    encoder = switchable()
    decode = encoder.tokenizer.decode
    low, high = (decode(encoder.at(name).encode("1 + 1?")) for name in ("low", "high"))
    assert low.endswith("assistant\n<think>\n\n</think>\n\n") and "Think hard." not in low
    assert high.endswith("assistant\n") and high.startswith("<|im_start|>system\nThink hard.<")
    detokenizer, counters = (
        Detokenizer(encoder.tokenizer, encoder.response),
        thinking_counters(encoder),
    )
    said = encoder.tokenizer("<think>2</think>Two", add_special_tokens=False)["input_ids"]
    for name, prefix, thinking in (("low", "<think>\n\n</think>\n\n", 0), ("high", "", 1)):
        completion = Completion(0, 0, encoder.at(name).encode("1 + 1?"), said, [], [], "stop")
        assert detokenizer.parts(completion) == (prefix, "<think>2</think>Two")
        assert counters[name].count(completion) == thinking
    probe = Completion(0, 0, [said[0]], said, [], [], "stop")  # a prompt of the parity check
    assert detokenizer.parts(probe)[1] == "<think>2</think>Two"


@pytest.mark.parametrize("shape", ["qwen2.5", "gemma", "base"])
@pytest.mark.parametrize("own", [False, True])
def test_a_phrase_comes_before_any_system_prompt(shape: str, own: bool) -> None:
    config, levels = PromptConfig(system_prompt="Add."), {"low": EffortConfig(phrase="Be brief.")}
    encoder = PromptEncoder(make_tokenizer(shape), config, None, levels)
    chat: Any = [{"role": "system", "content": "Own."}, {"role": "user", "content": "1 + 1?"}]
    prompt = chat if own else "1 + 1?"
    text, plain = encoder.at("low").render(prompt), encoder.render(prompt)
    system = "Own." if own else "Add."
    assert text == plain.replace(system, f"Be brief.\n\n{system}", 1) != plain


def test_a_conversation_is_asked_at_the_level_of_its_problem() -> None:
    data: Any = {"train": "playground:", "tools": ["calculator"], "effort": LEVELS}
    config = Config(model="tiny", data=data, pipeline={"l_max": 64})  # type: ignore[arg-type]
    encoder = PromptEncoder(tokenizer_of("qwen2.5"), config.data, None, config.data.effort)
    worker = EnvironmentWorker(config, encoder)

    async def prompts() -> list[str]:
        asked = config.data.at_efforts([SUM], ["low", "high"])
        begun = [await worker.start((i, 0), problem, 1) for i, problem in enumerate(asked)]
        return [encoder.tokenizer.decode(started.prompt_ids) for started in begun]

    low, high = asyncio.run(prompts())
    assert "Effort: low." in low and "Effort: high." not in low
    assert low.replace("Effort: low.", "Effort: high.") == high


def test_prompts_are_measured_at_the_level_that_makes_them_longest() -> None:
    long = {"low": EffortConfig(phrase="x " * 40), "high": EffortConfig(phrase="x")}
    encoder = PromptEncoder(load_tokenizer("tiny"), PromptConfig(), None, long)
    longest = len(encoder.at("low").encode(SUM.prompt))
    assert measure_prompts(encoder, [SUM], PromptLimit(longest, "")).longest == longest
    found = measure_prompts(encoder, [SUM], PromptLimit(longest - 1, ""))
    assert found.overlong == {0: longest}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"data": {"train_effort": ["lo"]}},
            "data.train_effort: lo: not in data.effort, which has",
        ),
        ({"evaluation": {"effort": "max"}}, "evaluation.effort: max: not in data.effort"),
        (
            {"evaluation": {"also": {"easy": {"source": "playground:", "effort": "max"}}}},
            "evaluation.also.easy.effort: max",
        ),
        (
            {"data": {"effort": {"low": {"phrase": "x", "l_max": 300}}}},
            "data.effort.low.l_max: .*300",
        ),
        (
            {
                "data": {
                    "effort": {**LEVELS, "max": {"phrase": "x", "l_max": 300}},
                    "train_effort": "low",
                }
            },
            "data.effort.max.l_max: l_max 300 is above",
        ),
        ({"data": {"effort": {"low": {"phrase": "x", "l_max": 20}}}}, "data.effort.low.l_cache"),
        ({"data": {"effort": {"low": {"l_max": 20}}}}, "data.effort.low.phrase: the model cannot"),
        (
            {"cold_start": {"data": {"playground": [{}, {"effort": "max"}]}}},
            "cold_start.data.playground.1.effort: max: not in data.effort",
        ),
        ({"generator": {"interruption": {"after": [20, 50]}}}, "end at l_max 40: raise l_max"),
    ],
)
def test_levels_that_cannot_be_are_refused(sections: dict[str, Any], message: str) -> None:
    effort = {"low": {"phrase": "x", "l_max": 40, "l_cache": 20}}
    raw: dict[str, Any] = {
        **sections,
        "data": {"train": "playground:", "effort": effort} | sections.get("data", {}),
    }
    with pytest.raises(InputError, match=message):
        parse_settings(Config, raw, [], "run.yaml")


def test_an_evaluation_measures_the_levels_that_are_chosen(tmp_path: Path) -> None:
    also = {"easy": {"source": "playground:", "problems": 2, "effort": "low"}}
    sections: Any = {
        "data": {"train": "playground:", "effort": LEVELS, "eval": "playground:"},
        "evaluation": {"problems": 3, "also": also},
    }
    sets = read_input(small_config(tmp_path, **sections)).sets
    asked = {name: [(p.effort, p.l_max) for p in each.problems] for name, each in sets.items()}
    assert asked == {"held_out": [("low", 6)] * 3 + [("high", None)] * 3, "easy": [("low", 6)] * 2}
    held_out = sets["held_out"].problems
    assert [p.id for p in held_out[:3]] == [p.id for p in held_out[3:]]
    given = small_config(tmp_path, **sections)
    assert settings_for("tiny", None, given, [], {}).efforts == ["low", "high"]
    assert settings_for("tiny", None, given, [], {"effort": ["high"]}).efforts == ["high"]
    with pytest.raises(InputError, match="effort: choose one of low, high"):
        tramontane.generate("tiny", "1 + 1?", given)


def test_a_run_records_and_measures_each_level(tmp_path: Path, one_layer: str) -> None:
    medium = {"phrase": "Effort: medium.", "l_max": 40, "l_cache": 8}
    levels = {"low": {**LOW, "l_max": 20, "share": 1.0}, "medium": medium, "high": LEVELS["high"]}
    run = small_config(
        tmp_path / "run",
        model=one_layer,
        data={"effort": levels, "eval": "playground:"},
        evaluation={"problems": 2, "samples": 2, "before": False},
        pipeline={"updates": 1, "group_size": 2, "l_max": 64, "diversity": "none"},
    )
    result = train(run, QuietScreen())
    rows = list(read_run(RunFolder(tmp_path / "run").path))
    tokens: dict[str, list[int]] = {name: [] for name in levels}
    for row in rows:
        tokens[row["effort"]].append(len(row["token_ids"]))
    longest = [max(found) for found in tokens.values()]
    assert longest[:2] == [20, 40] and 40 < longest[2] <= 64
    for metrics in read_log(RunFolder(tmp_path / "run").metrics_file):
        own = [row for row in rows if row["update"] == metrics["update"]]
        for level, mean in metrics["effort_completion_tokens"].items():
            found = [len(r["token_ids"]) for r in own if r["effort"] == level]
            assert mean == pytest.approx(sum(found) / len(found))
        assert metrics["effort_pass_rate"].keys() == {r["effort"] for r in own}
    by_effort = result.summary["evaluation"]["after"]["by_effort"]
    assert [part["n_problems"] for part in by_effort.values()] == [2, 2, 2]
    means = [by_effort[name]["mean_completion_tokens"] for name in levels]
    assert means[0] <= 20 and means[1] <= 40


def test_accuracy_over_tokens_is_the_share_that_is_right_by_then() -> None:
    def row(effort: str | None, tokens: int, right: bool) -> dict[str, Any]:
        return {"effort": effort, "tokens": tokens, "verdict": "right" if right else "wrong"}

    rows = [row("low", 5, True), row("low", 3, False), row("low", 2, True), row("low", 5, True)]
    rows += [row("high", 9, False)]
    assert accuracy_over_tokens("after", rows) == [
        {"name": "low, after", "points": [(0, 0.0), (2, 0.25), (5, 0.75)]},
        {"name": "high, after", "points": [(0, 0.0)]},
    ]
    many = accuracy_over_tokens("after", [row("low", n, True) for n in range(1, 1001)])[0]["points"]
    assert len(many) <= 100 and many[-1] == (1000, 1.0)
    assert accuracy_over_tokens("before", [row(None, 5, True)]) == []
