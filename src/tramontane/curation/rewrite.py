r"""Finds multiple choice in a statement, and rewrites it as an open question.

What is 2 + 3?\n(A) 4\n(B) 5\n(C) 6        answer B
→ What is 2 + 3?                            answer 5
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tramontane.types import Problem
from tramontane.verifier.math.grade import judge_answer
from tramontane.verifier.math.normalize import vote

LETTERS = "ABCDEFGHIJ"
_LATEX = r"\$?\{?(?:\\(?:text(?:bf|rm|it)?|math(?:rm|bf)|bf|rm)\s*\{?\s*)+"
# A label: "(A)", "A)", "A.", "[A]", "\textbf{(A)}", "$\mathrm{(A) \ }". It begins a line or follows
# a space, so "f(A)" is not a label.
_LABEL = re.compile(
    rf"(?:(?<=[\s$~}}\[;,.?:])|(?<=quad)|^)(?P<latex>{_LATEX})?(?:"
    r"\((?P<round>[A-Ja-j])\)|\[(?P<square>[A-J])\]|(?P<bare>[A-J])(?:\s*\)|[.:](?!\d)))[.:)]?"
    r"(?(latex)(?:\s|\\[ ,;]|[~}$])*|\s*)",
    re.MULTILINE,
)
_SPACE = r"(?:\\\\|\\q?quad|\\hspace\{[^}]*\}|\\indent|\\(?=\s|$)|~|\\[,;]|[\s;,])+"
_BEFORE, _AFTER = re.compile("^" + _SPACE), re.compile(_SPACE + "$")
_FIGURE = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_LETTER_ALONE = re.compile(r"[\W_]*(?:\\(?:text(?:bf|rm)?|math(?:rm|bf))\W*)?([A-Ja-j])\W*")
_LETTER_AND_TEXT = re.compile(r"\s*\(?([A-J])\s*[).:]\s*(\S.*)", re.DOTALL)
_LETTERS = re.compile(r"\W*(?:\\text\s*\{)?\W*[A-J](?:\W+(?:and\W+)?[A-J])+\W*")
_INSTRUCTION = re.compile(
    r"\s*\(?\b(?:enter|type|write|express|choose|select|give|indicate|list|answer)\b[^.\n]*"
    r"\b(?:letters?|options?|choices?|[A-C]\$?,\s*\$?[B-D])\b.*$",
    re.IGNORECASE | re.DOTALL,
)
# A question about the options themselves, in the seven languages of the paper.
_ABOUT_OPTIONS = re.compile(
    r"\bwhich\s+(?:one\s+|ones\s+|two\s+)?of\b"
    r"|\bwhich\s+(?:is|are|equation|expression|statement|graph|pair|set|option|function|inequalit)"
    r"|\b(?:which|what|one|each|any|all|none|is|are|by|to|equals?|except)\b.{0,200}\bfollowing\b"
    r"|\bfollowing\b.{0,200}\b(?:which|is|are|can|could|must)\b"
    r"|\b(?:correct|right|best|true|false)\s+(?:answer|option|choice|statement|alternative)"
    r"|\b(?:must|is|are|be)\s+(?:always\s+|necessarily\s+)?(?:true|false|correct|incorrect)\b"
    r"|\b(?:a|one)\s+possible\b|\bexcept\s*:?$"
    r"|\b(?:can|could|might|may)\s+(?:also\s+)?be\s+(?:the\s+|an?\s+)?"
    r"(?:value|equal|number|root|zero|factor|divisor|length|expressed|written)"
    r"|\b(?:lequel|laquelle|lesquel(?:le)?s)\b|suivante?s?\b|\bsiguientes?\b|\bseguenti?\b"
    r"|\bfolgenden?\b|以下|下列|следующ",
    re.IGNORECASE | re.DOTALL,
)
# The answer is rounded to fit the options: without them, the precision is unknown.
_ROUNDED = re.compile(
    r"\bapproximat|\bclosest\b|\bnearest\s+to\b|\broughly\b|\bestimate\b|\babout\s+(?:how|what)\b"
    r"|\benviron\b|\baproximad|\bungefähr\b|\bcirca\b|大约|约为|примерно",
    re.IGNORECASE,
)
_NO_VALUE = re.compile(
    r"\b(?:none|neither|all|both)\b|\bcan(?:\s?not|'t)\b|\bnot\s+(?:enough|sufficient)\b|\bonly\b"
    r"|\binsufficient\b|\bindeterminate\b|\binadequate\b|\bdepends\b|o'clock|\bI{1,3}\b|^[A-J]\s*(?:and|&|,)|^\W*$|^N\.?\s?O\.?\s?T",
    re.IGNORECASE,
)
_REQUEST = re.compile(
    r"(?:^|[.,;:\n]\s*|\b(?:then|and|to)\s+)"
    r"(?:find|compute|calculate|evaluate|determine|simplify|solve|what|how)\b",
    re.IGNORECASE,
)
# A label of an option that stayed in the stem, or a mention of the options' letters.
_LEFTOVER = re.compile(
    r"(?:^|\n)\s*\(?[A-J][).:]\s*\S|\b(?:options?|choices?|answer)\s+\(?[A-E]\)?(?![\w'])|\?\s*\(?[A-E][).]?\s*$"
)
MAX_WORDS = 4
MAX_OPTION = 300  # characters
MAX_LABELS = 60  # the last labels of a statement are examined
BLANK = "____"


class Choices(NamedTuple):
    """The parts of a statement: the question, and the options by letter."""

    stem: str
    options: dict[str, str]


class NotOpen(Exception):
    """The problem is not a question without its options; the message gives the reason."""


def find_choices(statement: str) -> Choices | None:
    """The options at a statement's end: three or more, with consecutive letters from A."""
    # Code of figures is full of labels. Blanking it keeps every other offset.
    visible = _FIGURE.sub(lambda m: " " * len(m[0]), statement)
    labels = list(_LABEL.finditer(visible))[-MAX_LABELS:]
    for start in reversed(range(len(labels))):
        run = _consecutive(labels[start:])
        if len(run) < 3:
            continue
        ends = [*(label.start() for label in run[1:]), len(statement)]
        latex = bool(run[0]["latex"])
        texts = [
            _clean(statement[label.end() : end], latex)
            for label, end in zip(run, ends, strict=True)
        ]
        if all(texts) and max(map(len, texts)) <= MAX_OPTION:
            stem = re.sub(r"(?:\$\$|\\\[)$", "", _AFTER.sub("", statement[: run[0].start()]))
            figures = "".join(f"\n\n{f}" for f in _FIGURE.findall(statement, run[0].start()))
            named = zip((_letter(label).upper() for label in run), texts, strict=True)
            return Choices(_AFTER.sub("", stem) + figures, dict(named))
    return None


def _consecutive(labels: list[re.Match[str]]) -> list[re.Match[str]]:
    """The labels that count A, B, C … or a, b, c …, without other labels between them."""
    run: list[re.Match[str]] = []
    for label in labels:
        lower = _letter(run[0] if run else label).islower()
        letters = LETTERS.lower() if lower else LETTERS
        if _letter(label) == letters[len(run) : len(run) + 1]:
            run.append(label)
    return run


def answer_letter(answer: str) -> str | None:
    r"""The letter of an answer that is only a letter: `C`, `(C)`, `\text{(C)}`; else None."""
    match = _LETTER_ALONE.fullmatch(answer)
    return match[1].upper() if match else None


def is_choice(answer: str | None, choices: Choices) -> bool:
    """True if the answer is one of the options, which are then not conditions or parts."""
    if not answer or answer_letter(answer) or _LETTERS.fullmatch(answer):
        return True
    if _LETTER_AND_TEXT.fullmatch(answer):
        return True
    return _bare(answer) in map(_bare, choices.options.values())


# A decimal that is probably rounded: two or more places, the last not 0 or 5; or thirds.
_ROUNDED_VALUE = re.compile(r"(?:\d|(?<![\w.]))\.(?:\d+[12346789](?!\d|[a-z]\b)|[37](?=\s*\\?%))")
_ANY_DECIMAL = re.compile(r"(?:\d|(?<![\w.]))\.\d")
_PRECISION = re.compile(
    r"\b(?:round|decimal\s+places?|significant|nearest\s+(?!to\b)|correct\s+to)\b|\bto\s+the\s+nearest\b",
    re.IGNORECASE,
)
_IRRATIONAL = re.compile(
    r"\\sqrt|√|\\pi|π|\b(?:square\s+root|hypotenuse|diagonal|circle|circumference|radius|sphere"
    r"|cylind|cone|compound)",
    re.IGNORECASE,
)
# `5C3*4C3`, `C(5, 3)`: `\binom` is the only notation of combinations that the verifier evaluates.
_COMBINATIONS = re.compile(
    r"(?<![A-Za-z\d])\d{1,3}\}?\s*_?[CP]\s*_?\{?\d|(?<![\w\\])[CP]\s*\(\s*\d+\s*,"
)
_PLAIN_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?")


def refuse_narrow(value: str, question: str) -> None:
    """Reject an option that, as the reference of an open question, would reject honest answers.

    Raises:
        NotOpen: the option is rounded, says more than a value, or is written in a notation that the
            verifier cannot evaluate.
    """
    if match := _COMBINATIONS.search(value):
        raise NotOpen(f"the verifier cannot evaluate it: {match[0]!r}")
    digits = re.sub(r"\D", "", value).strip("0")
    # A stated precision, digits that only moved (4,120 to 0.00412), a binary number.
    exact = _PRECISION.search(question) or (len(digits) > 1 and digits in question.replace(",", ""))
    exact = exact or bool(re.fullmatch(r"[01]*\.[01]+", value))
    if not exact and (match := _ROUNDED_VALUE.search(value)):
        raise NotOpen(f"the answer is rounded: {match[0]!r}")
    if not exact and _IRRATIONAL.search(question) and (match := _ANY_DECIMAL.search(value)):
        raise NotOpen(f"the answer is rounded: {value[:80]!r}")
    words = re.findall(r"[^\W\d_]{2,}", re.sub(r"\\[a-zA-Z]+", "", value))
    numbers = _PLAIN_NUMBER.findall(value)
    is_plain = not re.search(r"[/^*+=<>\\_!(]|illion|thousand", value)
    listed = re.fullmatch(r"[\d\s,.$%:-]*(?:(?:and|or)[\d\s,.$%-]*)+", value)
    if words and len(numbers) > 1 and is_plain and ":" not in value and not listed:
        raise NotOpen(f"the answer is several quantities: {value[:80]!r}")
    refuses = is_plain and len(numbers) == 1 and judge_answer(numbers[0], value).outcome != "right"
    if words and refuses:
        raise NotOpen(f"the answer says more than its number: {value[:80]!r}")


def rewrite(problem: Problem, choices: Choices) -> tuple[str, str]:
    """(statement, answer) of the open question.

    Raises:
        NotOpen: it asks about the options, or its answer is meaningless without them.
    """
    value = _value(problem.answer or "", choices.options)
    stem = _INSTRUCTION.sub("", choices.stem) or choices.stem
    sentences = _sentences(_FIGURE.sub("", stem))
    asked = " ".join([*[s for s in sentences[:-1] if "?" in s][-1:], *sentences[-1:]])
    if match := _LEFTOVER.search(stem):
        raise NotOpen(f"an option is left in its text: {match[0].strip()[:80]!r}")
    if stem.count("(") > stem.count(")"):
        raise NotOpen(f"its question breaks off: {stem[-80:]!r}")
    if match := _ABOUT_OPTIONS.search(asked):
        raise NotOpen(f"it asks about its options: {match[0][-80:]!r}")
    if match := _ROUNDED.search(asked):
        raise NotOpen(f"its options say how to round: {match[0]!r}")
    if _NO_VALUE.search(value):
        raise NotOpen(f"the answer is not a value: {value[:80]!r}")
    words = re.findall(r"[^\W\d_]{3,}", re.sub(r"\\[a-zA-Z]+", "", value))
    if len(words) > MAX_WORDS:
        raise NotOpen(f"the answer is a phrase: {value[:80]!r}")
    refuse_narrow(value, stem)
    if "?" in asked or _REQUEST.search(asked) or re.search(r"_{2,}\W*$", asked):
        return stem, value
    # The stem breaks off, and the options complete it.
    if (words and not re.search(r"\d", value)) or re.search(r"[=<>]|\\[lg]eq?(?![a-z])", value):
        raise NotOpen(f"many things could be said there, not only {value[:80]!r}")
    figure = re.search(r"\s*\[asy\](?:(?!\[asy\]).)*\[/asy\]\s*$", stem, re.DOTALL)
    text, rest = (stem[: figure.start()], figure[0]) if figure else (stem, "")
    if not re.search(r"[.!。]\W{0,3}$", text):
        text = re.sub(r"[ :=,-]+$", "", text) + f" {BLANK}. What belongs in the blank?"
    return text + rest, value


def _value(answer: str, options: dict[str, str]) -> str:
    letter = answer_letter(answer)
    if letter is None and (match := _LETTER_AND_TEXT.fullmatch(answer)):
        letter = match[1]
    if letter in options:
        return options[letter]
    if not answer.strip() or letter or _LETTERS.fullmatch(answer):
        raise NotOpen(f"the answer is not one of its options: {answer[:80]!r}")
    return answer  # the value itself


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.?!。？])\s+(?=\S)|\n\s*\n", text.strip())


def _letter(label: re.Match[str]) -> str:
    return label["round"] or label["square"] or label["bare"]


def _bare(text: str) -> str:
    return re.sub(r"\\(?:text|mathrm)|[\s${}\\,]", "", vote(text) or "")


def _clean(text: str, latex: bool) -> str:
    """An option's text without surrounding layout and outer formula delimiters."""
    text = re.split(r"\n\s*\n", _FIGURE.sub("", text).strip())[0]
    text = re.sub(r"(?:\$\$|\\\])$", "", _AFTER.sub("", _INSTRUCTION.sub("", text)))
    text = _AFTER.sub("", _BEFORE.sub("", text))
    if latex and text.count("$") % 2:
        text = _AFTER.sub("", text.removesuffix("$"))
    if latex and text.count("}") > text.count("{"):
        text = text.removesuffix("}")
    whole = re.fullmatch(r"\$([^$]+)\$", text)
    return (whole[1] if whole else text).strip()
