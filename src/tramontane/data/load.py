"""Problems from every finite source: files, Hugging Face datasets, drawn sets of generated ones."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tramontane.config import LANGUAGES, PlaygroundConfig
from tramontane.data import playground as world
from tramontane.data.code import parse_tests
from tramontane.data.files import ENDINGS, SCHEMES, read_rows
from tramontane.errors import InputError
from tramontane.types import Domain, Problem

Split = Literal["train", "test"]

FIELDS = ("id", "domain", "problem", "answer", "tests", "language", "difficulty", "source")
# What a row may call a field without `data.fields` saying so. Only names that mean one thing:
# a `solution`, for instance, is an answer here and a whole derivation there.
ALIASES = {
    "problem": ("question", "prompt"),
    "answer": ("final_answer", "expected_answer"),
    "difficulty": ("level",),
}
# What no Problem has a field for, but a stage of curation reads from its metadata.
CARRIED = ("solutions",)


def load_problems(
    source: str,
    *,
    fields: dict[str, str],
    split: str,
    limit: int | None,
    playground: PlaygroundConfig,
    playground_split: Split,
    seed: int,
) -> list[Problem]:
    """All problems of a finite source.

    Args:
        source: a .jsonl, .jsonl.gz or .parquet file, a Hugging Face dataset (`NAME` or
            `NAME#SUBSET`), `reasoning_gym:NAME`, or `playground:`.
        fields: a Problem's field → the row's name for it.
        split: of a Hugging Face dataset.
        limit: so many problems at most, evenly spaced over the source (which may be sorted);
            needed by the generated sources, which have no end.
        playground: what the playground draws from.
        playground_split: the split of the generated sources; no problem is in both.
        seed: of the generated sources.

    Raises:
        InputError: no such source, a damaged one, a row without what it takes to grade it, an
            unknown name in `fields`, or too few different generated problems.
    """
    check_fields(fields)
    scheme, name = generated(source)
    if scheme and limit is None:
        raise InputError(f"data {source!r} has no end: say how many problems (data.limit)")
    if scheme == "playground":
        choices = (playground.levels, playground.languages, playground.kinds)
        try:
            return list(world.problems(playground_split, seed, *choices, count=limit))
        except ValueError as error:
            raise InputError(f"data {source!r}: {error}") from None
    if scheme == "reasoning_gym":
        assert limit is not None
        problems = _distinct(gym_problems(name, playground_split, seed), limit)
        if len(problems) < limit:
            raise InputError(
                f"data {source!r}: only {len(problems)} different {playground_split} problems "
                f"were found of {limit} asked for; ask for fewer"
            )
        return problems
    problems = _file_problems(source, fields, split)
    if limit is not None and limit < len(problems):
        problems = [problems[i * len(problems) // limit] for i in range(limit)]
    return problems


def check_fields(fields: dict[str, str]) -> None:
    """Refuse a name in `data.fields` that no problem has.

    Raises:
        InputError: with the nearest name.
    """
    known = (*FIELDS, *CARRIED)
    for field in fields:
        if field not in known:
            near = difflib.get_close_matches(field, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise InputError(f"data.fields.{field}: a problem has no such field; {hint}")


def generated(source: str) -> tuple[str, str]:
    """(scheme, name) of a source that makes its problems; ("", "") of one that holds them.

    Raises:
        InputError: something stands behind `playground:`.
    """
    scheme, colon, name = source.partition(":")
    if f"{scheme}{colon}" not in SCHEMES:
        return "", ""
    if scheme == "playground" and name:
        raise InputError(
            f"data {source!r}: write 'playground:' alone, and what to draw in data.playground"
        )
    return scheme, name


def gym_problems(name: str, split: Split, seed: int) -> Iterator[Problem]:
    """An endless stream from Reasoning Gym, graded by the maths verifier on the plain answer.

    The split is decided on the statement, as in the playground, since neighbouring seeds of
    Reasoning Gym share most of their problems.

    Raises:
        InputError: the package is missing, it knows no such dataset, or the dataset's answers are
            not one line of text.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        raise InputError(
            f"data 'reasoning_gym:{name}' needs a package that is not installed: "
            f"pip install tramontane[reasoning-gym]"
        ) from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)
        raise InputError(
            f"data 'reasoning_gym:{name}': no such dataset; did you mean one of {', '.join(near)}?"
        )
    return _gym_stream(name, split, seed, create_dataset)


def _gym_stream(name: str, split: Split, seed: int, create_dataset: Any) -> Iterator[Problem]:
    size, unfit = 1000, 0  # of 200 draws one at least is for testing, but for 1 in 10¹¹ cases
    for start in range(seed, 2**63, size):
        for row in create_dataset(name, size=size, seed=start):
            statement, answer = row["question"].strip(), (row["answer"] or "").strip()
            if not answer or "\n" in answer or world.split_of(statement) != split:
                unfit += 1
                if unfit == 200:
                    raise InputError(
                        f"data 'reasoning_gym:{name}': {unfit} draws, and not one {split} problem "
                        f"with an answer of one line, as the maths verifier needs it; choose "
                        f"another dataset"
                    )
                continue
            unfit = 0
            yield Problem(
                id=f"{name}-{hashlib.sha256(statement.encode()).hexdigest()[:16]}",
                domain="math",
                problem=statement,
                answer=answer,
                language="en",
                source=f"reasoning_gym:{name}",
            )


def _distinct(problems: Iterable[Problem], count: int) -> list[Problem]:
    """The first `count` different ones; fewer where hardly any new ones come."""
    found: dict[str, Problem] = {}
    for problem in islice(problems, 20 * count + 1000):
        found.setdefault(problem.id, problem)
        if len(found) == count:
            break
    return list(found.values())


def _file_problems(source: str, fields: dict[str, str], split: str) -> list[Problem]:
    is_file = source.endswith(ENDINGS)
    stem = Path(source).name.partition(".")[0] if is_file else source
    # Of a dataset both splits may be read: their rows are different problems.
    prefix = stem if is_file else f"{stem}-{split}"
    problems: dict[str, Problem] = {}
    names: set[str] = set()
    for where, row in read_rows(source, split):
        names.update(row)
        line = re.findall(r"\d+", where)[-1]
        problem = parse_problem(row, where, fields, default_id=f"{prefix}-{line}", source=stem)
        while problem.id in problems:
            # A run's records name problems by their id, so each needs its own.
            problem = replace(problem, id=f"{problem.id}-{line}")
        problems[problem.id] = problem
    for field, name in fields.items():
        if name not in names:
            raise InputError(
                f"data {source!r}: data.fields maps {field!r} to {name!r}, but no row has that; "
                f"the rows have {', '.join(sorted(names))}"
            )
    return list(problems.values())


def parse_problem(
    row: dict[str, Any],
    where: str,
    fields: dict[str, str],
    default_id: str,
    source: str,
    gradable: bool = True,
) -> Problem:
    """One row as a Problem; what a Problem has no field for goes into `metadata`.

    Raises:
        InputError: there is no statement, the tests are of no known form, or, where it must be
            `gradable`, there is neither an answer nor tests.
    """
    rest = {name: value for name, value in row.items() if value is not None}
    got: dict[str, Any] = {}
    for field in FIELDS:
        named = (fields[field],) if field in fields else (field, *ALIASES.get(field, ()))
        name = next((n for n in named if n in rest), None)
        got[field] = None if name is None else rest.pop(name)
    rest |= {name: rest.pop(fields[name]) for name in CARRIED if fields.get(name) in rest}
    statement, tests = got["problem"], parse_tests(got["tests"], where)
    domain: Domain = "code" if got["domain"] == "code" or tests else "math"
    says = f"the row has {', '.join(sorted(row))}; name the right one in data.fields"
    if not isinstance(statement, str) or not statement.strip():
        raise InputError(f"{where}: no text in field {fields.get('problem', 'problem')!r}; {says}")
    if gradable and domain == "code" and not tests:
        raise InputError(f"{where}: no tests in field {fields.get('tests', 'tests')!r}; {says}")
    if got["domain"] not in (None, "math", "code"):
        rest["domain"] = got["domain"]
    answer = _answer(got["answer"])
    if gradable and domain == "math" and not answer:
        raise InputError(
            f"{where}: no answer (text or a number) in field "
            f"{fields.get('answer', 'answer')!r}, and no tests: the row could not be graded; "
            f"{says}, or remove the row"
        )
    language, level = _language(got["language"], domain), _level(got["difficulty"])
    if got["language"] is not None and language is None:
        rest["programming_language" if domain == "code" else "language"] = got["language"]
    if got["difficulty"] is not None and level is None:
        rest["difficulty"] = got["difficulty"]
    return Problem(
        id=default_id if got["id"] is None else str(got["id"]),
        domain=domain,
        problem=statement,
        answer=answer,
        tests=tests,
        language=language,
        difficulty=level,
        source=source if got["source"] is None else str(got["source"]),
        metadata=_plain(rest),
    )


def _answer(value: Any) -> str | None:
    """The reference answer as text; of GSM8K's worked answers the number behind `####`."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        return None
    return value.rpartition("####")[2].strip()


def _language(value: Any, domain: Domain) -> str | None:
    """The language of the statement; rows with tests often mean the program's by `language`."""
    if domain == "code":
        return value if value in LANGUAGES else None
    return value if isinstance(value, str) and re.fullmatch("[a-z]{2}", value) else None


def _level(value: Any) -> int | None:
    """A whole number, also as the MATH dataset writes it (`Level 3`)."""
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    found = re.fullmatch(r"(?:level )?(\d{1,9})", text.strip(), re.IGNORECASE)
    return int(found[1]) if found else None


def _plain(value: Any) -> Any:
    """As JSON can hold it: a run records its problems, and tables may hold dates or images."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
