"""Single-turn task sets of the package `verifiers` (0.4), as a source of problems,
`verifiers:NAME`. Their rubrics judge the answers.

A row has a task's prompt and data, and names the task by its set (`taskset`) and index (`idx`); the
worker that judges loads the set again. Sets whose tasks have tools, a container or a user of their
own are refused: verifiers' own agents play those, as a harness (docs/endpoint.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from tramontane.errors import InputError, install
from tramontane.imports import search_current_folder
from tramontane.types import Message, Problem

SCHEME = "verifiers:"


def task_rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tasks of `verifiers:NAME` as rows, each with its location.

    Raises:
        InputError: the package is not installed; or the set cannot be loaded, is empty or endless,
            or its tasks need more than one turn, or a container.
    """
    name = source.removeprefix(SCHEME)
    try:
        import verifiers.v1  # noqa: F401
    except ImportError as error:
        raise InputError(f"data {source!r}: {error}; install: {install('verifiers')}") from None
    try:
        tasks = _tasks(name)
    except InputError as error:
        raise InputError(f"data {source!r}: {error}") from None
    except Exception as error:  # a set's own code, which may raise anything
        raise InputError(
            f"data {source!r}: cannot be loaded: {type(error).__name__}: {error}"
        ) from None
    for idx, task in enumerate(tasks):
        row = {"problem": _chat(task.data), "domain": "verifiers", "taskset": name, "idx": idx}
        yield f"{source}[{idx}]", row | {"answer": getattr(task.data, "answer", None)}


def _chat(data: Any) -> list[Message]:
    from verifiers.v1.types import content_text

    chat = [Message(role="system", content=data.system_prompt)] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*chat, Message(role="user", content=data.prompt)]
    return chat + [Message(role=m.role, content=content_text(m.content)) for m in data.prompt]


async def score(problem: Problem, answer: str) -> tuple[float, str]:
    """The sum of the task's rewards for an answer (by functions and judges) as a share of their
    weights, and the rewards by name."""
    import verifiers.v1 as vf

    task = _tasks(problem.metadata["taskset"])[problem.metadata["idx"]]
    said = vf.AssistantMessage(content=answer)
    trace: Any = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[
            vf.MessageNode(message=vf.UserMessage(content=task.data.prompt_text)),
            vf.MessageNode(parent=0, message=said, sampled=True),
        ],
    )
    await task.score(trace)
    possible = sum(max(reward.weight, 0.0) for reward in trace.rewards.values())
    if not possible:
        raise InputError(f"task {problem.id}: none of its rewards has a positive weight")
    rewards = ", ".join(f"{name} {reward.score:g}" for name, reward in trace.rewards.items())
    return sum(reward.value for reward in trace.rewards.values()) / possible, rewards


@lru_cache
def _tasks(name: str) -> list[Any]:
    import verifiers.v1 as vf

    search_current_folder()
    taskset = vf.load_taskset(vf.taskset_config_type(name)(id=name))
    if not taskset.bounded:
        raise InputError("the set is endless; bound it in a set of your own")
    tasks = list(taskset)
    if not tasks:
        raise InputError("the set is empty")
    task = tasks[0]
    hooks = [inspect.signature(reward).parameters for reward in task.hooks("reward")]
    boxed = any(h["runtime"].default is inspect.Parameter.empty for h in hooks if "runtime" in h)
    own_tools = taskset.toolsets(taskset.config) or task.toolsets(task.config)
    if own_tools or boxed or task.NEEDS_CONTAINER or task.data.prompt is None:
        raise InputError(
            "its tasks have tools, a container or a user of their own; name a set whose rewards "
            "need the model's answer alone, or play it as a harness (docs/endpoint.md)"
        )
    return tasks
