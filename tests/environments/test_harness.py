"""Harnesses whose requests are turns of a conversation."""

import asyncio
import contextlib
import resource
import signal
import sys
import time
from dataclasses import replace

import httpx
import pytest

pytest.importorskip("fastapi", reason="not installed: pip install 'tramontane-rl[view]'")

from fastapi import HTTPException

from tests.environments import harnesses
from tests.environments.harnesses import TOOL
from tests.environments.templates import tokenizer_of
from tests.environments.test_worker import KEY, Talk, call, problem, talk
from tramontane.config import Config, DataConfig
from tramontane.config.images import ImagesConfig
from tramontane.controller.conversations import take_answer
from tramontane.data.prompts import PromptEncoder
from tramontane.environments import harness, loading, wire
from tramontane.environments.calls import Parsed
from tramontane.environments.harness import HarnessSession, Line, Switchboard
from tramontane.environments.protocol import Lost, Started
from tramontane.environments.running import EnvironmentFailed, Runner
from tramontane.environments.worker import EnvironmentWorker
from tramontane.errors import InputError
from tramontane.status import Status
from tramontane.tokens import floats, ints
from tramontane.types import Completion, SamplingParams

LIMITS = ImagesConfig().limits
EFFORT = {"low": {"phrase": "Be brief."}}
SAID = f"<think>add</think>\n{call('add', a=1)}{call('add', a=2)}"


def worker_of(name, shape="qwen2.5", **conversation):
    environment = f"tests.environments.harnesses:{name}"
    data = {"train": "playground:", "environment": environment, "effort": EFFORT}
    config = Config(model="tiny", data=data, conversation=conversation)
    encoder = PromptEncoder(tokenizer_of(shape), config.data, None, config.data.effort)
    return EnvironmentWorker(config, encoder)


@pytest.mark.parametrize("shape", ["qwen2.5", "smollm2"])
def test_requests_continue_one_sequence_to_the_token(shape):
    answered, spoken = talk(worker_of("Adder", shape), SAID, "It is 5.")
    assert answered.ending == "completed" and answered.turn.reward == 1.0
    assert not spoken.earlier and len(spoken.turns) == 2 and spoken.turns[1].messages == []
    assert [m["content"] for m in spoken.turns[0].messages] == ["five 0", "five 1"]
    assert [c.name for c in spoken.turns[0].calls] == ["add", "add"]
    assert spoken.text.index("five 0") < spoken.text.index("five 1")
    assert talk(worker_of("Adder", shape), "It is 6.")[0].turn.reward == 0.0


def test_conversations_at_once_have_an_address_each_and_one_server():
    worker = worker_of("Compact")
    handler, limits = signal.getsignal(signal.SIGTERM), resource.getrlimit(resource.RLIMIT_NOFILE)
    given = [replace(problem(n=1), id=f"closed {number}") for number in range(2)]

    async def run():
        started, bases = [], set()
        for number, each in enumerate(given):
            started.append(await worker.start((3, number), each, 7))
            bases.add(worker._switchboard._base)
        assert len(bases) == 1 and signal.getsignal(signal.SIGTERM) is handler
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
        assert len({key.partition("-")[2] for key in worker._switchboard.lines}) == 2
        for number in range(2):
            await worker.close((3, number))
        assert not worker._switchboard.lines
        while not all(isinstance(harnesses.SEEN.get(each.id), list) for each in given):
            await asyncio.sleep(0.01)  # each is told that its request is not answered any more
        return [each.prompt_ids for each in started]

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[1]), limits[1]))
    try:
        one, other = asyncio.run(asyncio.wait_for(run(), 30))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert one == other
    assert [harnesses.SEEN[each.id] for each in given] == [[410, 410]] * 2


def test_a_request_that_repeats_one_under_way_shares_its_turn():
    async def run():
        line = Line(PromptEncoder(tokenizer_of("qwen2.5")), LIMITS)
        bodies = [wire.TokenRequest(token_ids=[token]) for token in (5, 0, 5)]
        tasks = [asyncio.create_task(line.continued(body)) for body in bodies]
        await asyncio.sleep(0)
        asked = [line.requests.get_nowait() for _ in range(line.requests.qsize())]
        assert [(each.body.token_ids, each.clients) for each in asked] == [([5], 2), ([0], 1)]
        line.close(HTTPException(410, "over"))
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [each.status_code for each in found] == [410] * 3
        for wrong in ({"n": 2}, {"stop": ["x"]}):
            with pytest.raises(HTTPException, match="`n` is 1 and `stop` is not supported"):
                await line.continued(wire.TokenRequest(token_ids=[5], sampling_params=wrong))
        with pytest.raises(HTTPException, match="outside the model's vocabulary"):
            await line.continued(wire.TokenRequest(token_ids=[len(line.encoder.tokenizer)]))
        chat = {"model": "", "messages": [{"role": "user", "content": "?"}]}
        with pytest.raises(HTTPException, match="`stop_token_ids` is not supported"):
            await line.sampled(wire.ChatRequest(**chat, stop_token_ids=[1]))
        for error in (OSError("first"), OSError("second")):
            line.failed(error)
        assert str(line.fault.exception()) == "first"

    asyncio.run(asyncio.wait_for(run(), 30))


def test_what_was_given_up_before_its_turn_may_be_asked_again():
    async def run():
        line = Line(PromptEncoder(tokenizer_of("qwen2.5")), LIMITS)
        one, other = (wire.TokenRequest(token_ids=[token]) for token in (5, 6))

        class Hasty:
            async def run(self, problem, base_url):
                first, second = (asyncio.create_task(line.continued(b)) for b in (one, other))
                await asyncio.sleep(0)
                second.cancel()
                await first
                while line.requests.qsize():
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
                await line.continued(other)
                return 1.0

        session = HarnessSession(Hasty, Runner(), Switchboard(), line)
        await session.start(problem(), 7)
        for asked in ([5], [6]):
            assert session.posted == asked
            turn = Completion(*KEY, asked, ints([7]), floats([-1.0]), ints([0]), "stop")
            reply = await session.step(Parsed("", "", "", []), turn)
        await session.close()
        return reply

    reply = asyncio.run(asyncio.wait_for(run(), 30))
    assert (reply.reward, reply.done) == (1.0, True)


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        ("given-up read given-up given-up given-up", "gave up 2 requests"),
        ("read given-up", "the disk is full"),
        ("read refused given-up", "the disk is full"),
    ],
)
def test_requests_given_up_are_counted_from_the_last_answer_on(monkeypatch, requests, reason):
    monkeypatch.setattr(harness, "MAX_WITHDRAWN", 2)
    *requests, last = requests.split()

    async def run():
        line, gives_up = Line(PromptEncoder(tokenizer_of("qwen2.5")), LIMITS), asyncio.Event()

        class Hasty:
            async def run(self, problem, base_url):
                for token, request in enumerate([*requests, last]):
                    body = wire.TokenRequest(token_ids=[token])
                    asked = asyncio.create_task(line.continued(body))
                    with contextlib.suppress(HTTPException):
                        await (gives_up.wait() if request == "given-up" else asked)
                    gives_up.clear()
                    asked.cancel()
                raise OSError("the disk is full")

        async def next_one(request):
            if request == "read":
                turn = Completion(*KEY, [1], ints([7]), floats([-1.0]), ints([0]), "stop")
                return await session.step(Parsed("", "", "", []), turn)
            if request == "refused":
                return await session.refuse("context_full", "too long")
            gives_up.set()
            while not session.withdraws():
                await asyncio.sleep(0)
            return await session.next()

        session = HarnessSession(Hasty, Runner(), Switchboard(), line)
        await session.start(problem(), 7)
        for request in requests:
            await next_one(request)
        with pytest.raises(EnvironmentFailed, match=reason):
            await next_one(last)
        await session.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_conversation_that_is_closed_ends_the_coroutine_of_its_harness():
    async def run():
        line, ended = Line(PromptEncoder(tokenizer_of("qwen2.5")), LIMITS), asyncio.Event()

        class Sleeps:
            async def run(self, problem, base_url):
                asked = asyncio.create_task(line.continued(wire.TokenRequest(token_ids=[5])))
                try:
                    await asyncio.sleep(60)
                finally:
                    with pytest.raises(HTTPException):
                        await asked
                    ended.set()

        session = HarnessSession(Sleeps, Runner(), Switchboard(), line)
        await session.start(problem(), 7)
        await session.close()
        await ended.wait()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_chat_is_continued_where_it_repeats_all_before_and_the_answer():
    add = {"type": "function", "function": {"name": "add", "arguments": "{}"}, "id": "1"}
    one, two = ({"role": "user", "content": text} for text in ("One?", "Two?"))
    yes, no = ({"role": "assistant", "content": text} for text in ("Yes.", "No."))
    called = {**yes, "tool_calls": [add]}
    requests = [  # what is kept of the chat before, what comes behind it, and whether it continues
        ([one], [], [], False),
        (None, [yes, two], [], True),
        ([two, yes, two], [yes, two], [], False),
        (None, [{**yes, "role": "user"}, two], [], False),
        (None, [no, two], [], False),
        (None, [called, {**two, "role": "tool"}], [], False),
        (None, [], [], False),
        (None, [yes, two, two], [], True),
        (None, [yes, one], [TOOL], False),
    ]

    async def run():
        line = Line(PromptEncoder(tokenizer_of("qwen2.5")), LIMITS)

        class Asks:
            async def run(self, problem, base_url):
                chat = []
                await line.continued(wire.TokenRequest(token_ids=[5]))
                for kept, more, tools, _ in requests:
                    chat = (kept or chat) + more
                    await line.sampled(wire.ChatRequest(model="", messages=chat, tools=tools))

        session = HarnessSession(Asks, Runner(), Switchboard(), line)
        await session.start(problem(), 7)
        turn = Completion(*KEY, [1], ints([7]), floats([-1.0]), ints([0]), "stop")
        for _, more, _, continues in requests:
            reply = await session.step(Parsed("", "", "Yes.", []), turn)
            assert session.restarted is not continues
            assert reply.messages == (more[1:] if continues else [])
        await session.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_another_chat_is_a_new_sequence():
    answered, spoken = talk(worker_of("Forgetful"), "A draft.", "Better.")
    assert spoken.turns[0].opened == [{"role": "user", "content": "Improve: A draft."}]
    assert spoken.started.opened == [{"role": "user", "content": "Draft."}]
    assert not talk(worker_of("Adder"), "It is 5.")[1].started.opened  # the problem's own
    assert answered.ending == "completed" and answered.turn.reward is None
    assert len(spoken.earlier) == 1 and "Improve: A draft." in spoken.text
    assert "Draft." not in spoken.text and "Be brief." not in spoken.text
    given = replace(problem(), effort="low")
    _, spoken = talk(worker_of("Forgetful"), "A draft.", "Better.", given=given)
    prompts = [spoken.started.prompt_ids, spoken.prompt]
    assert all("Be brief." in spoken.tokenizer.decode(prompt) for prompt in prompts)


def test_tokens_are_continued_where_they_extend_those_so_far():
    said = ["One.", "<think>Two.</think>", "Three."]
    answered, spoken = talk(worker_of("Tokens"), *said)
    assert answered.ending == "completed", answered.reason
    (earlier,), decode = spoken.earlier, spoken.tokenizer.decode
    first, second, third = spoken.turns
    assert earlier.prompt_ids == [5, 6, 7] and spoken.prompt == [10]
    assert list(earlier.token_ids[first.end : second.start]) == [8, 9, 8] == spoken.put[0]
    assert first.messages == [{"role": "user", "content": decode([8, 9, 8])}]
    assert first.anew is None and not first.opened  # as it continues
    assert second.anew == [] and second.opened == [{"role": "user", "content": decode([10])}]
    assert second.messages == [] and (third.sequence, third.start) == (1, 0)
    assert [turn.text for turn in spoken.turns] == said
    assert answered.turn.reward == sum(turn.end - turn.start for turn in spoken.turns)


def test_an_answer_begins_with_what_the_tokens_of_its_prompt_have_opened():
    ids = tokenizer_of("qwen3")("So?<think>", add_special_tokens=False)["input_ids"]
    answered, spoken = talk(worker_of("Opens", "qwen3"), "Hm.</think>3", given=problem(ids=ids))
    assert answered.turn.reward == 1.0 and spoken.prompt == ids
    assert [turn.text for turn in spoken.turns] == ["<think>Hm.</think>3"]


def test_tokens_are_replayed():
    worker, other = worker_of("Tokens"), worker_of("Tokens")

    async def run():
        spoken = Talk(worker)
        await spoken.begin()
        await spoken.say("One.")
        await spoken.say("Two.")
        assert (await spoken.replayed(other)).prompt_ids == [5, 6, 7]
        spoken.worker = other
        answered = await spoken.say("Three.")
        assert answered.ending == "completed", answered.reason
        assert answered.turn.reward == sum(turn.end - turn.start for turn in spoken.turns)
        await worker.close(KEY)

    asyncio.run(run())


def test_a_harness_is_told_what_is_not_answered_and_reads_its_tokens():
    answered, spoken = talk(worker_of("Unfit"), "Hm.")
    assert answered.ending == "completed", answered.reason
    assert answered.turn.reward == len(spoken.ids)


@pytest.mark.parametrize(
    ("name", "said", "reason"),
    [
        ("Broken", ["hm"], "the disk is full"),
        ("Silent", [], "without a request"),
        ("Unmade", [], "no room for another"),
        ("Wordy", ["hm"], "run returned 'much', not a finite number or None"),
    ],
)
def test_a_harness_that_fails_is_named(name, said, reason):
    answered, _ = talk(worker_of(name), *said)
    assert answered.ending == "environment_failed" and reason in answered.reason


def test_a_conversation_that_ends_refuses_its_harness():
    worker = worker_of("Adder", turns=1)
    answered, _ = talk(worker, SAID)
    assert answered.ending == "max_turns" and not worker._switchboard.lines


async def play(worker, *said, given=None, l_max=2000, **limits):
    """A conversation as the controller leads it: the model says a text, or first waits (a number of
    seconds)."""
    tokenizer = worker._format.encoder.tokenizer
    answer = await worker.start(KEY, given or problem(), 7, **limits)
    sampling = SamplingParams(l_max)
    request = Completion.requested(*KEY, answer.prompt_ids, 7, sampling, images=answer.images)
    prompts = [answer.prompt_ids]
    for each in said:
        if answer.ending is not None:
            break
        if isinstance(each, float):
            await asyncio.sleep(each)
            continue
        ids = [*tokenizer(each, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        ids = ids[: request.sampling.max_tokens - len(request.token_ids)]
        request.token_ids = request.token_ids + ints(ids)
        request.logprobs = request.logprobs + floats([-0.5] * len(ids))
        request.versions = request.versions + ints([3] * len(ids))
        reason = "stop" if ids[-1] == tokenizer.eos_token_id else "length"
        request.finish_reason = reason
        request.move(Status.STEPPING)
        answer = await worker.step(KEY, replace(request, turns=[]), l_max)
        if isinstance(answer, Started):
            request = Completion.requested(*KEY, answer.prompt_ids, 7, sampling)
            prompts.append(answer.prompt_ids)
        else:
            take_answer(request, answer)
    if isinstance(answer, Started) and answer.ending is not None:  # it is not known any more
        assert await worker.step(KEY, replace(request, turns=[]), l_max) == Lost()
    await worker.close(KEY)
    return answer, request, prompts


def played(worker, *said, **keys):
    return asyncio.run(play(worker, *said, **keys))


def test_a_harness_at_the_end_of_its_context_is_told_and_may_go_on_with_a_shorter_chat():
    given = replace(problem(n=60), id="full")
    # A prompt of the second sequence may have the room of the first one's.
    answer, whole, _ = played(worker_of("Compact"), *["Yes."] * 9, given=given, l_max=100)
    assert (answer.ending, answer.turn.reward) == ("context_full", 0.5)
    codes = harnesses.SEEN["full"]
    assert codes.count("context_length_exceeded") == 2 and codes.count("stop") == len(whole.turns)
    first = codes.index("context_length_exceeded")
    assert 0 < first < len(codes) - 2  # an answer came after it
    assert len(whole.earlier) == 1 and whole.n_tokens <= 100
    assert "maximum context length" in answer.reason
    assert answer.reason in harnesses.SEEN["full", "told"][-1]


def test_a_harness_whose_answer_was_cut_reads_it_and_gives_its_reward():
    given = replace(problem(n=1), id="cut")
    answer, whole, _ = played(worker_of("Compact"), "word " * 60, given=given, l_max=20)
    assert (answer.ending, answer.turn.reward) == ("context_full", 0.5)
    assert harnesses.SEEN["cut"] == ["length", *["context_length_exceeded"] * 2]
    assert len(whole.token_ids) == 20 and whole.finish_reason == "length"


def test_a_harness_that_fails_at_an_answer_that_was_cut_is_not_blamed():
    answer, whole, _ = played(worker_of("Broken"), "word " * 60, l_max=20)
    assert (answer.ending, answer.turn.reward) == ("max_tokens", None)
    assert whole.finish_reason == "length" and len(whole.turns) == 1


def test_a_harness_after_its_last_turn_is_told_and_gives_its_reward():
    given = replace(problem(n=1), id="turns")
    answer, *_ = played(worker_of("Compact", turns=2), "A.", "B.", given=given)
    assert (answer.ending, answer.turn.reward) == ("max_turns", 0.5)
    assert harnesses.SEEN["turns"] == ["stop", "stop", 410, 410]
    assert answer.reason in harnesses.SEEN["turns", "told"][-1]


@pytest.mark.parametrize("longest", [2, 70])
def test_a_first_prompt_that_is_too_long_may_be_shortened(longest):
    given = replace(problem(n=60), id="first")
    worker = worker_of("Compact", turns=1)
    answer, _, prompts = played(worker, "A.", given=given, max_prompt=longest)
    if longest == 2:  # nothing is short enough
        assert answer.ending == "context_full" and "data.max_prompt_tokens" in answer.reason
        assert harnesses.SEEN["first"] == ["context_length_exceeded"] * 2
        assert answer.reason in harnesses.SEEN["first", "told"][-1]
        answer, *_ = played(worker_of("Adder"), max_prompt=longest)  # which fails when it is told
        assert answer.ending == "context_full" and "data.max_prompt_tokens" in answer.reason
    else:
        assert answer.ending == "max_turns" and len(prompts[0]) <= 70


def test_a_conversation_that_has_ended_is_gone_and_others_do_not_exist():
    given = replace(problem(n=1), id="stays")
    worker = worker_of("Stays", turns=1, step_timeout=1.0)

    async def run():
        begun = time.perf_counter()
        answer, *_ = await play(worker, "A.", given=given)
        assert answer.ending == "max_turns" and time.perf_counter() - begun < 20
        base = worker._switchboard._base
        while "stays" not in harnesses.SEEN or not isinstance(harnesses.SEEN["stays"], int):
            await asyncio.sleep(0.05)
        asked = await asyncio.to_thread(httpx.get, f"{base}/0-{'0' * 64}/v1/models")
        assert asked.status_code == 401

    asyncio.run(asyncio.wait_for(run(), 60))
    assert harnesses.SEEN["stays"] == 410


def test_harnesses_are_checked_at_the_start(monkeypatch):
    environment = "tests.environments.harnesses:Adder"
    loading.check(DataConfig(train="playground:", environment=environment))
    with pytest.raises(InputError, match="tools of its own"):
        loading.check(
            DataConfig(train="playground:", environment=environment, tools=("calculator",))
        )
    rows = DataConfig(train="playground:", environment="row", tools=("calculator",))
    with pytest.raises(InputError, match="^1: field 'environment': .* tools of its own"):
        loading.check(rows, [problem(environment=environment)])
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # as if it were not installed
    with pytest.raises(InputError, match="^data.environment: a harness needs uvicorn; install"):
        loading.check(DataConfig(train="playground:", environment=environment))


def test_a_harness_gives_back_tokens_without_a_text():
    """The vocabulary of a model may be padded beyond its tokenizer's."""
    worker = worker_of("Back")

    async def run():
        spoken = Talk(worker)
        await spoken.begin()
        spoken.ids = [len(spoken.tokenizer), spoken.tokenizer.eos_token_id]
        turn = replace(spoken.completion, turn_start=0)
        answered = await worker.step(KEY, turn, 2000)
        await worker.close(KEY)
        return answered

    answered = asyncio.run(run())
    assert answered.ending is None and answered.prompt_ids is None and list(answered.put) == [7]


def test_an_exception_in_its_endpoint_fails_a_conversation_alone():
    worker = worker_of("Adder")

    async def run():
        spoken = Talk(worker)
        await spoken.begin()
        worker._open[KEY].session._line.encoder = None  # broken
        with pytest.raises(AttributeError):  # with its traceback, and not what the harness raised
            await spoken.say("It is 5.")
        await worker.close(KEY)
        whole = Talk(worker)
        await whole.begin()
        assert (await whole.say("It is 5.")).turn.reward == 1.0

    asyncio.run(asyncio.wait_for(run(), 60))
