"""What the readers of calls share, and calls written as texts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tramontane.data.values import encoded
from tramontane.types import ToolCall

PYTHON = "python"  # the tool that runs code, whose argument is `code`
MAX_CALLS = 64  # of one turn; further ones are not read
MAX_DEPTH = 32  # of nested arguments
_SPACE = re.compile(r"\s*")
_ID = re.compile(r"[a-zA-Z0-9]{9}|functions\.[^\s<]+:\d+")


def unparsed(reason: str, text: str = "") -> ToolCall:
    """A call that cannot be read, and what the model wrote; its answer tells the model why."""
    answer = f"error: the call cannot be read: {reason[:200]}"
    return ToolCall("", {}, answer, error=True, text=text)


def written_as(text: str, calls: list[ToolCall]) -> list[ToolCall]:
    """The calls that a text holds; one that cannot be read keeps the text, unless others in it
    can."""
    if calls and not any(call.name for call in calls):
        calls[0].text = text
    return calls


def kept_id(text: object) -> str:
    """The id of a call, if it has a form that models are trained on: nine letters and digits
    (Mistral), `functions.NAME:NUMBER` (Kimi); else empty."""
    return text if isinstance(text, str) and _ID.fullmatch(text) else ""


def call_of(value: Any, own_id: object = None) -> ToolCall:
    """A call from an object with a name and arguments, which may be JSON in a text; `own_id`: what
    the model wrote as its id."""
    if not isinstance(value, dict):
        return unparsed("not an object with `name` and `arguments`")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments) if arguments.strip() else {}
        arguments = _clean(arguments)
    except (ValueError, RecursionError) as error:
        return unparsed(f"its arguments are not JSON: {error}")
    if not isinstance(name, str) or not name:
        return unparsed("it has no `name`")
    if not isinstance(arguments, dict) and arguments is not None:
        return unparsed("its `arguments` are not an object")
    return ToolCall(_clean(name), arguments or {}, "", id=kept_id(own_id))


def _clean(value: Any, depth: int = 0) -> Any:
    """A value from JSON without unpaired surrogates, which cannot be encoded. Python reads numbers
    that JSON does not have, and one that is too large as infinity; clients could not."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    if isinstance(value, str):
        return encoded(value)
    if isinstance(value, dict):
        return {_clean(key): _clean(item, depth + 1) for key, item in value.items()}
    return [_clean(item, depth + 1) for item in value] if isinstance(value, list) else value


def from_json(text: str) -> ToolCall:
    """A call from its JSON."""
    try:
        return call_of(json.loads(text))
    except (ValueError, RecursionError) as error:
        return unparsed(f"not JSON: {error}")


def decoded(text: str, start: int) -> tuple[Any, int | None]:
    """The first value in JSON from `start` on, and its end; no end if there is none."""
    start = _SPACE.match(text, start).end()  # type: ignore[union-attr]
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, None


# The tokens around calls that are written as text.
DELIMITERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "lfm": ("<|tool_call_start|>", "<|tool_call_end|>"),
}


def written(form: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls, each with `name` and `arguments`, as a model writes them in a form; for templates that
    do not write them."""
    if form == "lfm":
        texts = [
            f"{call['name']}({', '.join(f'{k}={v!r}' for k, v in call['arguments'].items())})"
            for call in calls
        ]
        return f"<|tool_call_start|>[{', '.join(texts)}]<|tool_call_end|>"
    if form == "llama":
        made = ({"name": c["name"], "parameters": c["arguments"]} for c in calls)
        return "; ".join(json.dumps(each, ensure_ascii=False) for each in made)
    lines = (json.dumps(dict(call), ensure_ascii=False) for call in calls)
    return "\n".join(f"<tool_call>{line}</tool_call>" for line in lines)
