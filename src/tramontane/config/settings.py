"""A section of settings from YAML and `key=value` texts, with every complaint an `InputError`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from tramontane.errors import InputError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


S = TypeVar("S", bound=Section)


def load_section(cls: type[S], path: str | Path, overrides: list[str] | None = None) -> S:
    """Read a YAML file into `cls`, with `key.sub=value` overrides laid on top.

    Raises:
        InputError: no such file, not YAML, an unknown key (with the nearest valid one), a value of
            the wrong kind, or sizes that contradict each other.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such config file")
    try:
        raw = yaml.safe_load(path.read_bytes()) or {}
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: the file must hold keys and values, not a {type(raw).__name__}")
    return parse_settings(cls, raw, overrides or [], str(path))


def parse_settings(cls: type[S], raw: dict[str, Any], overrides: list[str], where: str) -> S:
    """`cls` from a few values and `key.sub=value` overrides; `where` names them in errors."""
    for override in overrides:
        _apply(cls, raw, override)
    return parse(cls, raw, where)


def parse(cls: type[S], raw: dict[str, Any], where: str) -> S:
    """Validate `raw` as `cls`, turning every complaint into one `InputError` that names `where`."""
    try:
        return cls.model_validate(raw)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc']))}: not given; set it in the file, or as key=value"
            if e["input"] is None and e["type"] != "extra_forbidden"
            else _explain(cls, e["loc"], e["type"], e["msg"])
            for e in error.errors()
        ]
        raise InputError("\n".join(f"{where}: {line}" for line in lines)) from None


def _apply(cls: type[Section], raw: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise InputError(f"override {override!r}: write it as key=value, e.g. pipeline.updates=10")
    *parents, last = key.split(".")
    for parent in parents:
        raw = raw.setdefault(parent, {})
        if not isinstance(raw, dict):
            raise InputError(f"override {override!r}: {parent} is a value, not a section")
    # YAML 1.1 reads 1e-4 as a string; pydantic turns it into a float where one is wanted.
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise InputError(f"override {override!r}: the value is not valid YAML: {error}") from None
    # To YAML, `playground:` is a mapping, 123 a number and off a boolean.
    as_text = not isinstance(parsed, str | None) and _takes_text(cls, key.split("."))
    raw[last] = value if as_text else parsed


def _takes_text(cls: type[Section], keys: list[str]) -> bool:
    """Whether the field that the keys lead to holds text and nothing else (or null)."""
    annotation: Any = cls
    for key in keys:
        if get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields.get(key)
            annotation = field.annotation if field else None
        else:
            return False
    if get_origin(annotation) is Literal:
        return all(isinstance(choice, str) for choice in get_args(annotation))
    return annotation is str or set(get_args(annotation)) == {str, type(None)}


def _explain(cls: type[BaseModel], loc: tuple[int | str, ...], kind: str, message: str) -> str:
    key = ".".join(str(part) for part in loc)
    if kind != "extra_forbidden":
        message = message.removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    parent: Any = cls
    for part in loc[:-1]:
        if isinstance(part, int):  # an item of a list, whose sections are all alike
            continue
        annotation = parent.model_fields[part].annotation
        options = [annotation, *get_args(annotation)]
        parent = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    valid = list(parent.model_fields)
    near = difflib.get_close_matches(str(loc[-1]), valid, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(sorted(valid))}"
    return f"{key}: unknown key; {hint}"
