"""How conversations of a worker begin, or do not, and begin again."""

import asyncio

import pytest

from tests.environments.templates import tokenizer_of
from tests.environments.test_worker import KEY, Talk, problem, worker_of
from tramontane.config import Config
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.protocol import Lost, Started
from tramontane.environments.worker import EnvironmentWorker


class Late:
    """Begins late, and says when it is closed."""

    closed: list = []  # noqa: RUF012

    async def start(self):
        await asyncio.sleep(60)

    async def step(self, message):
        raise AssertionError

    async def close(self):
        Late.closed.append(type(self).__name__)


class Broken(Late):
    async def start(self):
        raise OSError("the disk")


class Odd(Late):
    async def start(self, config):
        return f"Odd start of {config.model}."

    def look(self) -> str:
        """Look."""
        return "left"

    @property
    def tools(self):
        return [self.look]


def worker(kind, **conversation):
    data = {"train": "playground:", "environment": f"{__name__}:{kind.__name__}"}
    config = Config(model="other", data=data, conversation=conversation)
    return EnvironmentWorker(config, PromptEncoder(tokenizer_of("qwen2.5")))


@pytest.mark.parametrize(
    ("kind", "ending", "reason"),
    [
        (Late, "step_timeout", "its start took longer than 0.05 s"),
        (Broken, "environment_failed", "Broken.start: OSError: the disk"),
    ],
)
def test_a_conversation_that_does_not_begin_is_closed_and_says_why(kind, ending, reason):
    Late.closed.clear()
    made = worker(kind, step_timeout=0.05)

    async def run():
        spoken = Talk(made)
        started = await spoken.begin()
        return started, await made.step(KEY, spoken.completion, 2000)

    started, answered = asyncio.run(run())
    assert started.reason.startswith(reason)
    assert started == Started([], ending, started.reason)
    assert isinstance(answered, Lost) and Late.closed == [kind.__name__]


def test_a_beginning_tells_its_chat_and_tools_and_ends_the_one_before():
    Late.closed.clear()
    made = worker(Odd)

    async def run():
        first = await made.start(KEY, problem(), 1)
        assert Late.closed == []
        again = await made.start(KEY, problem(), 1)
        assert Late.closed == ["Odd"] and again == first
        await made.close(KEY)
        await made.close(KEY)
        return first

    started = asyncio.run(run())
    assert Late.closed == ["Odd"] * 2
    assert (started.ending, started.reason, started.tools) == (None, "", ["look"])
    assert started.opened == [{"role": "user", "content": "Odd start of other."}]
    assert "Odd start of other." in tokenizer_of("qwen2.5").decode(started.prompt_ids)


def test_a_first_prompt_has_its_limit():
    made = worker(Odd)

    async def run(limit):
        return await made.start(KEY, problem(), 1, limit)

    prompt = asyncio.run(run(10_000)).prompt_ids
    assert asyncio.run(run(len(prompt))).prompt_ids == prompt
    refused = asyncio.run(run(len(prompt) - 1))
    assert (refused.prompt_ids, refused.ending) == ([], "context_full")
    assert refused.reason == (
        f"This model's maximum context length is {len(prompt) - 1} tokens at its beginning "
        f"(data.max_prompt_tokens), and this prompt has {len(prompt)}"
    )


def test_turns_that_were_replayed_count():
    one, other = (worker_of(environment="Guess", turns=3) for _ in range(2))

    async def run():
        spoken = Talk(one)
        await spoken.begin()
        assert (await spoken.say("0")).ending is None
        assert (await spoken.say("2")).ending is None
        spoken.worker = other
        assert (await spoken.replayed(other)).ending is None
        return await spoken.say("1")

    assert asyncio.run(run()).ending == "max_turns"


def test_an_error_of_this_package_is_nobodys_failure():
    """It is raised, not told as the environment's."""
    made = worker(Odd)
    made._format = None  # what no prompt can be made with
    Late.closed.clear()
    with pytest.raises(AttributeError):
        asyncio.run(made.start(KEY, problem(), 1))
    assert Late.closed == ["Odd"]
