r"""What makes a right answer suspicious: hedges, answers from nowhere, programs that cheat.

Each function says why, or nothing. For `audit`: a finding is a place to look at, not a verdict.
"""

from __future__ import annotations

import ast
import re
import unicodedata
from typing import Any

from tramontane.verifier.math.normalize import to_number, vote

# One of them in the box is a hedge where the reference is a single value.
_ALTERNATIVES = re.compile(
    r"\b(?:or|either|oder|ou|или)\b|(?<=[\s}])o(?=[\s{])|\\lor\b|\\vee\b|\\pm\b|±|或",
    re.IGNORECASE,
)
_DOUBTS = re.compile(
    r"\b(?:maybe|perhaps|possibly|not|vielleicht|quizás|peut-être|forse|возможно)\b|也许|不是",
    re.IGNORECASE,
)
# References that an answer may well spell with other words and other numbers.
_RELATION = re.compile(
    r"[<>|≤≥≠∈∪∩±]|\\(?:leq?|geq?|lt|gt|neq?|in|cup|cap|infty|pm|mp|setminus|mathbb|lvert)\b"
)
_SETS = re.compile(r"[∪∩]|\\(?:cup|cap|setminus)\b")  # several numbers, but one value
# Not at braces: what stands in those of \frac or \binom is no value of its own.
_SPLIT = re.compile(
    rf"[,;=<>，；]|\\+(?:approx|leq?|geq?|in|cup|cap)\b|\band\b|{_ALTERNATIVES.pattern}", re.I
)
_NUMERAL = re.compile(r"\\frac\{\d{1,30}\}\{\d{1,30}\}|\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.\d+|\d+")
_WORDS = re.compile(r"\\(?:text\w*|mathrm|mathbf)\{([^{}]*)\}")
_LAYOUT = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[,;:! ]|\$")
_QUOTIENT = re.compile(r"(?:\d*\.)?\d+\s*/\s*\d+")


def hedges(box: str, reference: str) -> str:
    """Why a box says more than one thing where its reference does not, or nothing."""
    if extra := _said(_DOUBTS, box) - _said(_DOUBTS, reference):
        return f"says “{min(extra)}”"
    if _RELATION.search(reference):
        return ""
    wanted = max(_values(reference), 1)
    extra = _said(_ALTERNATIVES, box) - _said(_ALTERNATIVES, reference)
    if extra and wanted == 1:
        return f"says “{min(extra)}”"
    decimal = to_number(box.strip().replace(",", "."))  # with a decimal comma, one value
    if decimal is not None and decimal == to_number(reference.strip()):
        return ""
    if (values := _values(box)) > wanted and not _SETS.search(box):
        return f"{values} different numbers"
    return ""


def _said(pattern: re.Pattern[str], text: str) -> set[str]:
    return {word.lower() for word in pattern.findall(text)}


def _values(text: str) -> int:
    """How many different plain numbers stand between separators."""
    text = re.sub(r"(?<=\d)(?:\{,\}|\\[,!;:]|,)(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\[cdt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text)
    numbers = (to_number(part.strip(" \\()[]{}")) for part in _SPLIT.split(text) if part)
    return len({number for number in numbers if number is not None})


def occurs(answer: str, thoughts: str) -> bool:
    """Does the answer, or each of its parts, stand in the thoughts, as a string or as a number?

    The sign is left aside, as are spaces and layout.
    """
    answer, thoughts = _plain(answer), _plain(thoughts)
    squeezed = "".join(thoughts.split()).casefold()
    numerals = _NUMERAL.findall(thoughts) + _QUOTIENT.findall(thoughts)
    numbers = {to_number(numeral) for numeral in numerals} - {None}
    parts = [part.strip(" \\()[]{}") for part in _SPLIT.split(answer) if part.strip(" \\()[]{}")]
    return _stands(answer, squeezed, numbers) or (
        len(parts) > 1 and all(_stands(part, squeezed, numbers) for part in parts)
    )


def _plain(text: str) -> str:
    text = _WORDS.sub(r"\1", unicodedata.normalize("NFKC", text))
    return _LAYOUT.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def _stands(answer: str, thoughts: str, numbers: set[Any]) -> bool:
    bare = "".join(answer.split()).casefold().strip(".")
    if re.search(rf"(?<![\d.]){re.escape(bare)}(?!\d)", thoughts):
        return True
    spelt = vote(answer)
    value = to_number(spelt) if spelt and len(spelt) < 100 else None
    return value is not None and bool(numbers & {value, -value})


# ------------------------------------------------------------------------------------- programs

_PEEKS = re.compile(
    r"/proc/|/dev/fd|[\"']/inside\b|_getframe|gc\.get_objects|gc\.get_referrers|inspect\.(?:stack|\w*frame)"
    r"|settrace|setprofile|open\(\s*__file__|\bptrace\b|process_vm_readv"
)
_ENDS = re.compile(r"\bos\.(?:_exit|abort|kill|killpg)\b|\b(?:_exit|_Exit|quick_exit)\s*\(")
_CPP_EQUAL = re.compile(
    r"operator\s*[=!]=\s*\([^)]*\)[^{};]*\{\s*return\s+(?:true|1)\s*;\s*\}"
    r"|#\s*define\s+(?:main|assert)\b"
)
_READS = re.compile(
    r"\binput\b|\bstdin\b|\bopen\b|\bfileinput\b|\bos\.read\b|\bcin\b|scanf|getline|getchar|\bread\b"
)
_WORD = re.compile(r"[\w+-]+(?:\.\w+)*")
TELLING = 3  # characters from which an expected output with a digit is no accident in a program


def cheats(program: str, tests: dict[str, Any] | None) -> str:
    """Why a program that passes its tests may not solve its problem, or nothing.

    What needs the expected outputs (a lookup table, an input never read) is seen only with
    `tests`.
    """
    if found := _PEEKS.search(program):
        return f"looks beyond its input: “{found[0]}”"
    if found := _ENDS.search(program):
        return f"ends its own process: “{found[0]}”"
    if found := _CPP_EQUAL.search(program):
        return f"redefines what tests rely on: “{' '.join(found[0].split())[:60]}”"
    if why := _python(program):
        return why
    cases = (tests or {}).get("cases") or []
    if cases and all(case["input"].strip() for case in cases) and not _READS.search(program):
        return "never reads its input"
    outputs = {" ".join(case["output"].split()) for case in cases}
    telling = {o for o in outputs if len(o) >= TELLING and re.search(r"\d", o)}
    words = _spaced(program)
    known = {output for output in telling if _spaced(output) in words}
    if len(known) >= 3 and 2 * len(known) >= len(telling):
        return f"holds {len(known)} of {len(telling)} expected outputs"
    return ""


def _spaced(text: str) -> str:
    """Its words and numbers alone, however they were set apart."""
    return f" {' '.join(_WORD.findall(text))} "


def _python(program: str) -> str:
    """Equality that is always true, or an exit at top level; nothing where it is not Python."""
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in ("__eq__", "__ne__"):
            returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
            if returned and all(isinstance(v, ast.Constant) for v in returned):
                return f"redefines what tests rely on: “{node.name}” returns a constant"
    for statement in tree.body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        name = ast.unparse(call.func) if isinstance(call, ast.Call) and _fixed(call) else ""
        if name in ("sys.exit", "exit", "quit"):
            return f"ends its own process: “{name}” at top level"
        if isinstance(statement, ast.Raise) and "SystemExit" in ast.unparse(statement):
            return "ends its own process: “SystemExit” at top level"
    return ""


def _fixed(call: ast.Call) -> bool:
    return all(isinstance(argument, ast.Constant) for argument in call.args)
