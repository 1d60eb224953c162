"""Environments of OpenEnv: in the worker's process by import path, `openenv:my_module:Shop`, or a
server by its address, `openenv:http://localhost:8000`.

- seed: given to `reset`, with those of the row's other fields that it takes.
- reward: of each turn, if the observation has one.
- ending: `completed` when the observation says so.

The model reads an observation's only text, or all of its fields as JSON. It writes an action whose
only required field is a text as that text, and any other action as a JSON object. A server must
allow as many sessions as there are conversations (`max_concurrent_envs`). Tools over MCP are not
offered.
"""

from __future__ import annotations

import asyncio
import json
from functools import lru_cache
from typing import Any, get_type_hints

import httpx
import jsonschema
from openenv.core.client_types import StepResult
from openenv.core.generic_client import GenericEnvClient

from tramontane.config import Config
from tramontane.config.domains import checked_path, import_path
from tramontane.environments.adapters import seed_of
from tramontane.environments.protocol import Turn
from tramontane.errors import InputError
from tramontane.types import Message, Problem
from tramontane.verifier import functions

SCHEMA_SECONDS = 10.0  # limit of a server's description of its actions
_ADDRESSES = ("http://", "https://", "ws://", "wss://")
_NOT_SHOWN = ("done", "reward", "metadata")  # fields of every observation


class OpenEnv:
    """An environment of OpenEnv. A message that is not an action is answered with an error text,
    and the episode continues."""

    name = ""

    @classmethod
    def check(cls, name: str) -> None:
        """Read the description of the environment's actions.

        Raises:
            InputError: the class cannot be imported, or the server does not answer.
        """
        try:
            _actions(name)
        except httpx.HTTPError as error:
            raise InputError(f"the server does not answer: {error!r}; start it first") from None
        except (ValueError, KeyError) as error:
            raise InputError(f"not an environment of OpenEnv: {error}") from None

    async def start(self, problem: Problem, seed: int, config: Config) -> list[Message] | None:
        self._environment: Any
        if self.name.startswith(_ADDRESSES):
            limit = config.conversation.step_timeout
            self._environment = GenericEnvClient(self.name, message_timeout_s=limit)
        else:
            self._environment = _InProcess(self.name)
        begun = await self._environment.reset(
            **{**problem.metadata, "seed": seed_of(problem, seed)}
        )
        return _shown(begun.observation) or None  # without any, the problem's own prompt stands

    async def step(self, message: dict[str, Any]) -> Turn:
        try:
            action = _action(message["content"], _actions(self.name))
        except (ValueError, jsonschema.ValidationError) as error:
            return Turn(f"error: not an action: {getattr(error, 'message', error)}")
        answered = await self._environment.step(action)
        shown = _shown(answered.observation) or [Message(role="user", content="")]
        reward = answered.reward
        return Turn(shown, None if reward is None else float(reward), bool(answered.done))

    async def close(self) -> None:
        await self._environment.close()


class _InProcess:
    """An environment in this process, with the methods of OpenEnv's client."""

    def __init__(self, path: str) -> None:
        self._environment: Any = functions.load(import_path(path))()

    async def reset(self, **given: Any) -> StepResult[dict[str, Any]]:
        taken = functions.accepted(self._environment.reset, given)
        return self._result(await asyncio.to_thread(self._environment.reset, **taken))

    async def step(self, action: dict[str, Any]) -> StepResult[dict[str, Any]]:
        made = _action_class(type(self._environment)).model_validate(action)
        return self._result(await asyncio.to_thread(self._environment.step, made))

    async def close(self) -> None:
        await asyncio.to_thread(self._environment.close)

    def _result(self, observation: Any) -> StepResult[dict[str, Any]]:
        fields = observation.model_dump(mode="json")
        return StepResult(fields, observation.reward, observation.done)


@lru_cache
def _actions(name: str) -> dict[str, Any]:
    """The JSON schema of the actions of a class or a server."""
    if name.startswith(_ADDRESSES):
        address = name.replace("ws", "http", 1) if name.startswith("ws") else name
        answer = httpx.get(f"{address.rstrip('/')}/schema", timeout=SCHEMA_SECONDS)
        return dict(answer.raise_for_status().json()["action"])
    path = checked_path(import_path(name))
    functions.check(path, "the environment", lambda function: "")
    return dict(_action_class(functions.load(path)).model_json_schema())


def _action_class(environment: Any) -> Any:
    hints = get_type_hints(environment.step)
    if not hasattr(hints.get("action"), "model_json_schema"):
        raise ValueError(f"{environment.__name__}.step has no type hint of its action")
    return hints["action"]


def _action(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The action in a message of the model.

    Raises:
        ValueError: the message holds no JSON.
        ValidationError: the JSON does not fit the schema.
    """
    fields = {n: field for n, field in schema["properties"].items() if n != "metadata"}
    names = schema.get("required") or list(fields)
    if len(names) == 1 and fields[names[0]].get("type") == "string":
        action = {names[0]: text}
    else:
        start, end = text.find("{"), text.rfind("}")
        if start < 0 or end < start:
            raise ValueError(f"write a JSON object with {', '.join(fields)}")
        action = json.loads(text[start : end + 1])
    jsonschema.validate(action, schema)
    return action


def _shown(observation: dict[str, Any]) -> list[Message]:
    """An observation as the model reads it; empty if it has nothing to read."""
    fields = {n: v for n, v in observation.items() if n not in _NOT_SHOWN and v is not None}
    texts = list(fields.values())
    if len(texts) == 1 and isinstance(texts[0], str):
        content = texts[0]
    else:
        content = json.dumps(fields, ensure_ascii=False) if fields else ""
    return [Message(role="user", content=content)] if content else []
