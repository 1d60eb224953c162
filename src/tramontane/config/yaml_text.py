"""The one reader of YAML, for configs, overrides and the tables in the package."""

from __future__ import annotations

import pickle
import re
from functools import lru_cache
from typing import Any

import yaml

from tramontane.errors import InputError

_TOP_KEY = re.compile(rb"^(?=[^\s#-])", re.MULTILINE)
MAX_VALUES = 1_000_000  # in a YAML text, with aliases expanded
LONG = 1 << 14  # characters of a text that is read anew each time
_MARKS = ("@", "`", "%", "*", "&", "!")  # with a meaning of their own at the beginning of a value
_COLON = "mapping values are not allowed here"  # PyYAML's words
_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which PyYAML keeps the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # type: ignore[no-untyped-call]
        lines: dict[Any, int] = {}  # by key
        # Here, and not where the mapping is built: keys merged by `<<` may be given again.
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            value = key.value if key.tag == _MERGE else self.construct_object(key)  # type: ignore[no-untyped-call]
            line = key.start_mark.line + 1
            if value in lines:
                first = lines[value]
                where = (
                    f"in line {first}" if first == line else f"in line {first} and in line {line}"
                )
                raise yaml.YAMLError(
                    f"key {key.value!r} is given twice, {where}: remove one, or put the keys of "
                    f"both under one"
                )
            lines[value] = line
        return node


def read_own(text: bytes) -> dict[str, Any]:
    """The keys and values of a YAML text that this package wrote, unchanged, or ships.

    Seven times as fast as `read_yaml` where libyaml is installed. Runs of one sweep share most
    sections, each of which is parsed once.
    """
    found: dict[str, Any] = {}
    for section in _TOP_KEY.split(text):
        found |= pickle.loads(_parsed(section))
    return found


@lru_cache(maxsize=4096)
def _parsed(section: bytes) -> bytes:
    """The keys and values of a section, pickled: each caller gets its own."""
    value = yaml.load(section, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return pickle.dumps(value or {})


def read_yaml(text: str | bytes, where: str) -> Any:
    """The value of a YAML text; `where` names the source in errors.

    Raises:
        InputError: invalid YAML, a key given twice, nested too deeply, or more than `MAX_VALUES`
            values.
    """
    try:
        value = _load(text) if len(text) > LONG else pickle.loads(_loaded(text))
    except RecursionError:
        raise InputError(f"{where}: not valid YAML: nested too deeply") from None
    # For scalars such as `!!timestamp x` or a date in month 13, PyYAML raises whatever its
    # constructors raise.
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{where}: not valid YAML: {_explained(error)}") from None
    return value


@lru_cache(maxsize=1024)
def _loaded(text: str | bytes) -> bytes:
    """The value of a text, pickled: each caller gets its own. The arms of a study and the runs of a
    sweep read one config and like overrides again and again."""
    return pickle.dumps(_load(text))


def _load(text: str | bytes) -> Any:
    value = yaml.load(text, _Loader)
    values, count = [value], 0
    while values:
        found = values.pop()
        if (count := count + 1) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} values")
        if isinstance(found, dict):
            values += found.values()
        elif isinstance(found, list):
            values += found
    return value


def _explained(error: Exception) -> str:
    """What is wrong, where, and what to do about it, on one line."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    at, began = error.problem_mark, error.context_mark
    what = error.problem or error.context or ""
    if began is not None and began.line != at.line:
        what += f" ({error.context} that begins in line {began.line + 1})"
    found = at.buffer[at.pointer] if at.buffer else ""
    if found == "\t":
        what = "a tab: indent with spaces"
    elif found in _MARKS:
        what += f": put quotes around a value that begins with {found}"
    elif what == _COLON:
        what = "a colon within a value, or a line that is indented unlike those above it: put "
        what += "quotes around the value, or align the line"
    return f"line {at.line + 1}, column {at.column + 1}: {what}"
