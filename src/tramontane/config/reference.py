"""Descriptions of all configuration keys, from their docstrings, types and defaults.

`tramontane config` prints them; the page configuration.md of the site is the output of `markdown`.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from pydantic.fields import FieldInfo

from tramontane.config.peers import explain
from tramontane.config.resume import UNMARKED, OnResume, mark_of
from tramontane.config.section import Section, descriptions, nearest, paths, subsection
from tramontane.errors import InputError

WIDTH = 100  # line length of the Markdown, in characters
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_TYPES = {"string": "text", "boolean": "true or false"}
_INTRODUCTION = (
    "Every key of every config file. `tramontane config SECTION` prints one section. A key is set "
    "in the YAML file, or on the command line by its path, as in "
    "`tramontane train configs/quickstart.yaml pipeline.updates=10`. In a path, N is a place in a "
    "list, from 0, and NAME a name of your choice. A key that may change on resume may follow "
    "`tramontane train --resume RUN` as key=value; until the first update, every key may (see "
    "docs/reliability.md). “The paper” is Magistral (arXiv 2506.10910); a "
    "default is ours unless its description names the paper."
)


@dataclass(frozen=True)
class Key:
    """One key of a section.

    Attributes:
        path: dotted path; `N` is a place in a list, `NAME` a mapping's key.
        kind: type and range, e.g. `integer ≥ 1 | null`.
        default: default value as YAML; None for a required key.
        description: the key's docstring, on one line.
        section: the section that the key holds, if any.
    """

    path: str
    kind: str
    default: str | None
    description: str
    section: type[Section] | None
    on_resume: OnResume = UNMARKED

    @property
    def summary(self) -> str:
        """Type, range and default, and whether the key may change when a run is resumed."""
        if self.kind == "section":
            return "section"
        default = "required" if self.default is None else f"default {self.default}"
        changes = "; may change on resume" if self.on_resume.may_change else ""
        return f"{self.kind}; {default}{changes}"

    @property
    def section_path(self) -> str:
        """Path of the section that the key holds; N is a place in a list, NAME a mapping's key."""
        if self.kind == "mapping":
            return f"{self.path}.NAME"
        return f"{self.path}.N" if self.kind.startswith("list") else self.path


@dataclass(frozen=True)
class Entry:
    """A section at its place in a config.

    Attributes:
        root: name of the config; empty for the config of a training run.
        path: dotted path of the section in the config; empty for the whole config.
        section: the section.
        on_resume: mark that the section's keys inherit.
    """

    root: str
    path: str
    section: type[Section]
    on_resume: OnResume = UNMARKED

    @property
    def title(self) -> str:
        """The argument of `tramontane config` that shows this section."""
        return ".".join(part for part in (self.root, self.path) if part)

    @property
    def description(self) -> str:
        """The section's docstring, on one line."""
        return _one_line(inspect.cleandoc(self.section.__doc__ or ""))

    @cached_property
    def keys(self) -> list[Key]:
        """The section's keys, in the order of its source."""
        schemas = _schemas(self.section)
        return [
            Key(
                path=".".join(part for part in (self.path, name) if part),
                kind=_kind(schemas[name]),
                default=_default(field),
                description=_one_line(descriptions(self.section)[name]),
                section=subsection(field.annotation),
                on_resume=mark_of(field, self.on_resume),
            )
            for name, field in self.section.model_fields.items()
        ]

    @property
    def subsections(self) -> dict[str, Entry]:
        """Sections that the section's keys hold, by key."""
        names = self.section.model_fields
        return {
            name: Entry(self.root, key.section_path, key.section, key.on_resume)
            for name, key in zip(names, self.keys, strict=True)
            if key.section
        }


def walk(entry: Entry) -> Iterator[Entry]:
    """A section, and then all sections below it, depth first."""
    yield entry
    for below in entry.subsections.values():
        yield from walk(below)


def find(roots: Mapping[str, type[Section]], path: str) -> Entry:
    """The section at a dotted path, e.g. `trainer.objective` or `curate.code`; for a key, the
    section that has it.

    Args:
        roots: configs by name; the name of a training run's config is empty.
        path: a path in a training run's config, or the name of another config and a path in it.
            Places in lists and mappings (`N`, a number, `NAME`) are optional.

    Raises:
        InputError: no such section; the message has the nearest name, or what a key without its
            section, or of another project, is here.
    """
    parts = [
        part for part in path.split(".") if part not in ("", "N", "NAME") and not part.isdigit()
    ]
    root = parts.pop(0) if parts and parts[0] in roots else ""
    entry = Entry(root, "", roots[root])
    for part in parts:
        below = entry.subsections
        keys = entry.section.model_fields
        if part not in below and part in keys and part == parts[-1]:
            return entry
        if part not in below:
            names = [*below, *(name for name in roots if name and not entry.title)] or [*keys]
            near = nearest(part, names)
            hint = f"did you mean {near!r}?" if near else f"choose from {', '.join(names)}"
            hint = "; ".join(explain(path, None, paths(roots[""]))) or hint
            where = f" in {entry.title}" if entry.title else ""
            raise InputError(f"config: no section {part!r}{where}; {hint}")
        entry = below[part]
    return entry


def markdown(roots: Mapping[str, type[Section]]) -> str:
    """A Markdown page with every key of every config.

    A section that occurs in several places is described at the first and linked from the others.

    Args:
        roots: configs by name, as for `find`.
    """
    entries = [entry for root in roots for entry in walk(Entry(root, "", roots[root]))]
    described: dict[type[Section], Entry] = {}
    for entry in entries:
        described.setdefault(entry.section, entry)
    blocks = ["# Configuration", _wrapped(_linked(_INTRODUCTION))]
    for entry in entries:
        if described[entry.section] is not entry:
            continue
        blocks.append(f"{'###' if entry.path else '##'} {_heading(entry)}")
        blocks.append(_wrapped(_linked(entry.description)))
        for key in entry.keys:
            summary = re.sub(r"default (.+?)(; may.*)?$", r"default `\1`\2", key.summary)
            text = _linked(key.description)
            if key.section:
                at = described[key.section]
                text += f" See [{at.title}](#{_anchor(_heading(at))})."
            blocks.append(_wrapped(f"- **`{key.path}`**: {summary}.", "  "))
            blocks.append(_wrapped(text, "    ", "    "))
    return "\n\n".join(blocks) + "\n"


@cache
def _schemas(section: type[Section]) -> Mapping[str, Any]:
    """The schema of each key, which is made once though the section stands in several places."""
    schemas: Mapping[str, Any] = section.model_json_schema()["properties"]
    return schemas


def _heading(entry: Entry) -> str:
    return entry.title if entry.path else entry.section.read_by or f"tramontane {entry.root}"


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return "section"
    if "anyOf" in schema:
        return " | ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("type", "any value")
    if kind == "array" and "prefixItems" in schema:
        items = schema["prefixItems"]
        return f"list of {len(items)}: {', '.join(map(_kind, items))}"
    if kind == "array":
        return f"list of {_kind(schema['items'])}"
    if kind == "object":
        return "mapping"
    bounds = [f"{sign} {schema[name]:g}" for name, sign in _BOUNDS.items() if name in schema]
    return f"{_TYPES.get(kind, kind)} {' and '.join(bounds)}".strip()


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    value = field.get_default(call_default_factory=True)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(
        value, ensure_ascii=False, default=lambda item: item.model_dump(exclude_defaults=True)
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _wrapped(text: str, indent: str = "", first: str = "") -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _linked(text: str) -> str:
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", text)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\s-]", "", title.lower()).replace(" ", "-")
