"""Parses the tests and solutions of programming problems in the forms of public sets.

Tests may have Tramontane's form (docs/data.md), or one of these: an object with the lists `inputs`
and `outputs` (APPS, TACO; with `fn_name`, calls of a function) or `input` and `output`
(CodeContests), or a list of objects with an `input` and an `output` each (LiveCodeBench,
PrimeIntellect, DeepCoder). Solutions may be texts, objects with `language` and `code`, or an object
with the lists `language` and `solution` (CodeContests). Both may be JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from tramontane.errors import InputError
from tramontane.journals import unique_keys
from tramontane.types import Problem
from tramontane.verifier.code.comparing import fault_of
from tramontane.verifier.code.grade import language_of

ProgrammingLanguage = Literal["python", "cpp"]


class Solution(NamedTuple):
    """A program that the problem's source declares to be right."""

    language: ProgrammingLanguage
    code: str


# --------------------------------------------------------------------------------------- tests

# LeetCode's programs have the function in a class `Solution`. JSON has no tuples and no numeric
# keys, so results are compared after conversion to JSON's types.
_CALLS = """\
from math import inf, nan
try:
    _function = Solution().{name}
except NameError:
    _function = {name}
def _key(k):
    if k is None or k is True or k is False:
        return {{None: "null", True: "true", False: "false"}}[k]
    return repr(k) if type(k) in (int, float) else k
def _plain(x):
    if isinstance(x, (list, tuple)):
        return [_plain(v) for v in x]
    if isinstance(x, dict):
        return dict((_key(k), _plain(v)) for k, v in x.items())
    return x
"""


def parse_tests(value: Any, where: str) -> dict[str, Any] | None:
    """Tests in the code verifier's form; the value may also be JSON text.

    Raises:
        InputError: wrong type or shape; the message begins with `where`.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:  # numbers too long, or nesting too deep
            raise InputError(f"{where}: the tests are text, but not JSON ({error})") from None
    if not value:
        return None
    value = _known_form(value, where)
    if not value:
        return None
    if fault := fault_of(value):
        raise InputError(f"{where}: the tests {fault}; see docs/data.md")
    # A table has nulls for fields of other rows.
    return {name: part for name, part in value.items() if part is not None}


def _known_form(value: Any, where: str) -> Any:
    """Tests of a public set in Tramontane's form; values of unknown form unchanged."""
    if isinstance(value, dict) and "type" not in value and value.get("rules"):
        known = _known_form(value.get("cases"), where)
        rest = {key: value[key] for key in ("rules", "shown") if key in value}
        return known | rest if isinstance(known, dict) else known
    if isinstance(value, dict) and "type" not in value:
        for names in (("inputs", "outputs"), ("input", "output")):
            columns = [x for name in names if isinstance(x := value.get(name), list)]
            if len(columns) == 2:
                if len(columns[0]) != len(columns[1]):
                    counts = f"{len(columns[0])} inputs and {len(columns[1])} outputs"
                    raise InputError(f"{where}: the tests have {counts}")
                pairs = list(zip(*columns, strict=True))
                return _from_pairs(pairs, value.get("fn_name"), is_exact=False)
    if isinstance(value, list) and all(isinstance(x, dict) and "input" in x for x in value):
        functions = {x.get("fn_name") or _function_of(x.get("metadata")) for x in value}
        if len(functions) == 1:
            pairs = [(x["input"], x.get("output")) for x in value]
            # PrimeIntellect has APPS's lists of arguments, LiveCodeBench text.
            is_exact = all(isinstance(text, str) for text, _ in pairs)
            return _from_pairs(pairs, *functions, is_exact=is_exact)
    return value


def _function_of(metadata: Any) -> Any:
    return metadata.get("func_name") if isinstance(metadata, dict) else None


def _from_pairs(
    pairs: list[tuple[Any, Any]], function: Any, *, is_exact: bool
) -> dict[str, Any] | None:
    if not pairs:
        return None
    if function:
        return _calls(pairs, function, is_exact=is_exact)
    cases = [{"input": _joined(text), "output": _joined(output)} for text, output in pairs]
    return {"type": "stdio", "cases": cases}


def _joined(text: Any) -> Any:
    """Text, which some rows hold as a list of lines."""
    is_lines = isinstance(text, list) and all(isinstance(line, str) for line in text)
    return "\n".join(text) + "\n" if is_lines else text


def _calls(pairs: list[tuple[Any, Any]], name: Any, *, is_exact: bool) -> dict[str, Any]:
    """Function tests with one assertion per call; `is_exact`: results are exact JSON text."""
    if not isinstance(name, str) or not name.isidentifier():
        return {"type": f"calls of {name!r}"}
    asserts = []
    for given, expected in pairs:
        arguments = ", ".join(repr(_with_integer_keys(x)) for x in _arguments(given))
        accepted = _accepted(expected, is_exact=is_exact)
        asserts.append(f"assert _plain(_function({arguments})) in {accepted!r}\n")
    code = _CALLS.format(name=name) + "".join(asserts)
    return {"type": "python_assert", "code": code, "entry_point": name}


def _arguments(given: Any) -> list[Any]:
    """The arguments of a call: a list, or text with one JSON value per line, or one text."""
    if not isinstance(given, str):
        return given if isinstance(given, list) else [given]
    try:
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        return [given]


def _with_integer_keys(value: Any) -> Any:
    """An argument with integer keys restored, which JSON had turned into texts, as in APPS's
    judge."""
    if isinstance(value, list):
        return [_with_integer_keys(x) for x in value]
    if not isinstance(value, dict):
        return value
    are_integers = all(re.fullmatch(r"-?(?:0|[1-9][0-9]*)", key) for key in value)
    return {int(k) if are_integers else k: _with_integer_keys(v) for k, v in value.items()}


def _accepted(expected: Any, *, is_exact: bool) -> list[Any]:
    """The results that pass. APPS and TACO may wrap a result in a list, and write a text without
    JSON's quotes."""
    value = expected
    if isinstance(expected, str):
        try:
            value = json.loads(expected)
        except (ValueError, RecursionError):
            return [expected]
    if is_exact:
        return [value]
    accepted = [value] if value == expected else [expected, value]
    return [*accepted, value[0]] if isinstance(value, list) and len(value) == 1 else accepted


# ----------------------------------------------------------------------------------- solutions

_CODES: dict[Any, ProgrammingLanguage] = {3: "python", 2: "cpp"}  # CodeContests' numbers
_FENCED = re.compile(r"\s*```[ \t]*([\w+#]*)[^\n]*\n(.*?)\n?```\s*", re.DOTALL)
_CPP = re.compile(r"^\s*#\s*include\b|^\s*using namespace \w+;", re.MULTILINE)


def parse_solutions(
    problem: Problem, names: Sequence[str] = ("solutions", "solution", "solution_cpp")
) -> list[Solution]:
    """The distinct solutions in a problem's metadata, in order.

    They come from the first of these names that has any, or else from the others. Languages other
    than Python and C++ are skipped. Without a named language, the program's text decides.
    """
    first, *others = (_solutions(problem.metadata.get(name)) for name in names)
    return list(dict.fromkeys(first or [s for found in others for s in found]))


def _solutions(value: Any, language: Any = None) -> list[Solution]:
    if isinstance(value, str):
        text = value.lstrip()
        if text[:1] in ("[", "{"):  # programs rarely start like this
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
            return [s for text, tag in pairs if isinstance(text, str) for s in _solution(text, tag)]
        return _solution(code, named) if isinstance(code, str) else []
    return [s for part in value for s in _solutions(part)] if isinstance(value, list) else []


def _solution(code: str, language: Any) -> list[Solution]:
    if fenced := _FENCED.fullmatch(code):
        language, code = language or fenced[1], fenced[2]
    if not code.strip():
        return []
    if language is None or language == "":
        return [Solution("cpp" if _CPP.search(code) else "python", code)]
    named = language_of(language) if isinstance(language, str) else _CODES.get(language)
    return [] if named is None or named == "c" else [Solution(named, code)]
