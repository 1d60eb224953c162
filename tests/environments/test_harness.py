"""Harnesses whose requests are turns of a conversation."""

import asyncio

import pytest

pytest.importorskip("fastapi", reason="not installed: pip install 'tramontane-rl[view]'")

from tests.environments.templates import tokenizer_of
from tests.environments.test_worker import KEY, Talk, call, talk
from tramontane.config import Config, DataConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.environments import loading
from tramontane.environments.worker import EnvironmentWorker
from tramontane.errors import InputError

SAID = f"<think>add</think>\n{call('add', a=1)}{call('add', a=2)}"


def worker_of(name, shape="qwen2.5", **conversation):
    environment = f"tests.environments.harnesses:{name}"
    config = Config(model="tiny", data={"environment": environment}, conversation=conversation)
    return EnvironmentWorker(config, PromptEncoder(tokenizer_of(shape)))


@pytest.mark.parametrize("shape", ["qwen2.5", "smollm2"])
def test_requests_continue_one_sequence_to_the_token(shape):
    answered, spoken = talk(worker_of("Adder", shape), SAID, "It is 5.")
    assert answered.ending == "completed" and answered.turn.reward == 1.0
    assert not spoken.earlier and len(spoken.turns) == 2
    assert [m["content"] for m in spoken.turns[0].messages] == ["five 0", "five 1"]
    assert [c.name for c in spoken.turns[0].calls] == ["add", "add"]
    assert spoken.text.index("five 0") < spoken.text.index("five 1")
    assert talk(worker_of("Adder", shape), "It is 6.")[0].turn.reward == 0.0


def test_another_chat_is_a_new_sequence():
    answered, spoken = talk(worker_of("Forgetful"), "A draft.", "Better.")
    assert answered.ending == "completed" and answered.turn.reward is None
    assert len(spoken.earlier) == 1 and "Improve: A draft." in spoken.text
    assert "Draft." not in spoken.text


def test_tokens_are_continued_where_they_extend_those_so_far():
    said = ["One.", "<think>Two.</think>", "Three."]
    answered, spoken = talk(worker_of("Tokens"), *said)
    assert answered.ending == "completed", answered.reason
    (earlier,), decode = spoken.earlier, spoken.tokenizer.decode
    first, second, third = spoken.turns
    assert earlier.prompt_ids == [5, 6, 7] and spoken.prompt == [10]
    assert list(earlier.token_ids[first.end : second.start]) == [8, 9] == spoken.put[0]
    assert first.messages == [{"role": "user", "content": decode([8, 9])}]
    assert second.messages == [] and (third.sequence, third.start) == (1, 0)
    assert [turn.text for turn in spoken.turns] == said
    assert answered.turn.reward == sum(turn.end - turn.start for turn in spoken.turns)


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
        await worker.close(KEY)

    asyncio.run(run())


def test_a_harness_is_told_what_is_not_answered_and_reads_its_tokens():
    answered, spoken = talk(worker_of("Unfit"), "Hm.")
    assert answered.ending == "completed", answered.reason
    assert answered.turn.reward == len(spoken.ids)


@pytest.mark.parametrize(
    ("name", "said", "reason"),
    [("Broken", ["hm"], "the disk is full"), ("Silent", [], "without a request")],
)
def test_a_harness_that_fails_is_named(name, said, reason):
    answered, _ = talk(worker_of(name), *said)
    assert answered.ending == "environment_failed" and reason in answered.reason


def test_a_conversation_that_ends_refuses_its_harness():
    worker = worker_of("Adder", turns=1)
    answered, _ = talk(worker, SAID)
    assert answered.ending == "max_turns" and not worker._switchboard.lines


def test_harnesses_are_checked_at_the_start():
    environment = "tests.environments.harnesses:Adder"
    loading.check(DataConfig(environment=environment))
    with pytest.raises(InputError, match="tools of its own"):
        loading.check(DataConfig(environment=environment, tools=("calculator",)))
