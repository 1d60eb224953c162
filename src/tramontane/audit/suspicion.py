r"""Signs that a right answer is undeserved: hedges, unexplained answers, programs that cheat."""

from __future__ import annotations

import ast
import re
import unicodedata
from typing import Any

from tramontane.verifier.math.normalize import vote
from tramontane.verifier.math.numbers import to_number

# Words for alternatives: a hedge if the reference is a single value.
_ALTERNATIVES = re.compile(
    r"\b(?:or|either|oder|ou|или)\b|(?<=[\s}])o(?=[\s{])|\\lor\b|\\vee\b|\\pm\b|±|或",
    re.IGNORECASE,
)
_DOUBTS = re.compile(
    r"\b(?:maybe|perhaps|possibly|not|vielleicht|quizás|peut-être|forse|возможно)\b|也许|不是",
    re.IGNORECASE,
)
# Relations and sets, which an answer can write with different words and numbers.
_RELATION = re.compile(
    r"[<>|≤≥≠∈∪∩±]|\\(?:leq?|geq?|lt|gt|neq?|in|cup|cap|infty|pm|mp|setminus|mathbb|lvert)\b"
)
_SETS = re.compile(r"[∪∩]|\\(?:cup|cap|setminus)\b")  # several numbers, but one value
# Braces do not separate: the parts of \frac or \binom are not values by themselves.
_SPLIT = re.compile(
    rf"[,;=<>，；]|\\+(?:approx|leq?|geq?|in|cup|cap)\b|\band\b|{_ALTERNATIVES.pattern}", re.I
)
_NUMERAL = re.compile(r"\\frac\{\d{1,30}\}\{\d{1,30}\}|\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.\d+|\d+")
_WORDS = re.compile(r"\\(?:text\w*|mathrm|mathbf)\{([^{}]*)\}")
_LAYOUT = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[,;:! ]|\$")
_QUOTIENT = re.compile(r"(?:\d*\.)?\d+\s*/\s*\d+")


def describe_hedge(box: str, reference: str) -> str:
    """The sign that a box gives more answers than its reference, or "".

    A doubt (“maybe”) is always a hedge. An alternative (“or”) is one if the reference has a single
    value; several numbers are one if the reference has fewer.
    """
    if extra := _matches(_DOUBTS, box) - _matches(_DOUBTS, reference):
        return f"says “{min(extra)}”"
    if _RELATION.search(reference):
        return ""
    wanted = max(_count_values(reference), 1)
    extra = _matches(_ALTERNATIVES, box) - _matches(_ALTERNATIVES, reference)
    if extra and wanted == 1:
        return f"says “{min(extra)}”"
    decimal = to_number(box.strip().replace(",", "."))  # with a decimal comma, one value
    if decimal is not None and decimal == to_number(reference.strip()):
        return ""
    if (values := _count_values(box)) > wanted and not _SETS.search(box):
        return f"{values} different numbers"
    return ""


def _matches(pattern: re.Pattern[str], text: str) -> set[str]:
    return {word.lower() for word in pattern.findall(text)}


def _count_values(text: str) -> int:
    """Number of different plain numbers between separators."""
    text = re.sub(r"(?<=\d)(?:\{,\}|\\[,!;:]|,)(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\[cdt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text)
    numbers = (to_number(part.strip(" \\()[]{}")) for part in _SPLIT.split(text) if part)
    return len({number for number in numbers if number is not None})


def occurs_in(answer: str, thoughts: str) -> bool:
    """True if the thoughts contain the answer, or each of its parts, as a string or as a number.

    Sign, spaces and layout are ignored.
    """
    answer, thoughts = _plain(answer), _plain(thoughts)
    squeezed = "".join(thoughts.split()).casefold()
    numerals = _NUMERAL.findall(thoughts) + _QUOTIENT.findall(thoughts)
    numbers = {to_number(numeral) for numeral in numerals} - {None}
    parts = [part.strip(" \\()[]{}") for part in _SPLIT.split(answer) if part.strip(" \\()[]{}")]
    return _contains(squeezed, numbers, answer) or (
        len(parts) > 1 and all(_contains(squeezed, numbers, part) for part in parts)
    )


def _plain(text: str) -> str:
    text = _WORDS.sub(r"\1", unicodedata.normalize("NFKC", text))
    return _LAYOUT.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def _contains(thoughts: str, numbers: set[Any], answer: str) -> bool:
    """True if the answer is in the thoughts (without spaces), or its value among their numbers."""
    bare = "".join(answer.split()).casefold().strip(".")
    if re.search(rf"(?<![\d.]){re.escape(bare)}(?!\d)", thoughts):
        return True
    spelt = vote(answer)
    value = to_number(spelt) if spelt and len(spelt) < 100 else None
    return value is not None and bool(numbers & {value, -value})


# ------------------------------------------------------------------------------------- programs

_LOOKS_AROUND = re.compile(
    r"/proc/|/dev/fd|[\"']/inside\b|_getframe|gc\.get_objects|gc\.get_referrers|inspect\.(?:stack|\w*frame)"
    r"|settrace|setprofile|open\(\s*__file__|\bptrace\b|process_vm_readv"
)
_EXITS = re.compile(r"\bos\.(?:_exit|abort|kill|killpg)\b|\b(?:_exit|_Exit|quick_exit)\s*\(")
_READS = re.compile(
    r"\binput\b|\bstdin\b|\bopen\b|\bfileinput\b|\bos\.read\b|\bcin\b|scanf|getline|getchar|\bread\b"
)
_WORD = re.compile(r"[\w+-]+(?:\.\w+)*")
MIN_LENGTH = 3  # characters; shorter outputs may occur in a program by chance


def describe_cheat(program: str, tests: dict[str, Any] | None) -> str:
    """Why a passing program may not solve its problem; "" if no reason is found.

    A table of expected outputs, and an input that is never read, are found only with `tests`.
    """
    if found := _LOOKS_AROUND.search(program):
        return f"looks beyond its input: “{found[0]}”"
    if found := _EXITS.search(program):
        return f"ends its own process: “{found[0]}”"
    if reason := _describe_python_cheat(program):
        return reason
    cases = (tests or {}).get("cases") or []
    if cases and all(case["input"].strip() for case in cases) and not _READS.search(program):
        return "never reads its input"
    outputs = {" ".join(case["output"].split()) for case in cases}
    rare = {o for o in outputs if len(o) >= MIN_LENGTH and re.search(r"\d", o)}
    words = _words(program)
    known = {output for output in rare if _words(output) in words}
    if len(known) >= 3 and 2 * len(known) >= len(rare):
        return f"holds {len(known)} of {len(rare)} expected outputs"
    return ""


def _words(text: str) -> str:
    """The text's words and numbers, separated by spaces."""
    return f" {' '.join(_WORD.findall(text))} "


def _describe_python_cheat(program: str) -> str:
    """A constant equality or an exit at top level; "" if none is found, or not Python."""
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
        if isinstance(call, ast.Call) and all(isinstance(x, ast.Constant) for x in call.args):
            if (name := ast.unparse(call.func)) in ("sys.exit", "exit", "quit"):
                return f"ends its own process: “{name}” at top level"
        elif isinstance(statement, ast.Raise) and "SystemExit" in ast.unparse(statement):
            return "ends its own process: “SystemExit” at top level"
    return ""
