"""Sections of configuration, read from YAML and `key=value` overrides.

All problems of a file or an override are one `InputError` with lines `FILE: KEY: message`.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
import logging
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from tramontane.config.peers import explain, peer_keys
from tramontane.config.yaml_text import read_own, read_yaml
from tramontane.errors import InputError
from tramontane.workplace import path_part

logger = logging.getLogger("tramontane")


class Section(BaseModel):
    """A group of keys. The docstring under each key describes it to `tramontane config`.

    Attributes:
        read_by: reader of a file with these keys, if that is not the command of the config's name.
        renamed: new names of keys by their old ones, which are read with a warning.
        removed: keys of earlier versions, each with its default, which is ignored, and what to do
            about any other value, which is refused.
        of_text: key that a text in place of the section sets; empty if there is none.
    """

    read_by: ClassVar[str] = ""
    renamed: ClassVar[Mapping[str, str]] = {}
    removed: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    of_text: ClassVar[str] = ""
    model_config = ConfigDict(extra="forbid", validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _of_texts_and_earlier_versions(cls, raw: Any) -> Any:
        if isinstance(raw, str) and cls.of_text:
            return {cls.of_text: raw}
        if not isinstance(raw, dict):
            return raw
        raw = dict(raw)
        for old, new in cls.renamed.items():
            if old in raw:
                if new in raw:
                    raise key_error(f"the old name of {new}, which is given too; remove it", old)
                _warn_renamed(old, new)
                raw[new] = raw.pop(old)
        for key, (default, remedy) in cls.removed.items():
            if raw.pop(key, default) != default:
                raise key_error(f"removed: {remedy}", key)
        return raw

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name in _numbers(cls):
            raise ValueError(f"a number, not {str(value).lower()} (in YAML, also yes, no)")
        return value


PathPart = Annotated[str, AfterValidator(path_part)]  # a name in the path of a file or folder


@cache
def _warn_renamed(old: str, new: str) -> None:
    """Once, though a run's config is read several times."""
    logger.warning(f"key {old} is now called {new}")


@cache
def _numbers(cls: type[Section]) -> list[str]:
    """The keys of a section that take numbers, and neither true nor false."""
    kinds = {name: {f.annotation, *get_args(f.annotation)} for name, f in cls.model_fields.items()}
    return [name for name, types in kinds.items() if types & {int, float} and bool not in types]


S = TypeVar("S", bound=Section)
_SEALED = re.compile(rb"# Written by tramontane; sha256 of what follows: ([0-9a-f]{64})\n")
MAX_SUGGESTED = 3  # keys in a message
SHOWN_CHARACTERS = 60  # of an invalid value in a message
_BETWEEN_KEYS = "between_keys"  # the pydantic error type of `key_error`


def key_error(message: str, *keys: str) -> ValidationError:
    """An error for validators that check keys against each other.

    Args:
        message: the contradiction and its remedy.
        keys: dotted paths of the contradictory keys, relative to the section whose validator
            raises. The error is reported at the first.
    """
    kind = PydanticCustomError(_BETWEEN_KEYS, "{message}", {"message": message, "keys": keys})
    details = InitErrorDetails(type=kind, loc=_location(keys[0]), input=None)
    return ValidationError.from_exception_data("configuration", [details])


def keys_in_error(error: Mapping[str, Any]) -> list[str]:
    """Dotted paths of all keys that an item of `ValidationError.errors()` involves.

    The key that the error is reported at comes first.
    """
    location = error["loc"]
    if error["type"] != _BETWEEN_KEYS:
        return [_path(location)]
    keys = error["ctx"]["keys"]
    parent = location[: len(location) - len(_location(keys[0]))]
    return [_path((*parent, *_location(key))) for key in keys]


def load_section(cls: type[S], path: str | Path, overrides: Sequence[str] | None = None) -> S:
    """Read a YAML file into `cls`, with `key.sub=value` overrides on top.

    Raises:
        InputError: no such file, invalid YAML, an unknown key (with the nearest valid key), a value
            of the wrong type, or contradictory sizes.
    """
    return parse_settings(cls, read_settings(path), overrides or [], str(path))


def read_settings(path: str | Path) -> dict[str, Any]:
    """The keys and values of a YAML file, unchecked.

    Raises:
        InputError: no such file, invalid YAML, a key given twice, no keys and values, or a file
            from `sealed` that was cut or edited.
    """
    if not isinstance(path, str | Path):
        kind = type(path).__name__
        raise InputError(f"config of type {kind}: give a Config, or the path of a file")
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such config file{_found_instead(path)}")
    if {".jsonl", ".csv", ".tsv", ".parquet"} & {*path.suffixes}:
        raise InputError(f"{path}: rows of data, not a config, which is a YAML file")
    if path.suffix == ".toml":
        raise InputError(f"{path}: TOML, and a config is YAML: write `key: value` in a .yaml file")
    text = path.read_bytes()
    found = _SEALED.match(text)
    if found and hashlib.sha256(text[found.end() :]).hexdigest() != found[1].decode():
        raise InputError(
            f"{path}: cut short, damaged or edited: it is not what was written (checksum). "
            f"Restore it from a copy. To change keys of a run, give them on the command line "
            f"(--resume RUN key=value); to use an edited copy as a config, delete its first line"
        )
    raw = read_own(text) if found else read_yaml(text, str(path))
    if raw is None or raw == {}:
        raise InputError(
            f"{path}: the file is empty, or was cut short: it must hold keys and values"
        )
    if not isinstance(raw, dict):
        raise InputError(f"{path}: the file must hold keys and values, not a {type(raw).__name__}")
    return raw


def _found_instead(path: Path) -> str:
    """A hint at what is there in place of a missing file."""
    if "=" in path.name:
        return "; give one first, and then keys as key=value"
    if (path / "config.yaml").is_file():
        return f", but a folder that has one: {path / 'config.yaml'}"
    if str(path) in ("tiny", "tiny_vision") or (path / "config.json").is_file():
        return f", but a model; give it as the key model={path}, in Python as model={str(path)!r}"
    if path.is_dir():
        return ", but a folder; name a file in it"
    siblings = path.parent.iterdir() if path.parent.is_dir() else ()
    near = nearest(path.name, [file.name for file in siblings if file.suffix in (".yaml", ".yml")])
    return f"; did you mean {str(path.parent / near)!r}?" if near else ""


def sealed(section: Section) -> str:
    """A section with all its keys as YAML, after a line with the text's checksum, which
    `read_settings` checks."""
    text = yaml.safe_dump(section.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"# Written by tramontane; sha256 of what follows: {digest}\n{text}"


def check_complete(cls: type[Section], path: Path) -> None:
    """Check that a file from `sealed` is intact; if its first line was removed, check that no key
    is missing, since it would get its default.

    Raises:
        InputError: it is not; or see `read_settings`.
    """
    raw = read_settings(path)
    if not _SEALED.match(path.read_bytes()) and (missing := _missing_key(cls, raw)):
        raise InputError(
            f"{path}: cut short or edited: {missing} is missing, and would get its default; "
            f"restore the file from a copy"
        )


def _missing_key(cls: type[Section], raw: Mapping[str, Any]) -> str | None:
    """The first key of a section, or of those below it, that a file lacks."""
    raw = {cls.renamed.get(name, name): value for name, value in raw.items()}
    for name, field in cls.model_fields.items():
        if name not in raw:
            return name
        below, value = subsection(field.annotation), raw[name]
        if get_origin(field.annotation) is dict or not (below and isinstance(value, dict)):
            continue
        if missing := _missing_key(below, value):
            return f"{name}.{missing}"
    return None


def parse_settings(cls: type[S], raw: dict[str, Any], overrides: Sequence[str], where: str) -> S:
    """Validate `raw` with `key.sub=value` overrides as `cls`; `where` names the source in errors.

    Raises:
        InputError: a key that two overrides give; or see `load_section`.
    """
    given: dict[str, str] = {}  # overrides by key
    for override in overrides:
        key = _apply(cls, raw, override)
        # A more general key would replace the value of an earlier one, too.
        if lost := next((k for k in given if f"{k}.".startswith(f"{key}.")), None):
            raise InputError(
                f"override {override!r}: {given[lost]!r} gives {lost} already; remove one of them"
            )
        given[key] = override
    return parse(cls, raw, where)


def parse(cls: type[S], raw: dict[str, Any], where: str) -> S:
    """Validate `raw` as `cls`; `where` names the source in errors.

    Raises:
        InputError: one line per invalid key.
    """
    try:
        return cls.model_validate(raw, context=where)
    except ValidationError as error:
        if reader := _other_reader(cls, raw):
            raise InputError(f"{where}: a config of `{reader}`, by its keys") from None
        lines = [_explain(cls, dict(details)) for details in error.errors()]
        raise InputError("\n".join(f"{where}: {line}" for line in dict.fromkeys(lines))) from None


def _other_reader(cls: type[Section], raw: Mapping[str, Any]) -> str:
    """The command whose config this is, if several of its keys are not of `cls`, and all of
    another's; else an empty text."""
    if len(raw.keys() - cls.model_fields.keys()) < 2:
        return ""
    readers = (other for other in _sections_below(Section) if other.read_by)
    return next((r.read_by for r in readers if raw.keys() <= r.model_fields.keys()), "")


def _sections_below(cls: type[Section]) -> Iterator[type[Section]]:
    for below in cls.__subclasses__():
        yield below
        yield from _sections_below(below)


def subsection(annotation: Any) -> type[Section] | None:
    """The section held by a key of this type: directly, `| None`, or as items of a tuple or a
    mapping."""
    options = (annotation, *get_args(annotation))
    return next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)


def first_sentence(text: str) -> str:
    """The first sentence of a description, on one line."""
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The most similar of `names`, if any is similar."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


def _location(key: str) -> tuple[int | str, ...]:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def _path(location: Iterable[int | str]) -> str:
    return ".".join(str(part) for part in location if part != "[key]")  # pydantic's, of a mapping


def _apply(cls: type[Section], raw: dict[str, Any], override: str) -> str:
    """Put the value of an override into `raw`; returns its key."""
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise InputError(f"override {override!r}: write it as key=value, e.g. pipeline.updates=10")
    *parents, last = key.split(".")
    place: Any = raw
    for number, parent in enumerate(parents):
        section = subsection(_annotation_at(cls, parents[: number + 1]))
        if section and isinstance(place, dict) and isinstance(place.get(parent), str):
            place[parent] = {section.of_text: place[parent]} if section.of_text else place[parent]
        if isinstance(place, list) and parent.isdigit() and int(parent) < len(place):
            place = place[int(parent)]
        else:
            place = place.setdefault(parent, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict | list):
            raise InputError(f"override {override!r}: {parent} is a value, not a section")
    if not isinstance(place, dict):
        raise InputError(f"override {override!r}: {'.'.join(parents)} is a list, not a section")
    # YAML 1.1 reads 1e-4 as a string; pydantic turns the string into a float.
    is_cut = value[:1] in ("{", "[") and value[-1] not in "]}"  # at a space, by the shell
    hint = ", cut off by the shell unless the whole override is in quotes" if is_cut else ""
    parsed = read_yaml(value, f"override {override!r}: the value{hint}")
    # YAML reads `playground:` as a mapping, 123 as a number and off as a boolean.
    if not isinstance(parsed, str | None) and _takes_only_text(_annotation_at(cls, key.split("."))):
        parsed = value
    place[last] = parsed
    return key


def _annotation_at(cls: type[Section], path: Sequence[int | str]) -> Any:
    """The type of the key at a path; None if the key does not exist."""
    found: Any = cls
    for part in path:
        section = subsection(found)
        if get_origin(found) is dict:
            found = get_args(found)[1]
        elif isinstance(part, int):
            found = section  # of a tuple's items
        else:
            field = section.model_fields.get(part) if section else None
            found = field.annotation if field else None
    return found


def _takes_only_text(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return all(isinstance(choice, str) for choice in get_args(annotation))
    return annotation is str or set(get_args(annotation)) == {str, type(None)}


def _explain(cls: type[Section], error: dict[str, Any]) -> str:
    """`KEY: message` for an item of `ValidationError.errors()`."""
    location, kind = error["loc"], error["type"]
    around = _annotation_at(cls, location[:-1])
    if get_origin(around) in (Union, UnionType) and not subsection(around):
        location = location[:-1]  # pydantic's name of the union's member
    key = _path(location)
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {_suggestion(cls, location, error['input'])}"
    if kind == "missing" or (kind != _BETWEEN_KEYS and error["input"] is None):
        return f"{key}: not given; set it in the file, or as key=value"
    theirs = explain(key, error["input"], paths(cls)) if kind == "string_type" else []
    if theirs and isinstance(error["input"], Mapping):  # a section there
        return f"{key}: {'; '.join(theirs)}"
    if kind == "model_type" and (section := subsection(_annotation_at(cls, location))):
        needed = [name for name, each in section.model_fields.items() if each.is_required()]
        needed = needed or [section.of_text or next(iter(section.model_fields))]
        example = ", ".join(f"{name}: …" for name in needed)
        given = repr(error["input"])
        return f"{key}: a section with keys, not {given}; write {key}: {{{example}}}"
    parent = subsection(around) if location[:-1] else cls
    if kind == "string_pattern_mismatch" and parent and location[-1] in parent.model_fields:
        meaning = first_sentence(descriptions(parent)[str(location[-1])])
        return f"{key}: {error['input']!r} cannot be the {meaning[:1].lower()}{meaning[1:]}"
    if kind in ("tuple_type", "list_type"):
        return f"{key}: a list, not {error['input']!r}; write {key}: [{error['input']}]"
    message = error["msg"].removeprefix("Value error, ")
    if message.startswith("Input should be") and isinstance(error["input"], str | int | float):
        found = textwrap.shorten(repr(error["input"]), SHOWN_CHARACTERS, placeholder=" …")
        message = f"{message.partition(', unable to')[0]}, not {found}"
    # A key that another project has too, of a different kind.
    notes = [k.note for k in peer_keys() if k.note and k.name == k.key == key]
    note = f" ({notes[0]})" if notes else ""
    return f"{key}: {message}{note}" if key else message


@cache
def descriptions(cls: type[Section]) -> dict[str, str]:
    """The docstrings under a section's keys, by key. They are read from its source when asked for;
    pydantic's `use_attribute_docstrings` reads those of all sections whenever they are imported."""
    found = dict.fromkeys(cls.model_fields, "")
    for section in reversed(cls.__mro__):
        if issubclass(section, Section):
            found |= _own_descriptions(section)
    return found


@cache
def _own_descriptions(section: type[Section]) -> dict[str, str]:
    """Those in the section's own source, which is read once for all sections that inherit it."""
    found: dict[str, str] = {}
    with suppress(OSError, TypeError):  # typed at a prompt
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(section))).body
        assert isinstance(definition, ast.ClassDef)
        for key, text in pairwise(definition.body):
            match key, text:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(docstring))):
                    found[name] = inspect.cleandoc(docstring)
    return found


@cache
def paths(cls: type[Section]) -> tuple[str, ...]:
    """Dotted paths of all keys of a section and those below it, except items of lists and
    mappings."""
    found = []
    for name, field in cls.model_fields.items():
        found.append(name)
        below = subsection(field.annotation)
        if below and get_origin(field.annotation) not in (dict, tuple):
            found += [f"{name}.{path}" for path in paths(below)]
    return tuple(found)


def _suggestion(cls: type[Section], location: tuple[int | str, ...], value: Any) -> str:
    if theirs := explain(_path(location), value, paths(cls)):
        return "; ".join(theirs)
    last = str(location[-1])
    if elsewhere := [path for path in paths(cls) if path.rpartition(".")[2] == last]:
        nearest_first = sorted(elsewhere, key=lambda path: path.count("."))[:MAX_SUGGESTED]
        return f"it belongs to another section: {' or '.join(nearest_first)}"
    parent = subsection(_annotation_at(cls, location[:-1]))
    assert parent, "only sections forbid unknown keys"
    if near := nearest(last, parent.model_fields):
        description = first_sentence(descriptions(parent)[near])
        return f"did you mean {near!r}? {description}"
    return f"valid keys: {', '.join(sorted(parent.model_fields))}"
