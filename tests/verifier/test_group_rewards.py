"""Rewards of a whole group, and TRL's reward functions as they are, through the real pool."""

import json
import re

import pytest

import tramontane
from tramontane.config import DataConfig, FormatConfig, VerifierConfig, parse_settings
from tramontane.data.load import load_problems
from tramontane.errors import InputError
from tramontane.run.folder import RunFolder
from tramontane.run.rollouts import read_run
from tramontane.types import Completion, Message, Problem, ToolCall, TurnRecord
from tramontane.verifier.custom import Response
from tramontane.verifier.format import check_format, sample
from tramontane.verifier.group_rewards import group_calls, run_group_call, with_group_rewards
from tramontane.verifier.pool import VerifierPool
from tramontane.verifier.reward import grade, grade_apart

# In the style of TRL's documentation and of scripts for it: none knows this package.
MODULE = r"""
import asyncio, os, re, time
import numpy

client = asyncio.Queue()   # belongs to the event loop that it is first used in

def last_message(completions, **columns):
    return [float(messages[-1]["content"] == "It is 5.") for messages in completions]

def tools_used(completions, **columns):
    called = [c["function"] for m in completions[0] for c in m.get("tool_calls", ())]
    assert called == [{"name": "add", "arguments": {"a": 2, "b": 3}}], called
    names = [m["name"] for m in completions[0] if m["role"] == "tool"]
    assert names == ["add", ""], names
    return [sum(float(m["role"] == "tool") for m in messages) for messages in completions]

def own_columns(completions, answer, level, question, **columns):
    kept = not {"prompt", "completion"} & columns.keys() and columns["id"] == [7] * 2
    same = [a == 5 and l == "Level 3" and q == "2+3" for a, l, q in zip(answer, level, question)]
    return [float(kept and each) for each in same]

def rank(problem, texts, n_tokens):
    '''The shortest is best.'''
    order = sorted(range(len(texts)), key=lambda i: n_tokens[i])
    return [1 - order.index(i) / len(texts) for i in range(len(texts))]

def correctness_reward_func(prompts, completions, answer, **kwargs) -> list[float]:
    responses = [completion[0]["content"] for completion in completions]
    assert prompts[0][-1]["role"] == "user" and len(prompts) == len(responses)
    return [2.0 if a in r else -0.5 for r, a in zip(responses, answer)]

def plain_reward(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", text) for text in completions]
    return [m is not None and m.group(1) == gt for m, gt in zip(found, ground_truth)]

def of_openrlhf(queries, prompts, labels):
    return [float(label in query) for query, label in zip(queries, labels)]

def only_maths(completions, task, **kwargs):
    return [None if t != "math" else 1.0 for t in task]

def lengths(completions_ids, **kwargs):
    return [float(len(ids)) for ids in completions_ids]

def last_token(completion_ids, log_metric, log_extra, trainer_state, **kwargs):
    log_metric("tokens", 3.0)
    log_extra("column", [1] * len(completion_ids))
    share = trainer_state.global_step / trainer_state.max_steps
    return numpy.array([ids[-1] + share for ids in completion_ids])

def narrow(completions):
    return [0.25] * len(completions)

async def remote(prompts, completions, **kwargs):
    client.put_nowait(1)
    await asyncio.wait_for(client.get(), 1)
    await asyncio.sleep(0.01)
    return [0.5 for _ in completions]

class Judge:
    def __call__(self, completions, **kwargs):
        return [0.125] * len(completions)

judge = Judge()

def odd(texts):
    word = texts[0].split()[-1]
    if word == "raise":
        return [{}["no board"]]
    if word == "hang":
        time.sleep(60)
    if word == "exit":
        os._exit(3)
    return {"short": [1.0], "one": 1.0, "text": ["0.5"] * 2, "nan": [0.1, float("nan")],
            "string": "11", "set": {0.25, 0.5}}.get(word, [None, 1.0][:len(texts)] or [])
"""
SUM = Problem("sum", "math", "What is the sum of $2$ and $3$?", "5", language="en")


@pytest.fixture(autouse=True, scope="module")
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "test_group_rewards_module.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


def rewards(*entries, **keys):
    rows = [e if isinstance(e, dict) else {"function": e} for e in entries]
    rows = [row | {"function": f"test_group_rewards_module.{row['function']}"} for row in rows]
    raw = {"timeout_s": 1.0, "workers": 2, "reward": {"custom": rows}} | keys
    return parse_settings(VerifierConfig, raw, [], "test")


def response(words, answer=5, n_tokens=10):
    ids = range(100, 100 + n_tokens)
    text = f"<think>I add them.</think>So \\boxed{{{answer}}} {words}"
    return Response(text, n_tokens, ids)


def scored(config, problem, responses, progress=(0, 1)):
    with VerifierPool(config, 256, 32) as pool:
        return pool.score(problem, responses, progress=progress).result(timeout=120)


def parts(verdicts, name):
    return [verdict.parts[name] for verdict in verdicts]


@pytest.mark.slow
def test_a_reward_ranks_the_whole_group():
    group = [response("", n_tokens=n) for n in (30, 10, 20)] + [Response("no format", 1)]
    verdicts = scored(rewards({"function": "rank", "weight": 0.5}), SUM, group)
    # The malformed one is the shortest, and takes the first rank without a reward.
    assert parts(verdicts, "rank") == [0.125, 0.375, 0.25, 0.0]
    assert [v.reward for v in verdicts] == pytest.approx([1.225, 1.475, 1.35, 0])
    also = rewards({"function": "rank", "weight": 0.5, "malformed": True})
    assert parts(scored(also, SUM, group), "rank") == [0.125, 0.375, 0.25, 0.5]


def test_functions_of_trl_run_as_they_are():
    names = ("plain_reward", "only_maths", "lengths", "last_token", "narrow", "remote", "judge")
    config, group = rewards(*names), [response("", n_tokens=n) for n in (3, 4)]
    group.append(response("", 6))
    problem = Problem("p", "math", "2 + 3?", "5", metadata={"ground_truth": "5", "task": "code"})
    verdicts = scored(config, problem, group, progress=(3, 12))
    assert parts(verdicts, "plain_reward") == [1, 1, 0]
    assert parts(verdicts, "only_maths") == [0, 0, 0]
    assert parts(verdicts, "lengths") == [3, 4, 10]
    assert parts(verdicts, "last_token") == [102.25, 103.25, 109.25]
    assert parts(verdicts, "remote") == [0.5] * 3
    assert parts(verdicts, "narrow") + parts(verdicts, "judge") == [0.25] * 3 + [0.125] * 3


def test_a_chat_reaches_functions_of_trl_as_messages():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
    problem = Problem("p", "talk", "2 + 3?", "5", language="en", messages=chat)
    config = rewards("correctness_reward_func", domains={"talk": {}})
    verdicts = scored(config, problem, [Response("5", 1), Response("6", 1)])
    assert [v.verdict for v in verdicts] == ["right", "wrong"]
    assert parts(verdicts, "correctness_reward_func") == [2.0, -0.5]


def test_functions_of_trl_read_a_conversation_s_messages():
    """Not one message of all that the model wrote: the last one is the answer, and tools are used
    where there are messages of tools."""
    call = ToolCall("add", {"a": 2, "b": 3}, "5")
    unread = ToolCall("", {}, "error: not JSON", error=True)
    answers = [Message(role="tool", content="5"), Message(role="tool", content="error: not JSON")]
    turns = [
        TurnRecord(0, 4, 0, "<tool_call>…", messages=answers, calls=[call, unread]),
        TurnRecord(8, 9, 0, "It is 5."),
    ]
    completion = Completion(
        0, 0, [1], text="<tool_call>…\n\nIt is 5.", turns=turns, ending="completed"
    )
    chat = [{"role": "user", "content": "2 + 3?"}]
    config = rewards("last_message", "tools_used", domains={"talk": {}})
    given = [Response.of(completion), Response("It is 5.", 3)]
    verdicts = scored(config, Problem("p", "talk", "2 + 3?", messages=chat), given)
    assert parts(verdicts, "last_message") == [1.0, 1.0]
    assert parts(verdicts, "tools_used") == [2.0, 0.0]


def test_functions_of_trl_get_the_row_s_own_columns(tmp_path):
    """Those that are a problem's fields under another name or in another form, too."""
    chat = [{"role": "user", "content": "2 + 3?"}]
    given = {
        "prompt": chat, "answer": 5, "question": "2+3", "level": "Level 3", "id": 7, "source": 1,
        "solution": "2 and 3 #### 5", "image": None,
    }  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text(
        json.dumps(given) + "\n" + json.dumps({"query": "2?", "final_answer": "#### 2"})
    )
    config = DataConfig(train=str(file))
    first, second = load_problems(str(file), config, split="train", limit=None, seed=0)
    assert (first.answer, first.difficulty, first.id, first.source) == ("5", 3, "7", "1")
    columns = {name: first.row[name] for name in given if name != "image"}
    assert columns == {name: value for name, value in given.items() if name != "image"}
    assert (second.row["query"], second.row["final_answer"]) == ("2?", "#### 2")
    assert (second.row["problem"], second.row["answer"]) == ("2?", "2")
    verdicts = scored(rewards("own_columns"), first, [response("", 3), response("", 4)])
    assert parts(verdicts, "own_columns") == [1.0, 1.0]


def test_what_no_reward_judges_is_unscorable():
    """None takes a reward out of the sum and out of what could be earned."""
    config = rewards("only_maths", domains={"talk": {}})
    talk = {task: Problem("p", "talk", "?", metadata={"task": task}) for task in ("math", "code")}
    assert grade(talk["math"], "x", 1, config, 99, 9).verdict == "right"
    verdict = grade(talk["code"], "x", 1, config, 99, 9)
    assert (verdict.verdict, verdict.reason) == ("unscorable", "every reward returned None")
    both = rewards("only_maths", "narrow", domains={"talk": {"pass_mark": 0.25}})
    assert grade(talk["code"], "x", 1, both, 99, 9).verdict == "right"
    assert grade(talk["math"], "x", 1, both, 99, 9).reason == ""


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("raise", r"KeyError: 'no board' \(.*module.py:\d+, in odd\)"),
        ("short", r"returned \[1.0\] \(list\), not a list of 2 numbers but of 1 "),
        ("one", r"returned 1.0 \(float\), not a list of 2 numbers"),
        ("string", r"returned '11' \(str\), not a list of 2 numbers"),
        ("text", r"returned '0.5' \(str\), not one of a list of 2 numbers, or None"),
        ("nan", r"returned nan \(float\), not one of"),
        ("set", r"returned \{0.25, 0.5\} \(set\), not a list of 2 numbers"),
    ],
)
def test_a_failing_group_reward_makes_its_group_unscorable(word, reason):
    config = rewards("odd", "narrow")
    group = [response(word), response("ok")]
    apart = [grade_apart(SUM, r, config, 256, 32) for r in group]
    calls = group_calls(SUM, apart, group, config)
    results = {call.name: run_group_call(SUM, call, config) for call in calls}
    verdicts = with_group_rewards(SUM, apart, results, config)
    assert [v.verdict for v in verdicts] == ["unscorable"] * 2
    for verdict in verdicts:
        assert verdict.reward == sum(verdict.parts.values()) == 0
        assert re.match(f"reward 'odd': {reason}", verdict.reason)


@pytest.mark.slow
def test_a_group_reward_that_hangs_or_dies_is_killed_and_named():
    with VerifierPool(rewards("odd"), 256, 32) as pool:
        hung = pool.score(SUM, [response("hang"), response("ok"), Response("malformed", 1)])
        died = pool.score(SUM, [response("exit"), response("ok")])
        fine = pool.score(SUM, [response("ok"), response("ok")])
        verdicts = hung.result(timeout=120)
        assert [v.verdict for v in verdicts] == ["unscorable", "unscorable", "malformed"]
        line = MODULE.splitlines().index("def odd(texts):") + 1
        assert verdicts[0].reason.startswith("reward 'odd' (")
        assert verdicts[0].reason.endswith(f"_module.py:{line}): timed out after 3 s")
        assert died.result(120)[1].reason.endswith(": the worker died (exit code 3)")
        assert [v.parts["odd"] for v in fine.result(120)] == [0.0, 1.0]
        assert pool.stats().timeouts == 1


def test_the_time_limit_of_a_group_counts_its_group_rewards():
    """Else a run would take slow rewards for a pool that has stalled."""
    with VerifierPool(rewards("rank", "narrow", {"function": "odd", "weight": 0}), 9, 1) as pool:
        assert pool.time_limit(SUM, 4) == 4 + 2 * 4


# ---------------------------------------------------------------------- the call before the start


def test_a_column_that_no_row_has_is_named_before_the_start():
    with VerifierPool(rewards("plain_reward"), 256, 32) as pool:
        with pytest.raises(InputError, match=r"'plain_reward' \(.*module.py:\d+\) takes ground_tr"):
            pool.try_functions([SUM])
        other = Problem("o", "math", "?", "1", metadata={"ground_truth": "1"})
        pool.try_functions([SUM, other])
    with (
        VerifierPool(rewards("of_openrlhf"), 256, 32) as pool,
        pytest.raises(InputError, match="OpenRLHF's .* take completions and answer"),
    ):
        pool.try_functions([SUM])


def test_a_group_reward_is_tried_before_the_start():
    with (
        VerifierPool(rewards("correctness_reward_func"), 256, 32) as pool,
        pytest.raises(InputError, match=r"TypeError: .*in <listcomp>\)|.*_module.py:\d+, in corr"),
    ):
        pool.try_functions([SUM])  # of no chat: completions are texts


@pytest.mark.parametrize(
    "form",
    [
        "boxed",
        "fenced",
        "none",
        {"answer": "boxed", "thinking": "optional"},
        {"regex": r"Move: (?:\d+\.)?(?P<answer>\w+)"},
        {"regex": r"Answer: (.*)$", "thinking": "required"},
        {"regex": r"^\d+\s*cm"},
        {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}},
                         "required": ["a"]}},
        {"json_schema": {"enum": ["yes", "no"]}},
        {"json_schema": {"type": "array", "items": {"type": "string"}, "minItems": 2}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("answer", ["5", r"\frac{1}{2}", "Ke2"])
def test_a_sample_has_the_format(form, answer):
    form = FormatConfig.model_validate(form)
    text = sample(form, answer)
    assert text and check_format(text, form).ok


# -------------------------------------------------------------------------- runs, files, signature


@pytest.mark.slow
def test_a_run_is_trained_with_functions_of_trl_alone(tmp_path):
    """From Python, rows with an answer column: as in TRL, the functions alone decide."""

    def sums(prompts, completions, answer, **kwargs):
        assert len({*prompts}) == 1
        return [2.0 if a in text else None for text, a in zip(completions, answer, strict=True)]

    async def shorter(completions, completion_ids, **kwargs):
        best = min(map(len, completion_ids))
        return [best / len(ids) for ids in completion_ids]

    rows = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(8)]
    sizes = {"updates": 1, "n_async": 16, "n_batch": 16, "group_size": 4, "l_max": 48}
    settings = {f"pipeline.{k}": v for k, v in sizes.items()} | {"run_dir": str(tmp_path / "run")}
    result = tramontane.train(
        model="tiny", data=rows, rewards=[sums, shorter], overrides=settings,
        quiet=True, report=False,
    )  # fmt: skip
    assert result.finished
    _, config = RunFolder.open(tmp_path / "run")
    assert config.data.domain == "task"
    found = list(read_run(tmp_path / "run"))
    groups = {row["group"] for row in found}
    best = [max(r["parts"]["shorter"] for r in found if r["group"] == g) for g in groups]
    assert best == [1.0] * len(groups)
    assert {row["parts"]["sums"] for row in found} <= {0.0, 2.0}


def test_score_ranks_rows_of_one_id_that_follow_each_other(tmp_path):
    texts = [response("", n_tokens=n) for n in (30, 10)] + [response("")]
    rows = [
        {"id": i, "domain": "math", "problem": "2+3?", "answer": "5", "response": r.text,
         "response_tokens": r.n_tokens}
        for i, r in zip(("a", "a", "b"), texts, strict=True)
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "c.yaml").write_text(
        "verifier: {reward: {custom: [{function: test_group_rewards_module.rank},"
        " {function: test_group_rewards_module.lengths, name: tokens}]}}"
    )
    summary = tramontane.score(tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "c.yaml")
    verdicts = [json.loads(line) for line in (tmp_path / "out.jsonl").open()]
    assert [v["parts"]["rank"] for v in verdicts] == [0.5, 1.0, 1.0]
    assert [v["parts"]["tokens"] for v in verdicts] == [30, 10, 10]
    assert (summary.scored, summary.double_ids) == (3, {})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda data_source, solution_str, ground_truth, extra_info=None: 1.0,  # verl's
            r"takes 'solution_str', and would be called with \(problem, text, n_tokens\) in this",
        ),
        (lambda prompt, completion, answer: 1.0, "takes 'answer'.* read problem.answer"),
        (lambda p, t: 1.0, r"^reward lambda \(p, t\), .*test_group_rewards.py:\d+, is called with"),
        (
            lambda problem, texts, tokens: 1.0,
            r"is called with \(problem, texts\): missing .*tokens",
        ),
    ],
)
def test_a_fault_is_told_by_the_signature(function, message):
    with pytest.raises(InputError, match=message):
        tramontane.dry_run(model="tiny", data=[{"prompt": "?"}], rewards=[function])
