"""Finds environments, toolboxes and tools by import path, and puts all kinds behind one interface.

Their methods determine the kind:

- an *environment* has `step` (and usually `start`)
- a *harness* has `run(problem, base_url)`: it talks to the model over HTTP (`harness`)
- an environment class of TRL has `reset` and no `step`: its public methods are tools, and
  `get_reward` is called once, at the end
- any other class is a *toolbox*: its public methods are tools
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, cast

from tramontane import loopback
from tramontane.config import Config, DataConfig
from tramontane.config.data import SCHEMES, checked_environment
from tramontane.config.domains import import_path
from tramontane.data.prompts import PromptEncoder, Tool, chat_of
from tramontane.data.values import encoded
from tramontane.environments.adapters import adapted
from tramontane.environments.builtin import BUILT_IN
from tramontane.environments.calls import Parsed, Parser
from tramontane.environments.chat_format import ChatFormat
from tramontane.environments.pictures import joined
from tramontane.environments.running import EnvironmentFailed, Runner, blaming
from tramontane.environments.tools import Toolset, methods, schema_of
from tramontane.environments.wire import ChatMessage
from tramontane.errors import InputError
from tramontane.types import Completion, Ending, Message, Problem
from tramontane.verifier import functions
from tramontane.verifier.functions import defined_at

Kind = Literal["environment", "harness", "trl", "toolbox", "tool"]
CLOSE_SECONDS = 5.0  # limit of an environment's `close`, and of a toolbox's
FIELD = "environment"  # of a row
ROW = f"field {FIELD!r} of a row"  # in messages about a row, in place of a config key
ROLES = ("user", "tool", "system")
STARTED_WITH = ("problem", "seed", "config")  # arguments that `start` may name
# Limits of what a method returns: far more than any context takes, yet rendered within seconds.
MAX_MESSAGES, MAX_CHARACTERS = 1000, 4_000_000


def environment_of(data: DataConfig, problem: Problem) -> str | None:
    """The environment of a problem: its row's own, else `data.environment`; None if there is none.

    Rows name environments only in a run that has `data.environment`.

    Raises:
        InputError: a row names what no row may, e.g. a pickled class.
    """
    if data.environment is None:
        return None
    if own := _own(problem):
        return _checked(own)
    return None if data.environment == "row" else data.environment


def _own(problem: Problem) -> str:
    """The environment that a problem's row names; empty if it names none."""
    own = problem.metadata.get(FIELD)
    return own if isinstance(own, str) else ""


def harness_of(data: DataConfig, problem: Problem) -> Callable[..., Any] | None:
    """The harness of a problem, if its environment is one."""
    path = environment_of(data, problem)
    loaded = None if path is None else load(path)
    return loaded if loaded is not None and kind_of(loaded) == "harness" else None


def deterministic(data: DataConfig, problem: Problem) -> bool:
    """True if the environment and all tools of a problem have `deterministic = True`."""
    loaded = [load(path, "data.tools") for path in data.tools]
    if environment := environment_of(data, problem):
        loaded.append(load(environment))
    return all(getattr(each, "deterministic", False) for each in loaded)


def check(data: DataConfig, problems: Iterable[Problem] = (), reward_is_set: bool = True) -> None:
    """Import the environments and tools of a config, and those that the rows of problems name, and
    check their shape.

    Args:
        data: names environments and tools.
        problems: rows that may name others.
        reward_is_set: True if the config has `conversation.reward`; a `get_reward` requires it.

    Raises:
        InputError: one cannot be imported, a tool cannot be described, or the config does not say
            which reward counts; the message names the key, or the row and its field, and the file
            and line.
    """
    keys = [("data.tools", path) for path in data.tools]
    if data.environment not in (None, "row"):
        keys.append(("data.environment", cast(str, data.environment)))
    if data.environment is not None:
        named: dict[str, str] = {}  # the first row with each
        rows = [*problems]
        for problem in rows:
            if own := _own(problem):
                named.setdefault(own, f"{problem.where or problem.id}: field {FIELD!r}")
        keys += [(key, _checked(path, key)) for path, key in named.items()]
        if data.environment == "row" and rows and not named:
            raise InputError(
                f"data.environment: row, but no row names one in its field {FIELD!r}; add it, or "
                f"name one for all rows"
            )
    for key, path in keys:
        loaded = load(path, key)
        kind = kind_of(loaded)
        name = _name(loaded) if path.startswith(functions.PICKLE) else path
        if kind == "tool":
            if key != "data.tools":
                raise InputError(
                    f"{key}: {name} ({defined_at(loaded)}) is a function, not an environment; name "
                    f"it in data.tools"
                )
            schema_of(loaded)
            continue
        if key == "data.tools" and kind != "toolbox":
            raise InputError(f"{key}: {name} is an environment; name it in data.environment")
        if fault := functions.fault_of_call(loaded):
            raise InputError(f"{key}: {name} is made without arguments: {fault}")
        if kind == "harness":
            loopback.check_installed(f"{key}: a harness")
            if data.tools:
                raise InputError(
                    f"{key}: {name} is a harness with tools of its own; remove data.tools"
                )
        elif kind != "environment":
            if kind == "trl" and hasattr(loaded, "get_reward") and not reward_is_set:
                raise InputError(
                    f"{key}: {loaded.__qualname__} has `get_reward`; set conversation.reward to "
                    f"last for its reward, or to verifier for that of the problem's domain"
                )
            for tool in methods(loaded):
                schema_of(tool)
            if kind == "toolbox" and not methods(loaded):
                raise InputError(
                    f"{key}: {name} has no public methods, so it is neither an environment (`start`"
                    f" and `step`) nor a toolbox"
                )
        elif not hasattr(loaded, "start") and hasattr(loaded, "reset"):
            raise InputError(
                f"{key}: {name} has `reset` and `step` like Gymnasium's environments; wrap it in a "
                f"class with `start(problem)` and `step(message)` (docs/environments.md)"
            )
        elif fault := _fault_of_methods(loaded):
            raise InputError(f"{key}: {name}: {fault}")


def _fault_of_methods(environment: Callable[..., Any]) -> str:
    """What is wrong with the parameters of an environment's own `start` and `step`; empty if
    nothing is."""
    for name, given, call in (("start", STARTED_WITH, ()), ("step", (), ("message",))):
        method = inspect.getattr_static(environment, name, None)
        if inspect.isfunction(method):
            named = functions.accepted(method, dict.fromkeys(given, ""))
            if fault := functions.fault_of_call(method, "self", *call, **named):
                return fault
    return ""


@lru_cache
def load(path: str, key: str = "data.environment") -> Callable[..., Any]:
    """A class or function by its import path, `module:Name` or `module.Name`, built-in name, or
    name in another package.

    Raises:
        InputError: it cannot be imported, or is neither a class nor a function; the message names
            the `key`.
    """
    if path.partition(":")[0] in SCHEMES:
        return adapted(path, key)
    name = BUILT_IN.get(path, path)
    if re.fullmatch(r"\w+", name):
        known = ", ".join(sorted(BUILT_IN)) or "none"
        raise InputError(f"{key}: {path!r} is not built in ({known}); name your own as module:Name")
    functions.check(import_path(name), key, lambda function: "")
    return functions.load(import_path(name))


def described(data: DataConfig) -> list[Tool]:
    """Descriptions of the tools in `data.tools`; see `check`."""
    return [schema_of(f) for f in _functions([load(path, "data.tools") for path in data.tools])]


def checked_tools(config: Config, encoder: PromptEncoder) -> int:
    """Check that a config's conversations can be written and read with a model's chat template;
    returns the number of tokens that its tools add to a prompt.

    Raises:
        InputError: the end of a turn cannot be told, or calls cannot be read.
    """
    talk, tools = config.conversation, described(config.data)
    if talk.tokens == "template" and (tools or config.data.environment is not None):
        ChatFormat(encoder, talk.history).check_ends()
        Parser(encoder.tokenizer, talk.calls, encoder.tags).check(tools)
    return encoder.tokens_of(tools)


def _checked(path: str, key: str = ROW) -> str:
    """A path that a row names, as the config's were checked when it was read."""
    try:
        return checked_environment(path)
    except ValueError as error:
        raise InputError(f"{key}: {error}") from None


def kind_of(loaded: Callable[..., Any]) -> Kind:
    """The kind of a class or function, by its methods."""
    if not inspect.isclass(loaded):
        return "tool"
    if callable(getattr(loaded, "step", None)):
        return "environment"
    run = getattr(loaded, "run", None)
    if callable(run) and "base_url" in functions.parameters_of(run):
        return "harness"
    return "trl" if callable(getattr(loaded, "reset", None)) else "toolbox"


@dataclass
class Reply:
    """What the environment and the tools answer to a message of the model."""

    # Put in after the message; those of the role `tool` answer its calls, in order.
    messages: list[Message] = field(default_factory=list)
    reward: float | None = None  # of the turn; None if there is none
    done: bool = False  # True if the conversation has ended


class Host:
    """The environment and the tools of one conversation.

    Args:
        data: names the environment and the tools.
        answer_bytes: `conversation.answer_bytes`.
        runner: calls what the user wrote: functions of `data.tools` in any thread, everything else
            in a thread of this conversation.
    """

    # Only a harness has these; see `harness.HarnessHost`.
    asked: Sequence[ChatMessage] = ()
    posted: Sequence[int] = ()
    restarted = False
    ending: Ending | None = None

    def __init__(self, data: DataConfig, answer_bytes: int, runner: Runner) -> None:
        self._data, self._answer_bytes = data, answer_bytes
        self._runner = runner.of_conversation()
        self._toolboxes: list[Any] = []
        self._environment: Any = None
        self._kind: Kind = "toolbox"
        self.toolset = Toolset((), answer_bytes)

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
                with blaming(_name(reset)):
                    raise self._refused(reset, shown, "a text or None")
            last = chat[-1]
            content = last["content"] + encoded(shown or "")
            chat[-1] = {**last, "content": content}
        elif self._kind == "environment":
            chat = await self._begun(given) or chat
            offered += await self._runner.run(_tools_of(self._environment))
        limits = self._data.images.limits
        self.toolset = Toolset(_functions(offered), self._answer_bytes, limits)
        return chat

    async def _begun(self, given: dict[str, Any]) -> list[Message]:
        """The chat of the environment's `start`; empty for the problem's own prompt."""
        start = getattr(self._environment, "start", None)
        if start is None:
            return []
        returned = await self._runner.run(start, **functions.accepted(start, given))
        if returned is None:
            return []
        with blaming(_name(start)):
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
        with blaming(_name(step)):  # what it returned may be of any kind
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
        with blaming(_name(get)):
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
        return EnvironmentFailed(f"{_name(method)} {functions.unusable(method, value, wanted)}")

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
        role, content = encoded(message["role"]), message["content"]
        if isinstance(content, str):
            return Message(role=role, content=encoded(content))
        text, images = joined(content, self._data.images.limits)
        return _message(role, encoded(text), images)


def _message(role: str, content: str, images: list[str]) -> Message:
    message = Message(role=role, content=content)
    return {**message, "images": images} if images else message


def _name(method: Callable[..., Any]) -> str:
    return str(getattr(method, "__qualname__", type(method).__name__))


def _tools_of(environment: Any) -> Callable[[], list[Any]]:
    """A function that returns the `tools` of an environment, which may be a property."""

    def tools() -> list[Any]:
        return list(getattr(environment, "tools", None) or ())

    return tools


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str | list | tuple)


def _functions(offered: Sequence[Any]) -> list[Callable[..., Any]]:
    """The tools of functions, toolboxes, and objects that are called."""
    found: list[Callable[..., Any]] = []
    for each in offered:
        own = [] if inspect.isroutine(each) else methods(each)
        found += own or ([each] if callable(each) else [])
    return found


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
