"""Keywords that a function of the package lacks, such as TRL's, answered with those here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

from tramontane.errors import InputError

# Keys of a config that are keywords of some function too, with other names.
_KEYWORDS = {
    "data.train": "data=…",
    "data.eval": 'data={"train": …, "eval": …}',
    "verifier.reward.custom": "rewards=[…]",
    "pipeline.l_max": "max_tokens=…",
}


def answering(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but an unknown keyword is an InputError, with the nearest one, or with what
    another project's keyword is here.

    Args:
        name: the function's, in errors.
        function: may take `**options: Unpack[Options]`, with `Options` in its module.
    """

    @wraps(function)
    def answered(*args: Any, **keywords: Any) -> Any:
        known = _keywords(function)
        for keyword in keywords:
            if keyword not in known:
                hint = _hint(name, keyword, known)
                raise InputError(f"tramontane.{name}({keyword}=…): unknown keyword; {hint}")
        return function(*args, **keywords)

    return answered


def _keywords(function: Callable[..., Any]) -> list[str]:
    known = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:  # annotated as a text
            options = parameter.annotation.removeprefix("Unpack[").removesuffix("]")
            known += function.__globals__[options].__annotations__
        else:
            known.append(parameter.name)
    return known


def _hint(name: str, keyword: str, known: Collection[str]) -> str:
    from tramontane.config import Config
    from tramontane.config.peers import Counterpart, counterpart
    from tramontane.config.section import nearest, paths
    from tramontane.config.sft import SFTConfig

    keys = paths(SFTConfig if name == "sft" else Config)
    here = None
    if "overrides" in known:
        own = Counterpart("", keyword, "") if keyword in keys else None
        here = own or counterpart(keyword, keys)
    if here is None:
        near = nearest(keyword, known)
        return f"did you mean {near}?" if near else f"it has {', '.join(known)}"
    peer = f"a key of {here.peer}; " if here.peer else ""
    note = f" ({here.note})" if here.note else ""
    if not here.key:
        return f"{peer}there is no such key here{note}"
    given = _KEYWORDS.get(here.key, f"{here.key.rpartition('.')[2]}=…")
    if given.partition("=")[0] in known:
        return f"{peer}here it is {given}"
    return f'{peer}here it is the key {here.key}, overrides={{"{here.key}": …}}{note}'
