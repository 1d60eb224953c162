"""Conversations in one worker: what follows a turn, endings, failures, and replays."""

import asyncio
import json
import re
import sqlite3
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.environments import worlds
from tests.environments.templates import tokenizer_of
from tramontane.batches import TrainSequence
from tramontane.config import Config
from tramontane.controller.conversations import take_answer
from tramontane.data.prompts import PromptEncoder
from tramontane.environments import loading
from tramontane.environments.calls import Parsed
from tramontane.environments.running import EnvironmentFailed, Runner
from tramontane.environments.session import Session
from tramontane.environments.worker import EnvironmentWorker
from tramontane.errors import InputError
from tramontane.run.input import read_input
from tramontane.run.task import config_of
from tramontane.status import Status
from tramontane.tokens import INSERTED, EarlierSequence, floats, ints
from tramontane.types import Completion, Problem, SamplingParams, ToolCall

WORLDS = "tests.environments.worlds"
KEY = (3, 1)


def worker_of(shape="qwen2.5", environment=None, tools=(), **conversation):
    config = Config(
        model="tiny",
        data={
            "train": "playground:",
            "environment": environment and (f"{WORLDS}:{environment}"),
            "tools": [f"{WORLDS}:{tool}" for tool in tools],
        },
        conversation=conversation,
    )
    return EnvironmentWorker(config, PromptEncoder(tokenizer_of(shape)))


def problem(statement="Go on.", answer="5", **metadata):
    return Problem("1", "math", statement, answer=answer, metadata=metadata)


class Talk:
    """Plays the loop: keeps the tokens of one conversation, and lets a script be the model."""

    def __init__(self, worker, l_max=2000, given=None, seed=7):
        self.worker, self.l_max = worker, l_max
        self.problem, self.seed = given or problem(), seed
        self.tokenizer = worker._format.encoder.tokenizer
        self.turns, self.earlier, self.ids, self.prompt, self.put = [], [], [], [], []

    async def begin(self):
        self.started = started = await self.worker.start(KEY, self.problem, self.seed)
        self.prompt, self.ids = started.prompt_ids, []
        return started

    async def say(self, text, reason="stop"):
        start = len(self.ids)
        said = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        self.ids = self.ids + said + ([self.tokenizer.eos_token_id] if reason == "stop" else [])
        completion = replace(self.completion, finish_reason=reason, turn_start=start)
        answered = await self.worker.step(KEY, completion, self.l_max)
        self.turns.append(answered.turn)
        if answered.prompt_ids is not None:
            said = self.completion
            sequence = EarlierSequence(
                said.prompt_ids, said.token_ids, said.logprobs, said.versions
            )
            self.earlier = [*self.earlier, sequence]
            self.prompt, self.ids = answered.prompt_ids, []
        else:
            self.put.append(list(answered.put))
            self.ids = self.ids + list(answered.put)
        return answered

    async def replayed(self, worker):
        completion = replace(self.completion, turns=self.turns)
        return await worker.replay(KEY, self.problem, self.seed, completion)

    @property
    def completion(self):
        n = len(self.ids)
        return Completion(
            *KEY, self.prompt, self.ids, [-0.5] * n, [3] * n, "stop", earlier=self.earlier
        )

    @property
    def text(self):
        return self.tokenizer.decode([*self.prompt, *self.ids])


def talk(worker, *said, l_max=2000, given=None):
    """A conversation to its end: (how it started or was answered last, the conversation)."""

    async def run():
        spoken = Talk(worker, l_max, given)
        answered = await spoken.begin()
        for text in said:
            if answered.ending is None:
                answered = await spoken.say(text)
        await worker.close(KEY)
        return answered, spoken

    return asyncio.run(run())


def call(name, **arguments):
    values = str(arguments).replace("'", '"')
    return f'<tool_call>{{"name": "{name}", "arguments": {values}}}</tool_call>'


def test_a_game_of_several_turns():
    answered, spoken = talk(worker_of(environment="Guess"), "50", "so what?", "0", "41")
    assert [turn.messages for turn in spoken.turns] == [
        [{"role": "user", "content": "lower"}],
        [{"role": "user", "content": "Write a number."}],
        [{"role": "user", "content": "higher"}],
        [],
    ]
    assert answered.ending == "completed" and answered.turn.reward == 1 / 4
    end, begin = "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert spoken.tokenizer.decode(spoken.ids) == (
        f"50{end}lower{begin}so what?{end}Write a number.{begin}0{end}higher{begin}41<|im_end|>"
    )
    assert [t.text for t in spoken.turns] == ["50", "so what?", "0", "41"]
    tokens = [spoken.tokenizer.decode(spoken.ids[t.start : t.end - 1]) for t in spoken.turns]
    assert tokens == ["50", "so what?", "0", "41"]


def test_tools_answer_until_the_model_makes_no_call():
    worker = worker_of(tools=("add", "Counter"))
    answered, spoken = talk(
        worker,
        call("add", a=1, b=2) + call("increase", by=3),
        call("increase") + call("nothing"),
        "It is 4.",
    )
    assert answered.ending == "completed"
    answers = [[c.answer for c in turn.calls] for turn in spoken.turns]
    assert answers[0] == ["3", "3"] and answers[1][0] == "4" and answers[2] == []
    assert [c.error for c in spoken.turns[1].calls] == [False, True]
    assert answered.turn.reward is None
    assert '"name": "increase"' in spoken.tokenizer.decode(spoken.prompt)
    assert all(c.seconds >= 0 for c in spoken.turns[0].calls)


def test_an_environment_of_trl_runs_unchanged():
    worker = worker_of(environment="TrlCounter")
    given = problem("Count.", "5")
    answered, spoken = talk(
        worker, call("increase", by=2), call("increase", by=3), "Done.", given=given
    )
    assert "Count. The target is 5." in spoken.tokenizer.decode(spoken.prompt)
    assert answered.ending == "completed" and answered.turn.reward == 1.0
    answered, spoken = talk(worker, call("increase", by=-2), "Done.", given=given)
    assert spoken.turns[0].calls[0].answer == "error: ValueError: only upwards"
    assert answered.turn.reward == 0.0


def test_an_environment_of_trl_is_reset_with_the_row_s_own_columns():
    """Not with the group's seed for the row's, nor with a text for a number."""
    worker = worker_of(environment="TrlRow")
    given = replace(problem("Count.", "5", seed=1007), renamed={"answer": 5, "question": "Count!"})
    _, spoken = talk(worker, "Done.", given=given)
    assert "answer 5, question 'Count!', seed 1007" in spoken.tokenizer.decode(spoken.prompt)


@pytest.mark.parametrize(
    ("behavior", "reason"),
    [
        ("raise", r"Odd.step: RuntimeError: broken \(.*worlds.py:\d+, in step\)"),
        ("exit", r"Odd.step: SystemExit: 1"),
        ("untold", r"Odd.step: Untold: \(its text cannot be made\) \(.*worlds.py:\d+"),
        ("cancel", r"Odd.step: RuntimeError: CancelledError"),
        ("stop", r"Odd.step: StopIteration: "),
        ("many", r"Odd.step returned .*, not messages .* at most 1,000 with"),
        ("huge", r"Odd.step returned .*, not messages .* 4,000,000 characters"),
        ("none", r"Odd.step returned None \(NoneType\), not a Turn.*worlds.py:\d+"),
        ("silent", r"Odd.step returned Turn.*not messages, or done=True"),
        ("nonsense", r"Odd.step returned 'much' \(str\), not a finite number"),
        ("nan", r"Odd.step returned nan"),
        ("unprintable", r"Odd.step: OSError: neither"),
        ("array", r"Odd.step: ValueError: The truth value"),
        ("endless", r"Odd.step returned <generator.*not messages with `role`"),
        (
            "roles",
            r"Odd.step returned .*'assistant'.*not messages with `role` \(user, tool, system",
        ),
    ],
)
def test_an_environment_that_fails_is_named(behavior, reason):
    answered, spoken = talk(worker_of(environment="Odd"), "x", given=problem(behavior=behavior))
    assert answered.ending == "environment_failed" and re.search(reason, answered.reason)
    assert not list(answered.put) and answered.turn.reward is None
    assert spoken.turns[0].text == "x"
    # Others go on, and so does the next.
    assert talk(worker_of(environment="Odd"), "x", given=problem(behavior=""))[0].turn.reward == 0.5


def test_half_a_character_is_replaced():
    answered, _ = talk(worker_of(environment="Odd"), "x", given=problem(behavior="halves"))
    assert answered.turn.messages == [{"role": "user", "content": "a?b"}]


def test_a_tool_that_breaks_fails_the_conversation():
    answered, _ = talk(worker_of(tools=("Counter",)), call("fail"))
    assert answered.ending == "environment_failed" and "the disk is gone" in answered.reason
    assert [c.name for c in answered.turn.calls] == ["fail"]


def test_a_late_step_ends_its_conversation_alone():
    worker = worker_of(tools=("Counter", "Dozer"), step_timeout=0.3)

    async def run():
        slow, quick = Talk(worker), Talk(worker)
        quick_key = (9, 9)
        await slow.begin()
        started = await worker.start(quick_key, problem(), 1)
        late = asyncio.create_task(slow.say(call("hang", seconds=1.0)))
        begun = time.perf_counter()
        ids = quick.tokenizer(call("increase"), add_special_tokens=False)["input_ids"]
        ids.append(quick.tokenizer.eos_token_id)
        n = len(ids)
        done = Completion(*quick_key, started.prompt_ids, ids, [0.0] * n, [0] * n, "stop")
        answered = await worker.step(quick_key, done, 2000)
        assert answered.ending is None and time.perf_counter() - begun < 0.25
        late = await late
        assert late.ending == "step_timeout" and "0.3 s" in late.reason
        assert 0.2 < late.turn.seconds < 0.6
        assert worker.stuck == 1  # the thread sleeps on
        await asyncio.sleep(0.9)
        assert worker.stuck == 0
        dozed = await slow.begin()
        assert dozed.ending is None
        late = await slow.say(call("doze", seconds=5))  # a coroutine is cancelled
        assert late.ending == "step_timeout" and worker.stuck == 0

    asyncio.run(run())


def test_turns_are_limited():
    answered, spoken = talk(worker_of(environment="Guess", turns=2), "50", "0", "41")
    assert answered.ending == "max_turns" and len(spoken.turns) == 2
    assert answered.reason == "2 turns were answered (conversation.turns)"
    assert answered.turn.messages and not list(answered.put)


def test_a_cut_turn_ends_the_conversation():
    worker = worker_of(environment="Guess")

    async def run():
        spoken = Talk(worker)
        await spoken.begin()
        answered = await spoken.say("41 and", "length")
        assert answered.ending == "max_tokens" and answered.turn.messages == []
        assert answered.turn.text == "41 and"

    asyncio.run(run())


@given(l_max=st.integers(5, 120))
@settings(deadline=None, max_examples=30)
def test_a_conversation_has_at_most_l_max_tokens(l_max):
    """What follows leaves room for a token of the model, or the context is full."""
    worker = worker_of(environment="Guess", turns=50)

    async def run():
        spoken = Talk(worker, l_max)
        await spoken.begin()
        while True:
            before = len(spoken.ids)
            answered = await spoken.say("50" if before else "5")
            if answered.ending is not None:
                assert answered.ending == "context_full"
                assert answered.turn.messages  # they did not fit
                break
            assert answered.max_tokens == l_max
            assert len(spoken.ids) < l_max

    asyncio.run(run())


def test_a_call_that_does_not_parse_is_answered_or_ends():
    broken = '<tool_call>{"name": "add", </tool_call>'
    answered, spoken = talk(worker_of(tools=("add",)), broken, "3")
    assert answered.ending == "completed"
    assert spoken.turns[0].messages[0]["content"].startswith("error: the call cannot be read")
    answered, _ = talk(worker_of(tools=("add",), unparsed="end"), broken)
    assert answered.ending == "unparsed_call" and "not JSON" in answered.reason
    whole = call("add", a=1, b=2)
    answered, spoken = talk(worker_of(tools=("add",), unparsed="end"), whole, whole + broken, "3")
    assert answered.ending == "unparsed_call" and spoken.turns[0].messages[0]["content"] == "3"


def test_an_answer_is_cut():
    answered, _ = talk(worker_of(tools=("Counter",), answer_bytes=64), call("x" * 100))
    assert len(answered.turn.calls[0].answer.encode()) <= 64


def test_a_template_that_drops_thoughts_forks_or_keeps():
    said = ("<think>Halve.</think>50", "<think>Less.</think>0", "<think>More.</think>41")
    answered, spoken = talk(worker_of("qwen3", environment="Guess"), *said)
    assert answered.ending == "completed" and len(spoken.earlier) == 2
    assert [turn.sequence for turn in spoken.turns] == [0, 1, 2]
    assert all(turn.start == 0 for turn in spoken.turns)
    shown = spoken.text
    assert shown.count("<think>") == 1 and "assistant\n50<|im_end|>" in shown
    # Of a turn's own tokens nothing is lost.
    first = spoken.tokenizer.decode(spoken.earlier[0].token_ids)
    assert first == "<think>Halve.</think>50<|im_end|>"
    answered, spoken = talk(worker_of("qwen3", environment="Guess", history="keep"), *said)
    assert answered.ending == "completed" and not spoken.earlier
    assert spoken.text.count("<think>") == 3


def test_tokens_that_do_not_extend_the_last_turns_are_refused():
    worker = worker_of(environment="Guess")

    async def run():
        spoken = Talk(worker)
        await spoken.begin()
        await spoken.say("50")
        spoken.ids[0] += 1
        with pytest.raises(RuntimeError, match="do not extend"):
            await spoken.say("40")

    asyncio.run(run())


def test_a_replay_continues_where_it_stopped():
    worker, other = (worker_of(environment="Guess") for _ in range(2))

    async def run():
        spoken = Talk(worker)
        await spoken.begin()
        await spoken.say("50")
        await spoken.say("0")
        turns = spoken.turns
        again = await spoken.replayed(other)
        assert again.ending is None and again.prompt_ids == spoken.prompt
        spoken.worker = other
        answered = await spoken.say("41")
        assert answered.ending == "completed" and answered.turn.reward == 1 / 3
        lower = [{"role": "user", "content": "lower"}]
        spoken.turns = [turns[0], replace(turns[1], messages=lower)]
        differs = await spoken.replayed(other)
        assert differs.ending == "environment_failed"
        assert "turn 2 was answered differently" in differs.reason

    asyncio.run(run())


def test_a_replay_of_a_forked_conversation_forks_alike():
    said = "<think>Halve.</think>50", "<think>Less.</think>0"
    worker, other = (worker_of("qwen3", environment="Guess") for _ in range(2))

    async def run():
        spoken = Talk(worker)
        await spoken.begin()
        for text in said:
            await spoken.say(text)
        await spoken.replayed(other)
        spoken.worker = other
        replayed = await spoken.say("<think>Up.</think>20")
        assert replayed.prompt_ids is not None and replayed.ending is None
        text = spoken.tokenizer.decode(replayed.prompt_ids)
        assert text.count("assistant\n") == 4 and "<think>" not in text

    asyncio.run(run())


def test_without_an_environment_of_its_own_a_row_is_one_turn():
    answered, spoken = talk(worker_of(environment=None), "It is 5.")
    assert answered.ending == "completed" and spoken.turns[0].calls == []


SAID = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name": "add"', ', "arguments": {', '"a": ', "1", "}",
         "}}", "[[", "]]", '"b": "2"', ", ", "<think>", "</think>", "<|im_end|>", "\\ud800", "NaN",
         "1e999", "9" * 5000, "hi", '{"name": "give", "arguments": {"kind": "half"}}']
    ),
    max_size=12,
).map("".join)  # fmt: skip


TEXTS = st.lists(
    st.one_of(
        st.text(max_size=9),
        st.sampled_from(["</s>", "<|im_end|>", "<|eot_id|>", "[INST]", "<think>", "\ud800", "🙂é"]),
    ),
    max_size=5,
).map(lambda parts: "".join(["x", *parts]))  # a message has a text


@settings(deadline=None, max_examples=60)
@given(
    shape=st.sampled_from(["qwen3", "llama-3", "mistral-v13", "gemma-3"]),
    first=SAID,
    rest=st.lists(st.tuples(TEXTS, SAID), max_size=2),
)
def test_whatever_is_written_what_was_sampled_is_trained_on(shape, first, rest):
    """Whatever the model, its tools and its environment write."""
    worker = worker_of(shape, environment="Says", tools=("add", "Counter"))
    tokenizer, sampled = worker._format.encoder.tokenizer, []

    async def run():
        given = problem(texts=[text for text, _ in rest])
        started = await worker.start(KEY, given, 7)
        request = Completion.requested(*KEY, started.prompt_ids, 7, SamplingParams(300_000))
        for said in [first, *(said for _, said in rest)]:
            new = tokenizer(said, add_special_tokens=False)["input_ids"]
            new = ints([*new, tokenizer.eos_token_id])
            sampled.extend(new)
            ids, n = request.token_ids + new, len(new)
            kept = request.logprobs + floats([-1.0] * n), request.versions + ints([4] * n)
            request.take_turn(Completion(*KEY, request.prompt_ids, ids, *kept, "stop"))
            request.move(Status.STEPPING)
            take_answer(request, await worker.step(KEY, replace(request), 300_000))
        await worker.close(KEY)
        return request

    whole = asyncio.run(run())
    assert whole.ending == "completed" and len(whole.turns) == 1 + len(rest)
    assert all(len(t.messages) == len(t.calls) + 1 for t in whole.turns[:-1])
    parts = [TrainSequence.of(part) for part in whole.sequences]
    tokens = [t for p in parts for t in zip(p.token_ids, p.versions, p.logprobs, strict=True)]
    assert [token for token, version, _ in tokens if version != INSERTED] == sampled
    assert {(version, logprob) for _, version, logprob in tokens} <= {(4, -1.0), (INSERTED, 0.0)}


def test_one_seed_makes_equal_conversations():
    worker = worker_of(environment="Guess")
    outcomes = {talk(worker, str(n))[0].turn.messages[0]["content"] for n in (40, 40, 40)}
    assert outcomes == {"higher"}


def test_rows_that_are_to_name_environments_and_do_not_are_refused():
    data = Config(model="tiny", data={"environment": "row"}).data
    row = Problem("1", "math", "Hey")
    with pytest.raises(InputError, match="row, but no row names one in its field 'environment'"):
        loading.check(data, [row])
    loading.check(data, [row, replace(row, metadata={"environment": f"{WORLDS}:Guess"})])


@pytest.mark.parametrize(
    ("environment", "tools", "found"),
    [
        ("guessing", (), True),
        ("repair", (), True),
        (None, ("calculator", "notebook"), True),
        ("guessing", ("calculator", "python"), False),
        (f"{WORLDS}:Guess", ("calculator",), False),
    ],
)
def test_what_is_deterministic_says_so(environment, tools, found):
    data = Config(
        model="tiny", data={"train": "playground:", "environment": environment, "tools": tools}
    ).data
    assert loading.deterministic(data, problem()) == found


def test_a_row_names_its_own_environment_where_the_config_has_one():
    data = Config(model="tiny", data={"train": "playground:", "environment": "row"}).data
    own = problem(environment=f"{WORLDS}:Guess")
    assert loading.environment_of(data, own) == f"{WORLDS}:Guess"
    assert loading.environment_of(data, problem()) is None
    assert loading.environment_of(Config(model="tiny").data, own) is None
    default = Config(model="tiny", data={"train": "playground:", "environment": "shop:Shop"}).data
    assert loading.environment_of(default, problem()) == "shop:Shop"
    for path, said in (
        ("os:system", "Python itself"),
        ("pickle:AAAA", "pickled"),
        ("x", "built in"),
    ):
        with pytest.raises(InputError, match=f"of a row: .*{said}"):
            loading.load(loading.environment_of(data, problem(environment=path)), loading.ROW)


def test_a_class_and_a_function_may_be_passed_from_python():
    class Echo:
        tools = ()

        def step(self, message):
            return message["content"], 0.0, True

    def shout(text: str) -> str:
        """Shout.

        Args:
            text: What.
        """
        return text.upper()

    given = {"data.train": "a", "data.environment": Echo, "data.tools": [shout, f"{WORLDS}:add"]}
    parsed, _ = config_of(None, given, model="tiny", data=None, rewards=())
    assert parsed.data.environment.startswith("pickle:")
    worker = EnvironmentWorker(parsed, PromptEncoder(tokenizer_of("qwen2.5")))
    loading.check(parsed.data)
    answered, spoken = talk(worker, "Hey" + call("shout", text="ho"))
    assert answered.ending == "completed"
    assert [m["content"] for m in spoken.turns[0].messages] == ["HO", "Hey"]


@pytest.mark.parametrize(
    ("key", "path", "said"),
    [
        ("environment", f"{WORLDS}:Missing", "data.environment: .*cannot be imported"),
        ("environment", "nowhere:Shop", r"No module named 'nowhere'\); name it"),
        (
            "environment",
            f"{WORLDS}:StartsWithMore",
            "start.* may take problem, seed, config, by name",
        ),
        ("environment", f"{WORLDS}:StepsWithMore", r"step\(self, message, state\).*'state'$"),
        ("environment", f"{WORLDS}:add", "is a function, not an environment.*data.tools"),
        ("environment", "chess", "'chess' is not built in"),
        ("tools", f"{WORLDS}:Guess", "is an environment; name it in data.environment"),
        ("tools", "tramontane.types.Problem", "made without arguments.*missing"),
        ("tools", f"{WORLDS}:Untyped", r"tool Untyped.look \(.*worlds.py:\d+\): .*type hint"),
    ],
)
def test_a_wrong_path_is_refused_at_the_start(key, path, said):
    value = [path] if key == "tools" else path
    data = Config(model="tiny", data={"train": "playground:", key: value}).data
    with pytest.raises(InputError, match=said):
        loading.check(data)


@pytest.mark.parametrize(
    ("environment", "tools", "found"),
    [
        ("Guess", (), []),
        ("Guess", ("add",), ["add"]),
        ("TrlCounter", (), ["increase"]),
        ("Counter", (), ["increase", "fail", "hang", "give"]),
        ("Stocked", (), ["look"]),
    ],
)
def test_a_conversation_tells_its_tools_wherever_they_come_from(environment, tools, found):
    started, _ = talk(worker_of(environment=environment, tools=tools))
    assert started.tools == found


def test_a_reward_of_trls_is_not_overlooked():
    sections = {"train": "playground:", "eval": None, "environment": f"{WORLDS}:TrlCounter"}
    with pytest.raises(InputError, match="TrlCounter has `get_reward`; set conversation.reward to"):
        read_input(Config(model="tiny", data=sections))
    for reward in ("last", "verifier"):
        read_input(Config(model="tiny", data=sections, conversation={"reward": reward}))


def test_rows_that_name_a_wrong_environment_are_refused_at_the_start(tmp_path):
    good, bad = {"problem": "a", "answer": "1", "environment": f"{WORLDS}:Guess"}, "nowhere:Shop"
    file = tmp_path / "rows.jsonl"
    rows = [good] * 100 + [good | {"environment": bad}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(file), "eval": None, "environment": "row"}
    said = r"rows\.jsonl:101: field 'environment': .*No module named 'nowhere'"
    with pytest.raises(InputError, match=said):
        read_input(Config(model="tiny", data=data))
    assert len(read_input(Config(model="tiny", data=data | {"environment": None})).problems.streams)


def test_a_toolbox_that_cannot_be_closed_keeps_no_other_open():
    closed = []

    class Broken:
        def close(self):
            raise RuntimeError("not now")

        def look(self) -> str:
            """Look."""
            return "nothing"

    class Kept:
        def close(self):
            closed.append("toolbox")

        def listen(self) -> str:
            """Listen."""
            return "nothing"

    class World:
        tools = ()

        def step(self, message):
            return "", 0.0, True

        def close(self):
            closed.append("environment")

    session = Session(Config(model="tiny").data, 1000, Runner())
    session._toolboxes, session._environment = [Broken(), Kept()], World()
    session._kind = "environment"
    asyncio.run(session.close())
    assert closed == ["toolbox", "environment"]


def test_objects_are_used_in_the_thread_that_made_them():
    made, threads = worlds.Bound.made, set(threading.enumerate())
    worker = worker_of(environment="Bound", tools=("Desk",))

    async def converse(index):
        started = await worker.start((0, index), problem(), 1)
        assert started.ending is None, started.reason
        text = "".join(call("double", number=n) for n in (1, 2)) + call("note", text="x")
        ids = worker._format.encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
        n = len(ids)
        said = Completion(0, index, started.prompt_ids, ids, [0.0] * n, [0] * n, "stop")
        answered = await worker.step((0, index), said, 2000)
        await worker.close((0, index))
        return answered

    async def run():
        return await asyncio.gather(*map(converse, range(8)))

    for answered in asyncio.run(run()):
        assert (answered.ending, answered.turn.reward) == ("completed", 1.0), answered.reason
        assert [m["content"] for m in answered.turn.messages] == ["2", "4", "3"]
    assert worlds.Bound.made == made
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        ({"environment": f"{WORLDS}:AsyncStep"}, ["2", "3"]),
        ({"environment": f"{WORLDS}:AsyncStart"}, ["2", "3"]),
        ({"tools": [f"{WORLDS}:MixedBox"]}, ["2", "3"]),
        ({"environment": f"{WORLDS}:MixedBox"}, ["2", "3"]),
        ({"environment": f"{WORLDS}:MixedTrl"}, ["2", "3"]),
        ({"environment": f"{WORLDS}:ClosingOver"}, ["3"]),
        ({"environment": f"{WORLDS}:Boxed"}, ["2"]),
    ],
)
def test_synchronous_and_asynchronous_methods_of_an_object_share_one_thread(data, seen):
    config = Config(model="tiny", data=data)

    async def converse(runner):
        session = Session(config.data, 1000, runner)
        await session.start(problem(), 1)
        calls = [ToolCall(tool["function"]["name"], {}, "") for tool in session.tools]
        await session.step(Parsed("", "", "", calls))
        if not calls:
            reply = await session.step(Parsed("", "", "", []))
            assert reply.done and reply.messages[-1]["content"] == "3"
            calls = [ToolCall("", {}, answer) for answer in ("2", "3")]
        reward = await session.final_reward()
        await session.close()
        return [call.answer for call in calls], reward

    async def run():
        return await asyncio.gather(*[converse(Runner()) for _ in range(8)])

    for answers, reward in asyncio.run(run()):
        assert (answers, reward) == (seen, 4.0 if "MixedTrl" in str(data) else None)


def test_what_a_module_shares_fails_with_a_remedy():
    connection = sqlite3.connect(":memory:")

    def look() -> str:
        """Look."""
        return str(connection.execute("select 1"))

    with pytest.raises(EnvironmentFailed, match=r"same thread.*make it in `__init__`"):
        asyncio.run(Runner().run(look))


def test_functions_without_an_object_run_side_by_side():
    begun = time.perf_counter()
    answered, _ = talk(worker_of(tools=("pause",)), call("pause", seconds=0.5) * 4)
    assert [m["content"] for m in answered.turn.messages] == ["done"] * 4
    assert time.perf_counter() - begun < 1.9
