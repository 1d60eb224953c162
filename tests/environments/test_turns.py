"""Turns of a worker's conversations: their room, their order, and their repetition."""

import asyncio
import threading
from dataclasses import replace

import pytest
from tokenizers import decoders

from tests.environments.templates import UNREAD, tokenizer_of
from tests.environments.test_worker import KEY, Talk, call, talk, worker_of
from tramontane.config import Config, PromptConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.protocol import Lost, Started
from tramontane.environments.worker import EnvironmentWorker


class Fickle:
    """Says little, and in its second life nothing any more."""

    lives = 0
    fails = False

    def start(self):
        Fickle.lives += 1

    async def step(self, message):
        if Fickle.lives > 1:
            if Fickle.fails:
                raise OSError("the disk")
            await asyncio.sleep(60)
        return "Go on.", None, False


class Looks(Fickle):
    def look(self) -> str:
        """Look."""
        return "left"

    @property
    def tools(self):
        return [self.look]


MEETING = threading.Barrier(40)


def meet() -> str:
    """Wait for the others."""
    MEETING.wait(60)
    return "met"


def worker(kind, tokenizer=None, prefix="", **conversation):
    data = {"train": "playground:", "environment": f"{__name__}:{kind.__name__}"}
    config = Config(model="tiny", data=data, conversation=conversation)
    prompts = PromptConfig(response_prefix=prefix)
    return EnvironmentWorker(config, PromptEncoder(tokenizer or tokenizer_of("qwen2.5"), prompts))


def test_each_sequence_has_the_room_of_the_conversation_and_of_the_first_prompt():
    async def run():
        spoken, sampled, rooms = Talk(worker_of("qwen3", environment="Guess")), 0, []
        first = len((await spoken.begin()).prompt_ids)
        for thoughts in ("Up.", "so " * 60, "More."):
            answered = await spoken.say(f"<think>{thoughts}</think>0")
            sampled += answered.turn.end
            rooms.append((2000 - sampled, 2000 + first - len(answered.prompt_ids)))
            assert answered.max_tokens == min(rooms[-1])
        return rooms

    async def run_on():
        spoken = Talk(worker_of(environment="Guess"))
        await spoken.begin()
        return [(await spoken.say(text)).max_tokens for text in ("50", "0", "2")]

    assert asyncio.run(run_on()) == [2000] * 3
    (sampled, prompt), *later = asyncio.run(run())
    assert sampled > prompt and all(sampled < prompt for sampled, prompt in later)


def test_the_end_of_the_context_is_told_in_tokens():
    async def run(l_max):
        spoken = Talk(worker_of(environment="Guess"), l_max)
        await spoken.begin()
        answered = await spoken.say("50")
        if answered.ending is None:
            return len(spoken.prompt), len(spoken.ids)
        return answered.ending, answered.reason

    prompt, needed = asyncio.run(run(2000))
    assert asyncio.run(run(needed + 1)) == (prompt, needed)
    assert asyncio.run(run(needed)) == (
        "context_full",
        f"This model's maximum context length is {prompt + needed} tokens (pipeline.l_max), and "
        f"the messages have {prompt + needed}",
    )


def test_a_first_turn_extends_its_prompt():
    async def run():
        spoken = Talk(worker_of(environment="Guess"))
        await spoken.begin()
        spoken.prompt = [spoken.prompt[0] + 1, *spoken.prompt[1:]]
        with pytest.raises(RuntimeError, match="do not extend"):
            await spoken.say("40")

    asyncio.run(run())


def test_one_turn_is_answered_at_a_time_and_none_after_the_end():
    Fickle.lives = 1
    made = worker(Fickle, step_timeout=0.05)

    async def run():
        spoken = Talk(made)
        await spoken.begin()
        both = [spoken.say("One."), Talk.say(spoken, "Two.")]
        late, second = await asyncio.gather(*both, return_exceptions=True)
        assert late.ending == "step_timeout"
        with pytest.raises(RuntimeError, match="a conversation is .*ENDED"):
            await spoken.say("Three.")
        return second

    with pytest.raises(RuntimeError, match="a conversation is .*STEPPING, and cannot become"):
        raise asyncio.run(run())


@pytest.mark.parametrize(
    ("fails", "ending", "reason"),
    [
        (True, "environment_failed", "Fickle.step: OSError: the disk"),
        (False, "step_timeout", "its step took longer than 0.05 s"),
    ],
)
def test_a_replay_that_fails_tells_the_prompt_and_why(fails, ending, reason):
    Fickle.lives, Fickle.fails = 0, fails
    made, other = (worker(Fickle, step_timeout=0.05) for _ in range(2))

    async def run():
        spoken = Talk(made)
        await spoken.begin()
        assert (await spoken.say("One.")).ending is None
        return spoken, await spoken.replayed(other)

    spoken, replayed = asyncio.run(run())
    assert replayed == Started(spoken.prompt, ending, replayed.reason)
    assert replayed.reason.startswith(reason)


def test_a_replay_that_is_answered_otherwise_tells_the_prompt():
    async def run():
        spoken = Talk(worker_of(environment="Guess"))
        await spoken.begin()
        await spoken.say("50")
        spoken.turns = [replace(spoken.turns[0], messages=[])]
        return spoken.prompt, await spoken.replayed(worker_of(environment="Guess"))

    prompt, replayed = asyncio.run(run())
    assert (replayed.prompt_ids, replayed.ending) == (prompt, "environment_failed")


def test_calls_that_cannot_be_read_end_a_conversation_at_its_beginning():
    tokenizer = tokenizer_of.__wrapped__("qwen2.5")
    tokenizer.chat_template = UNREAD
    made, toolless = (worker(kind, tokenizer) for kind in (Looks, Fickle))

    async def run():
        spoken = Talk(made)
        started, replayed = await spoken.begin(), await spoken.replayed(made)
        said = await made.step(KEY, spoken.completion, 2000)
        return started, replayed, said, await Talk(toolless).begin()

    started, replayed, said, other = asyncio.run(run())
    assert started == replayed == Started([], "environment_failed", started.reason)
    assert "not read" in started.reason and isinstance(said, Lost) and other.ending is None


def test_all_functions_of_a_turn_run_at_once():
    config = Config(model="tiny", data={"train": "playground:", "tools": [f"{__name__}:meet"]})
    made = EnvironmentWorker(config, PromptEncoder(tokenizer_of("qwen2.5")))
    answered, _ = talk(made, call("meet") * 40)
    assert [m["content"] for m in answered.turn.messages] == ["met"] * 40


def test_a_response_template_is_told_what_the_prompt_holds():
    tokenizer, asked = tokenizer_of.__wrapped__("qwen2.5"), []
    tokenizer.response_template = {"fields": {"content": {"close": "<|im_end|>"}}}
    tokenizer.parse_response = lambda *text, **given: asked.append((text, given["prefix"])) or {}
    Fickle.lives = 0

    async def run():
        spoken = Talk(worker(Fickle, tokenizer, "<think>\n"))
        await spoken.begin()
        asked.clear()  # of what was tried
        return (await spoken.say("So.</think>3")).turn.text

    assert asyncio.run(run()) == "<think>\nSo.</think>3"
    assert asked[0][0] == ("So.</think>3",) and asked[0][1].endswith("assistant\n<think>\n")


def test_the_space_before_a_turns_first_word_is_kept():
    tokenizer = tokenizer_of.__wrapped__("qwen2.5")
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace(replacement="Ġ")
    assert tokenizer.decode(tokenizer(" Hm", add_special_tokens=False)["input_ids"]) == "Hm"
    Fickle.lives = 0

    async def run():
        spoken = Talk(worker(Fickle, tokenizer))
        await spoken.begin()
        return (await spoken.say(" Hm")).turn.text

    assert asyncio.run(run()) == " Hm"
