"""The environment and the tools of one conversation, behind one interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tramontane.config import Config, DataConfig
from tramontane.data.prompts import Tool, chat_of
from tramontane.data.values import encoded
from tramontane.environments.calls import Parsed
from tramontane.environments.loading import (
    Kind,
    environment_of,
    functions_of,
    kind_of,
    load,
    name_of,
)
from tramontane.environments.pictures import joined
from tramontane.environments.running import EnvironmentFailed, Runner, blaming
from tramontane.environments.tools import Toolset
from tramontane.environments.wire import ChatMessage
from tramontane.types import Completion, Ending, Message, Problem
from tramontane.verifier import functions

CLOSE_SECONDS = 5.0  # limit of an environment's `close`, and of a toolbox's
ROLES = ("user", "tool", "system")
# Limits of what a method returns: far more than any context takes, yet rendered within seconds.
MAX_MESSAGES, MAX_CHARACTERS = 1000, 4_000_000


@dataclass
class Reply:
    """What the environment and the tools answer to a message of the model."""

    # Put in after the message; those of the role `tool` answer its calls, in order.
    messages: list[Message] = field(default_factory=list)
    reward: float | None = None  # of the turn; None if there is none
    done: bool = False  # True if the conversation has ended


class Session:
    """The environment and the tools of one conversation.

    Args:
        data: names the environment and the tools.
        answer_bytes: `conversation.answer_bytes`.
        runner: calls what the user wrote: functions of `data.tools` in any thread, everything else
            in a thread of this conversation.

    Attributes:
        opened: the chat that the model reads first, without images; empty if it is the problem's.
    """

    # Only a harness has these; see `harness.HarnessSession`.
    asked: Sequence[ChatMessage] = ()
    posted: Sequence[int] = ()
    restarted = False
    ending: Ending | None = None
    # Since `start`.
    toolset: Toolset
    opened: list[Message]

    def __init__(self, data: DataConfig, answer_bytes: int, runner: Runner) -> None:
        self._data, self._answer_bytes = data, answer_bytes
        self._runner = runner.of_conversation()
        self._toolboxes: list[Any] = []
        self._environment: Any = None
        self._kind: Kind = "toolbox"

    @property
    def tools(self) -> list[Tool]:
        """Descriptions of the tools that the model may call."""
        return self.toolset.schemas

    async def start(
        self, problem: Problem, seed: int, config: Config | None = None
    ) -> list[Message]:
        """Begin the conversation; returns the chat that the model reads first. The `start` of an
        environment or a toolbox may take any of the arguments.

        Raises:
            InputError: see `load`; or a tool cannot be described.
            EnvironmentFailed: a method raised an exception, or returned an unusable value.
        """
        chat = chat_of(problem.prompt)
        given = {"problem": problem, "seed": seed, "config": config or Config()}
        offered = await self._make(environment_of(self._data, problem))
        for toolbox in self._toolboxes:
            if start := getattr(toolbox, "start", None):
                await self._runner.run(start, **functions.accepted(start, given))
        if self._kind == "trl":
            own = list(problem.messages or [Message(role="user", content=problem.problem)])
            row = {"seed": seed} | deepcopy(problem.row) | {"prompt": own}
            reset = self._environment.reset
            shown = await self._runner.run(reset, **functions.accepted(reset, row))
            if shown is not None and not isinstance(shown, str):
                with blaming(name_of(reset)):
                    raise self._refused(reset, shown, "a text or None")
            last = chat[-1]
            content = last["content"] + encoded(shown or "")
            chat[-1] = {**last, "content": content}
        elif self._kind == "environment":
            chat = await self._begun(given) or chat
            offered += await self._runner.run(_tools_of(self._environment))
        limits = self._data.images.limits
        self.toolset = Toolset(functions_of(offered), self._answer_bytes, limits)
        self.opened = unlike(chat, problem)
        return chat

    async def _begun(self, given: dict[str, Any]) -> list[Message]:
        """The chat of the environment's `start`; empty for the problem's own prompt."""
        start = getattr(self._environment, "start", None)
        if start is None:
            return []
        returned = await self._runner.run(start, **functions.accepted(start, given))
        if returned is None:
            return []
        with blaming(name_of(start)):
            chat = self._messages(start, returned, (*ROLES, "assistant"))
            if not chat:
                raise self._refused(start, returned, "messages, or None for the problem's own")
        return chat

    async def _make(self, environment: str | None) -> list[Any]:
        """Make the environment and the toolboxes; returns what has tools."""
        offered: list[Any] = []
        for path in self._data.tools:
            loaded = load(path, "data.tools")
            if kind_of(loaded) == "tool":
                offered.append(loaded)
                self._runner.shared.append(loaded)
            else:
                self._toolboxes.append(await self._runner.run(loaded))
        if environment is not None:
            loaded = load(environment)
            self._kind, self._runner.environment = kind_of(loaded), loaded
            self._environment = await self._runner.run(loaded)
            if self._kind == "toolbox":
                self._toolboxes.append(self._environment)
        offered += self._toolboxes
        return [*offered, self._environment] if self._kind == "trl" else offered

    async def step(self, message: Parsed, turn: Completion | None = None) -> Reply:
        """Answer a message of the model: its calls, then the environment's step. Only a harness
        reads the tokens of the turn.

        Raises:
            EnvironmentFailed: a tool or the environment failed.
        """
        shown = await self.toolset.answer(message.calls, self._runner)
        answers = [call.answer for call in message.calls]
        reply = Reply([*map(partial(_message, "tool"), answers, shown)])
        if self._kind != "environment":
            reply.done = not message.calls
            return reply
        step = self._environment.step
        returned = await self._runner.run(step, _as_dict(message))
        with blaming(name_of(step)):  # what it returned may be of any kind
            found = self._turn(step, returned)
        found.messages = reply.messages + found.messages
        if not found.messages and not found.done:
            raise self._refused(step, returned, "messages, or done=True to end the conversation")
        return found

    def withdraws(self) -> bool:
        """False: an environment takes every turn."""
        return False

    async def refuse(self, ending: Ending, reason: str) -> Reply | None:
        """None: an environment does not go on beyond a limit."""
        self.ending = ending
        return None

    async def final_reward(self) -> float | None:
        """The reward of the whole conversation, from TRL's `get_reward`; None if there is none."""
        get = getattr(self._environment, "get_reward", None)
        if self._kind != "trl" or get is None:
            return None
        value = await self._runner.run(get)
        with blaming(name_of(get)):
            reward = functions.number(value, bools=True)
            if reward is None and value is not None:
                raise self._refused(get, value, "a number")
        return reward

    async def close(self) -> None:
        """Close the environment and the toolboxes that can be closed."""
        owned = [*self._toolboxes, self._environment]
        if self._kind == "toolbox":
            owned.pop()  # it is among them
        closes = [close for each in owned if (close := getattr(each, "close", None))]
        for close in closes:  # one that fails or hangs must not keep the others open
            with suppress(asyncio.TimeoutError, EnvironmentFailed):  # the conversation has ended
                await asyncio.wait_for(self._runner.run(close), CLOSE_SECONDS)
        self._runner.end()

    def _refused(self, method: Callable[..., Any], value: Any, wanted: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"{name_of(method)} {functions.unusable(method, value, wanted)}")

    def _turn(self, step: Callable[..., Any], value: Any) -> Reply:
        """What `step` returned, a `Turn` in any form."""
        names = ("messages", "reward", "done")
        if isinstance(value, tuple) and len(value) == 3:
            given = dict(zip(names, value, strict=True))
        elif isinstance(value, Mapping) and set(value) <= set(names):
            given = dict(value)
        elif hasattr(value, "messages"):
            given = {name: getattr(value, name) for name in names if hasattr(value, name)}
        else:
            raise self._refused(
                step, value, "a Turn, (messages, reward, done) or a mapping of them"
            )
        messages = self._messages(step, given.get("messages") or (), ROLES)
        reward, done = given.get("reward"), given.get("done", False)
        number = functions.number(reward, bools=True)
        if reward is not None and number is None:
            raise self._refused(step, reward, "a finite number or None as the reward")
        if done not in (True, False):
            raise self._refused(step, done, "True or False as `done`")
        return Reply(messages, number, bool(done))

    def _messages(
        self, method: Callable[..., Any], value: Any, roles: tuple[str, ...]
    ) -> list[Message]:
        if isinstance(value, str):
            value = [Message(role="user", content=value)]
        fits = isinstance(value, Sequence) and len(value) <= MAX_MESSAGES
        if fits and all(map(_is_message, value)):
            found = [self._read(message) for message in value]
            fits = sum(len(message["content"]) for message in found) <= MAX_CHARACTERS
            if fits and all(message["role"] in roles for message in found):
                return found
        raise self._refused(
            method,
            value,
            f"messages with `role` ({', '.join(roles)}) and `content`, at most {MAX_MESSAGES:,} "
            f"with {MAX_CHARACTERS:,} characters",
        )

    def _read(self, message: Mapping[str, Any]) -> Message:
        text, images = joined(message["content"], self._data.images.limits)
        return _message(encoded(message["role"]), encoded(text), images)


def unlike(chat: Sequence[Message], problem: Problem | None) -> list[Message]:
    """A chat without images; empty if it is that of the problem."""
    own = chat_of(problem.prompt) if problem else []
    texts, known = (
        [Message(role=each["role"], content=each["content"]) for each in messages]
        for messages in (chat, own)
    )
    return texts if texts != known else []


def _message(role: str, content: str, images: list[str]) -> Message:
    message = Message(role=role, content=content)
    return {**message, "images": images} if images else message


def _tools_of(environment: Any) -> Callable[[], list[Any]]:
    """A function that returns the `tools` of an environment, which may be a property."""

    def tools() -> list[Any]:
        return list(getattr(environment, "tools", None) or ())

    return tools


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list | tuple)


def _as_dict(message: Parsed) -> dict[str, Any]:
    """A message of the model as the environment reads it."""
    found: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.thoughts:
        found["reasoning_content"] = message.thoughts
    if message.calls:
        found["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": deepcopy(c.arguments)}}
            for c in message.calls
        ]
    return found
