"""What an environment returns and reads, in one conversation without a model."""

import asyncio
from types import SimpleNamespace

import pytest

from tramontane.config import Config, DataConfig
from tramontane.environments import session as sessions
from tramontane.environments.calls import Parsed
from tramontane.environments.running import EnvironmentFailed, Runner
from tramontane.environments.session import Reply, Session, unlike
from tramontane.types import Problem, ToolCall

SAID = Parsed("so", "", "so", [])
PROBLEM = Problem("id", "math", "1 + 1?", "2", metadata={"level": 3})


def user(content, **more):
    return {"role": "user", "content": content, **more}


class Given:
    """An environment that returns what a test says."""

    first = returned = None
    read: list = []  # noqa: RUF012

    def start(self):
        return Given.first

    def step(self, message):
        Given.read.append(message)
        return Given.returned


class Bare:
    tools = None

    def step(self, message):
        return "", None, True


class Configured(Bare):
    def start(self, config, seed):
        return f"{config.model} {seed}"


class Row:
    """An environment of TRL's kind."""

    shown = reward = None
    read: dict = {}  # noqa: RUF012

    def reset(self, prompt, seed, level=None, **others):
        Row.read = {"prompt": prompt, "seed": seed, "level": level, **others}
        return Row.shown

    def look(self) -> str:
        """Look."""
        return "left"

    def get_reward(self):
        return Row.reward


class Unrewarded:
    def reset(self):
        return "more"


class Box:
    begun: dict = {}  # noqa: RUF012

    def start(self, seed, problem):
        assert not hasattr(self, "started")
        self.started, Box.begun = True, {"seed": seed, "problem": problem}

    def get_reward(self):
        raise AssertionError("only TRL's environments have one")

    def peek(self) -> str:
        """Peek."""
        return f"{Box.begun['seed']}"


class Closed:
    closed: list = []  # noqa: RUF012

    def look(self) -> str:
        """Look."""
        return "left"

    def close(self):
        self.closed.append(type(self).__name__)


class ClosedWorld(Closed):
    @property
    def tools(self):
        return [Box().peek]

    def step(self, message):
        return "", None, True


def conversation(kind, *messages, problem=PROBLEM, config=None, tools=()):
    """(the session, its first chat, its replies, its last reward)."""
    path = f"{__name__}:{kind.__name__}"
    tools = [f"{__name__}:{each.__name__}" for each in tools]

    async def run():
        data = DataConfig(train="playground:", environment=path, tools=tools)
        made = Session(data, 1000, Runner())
        try:
            chat = await made.start(problem, 5, config)
            replies = [await made.step(message) for message in messages]
            return made, chat, replies, await made.final_reward()
        finally:
            await made.close()

    return asyncio.run(run())


def step(returned):
    Given.returned, Given.first = returned, None
    Given.read.clear()
    [reply] = conversation(Given, SAID)[2]
    return reply


TOOL, SYSTEM = {"role": "tool", "content": "b"}, {"role": "system", "content": "c"}
MANY = [user("")] * sessions.MAX_MESSAGES
LONG = "x" * (sessions.MAX_CHARACTERS - 1)


@pytest.mark.parametrize(
    ("returned", "reply"),
    [
        (("hi", 1, False), Reply([user("hi")], 1.0, False)),
        (([user("a"), TOOL, SYSTEM], None, 1), Reply([user("a"), TOOL, SYSTEM], None, True)),
        ((None, True, True), Reply([], 1.0, True)),
        (([], 0.5, True), Reply([], 0.5, True)),
        ({"messages": "a"}, Reply([user("a")])),
        ({"done": True, "reward": 0}, Reply([], 0.0, True)),
        (SimpleNamespace(messages="a"), Reply([user("a")])),
        (SimpleNamespace(messages=(), done=True, reward=2, other=3), Reply([], 2.0, True)),
        ({"messages": "a", "done": 0}, Reply([user("a")])),
        ({"messages": "a", "reward": 1, "done": True}, Reply([user("a")], 1.0, True)),
        (("half \ud800", None, False), Reply([user("half ?")])),
        (([user([{"type": "text", "text": "a"}, "b"])], None, False), Reply([user("ab")])),
        (([user("a", name="x")], None, False), Reply([user("a")])),
        ((MANY, None, False), Reply(MANY)),
        (([user(LONG), user("y")], None, False), Reply([user(LONG), user("y")])),
    ],
)  # fmt: skip
def test_a_turn_is_returned_in_any_of_its_forms(returned, reply):
    found = step(returned)
    assert found == reply and type(found.done) is bool


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        (None, "a Turn, (messages, reward, done) or a mapping of them"),
        ("a", "a Turn, (messages, reward, done) or a mapping of them"),
        (("a", 1), "a Turn, (messages, reward, done) or a mapping of them"),
        (("a", 1, False, {}), "a Turn, (messages, reward, done) or a mapping of them"),
        ({"messages": "a", "info": 1}, "a Turn, (messages, reward, done) or a mapping of them"),
        (("a", "1", False), "a finite number or None as the reward"),
        (("a", float("nan"), False), "a finite number or None as the reward"),
        (("a", 1, "yes"), "True or False as `done`"),
        (("a", 1, None), "True or False as `done`"),
        (("", 1, False), "messages, or done=True to end the conversation"),
        ({}, "messages, or done=True to end the conversation"),
        ((3, 1, False), "messages with `role` (user, tool, system) and `content`"),
        (({"role": "user", "content": "a"}, 1, False), "messages with `role` (user, tool, system)"),
        (([{"role": "assistant", "content": "a"}], 1, False), "messages with `role` (user, tool"),
        (([user("a"), {"role": "user"}], 1, False), "messages with `role`"),
        (([user("a"), {"content": "a"}], 1, False), "messages with `role`"),
        (([user(None)], 1, False), "messages with `role`"),
        (([user("a"), "b"], 1, False), "messages with `role`"),
        (([*MANY, user("")], 1, False), "at most 1,000 with 4,000,000 characters"),
        (([user(LONG), user("yz")], 1, False), "at most 1,000 with 4,000,000 characters"),
    ],
)
def test_anything_else_is_a_failure_that_says_what_is_wanted(returned, wanted):
    with pytest.raises(EnvironmentFailed) as failed:
        step(returned)
    assert str(failed.value).startswith("Given.step ") and wanted in str(failed.value)


@pytest.mark.parametrize(
    ("first", "chat"),
    [
        (None, [user("1 + 1?")]),
        ("Hi", [user("Hi")]),
        ([user("a"), {"role": "assistant", "content": "b"}, user("c")],
         [user("a"), {"role": "assistant", "content": "b"}, user("c")]),
    ],
)  # fmt: skip
def test_an_environment_begins_with_its_own_chat_or_the_problems(first, chat):
    Given.first = first
    made, found, *_ = conversation(Given)
    assert found == chat
    assert made.opened == ([] if first is None else chat)
    assert conversation(Configured, config=Config(model="m"))[1] == [user("m 5")]
    assert conversation(Configured)[1] == [user(f"{Config().model} 5")]
    assert conversation(Bare)[1] == [user("1 + 1?")] and conversation(Bare)[0].tools == []


@pytest.mark.parametrize(
    ("first", "wanted"),
    [
        ([], "messages, or None for the problem's own"),
        ([{"role": "developer", "content": "a"}], "`role` (user, tool, system, assistant)"),
        (3, "messages with `role`"),
    ],
)
def test_an_environment_that_begins_with_something_else_fails(first, wanted):
    Given.first = first
    with pytest.raises(EnvironmentFailed, match="^Given.start ") as failed:
        conversation(Given)
    assert wanted in str(failed.value)


def test_an_environment_reads_the_message_as_clients_of_openai_do():
    Given.first, Given.returned = None, ("a", None, False)
    Given.read.clear()
    call = ToolCall("f", {"a": [1]}, "there is no tool 'f'")
    said = [SAID, Parsed("", "t", "", []), Parsed("", "", "c", [call])]
    replies = conversation(Given, *said)[2]
    function = {"name": "f", "arguments": {"a": [1]}}
    assert Given.read == [
        {"role": "assistant", "content": "so"},
        {"role": "assistant", "content": "", "reasoning_content": "t"},
        {"role": "assistant", "content": "c",
         "tool_calls": [{"type": "function", "function": function}]},
    ]  # fmt: skip
    assert Given.read[2]["tool_calls"][0]["function"]["arguments"]["a"] is not call.arguments["a"]
    assert [[m["role"] for m in reply.messages] for reply in replies] == [
        ["user"], ["user"], ["tool", "user"],
    ]  # fmt: skip
    assert replies[2].messages[0]["content"].startswith("error: there is no tool 'f'")


def test_an_environment_of_trl_is_reset_with_the_row_and_adds_to_its_prompt():
    Row.shown, Row.reward = " Look around.\ud800", 1
    made, chat, replies, reward = conversation(Row, SAID)
    assert Row.read["prompt"] == [user("1 + 1?")]
    assert (Row.read["seed"], Row.read["level"]) == (5, 3)
    assert chat == made.opened == [user("1 + 1? Look around.?")]
    assert [tool["function"]["name"] for tool in made.tools] == ["look"]
    assert replies == [Reply([], None, True)] and reward == 1.0  # no call: it has ended
    call = Parsed("", "", "", [ToolCall("look", {}, "")])
    [reply] = conversation(Row, call)[2]
    assert reply == Reply([{"role": "tool", "content": "left"}])
    system = {"role": "system", "content": "s"}
    row = Problem("id", "math", "1 + 1?", messages=[system, user("1 + 1?")], metadata={"seed": 9})
    assert conversation(Row, problem=row)[1] == [system, user("1 + 1? Look around.?")]
    assert Row.read["prompt"] == [system, user("1 + 1?")] and Row.read["seed"] == 9
    Row.shown = None
    assert conversation(Row)[0].opened == []
    Row.shown = 3
    with pytest.raises(EnvironmentFailed, match="^Row.reset .*a text or None"):
        conversation(Row)


@pytest.mark.parametrize(("value", "reward"), [(None, None), (True, 1.0), (0, 0.0), (-0.5, -0.5)])
def test_the_reward_of_trls_is_asked_for_at_the_end(value, reward):
    Row.shown, Row.reward = None, value
    assert conversation(Row)[3] == reward
    assert conversation(Unrewarded)[1][0]["content"] == "1 + 1?more"
    assert conversation(Unrewarded)[3] is None and conversation(Box)[3] is None


@pytest.mark.parametrize("value", ["1", float("inf"), [1, 2]])
def test_a_reward_of_trls_that_is_no_number_is_a_failure(value):
    Row.shown, Row.reward = None, value
    with pytest.raises(EnvironmentFailed, match=r"^Row\.get_reward .*a number"):
        conversation(Row)


def test_a_toolbox_begins_with_what_it_takes_and_ends_with_a_turn_without_calls():
    call = Parsed("", "", "", [ToolCall("peek", {}, "")])
    replies = conversation(Box, call, SAID)[2]
    assert Box.begun == {"seed": 5, "problem": PROBLEM}
    assert replies == [Reply([{"role": "tool", "content": "5"}]), Reply([], None, True)]


@pytest.mark.parametrize(
    ("kind", "tools", "offered", "closed"),
    [
        (ClosedWorld, [], ["peek"], ["ClosedWorld"]),
        (ClosedWorld, [Closed], ["look", "peek"], ["Closed", "ClosedWorld"]),
        (Closed, [], ["look"], ["Closed"]),  # a toolbox in an environment's place
        (Closed, [Box], ["peek", "look"], ["Closed"]),
    ],
)
def test_the_environment_and_each_toolbox_are_offered_and_closed_once(kind, tools, offered, closed):
    Closed.closed.clear()
    made, *_ = conversation(kind, tools=tools)
    assert [tool["function"]["name"] for tool in made.tools] == offered
    assert Closed.closed == closed


class Hanging(Closed):
    async def close(self):
        await asyncio.Event().wait()


def test_a_close_that_hangs_keeps_no_other_open(monkeypatch):
    monkeypatch.setattr(sessions, "CLOSE_SECONDS", 0.01)
    Closed.closed.clear()
    conversation(ClosedWorld, tools=[Hanging])
    assert Closed.closed == ["ClosedWorld"]


def test_an_environment_does_not_go_on_beyond_a_limit():
    session = Session(DataConfig(train="playground:"), 1000, Runner())
    assert asyncio.run(session.refuse("context_full", "too long")) is None
    assert session.ending == "context_full" and not session.withdraws()


def test_a_chat_is_unlike_the_problems_in_a_role_or_a_content():
    assert unlike([user("1 + 1?")], PROBLEM) == []
    assert unlike([user("1 + 1?", images=["x"])], PROBLEM) == []
    for other in ([user("2?")], [{"role": "system", "content": "1 + 1?"}], [user("1 + 1?")] * 2):
        assert unlike(other, PROBLEM) == other
    assert unlike([user("a", images=["x"])], None) == [user("a")]
    assert unlike([], None) == []
