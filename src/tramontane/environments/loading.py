"""Finds environments, toolboxes and tools by import path, and puts all kinds behind one interface.

Their methods determine the kind:

- an *environment* has `step` (and usually `start`)
- a *harness* has `run(problem, base_url)`: it talks to the model over HTTP (`harness`)
- an environment class of TRL has `reset` and no `step`: its public methods are tools, and
  `get_reward` is called once, at the end
- any other class is a *toolbox*: its public methods are tools
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, cast

from tramontane import loopback
from tramontane.config import Config, DataConfig
from tramontane.config.data import SCHEMES, checked_environment
from tramontane.config.domains import import_path
from tramontane.data.prompts import PromptEncoder, Tool
from tramontane.environments.adapters import adapted
from tramontane.environments.builtin import BUILT_IN
from tramontane.environments.calls import Parser
from tramontane.environments.chat_format import ChatFormat
from tramontane.environments.tools import methods, schema_of
from tramontane.errors import InputError
from tramontane.types import Problem
from tramontane.verifier import functions
from tramontane.verifier.functions import defined_at

Kind = Literal["environment", "harness", "trl", "toolbox", "tool"]
FIELD = "environment"  # of a row
ROW = f"field {FIELD!r} of a row"  # in messages about a row, in place of a config key
STARTED_WITH = ("problem", "seed", "config")  # arguments that `start` may name


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
    return loaded if path is not None and kind_of(loaded := load(path)) == "harness" else None


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
    _check(keys, data, reward_is_set)
    check_rows(data, problems, reward_is_set)


def check_rows(data: DataConfig, problems: Iterable[Problem], reward_is_set: bool = True) -> None:
    """The part of `check` that is about the environments that rows name."""
    if data.environment is None:
        return
    named: dict[str, str] = {}  # the first row with each
    rows = [*problems]
    for problem in rows:
        if own := _own(problem):
            named.setdefault(own, f"{problem.where or problem.id}: field {FIELD!r}")
    if data.environment == "row" and rows and not named:
        raise InputError(
            f"data.environment: row, but no row names one in its field {FIELD!r}; add it, or name "
            f"one for all rows"
        )
    _check([(key, _checked(path, key)) for path, key in named.items()], data, reward_is_set)


def _check(keys: Iterable[tuple[str, str]], data: DataConfig, reward_is_set: bool) -> None:
    """`check`, for paths with what names each."""
    for key, path in keys:
        loaded = load(path, key)
        kind = kind_of(loaded)
        name = name_of(loaded) if path.startswith(functions.PICKLE) else path
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
            named = functions.accepted(method, dict.fromkeys(given))
            if fault := functions.fault_of_call(method, "self", *call, **named):
                return f"{fault}; `start` may take {', '.join(given)}, by name" if given else fault
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
        known = ", ".join(sorted(BUILT_IN))
        raise InputError(f"{key}: {path!r} is not built in ({known}); name your own as module:Name")
    functions.check(import_path(name), key, lambda function: "")
    return functions.load(import_path(name))


def described(data: DataConfig) -> list[Tool]:
    """Descriptions of the tools in `data.tools`; see `check`."""
    return [schema_of(f) for f in functions_of([load(path, "data.tools") for path in data.tools])]


def checked_tools(config: Config, encoder: PromptEncoder) -> int:
    """Check that a config's conversations can be written and read with a model's chat template;
    returns the number of tokens that its tools add to a prompt.

    Raises:
        InputError: the end of a turn cannot be told, or calls cannot be read.
    """
    talk, tools = config.conversation, described(config.data)
    if talk.tokens == "template" and (tools or config.data.environment is not None):
        ChatFormat(encoder).check_ends()
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


def functions_of(offered: Sequence[Any]) -> list[Callable[..., Any]]:
    """The tools of functions, toolboxes, and objects that are called."""
    found: list[Callable[..., Any]] = []
    for each in offered:
        found += methods(each) or ([each] if callable(each) else [])
    return found


def name_of(method: Callable[..., Any]) -> str:
    """The name of a class, function or method, for messages."""
    return str(getattr(method, "__qualname__", type(method).__name__))
