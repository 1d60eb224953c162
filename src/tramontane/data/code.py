"""Tests and solutions of programming problems, in the forms that public sets have them.

Tests, beside our own form (docs/data.md): an object with a list of `inputs` and one of `outputs`
(APPS, TACO; with `fn_name`, calls of a function) or of `input` and `output` (CodeContests), or a
list of objects with an `input` and an `output` each (LiveCodeBench, PrimeIntellect, DeepCoder).
Solutions: texts, objects with `language` and `code`, or an object with a list of `language` and
one of `solution` (CodeContests). Both may be JSON text.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NamedTuple

from tramontane.errors import InputError
from tramontane.types import Problem

TEST_TYPES = ("stdio", "python_assert", "cpp_assert")
ProgrammingLanguage = Literal["python", "cpp"]


class Solution(NamedTuple):
    """A program that the source of its problem takes for right."""

    language: ProgrammingLanguage
    code: str


# --------------------------------------------------------------------------------------- tests

# The program may hold the function in a class `Solution`, as LeetCode has it. JSON knows no tuples.
_CALLS = """\
try:
    _function = Solution().{name}
except NameError:
    _function = {name}
def _plain(x):
    return [_plain(v) for v in x] if isinstance(x, (list, tuple)) else x
"""


def parse_tests(value: Any, where: str) -> dict[str, Any] | None:
    """Tests as the code verifier takes them; a table may hold them as JSON text.

    Raises:
        InputError: of another type or shape; the message begins with `where`.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:  # also what is too long or nested to be read
            raise InputError(f"{where}: the tests are text, but not JSON ({error})") from None
    if not value:
        return None
    value = _known_form(value)
    if not value:
        return None
    wrong = None
    if not isinstance(value, dict) or value.get("type") not in TEST_TYPES:
        wrong = f"want a type, one of {', '.join(TEST_TYPES)}"
    elif value["type"] != "stdio":
        wrong = None if isinstance(value.get("code"), str) else "want code"
        if not isinstance(value.get("cases"), list | None):
            wrong = "have cases that are no list"
    elif not (
        isinstance(cases := value.get("cases"), list) and cases and all(map(_is_case, cases))
    ):
        wrong = "want cases, each with input and output as text"
    if wrong:
        raise InputError(f"{where}: the tests {wrong}; see docs/data.md")
    # A table fills what only other rows have with nulls.
    return {name: part for name, part in value.items() if part is not None}


def _is_case(case: Any) -> bool:
    return (
        isinstance(case, dict)
        and isinstance(case.get("input"), str)
        and isinstance(case.get("output"), str)
    )


def _known_form(value: Any) -> Any:
    """Tests of a public set in our form; what is of no known form as it is."""
    if isinstance(value, dict) and "type" not in value:
        for names in (("inputs", "outputs"), ("input", "output")):
            columns = [value.get(name) for name in names]
            if all(isinstance(column, list) for column in columns):
                return _of_pairs(list(zip(*columns, strict=False)), value.get("fn_name"))
    if isinstance(value, list) and all(isinstance(x, dict) and "input" in x for x in value):
        functions = {x.get("fn_name") or _function_of(x.get("metadata")) for x in value}
        if len(functions) == 1:
            return _of_pairs([(x["input"], x.get("output")) for x in value], *functions)
    return value


def _function_of(metadata: Any) -> Any:
    return metadata.get("func_name") if isinstance(metadata, dict) else None


def _of_pairs(pairs: list[tuple[Any, Any]], function: Any) -> dict[str, Any] | None:
    if not pairs:
        return None
    if function:
        return _calls(pairs, function)
    cases = [{"input": _lines(given), "output": _lines(wanted)} for given, wanted in pairs]
    return {"type": "stdio", "cases": cases}


def _lines(text: Any) -> Any:
    """Some rows hold a list of lines."""
    is_lines = isinstance(text, list) and all(isinstance(line, str) for line in text)
    return "\n".join(text) + "\n" if is_lines else text


def _calls(pairs: list[tuple[Any, Any]], name: Any) -> dict[str, Any] | None:
    """An assertion for each call. Arguments are a list, or text with one JSON value a line; the
    expected value may stand in a list of its own."""
    if not isinstance(name, str) or not name.isidentifier():
        return {"type": f"calls of {name!r}"}
    asserts = []
    for given, wanted in pairs:
        try:
            if isinstance(given, str):
                given = [json.loads(line) for line in given.splitlines() if line.strip()]
            if isinstance(wanted, str):
                wanted = json.loads(wanted)
        except (ValueError, RecursionError):  # a plain text stands for itself
            given = [given] if isinstance(given, str) else given
        either = [wanted, wanted[0]] if isinstance(wanted, list) and len(wanted) == 1 else [wanted]
        arguments = ", ".join(map(repr, given if isinstance(given, list) else [given]))
        asserts.append(f"assert _plain(_function({arguments})) in {either!r}\n")
    code = _CALLS.format(name=name) + "".join(asserts)
    return {"type": "python_assert", "code": code, "entry_point": name}


# ----------------------------------------------------------------------------------- solutions

# Numbers are CodeContests'. Python 2 is none that could be run.
_LANGUAGES: dict[Any, ProgrammingLanguage] = {
    "python": "python", "python3": "python", "py": "python", "py3": "python", 3: "python",
    "cpp": "cpp", "c++": "cpp", "cc": "cpp", "c++17": "cpp", "c++20": "cpp", 2: "cpp",
}  # fmt: skip
_FENCED = re.compile(r"\s*```[ \t]*([\w+#]*)[^\n]*\n(.*?)\n?```\s*", re.DOTALL)
_CPP = re.compile(r"^\s*#\s*include\b|^\s*using namespace \w+;", re.MULTILINE)


def parse_solutions(problem: Problem) -> list[Solution]:
    """The different solutions in a problem's metadata, in their order: those of `solutions`, else
    of `solution` and `solution_cpp`. Other languages than Python and C++ are left out; where none
    is named, the program's text decides."""
    held = [problem.metadata.get(name) for name in ("solutions", "solution", "solution_cpp")]
    found = _solutions(held[0]) or [*_solutions(held[1]), *_solutions(held[2])]
    return list(dict.fromkeys(found))


def _solutions(value: Any, language: Any = None) -> list[Solution]:
    if isinstance(value, str):
        text = value.lstrip()
        if text[:1] in ("[", "{"):  # which a program hardly begins with
            try:
                return _solutions(json.loads(text))
            except (ValueError, RecursionError):
                pass
        return _solution(value, language)
    if isinstance(value, dict):
        code = next((value[n] for n in ("code", "solution") if value.get(n)), None)
        named = value.get("language")
        if isinstance(code, list) and isinstance(named, list):
            pairs = zip(code, named, strict=False)
            return [s for text, its in pairs if isinstance(text, str) for s in _solution(text, its)]
        return _solution(code, named) if isinstance(code, str) else []
    return [s for part in value for s in _solutions(part)] if isinstance(value, list) else []


def _solution(code: str, language: Any) -> list[Solution]:
    if fenced := _FENCED.fullmatch(code):
        language, code = language or fenced[1], fenced[2]
    if not code.strip():
        return []
    if language is None or language == "":
        return [Solution("cpp" if _CPP.search(code) else "python", code)]
    named = language.lower() if isinstance(language, str) else language
    return [Solution(_LANGUAGES[named], code)] if named in _LANGUAGES else []
