"""Loads problems from finite sources: files, datasets, and fixed sets of generated problems."""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tramontane.config import BUILT_IN, LANGUAGES, DataConfig, DomainConfig, nearest
from tramontane.data import images, playground
from tramontane.data.catalog import named_source, problem_rows
from tramontane.data.code import parse_tests
from tramontane.data.files import ENDINGS, GENERATED, PYTHON_ROWS, name_of, read_rows
from tramontane.data.gym import gym_problems
from tramontane.data.values import encodable, is_missing
from tramontane.errors import InputError
from tramontane.types import IMAGE, Message, Problem
from tramontane.verifier.format import last_box
from tramontane.verifier.math.reference import stated

logger = logging.getLogger("tramontane")

Split = Literal["train", "test"]

FIELDS = (
    "id", "domain", "problem", "answer", "tests", "language", "difficulty", "source", "images",
)  # fmt: skip
# Names that a row may use for a field without `data.fields`.
ALIASES = {
    "problem": ("prompt", "question", "query"),
    "answer": ("final_answer", "expected_answer"),
    "difficulty": ("level",),
    "images": ("image",),
}
# Names elsewhere, OpenRLHF's and those of sets for fine-tuning, which a message proposes to map.
_ELSEWHERE = {
    "problem": (
        "input", "instruction", "messages", "context_messages", "problem_statement", "task", "text",
    ),
    "answer": ("label", "target", "output", "reference", "gold", "correct_answer", "answers"),
    "tests": ("test_cases", "public_tests", "input_output"),
}  # fmt: skip
# Names used for the answer in some sets, and for something else in others: a derivation, a program,
# or data for a user-defined reward. They are read if a row has no other answer and no tests, and
# are kept in the metadata.
UNSURE = ("ground_truth", "solution")
MAX_ANSWER = 200  # longest text without a box that counts as an answer, not a derivation
ROLES = ("system", "user", "assistant")
# Names in the metadata read by curation; `data.fields` can map these too.
METADATA_FIELDS = ("solutions",)


@dataclass(frozen=True)
class RowRules:
    """Rules for reading rows as problems."""

    # Names of a row's columns by field of a Problem, if different.
    fields: Mapping[str, str] = field(default_factory=dict)
    domain: str | None = None  # domain of every row; None: each row's own (`data.domain`)
    # The known domains, with the columns that they need (`verifier.domains`).
    domains: Mapping[str, DomainConfig] = field(default_factory=lambda: BUILT_IN)
    gradable: bool = True  # reject rows without the columns that their domain needs
    key: str = "data.fields"  # the key of the config that holds `fields`, for messages
    album: images.Album | None = None  # reads the rows' images; None: such rows are rejected

    @cached_property
    def columns(self) -> dict[str, tuple[str, ...]]:
        """Names of the columns that may hold each field of a Problem, the first one first."""
        return {name: columns_of(name, self.fields) for name in FIELDS}


def load_problems(
    source: str,
    config: DataConfig,
    *,
    split: Split,
    limit: int | None,
    seed: int,
    domains: Mapping[str, DomainConfig] = BUILT_IN,
) -> list[Problem]:
    """All problems of a finite source.

    Args:
        source: a file with one of `files.ENDINGS`, a Hugging Face dataset (`NAME` or
            `NAME#SUBSET`), `verifiers:NAME`, `reasoning_gym:NAME`, or `playground:`.
        config: `fields` and `eval_fields`, `domain`, `playground`, and the datasets' names for the
            two splits (`split` and `eval_split`) are used here.
        split: the problems to train on, or to evaluate with. Files have no splits; no problem of a
            generated source is in both.
        limit: maximum number of problems, evenly spaced over the source (which may be sorted);
            required for generated sources, which are endless.
        seed: seed of the generated sources.
        domains: the known domains (`verifier.domains`).

    Raises:
        InputError: no such source, a damaged file, a row that cannot be graded, an unknown domain,
            an unknown name in `fields`, or too few distinct generated problems.
    """
    mapped = config.fields, "data.fields"
    if split == "test" and config.eval_fields is not None:
        mapped = config.eval_fields, "data.eval_fields"
    check_fields(*mapped)
    if split == "test" and not config.fields and source != config.train:
        mapped = mapped[0], "data.eval_fields"
    scheme, name = generated(source)
    if scheme and limit is None:
        raise InputError(f"data {source!r} has no end: say how many problems (data.limit)")
    if scheme == "playground":
        settings = config.playground
        choices = (settings.levels, settings.languages, settings.kinds)
        try:
            return list(playground.problems(split, seed, *choices, count=limit))
        except ValueError as error:
            raise InputError(f"data {source!r}: {error}") from None
    if scheme == "reasoning_gym":
        assert limit is not None
        problems = _distinct(gym_problems(name, split, seed), limit)
        if len(problems) < limit:
            raise InputError(
                f"data {source!r}: only {len(problems)} different {split} problems "
                f"were found of {limit} asked for; ask for fewer"
            )
        return problems
    if found := named_source(source, config.sets):
        mapped = found.entry.fields, f"data.sets.{found.name}.fields"
        check_fields(*mapped)
        album = images.Album(Path(found.source).expanduser().parent, config.images.limits)
        rules = RowRules(mapped[0], found.entry.domain, domains, key=mapped[1], album=album)
        problems = _row_problems(problem_rows(found), rules, found.name, found.name)
        if not problems:
            count = sum(1 for _ in read_rows(found.source, found.entry.split))
            raise InputError(
                f"data {source!r}: all {count:,} rows were skipped: they cannot be graded "
                f"(docs/data.md says which rows {found.name} keeps); give another file"
            )
    else:
        hub_split = config.split if split == "train" else config.eval_split
        is_file = source.endswith(ENDINGS)
        stem = Path(source).name.partition(".")[0] if is_file else source
        # A run may read both splits of a dataset, whose rows are different problems.
        prefix = stem if is_file else f"{stem}-{hub_split}"
        # Rows given as Python objects are in a temporary file.
        folder = Path() if source.endswith(PYTHON_ROWS) else Path(source).expanduser().parent
        album = images.Album(folder, config.images.limits)
        rules = RowRules(mapped[0], config.domain, domains, key=mapped[1], album=album)
        problems = _row_problems(read_rows(source, hub_split, limit), rules, stem, prefix)
    if limit is not None and limit < len(problems):
        return [problems[i * len(problems) // limit] for i in range(limit)]
    if limit is not None and limit > len(problems) and split == "test":
        logger.warning(
            "evaluation on %s: all %s problems are taken, as there are fewer than the %s asked for",
            name_of(source), f"{len(problems):,}", f"{limit:,}",
        )  # fmt: skip
    return problems


def check_fields(fields: Mapping[str, str], key: str = "data.fields") -> None:
    """Check that `data.fields`, or the mapping at another key, names fields of problems.

    Raises:
        InputError: an unknown field; the message suggests the nearest name.
    """
    known = (*FIELDS, *METADATA_FIELDS)
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}"
            raise InputError(f"{key}.{name}: a problem has no such field; {hint}")


def generated(source: str) -> tuple[str, str]:
    """(scheme, name) of a source that generates problems; ("", "") for finite ones.

    Raises:
        InputError: the source is empty, or text follows `playground:`.
    """
    if not source:
        raise InputError("data.train: not given; name a source, or `playground:`")
    scheme, colon, name = source.partition(":")
    if f"{scheme}{colon}" not in GENERATED:
        return "", ""
    if scheme == "playground" and name:
        raise InputError(
            f"data {source!r}: write 'playground:' alone, and what to draw in data.playground"
        )
    return scheme, name


def _distinct(problems: Iterable[Problem], count: int) -> list[Problem]:
    """The first `count` distinct problems; fewer if new ones become rare."""
    found: dict[str, Problem] = {}
    for problem in islice(problems, 20 * count + 1000):
        found.setdefault(problem.id, problem)
        if len(found) == count:
            break
    return list(found.values())


def _row_problems(
    rows: Iterable[tuple[str, dict[str, Any]]], rules: RowRules, source: str, prefix: str
) -> list[Problem]:
    """The problems of rows; `prefix` and the row's number are the id of a problem without an id."""
    problems: dict[str, Problem] = {}
    names: set[str] = set()
    marked: list[str] = []
    files: dict[str, str] = {}
    for where, row in rows:
        names.update(row)
        line = where.rstrip("]").replace("[", ":").rpartition(":")[2]  # FILE:LINE or NAME[INDEX]
        problem = parse_problem(row, where, rules, default_id=f"{prefix}-{line}", source=source)
        while problem.id in problems:
            # A run's records name problems by id, so ids must differ.
            problem = replace(problem, id=f"{problem.id}-{line}")
        problems[problem.id] = problem
        texts = [m["content"] for m in problem.messages or ()] or [problem.problem]
        if not problem.images and any(IMAGE in text for text in texts):
            marked.append(where)
        if rules.album and not problem.images:
            for name in problem.metadata.keys() - files.keys():
                if images.names_file(problem.metadata[name], rules.album.folder):
                    files[name] = where
    images.warn_of_text(marked)
    images.warn_of_files(files)
    for key, column in rules.fields.items():
        if column not in names:
            raise InputError(
                f"data {source!r}: {rules.key} maps {key!r} to {column!r}, but no row has that; "
                f"the rows have {', '.join(sorted(names))}"
            )
    return list(problems.values())


def parse_problem(
    row: dict[str, Any], where: str, rules: RowRules, *, default_id: str, source: str
) -> Problem:
    """One row as a Problem; all values without a field in Problem go into `metadata`.

    Raises:
        InputError: no statement, an image, an unknown domain, tests of unknown form, or, if the
            problem must be gradable, no value in a column that its domain needs.
    """
    rest = {name: value for name, value in row.items() if value is not None}
    values: dict[str, Any] = {}
    taken: dict[str, Any] = {}  # values by column
    for name, columns in rules.columns.items():
        if name == "problem" and "prompt" in columns and isinstance(rest.get("prompt"), list):
            columns = ("prompt",)  # TRL's, made of the row's other columns
        column = next((c for c in columns if not _is_absent(name, rest.get(c))), None)
        values[name] = None if column is None else rest.pop(column)
        if column is not None and name != "images":
            taken[column] = values[name]
    for column in rules.columns["images"]:
        if column in rest and _is_absent("images", rest[column]):  # a row without
            del rest[column]
    fields = rules.fields
    for name in METADATA_FIELDS:
        if (mapped := fields.get(name, name)) in rest and mapped != name:
            rest[name] = taken[mapped] = rest.pop(mapped)
    tests = parse_tests(values["tests"], where)
    album = rules.album
    if album is None:
        images.refuse(row, where)
    if values["images"] is not None and any(rest.get(name) for name in images.FIELDS):
        raise InputError(
            f"{where}: images in two fields, `image` and `images`; give all in one list"
        )
    images.refuse(rest, where)
    given_text, own = images.flattened(values["problem"], where)
    statement, messages = _statement(given_text, where)
    if not isinstance(statement, str) or not statement.strip():
        name = fields.get("problem", "problem")
        says = _row_columns("problem", row, rules)
        raise InputError(f"{where}: no text in field {name!r}; {says}")
    given = [] if values["images"] is None else [*images.listed(values["images"])]
    found = images.placed(messages or statement, given, own, where)
    domain = _domain(values["domain"], where, rules) or ("code" if tests else "math")
    if rules.domain is not None and values["domain"] is not None:
        rest["domain"] = values["domain"]
    answer = answer_text(values["answer"])
    if values["answer"] is None and not tests and "answer" not in fields:
        answer = next(filter(None, (_stated(rest.get(name)) for name in UNSURE)), None)
    if answer and rules.domains[domain].verifier == "math":
        answer = stated(answer)
    if rules.gradable:
        for name in rules.domains[domain].needs:
            if not {"answer": answer, "tests": tests}[name]:
                raise InputError(f"{where}: {_missing(name, domain, rules, row)}")
    # Tests and references given as JSON text were decoded after the row was read.
    encodable({"problem": statement, "answer": answer, "tests": tests}, where)
    is_program = bool(tests) or rules.domains[domain].verifier == "code"
    language, level = _language(values["language"], is_program), _level(values["difficulty"])
    if values["language"] is not None and language is None:
        rest["programming_language" if is_program else "language"] = values["language"]
    if values["difficulty"] is not None and level is None:
        rest["difficulty"] = values["difficulty"]
    problem = Problem(
        id=default_id if values["id"] is None else str(values["id"]),
        domain=domain,
        problem=statement,
        answer=answer,
        tests=tests,
        language=language,
        difficulty=level,
        source=source if values["source"] is None else str(values["source"]),
        messages=messages,
        metadata=rest,
        where=where,
        images=[album.read(image, where) for image in found] if album else [],
    )
    return replace(problem, renamed=_other_than(problem.row, taken))


def _other_than(row: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given columns that a row lacks or has otherwise; 42 is not "42", nor True 1."""
    return {
        name: value
        for name, value in given.items()
        if name not in row or type(row[name]) is not type(value) or row[name] != value
    }


def _is_absent(field_name: str, value: Any) -> bool:
    return is_missing(value) or (field_name == "images" and value in ("", []))


def columns_of(field_name: str, fields: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the columns that may hold a field of a Problem, in order of precedence."""
    if field_name in fields:
        return (fields[field_name],)
    return (field_name, *ALIASES.get(field_name, ()))


def _row_columns(field_name: str, row: dict[str, Any], rules: RowRules) -> str:
    """What a row has in place of a usable value of a field, and the remedy."""
    name = rules.fields.get(field_name, field_name)
    found = f"the row has {', '.join(sorted(row))}"
    if not is_missing(row.get(name)):
        is_blank = isinstance(row[name], str) and not row[name].strip()
        kind = "empty" if is_blank else f"of type {type(row[name]).__name__}"
        found += f", and its {name!r} is {kind}"
    usual = (field_name, *ALIASES.get(field_name, ()), *_ELSEWHERE.get(field_name, ()))
    for column, value in row.items():
        if column != name and not is_missing(value) and column.strip().lower() in usual:
            other = column if re.fullmatch(r"\w+", column) else repr(column)
            return f"{found}; if {column!r} is it, write {rules.key}: {{{field_name}: {other}}}"
    return f"{found}; name the right one in {rules.key}"


def _statement(value: Any, where: str) -> tuple[Any, list[Message] | None]:
    """(statement, messages) of a problem, which is a text or a chat's messages."""
    if not isinstance(value, list | tuple):
        return value, None
    messages: list[Message] = []
    for place, message in enumerate(value):
        role, content = (
            (message.get("role"), message.get("content")) if isinstance(message, dict) else (0, 0)
        )
        if role not in ROLES or not isinstance(content, str):
            raise InputError(
                f"{where}: message {place} of the prompt is not a chat message: it needs a `role`, "
                f"one of {', '.join(ROLES)}, and a `content` that is text"
            )
        messages.append({"role": role, "content": content})
    if not messages or messages[-1]["role"] != "user":
        raise InputError(f"{where}: the prompt's last message must be the user's")
    return messages[-1]["content"], messages


def _domain(value: Any, where: str, rules: RowRules) -> str | None:
    name = value if rules.domain is None else rules.domain
    if name is None or (isinstance(name, str) and name in rules.domains):
        return name
    near = nearest(str(name), rules.domains)
    hint = f"did you mean {near!r}? " if near else ""
    raise InputError(
        f"{where}: unknown domain {name!r}; {hint}known are "
        f"{', '.join(rules.domains)}. Add it to verifier.domains, name another column in "
        f"data.fields, or set data.domain to the domain of all rows"
    )


def _missing(column: str, domain: str, rules: RowRules, row: dict[str, Any]) -> str:
    """What is wrong with a row that lacks a column needed by its domain."""
    says = _row_columns(column, row, rules)
    name = rules.fields.get(column, column)
    if row.get("reward_model"):
        return (
            "the row has the layout of verl's training files: name the file with it, "
            "data.sets: {mine: {source: FILE, layout: verl}}, and write data.train: mine"
        )
    if column == "tests":
        return f"no tests in field {name!r}, which domain {domain!r} needs; {says}"
    if unsure := [name for name in UNSURE if row.get(name) and "answer" not in rules.fields]:
        says = f"{unsure[0]!r} states none, by a box or in one line; {says}"
    return (
        f"no answer (text or a number) in field {name!r}, and no tests: domain {domain!r} could "
        f"not grade the row; {says}, remove the row, or set data.domain to a domain of your own "
        f"(verifier.domains) that needs no answer"
    )


def answer_text(value: Any) -> str | None:
    """The reference answer as text; in GSM8K's worked answers, the number after `####`. None for a
    value that is not an answer, such as NaN or infinity; for a list of one value, that value's."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        value = str(value)
    if not isinstance(value, str):
        return None
    return value.rpartition("####")[2].strip()


def _stated(value: Any) -> str | None:
    """The answer in a column that may hold a derivation: its last box, the text after `####`, what
    follows its label, or all of a short line."""
    answer = answer_text(value)
    if not answer or not isinstance(value, str) or "####" in value:
        return answer
    if box := last_box(value):
        return box
    is_short = len(answer) <= MAX_ANSWER and "\n" not in answer
    return answer if is_short or stated(answer) != answer else None


def _language(value: Any, is_program: bool) -> str | None:
    """The statement's language; in programming rows, `language` is often the program's."""
    if is_program:
        return value if value in LANGUAGES else None
    return value if isinstance(value, str) and re.fullmatch("[a-z]{2}", value) else None


def _level(value: Any) -> int | None:
    """A level as a whole number, also in the MATH dataset's form (`Level 3`)."""
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    found = re.fullmatch(r"(?:level )?(\d{1,9})", text.strip(), re.IGNORECASE)
    return int(found[1]) if found else None
