"""Single-turn task sets of the package `verifiers` (0.4), as a source of problems,
`verifiers:NAME`. Their own rewards judge the answers.

A row has a task's prompt and its whole data, from which the worker that judges makes the task
again: a set may be drawn, or shuffled, differently each time that it is loaded. Sets whose tasks
have tools, a container or a user of their own are refused: verifiers' own agents play those, as a
harness (docs/endpoint.md).
"""

from __future__ import annotations

import asyncio
import dis
import inspect
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain, islice
from typing import Any

from tramontane.errors import InputError, install
from tramontane.imports import search_current_folder
from tramontane.types import Message, Problem

SCHEME = "verifiers:"


def task_rows(source: str, limit: int | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tasks of `verifiers:NAME` as rows, each with its location; of an endless set, the first
    `limit`.

    Raises:
        InputError: the package is not installed; or the set cannot be loaded, is empty, or endless
            without a limit, or its tasks need more than one turn, or a container.
    """
    name = source.removeprefix(SCHEME)
    try:
        import verifiers.v1  # noqa: F401
    except ImportError as error:
        raise InputError(f"data {source!r}: {error}; install: {install('verifiers')}") from None
    try:
        tasks = _tasks(name, limit)
    except InputError as error:
        raise InputError(f"data {source!r}: {error}") from None
    except Exception as error:  # a set's own code, which may raise anything
        raise InputError(
            f"data {source!r}: cannot be loaded: {type(error).__name__}: {error}"
        ) from None
    for idx, task in enumerate(tasks):
        where = f"{source}[{idx}]"
        row = {
            "problem": _chat(task.data, where),
            "domain": "verifiers",
            "taskset": name,
            "idx": idx,
        }
        row["task"] = task.data.model_dump_json()
        yield where, row | {"answer": getattr(task.data, "answer", None)}


def _tasks(name: str, limit: int | None) -> list[Any]:
    taskset = _taskset(name)
    if not taskset.bounded and limit is None:
        raise InputError("the set is endless; say how many tasks (data.limit)")
    tasks = list(taskset if taskset.bounded else islice(taskset, limit))
    if not tasks:
        raise InputError("the set is empty")
    task = tasks[0]
    hooks = chain(task.hooks("reward"), task.hooks("metric"))  # which rewards may read
    staged = next((n for n in ("setup", "finalize") if _reads_runtime(getattr(task, n))), None)
    if staged:
        raise InputError(
            f"the {staged} of its tasks uses a container, which is not available here; name a set "
            f"whose {staged} needs the trace alone, or play it as a harness (docs/endpoint.md)"
        )
    own_tools = taskset.toolsets(taskset.config) or task.toolsets(task.config)
    boxed = own_tools or task.NEEDS_CONTAINER or any(map(_needs_runtime, hooks))
    if boxed or any(each.data.prompt is None for each in tasks):
        raise InputError(
            "its tasks have tools, a container or a user of their own; name a set whose rewards "
            "need the model's answer alone, or play it as a harness (docs/endpoint.md)"
        )
    return tasks


@lru_cache
def _taskset(name: str) -> Any:
    import verifiers.v1 as vf

    search_current_folder()
    return vf.load_taskset(vf.taskset_config_type(name)(id=name))


def _needs_runtime(hook: Callable[..., Any]) -> bool:
    runtime = inspect.signature(hook).parameters.get("runtime")
    return runtime is not None and runtime.default is inspect.Parameter.empty


def _reads_runtime(stage: Any) -> bool:
    """True for a stage, `setup(trace, runtime)`, that reads its last argument."""
    code = stage.__func__.__code__
    runtime = code.co_varnames[code.co_argcount - 1]
    reads = (i for i in dis.get_instructions(code) if i.opname.startswith("LOAD"))
    return any(runtime in (i.argval if isinstance(i.argval, tuple) else (i.argval,)) for i in reads)


def _chat(data: Any, where: str) -> list[Message]:
    chat = [Message(role="system", content=data.system_prompt)] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*chat, Message(role="user", content=data.prompt)]
    # `content_text` leaves images out.
    parts = (part for m in data.prompt if isinstance(m.content, list) for part in m.content)
    if other := next((part.type for part in parts if part.type != "text"), None):
        raise InputError(f"{where}: the task has a part of type {other}, and is read as text alone")
    from verifiers.v1.types import content_text

    return chat + [Message(role=m.role, content=content_text(m.content)) for m in data.prompt]


# Errors that an answer can cause, in rewards that read it. Others are a judge's or the machine's.
_OF_ANSWERS = (
    ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError,
    RecursionError, MemoryError, SyntaxError,
)  # fmt: skip


def is_of_answer(error: Exception, problem: Problem, scale: float | None) -> bool:
    """True for an error in the rewards that the task's own answer, or a 0, does not raise."""
    return isinstance(error.__cause__ or error, _OF_ANSWERS) and can_score(problem, scale)


def can_score(problem: Problem, scale: float | None) -> bool:
    """True if a task's rewards can judge its own answer or, if it has none, a 0."""
    try:
        asyncio.run(score(problem, "", problem.answer or "0", scale))
    except Exception:  # of the set's own code
        return False
    return True


async def score(
    problem: Problem, thoughts: str, answer: str, scale: float | None, n_tokens: int = 1
) -> tuple[float, str]:
    """The sum of the task's rewards for an answer (by functions and judges), divided by `scale` or,
    without one, by the sum of their positive weights; and the rewards by name. Its `setup`,
    `finalize` and metrics run before, without a container.

    Raises:
        ValueError: a reward is not a finite number.
        Exception: any that the set's own code raises.
    """
    import verifiers.v1 as vf
    from verifiers.v1.trace import ModelCall
    from verifiers.v1.types import Usage

    task = _task(problem)
    trace = _trace(task)
    await task.setup(trace, None)
    _add(trace, vf.AssistantMessage(content=answer, reasoning_content=thoughts or None), True)
    usage = Usage(prompt_tokens=0, completion_tokens=n_tokens)
    trace.calls.append(ModelCall(node=len(trace.nodes) - 1, finish_reason="stop", usage=usage))
    await task.finalize(trace, None)
    await task.score(trace)
    possible = scale or sum(max(reward.weight, 0.0) for reward in trace.rewards.values())
    if not possible:
        raise InputError(
            f"task {problem.id}: none of its rewards has a positive weight; set "
            f"verifier.reward.verifiers_scale"
        )
    rewards = ", ".join(f"{name} {reward.score:g}" for name, reward in trace.rewards.items())
    total = sum(reward.value for reward in trace.rewards.values())
    if not math.isfinite(total):
        raise ValueError(f"rewards that are not finite: {rewards}")
    return total / possible, rewards


def _task(problem: Problem) -> Any:
    taskset = _taskset(problem.metadata["taskset"])
    kind = taskset.task_type()
    data = kind.data_type().model_validate_json(problem.metadata["task"])
    return kind(data, taskset.config.task)


def _trace(task: Any) -> Any:
    """The record of a conversation that has the prompt alone."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    trace: Any = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
    )
    data = task.data
    if data.system_prompt:
        _add(trace, vf.SystemMessage(content=data.system_prompt))
    prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
    for message in prompt:
        _add(trace, message)
    return trace


def _add(trace: Any, message: Any, sampled: bool = False) -> None:
    import verifiers.v1 as vf

    parent = len(trace.nodes) - 1 if trace.nodes else None
    trace.nodes.append(vf.MessageNode(parent=parent, message=message, sampled=sampled))
