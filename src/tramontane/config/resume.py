"""Keys that may change when a run is resumed, and the differences between two configs.

Declared at the key: `MayChange[float]` instead of `float`, or `Annotated[float, Fixed("the
reason")]`. A key without a mark inherits its section's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_origin

from pydantic.fields import FieldInfo

from tramontane.config.section import Section, subsection

T = TypeVar("T")


@dataclass(frozen=True)
class OnResume:
    """Metadata of a key.

    Args:
        fixed_because: why the key cannot change; None if it may.
    """

    fixed_because: str | None

    @property
    def may_change(self) -> bool:
        return self.fixed_because is None


def Fixed(reason: str) -> OnResume:
    """Marks a key that cannot change when a run is resumed."""
    return OnResume(reason)


MAY_CHANGE = OnResume(None)
MayChange = Annotated[T, MAY_CHANGE]
UNMARKED = OnResume("it defines the run")


@dataclass(frozen=True)
class Change:
    """A key that differs between two configs; values are JSON-able.

    Args:
        key: dotted path.
        before, after: its values.
        mark: says whether the key may change when a run is resumed.
    """

    key: str
    before: Any
    after: Any
    mark: OnResume

    def __str__(self) -> str:
        return f"{self.key} {self.before} → {self.after}"


def mark_of(field: FieldInfo, inherited: OnResume) -> OnResume:
    """The mark of a key, `inherited` from its section if it has none."""
    return next((m for m in field.metadata if isinstance(m, OnResume)), inherited)


def differences(before: Section, after: Section) -> list[Change]:
    """The keys with different values in two configs of the same class, in the source's order."""
    pair = before.model_dump(mode="json"), after.model_dump(mode="json")
    return list(_differences(type(before), *pair, mark=UNMARKED, path=""))


def _differences(
    section: type[Section],
    before: dict[str, Any],
    after: dict[str, Any],
    *,
    mark: OnResume,
    path: str,
) -> Iterator[Change]:
    for name, field in section.model_fields.items():
        old, new = before[name], after[name]
        if old == new:
            continue
        key, found = f"{path}{name}", mark_of(field, mark)
        below = None if get_origin(field.annotation) is dict else subsection(field.annotation)
        if below and isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(below, old, new, mark=found, path=f"{key}.")
        elif below and isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            for number, (one, other) in enumerate(zip(old, new, strict=True)):
                yield from _differences(below, one, other, mark=found, path=f"{key}.{number}.")
        else:
            yield Change(key, old, new, found)
