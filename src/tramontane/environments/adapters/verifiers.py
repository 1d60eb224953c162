"""Sets of single-turn tasks of verifiers (0.4), as `verifiers:NAME`, with their rewards.

- seed: draws the task, unless the row's field `idx` names it by its index.
- reward: the weighted sum of the task's rewards, functions and judges.
- ending: `completed` after the first turn.

Tasks with tools, a container or a user of their own are refused: verifiers' own agents run those.
"""

from __future__ import annotations

import inspect
import random
from functools import lru_cache
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.types import content_text

from tramontane.environments.adapters import seed_of
from tramontane.environments.protocol import Turn
from tramontane.errors import InputError
from tramontane.types import Message, Problem

_REFUSED = (
    "its tasks have tools, a container or a user of their own; name a set of tasks whose rewards "
    "need the model's answer alone"
)


class Verifiers:
    """A task of a set; the problem's statement is not used."""

    name = ""

    @classmethod
    def check(cls, name: str) -> None:
        """Load the set.

        Raises:
            InputError: it cannot be loaded, is empty or endless, or its tasks need more than a
                turn, or a container.
        """
        try:
            task = _tasks(name)[0]
        except InputError:
            raise
        except Exception as error:  # a set's own code, which may raise anything
            raise InputError(f"cannot be loaded: {type(error).__name__}: {error}") from None
        boxed = [
            reward.__name__
            for reward in task.hooks("reward")
            if _required(inspect.signature(reward).parameters.get("runtime"))
        ]
        if task.NEEDS_CONTAINER or boxed or task.toolsets(task.config) or task.data.prompt is None:
            raise InputError(_REFUSED)

    def start(self, problem: Problem, seed: int) -> list[Message]:
        tasks = _tasks(self.name)
        draw = random.Random(seed_of(problem, seed)).randrange(len(tasks))
        self._task = tasks[int(problem.metadata.get("idx", draw))]
        data = self._task.data
        chat = [Message(role="system", content=data.system_prompt)] if data.system_prompt else []
        if isinstance(data.prompt, str):
            return [*chat, Message(role="user", content=data.prompt)]
        return chat + [Message(role=m.role, content=content_text(m.content)) for m in data.prompt]

    async def step(self, message: dict[str, Any]) -> Turn:
        thoughts = message.get("reasoning_content")
        said = vf.AssistantMessage(content=message["content"], reasoning_content=thoughts)
        asked = vf.UserMessage(content=self._task.data.prompt_text)
        trace: Any = vf.Trace(
            task=vf.TraceTask(type=type(self._task).__name__, data=self._task.data),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=[
                vf.MessageNode(message=asked),
                vf.MessageNode(parent=0, message=said, sampled=True),
            ],
        )
        await self._task.score(trace)
        return Turn(reward=float(trace.reward), done=True)


def _required(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and parameter.default is parameter.empty


@lru_cache
def _tasks(name: str) -> list[Any]:
    """The tasks of a set, in its order."""
    taskset = vf.load_taskset(vf.taskset_config_type(name)(id=name))
    if taskset.toolsets(taskset.config):
        raise InputError(_REFUSED)
    if not taskset.bounded:
        raise InputError("the set is endless; bound it in a set of your own")
    tasks = list(taskset)
    if not tasks:
        raise InputError("the set is empty")
    return tasks
