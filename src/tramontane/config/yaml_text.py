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
    """The keys and values of a YAML text that this package wrote, unchanged.

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
    except RecursionError:
        raise InputError(f"{where}: not valid YAML: nested too deeply") from None
    # For scalars such as `!!timestamp x` or a date in month 13, PyYAML raises whatever its
    # constructors raise.
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        message = re.sub(r'  in "<(byte|unicode) string>", ', "  in ", str(error))
        raise InputError(f"{where}: not valid YAML: {message}") from None
    return value
