r"""Stage `filter`: keeps math problems with one checkable answer (arXiv 2506.10910, 4.1).

`classify` applies rules to one problem, without a model, in well under a millisecond. Rules based
on words cover English and the most common words of the paper's other six languages. A statement
that a rule cannot interpret passes it.

| reason | what |
|---|---|
| `proof` | asks for a proof, and for nothing else that has an answer |
| `multi_part` | several questions |
| `incomplete` | mentions a missing figure, table or list of choices; breaks off; asks nothing |
| `multiple_choice` | makes no sense without its options (else it is rewritten as `open_question`) |
| `unverifiable` | no answer, or an answer that the verifier cannot judge against |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tramontane.curation.config import FilterConfig
from tramontane.curation.judge import ReferenceJudge
from tramontane.curation.rewrite import (
    Choices,
    NotOpen,
    answer_letter,
    find_choices,
    is_choice,
    rewrite,
)
from tramontane.curation.rows import Row, Stage
from tramontane.types import Problem


class Finding(NamedTuple):
    """The reason for dropping a problem, and the evidence in its text."""

    reason: str
    detail: str


class FormatFilter(Stage):
    """Drops or rewrites math problems; programming problems pass."""

    name = "filter"

    def __init__(self, config: FilterConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self.judge = ReferenceJudge(config.verifier)

    def decide(self, rows: Sequence[Row]) -> list[Row]:
        decided = [self._by_rules(row) if self._is_math(row) else row for row in rows]
        left = [row.decision != "dropped" and self._is_math(row) for row in decided]
        asked = [i for i, is_left in enumerate(left) if is_left]
        faults = self.judge.faults([decided[i].task.answer or "" for i in asked])
        for i, fault in zip(asked, faults, strict=True):
            if fault and decided[i].stage == self.name:  # this stage rewrote the row
                detail = f"its answer cannot be judged without its letter: {fault}"
                decided[i] = rows[i].drop(self.name, "multiple_choice", detail)
            elif fault:
                decided[i] = decided[i].drop(self.name, "unverifiable", fault)
        return decided

    def close(self) -> None:
        self.judge.close()

    def _is_math(self, row: Row) -> bool:
        return self.config.verifier.verifier_of(row.task.domain) == "math"

    def _by_rules(self, row: Row) -> Row:
        problem = row.task
        if finding := classify(problem):
            return row.drop(self.name, *finding)
        choices = _choices(problem)
        if choices is None:
            return row
        try:
            statement, answer = rewrite(problem, choices)
        except NotOpen as error:
            return row.drop(self.name, "multiple_choice", str(error))
        if not self.config.rewrite:
            return row.drop(self.name, "multiple_choice", "filter.rewrite is off")
        detail = f"answer {problem.answer!r} → {answer!r}"
        new = replace(problem, problem=statement, answer=answer)
        return row.rewrite(self.name, "open_question", detail, new)


def classify(problem: Problem) -> Finding | None:
    """The first rule that a problem breaks, or None; `rewrite` treats multiple choice."""
    text = _FIGURE_CODE.sub("…", problem.problem)
    answer = problem.answer or ""
    if finding := _proof(text, answer) or _multi_part(text, answer) or _missing(problem.problem):
        return finding
    choices = _choices(problem)
    if choices is not None:
        return None
    return (
        _missing_choices(text, answer)
        or _breaks_off(text)
        or _asks_nothing(text)
        or _unverifiable(answer)
    )


def _choices(problem: Problem) -> Choices | None:
    choices = find_choices(problem.problem)
    return choices if choices and is_choice(problem.answer, choices) else None


# ----------------------------------------------------------------------------------- requests

_FIGURE_CODE = re.compile(r"\[asy\].*?\[/asy\]|\\begin\{tikzpicture\}.*?\\end\{tikzpicture\}", re.S)
_START = r"(?:^\s*|[….!?:;,)\]$}\n。，：]\s*|\b(?:and|then|please|to|also|or)\s+|[\d.)]\s+)"
_VERBS = (
    "find|enter|remove|sum(?!\\s+of)|compute|calculate|evaluate|determine|solve|simplify|express|give|list|state|write|factor"
    "|factorise|factorize|expand|convert|round|estimate|name|add|subtract|multiply|divide|rationalize"
    "|count|describe|identify|locate|report|obtain|work\\s+out|combine|reduce|complete|fill|guess"
    "|graph|sketch|draw|plot|choose|select|order|arrange|rewrite|perform|use|suppose\\s+find|deduce"
    "|trouve[rz]?|calcule[rz]?|détermine[rz]?|résou[ds]\\w*|simplifie[rz]?"
    "|halla|hallar|encuentra|encontrar|encuentre|calcula|calcular|determina|determinar|resuelve|trova"
    "|calcola|calcolare|determinare|trovare|risolvi|semplifica|finde|berechne|bestimme|löse|ermittle"
    "|vereinfache|найдите|найти|вычислите|решите|определите|упростите|сколько"
)
_REQUEST = re.compile(
    rf"[?？]|{_START}(?:{_VERBS})\b|\bwhat\b|\bhow\s+(?:many|much|long|far|old|often|tall|fast|big)\b"
    r"|求|计算|多少|几|_{2,}|=\s*\$?\s*$",
    re.IGNORECASE,
)
# "Express your answer as a common fraction" asks nothing by itself.
_ABOUT_ANSWER = re.compile(
    r"\(?\b(?:express|enter|give|write|round|state|leave|list|type|report)\s+"
    r"(?:(?:your|the|all|each|any|exact|final|numerical)\s+)*answers?\b[^.?]*(?:\.|$)\)?",
    re.IGNORECASE,
)
_PROOF = re.compile(
    rf"{_START}(?:then\s+)?(?:(?:dis)?prove|show|verify|demonstrate|establish|justify|deduce)\s+"
    r"(?!(?:me|us|your\s+(?:work|steps|reasoning|answer|solution)|all)\b)"
    r"(?:\w+\s+){0,3}?(?:that|why|how|whether|if|the|\$|[A-Z$\\])"
    r"|(?:\b(?:give|write|provide|present|find)\s+(?:\w+\s+){1,3})?"
    r"\b(?:prove|proof)\b(?!\s+(?:reader|of\s+purchase))"
    r"|\b(?:dé)?montre[rz]?\s+que|\bprouve[rz]?\b|\bjustifie[rz]?\b|\bdemuestr[ae]n?\b|\bdemostrar\b"
    r"|\bprueb[ae]\s+que\b|\bdimostra(?:re|te)?\b|\b(?:beweise|zeige)n?\b|证明|求证"
    r"|\bдока(?:жите|зать)\b",
    re.IGNORECASE | re.MULTILINE,
)
_TO_PROVE = re.compile(rf"(?:{_PROOF.pattern})[^.?!]*", re.IGNORECASE | re.MULTILINE)
# Statements, not requests: "it can be shown that", "the movie shows that".
_REPORTED = re.compile(
    r"\b(?:can|may|could|was|were|been|is|be|he|she|they|it|who|which|managed|wants?|tried|trying)"
    r"\s+(?:\w+\s+)?(?:to\s+)?(?:dis)?(?:prove[ndr]?s?|show[ns]?|shows)\b",
    re.IGNORECASE,
)


def _requests(text: str) -> int:
    return len(_REQUEST.findall(_ABOUT_ANSWER.sub(" ", text)))


def _proof(text: str, answer: str) -> Finding | None:
    plain = _REPORTED.sub(" ", text)
    match = _PROOF.search(plain)
    if match is None:
        return None
    # "Find all x, and prove that there are no others" has an answer, if the row has one.
    if answer.strip() and _requests(_TO_PROVE.sub(" ", plain)):
        return None
    return Finding("proof", match[0].strip()[:80])


# --------------------------------------------------------------------------------- multi-part

_LABELS = {
    "(a) (b)": r"\(([a-h])\)",
    "a) b)": r"([a-h])\)",
    "(i) (ii)": r"\(([ivx]+)\)",
    "i. ii.": r"([ivx]+)[.)]",
    "1) 2)": r"\(?(\d)\)",
    "1. 2.": r"(\d)\.(?!\d)",
    "Part A, Part B": r"\W{0,2}(?:part|question|problem|teil|parte|partie)\s+([a-h]|[ivx]+|\d)\b",
}
_ROMAN = ("i", "ii", "iii", "iv", "v", "vi")
_ALSO = re.compile(
    r"(?:[.?!]|[.?!]\$|\\\])\s*"
    r"(?:also|additionally|in addition|furthermore|moreover|secondly|and)\b\s*[,:]?\s+(?=\S)",
    re.IGNORECASE,
)


_DIRECT = re.compile(
    rf"\W*(?:[^.?!]*,\s*(?:then\s+)?)?(?:{_VERBS}|what|how\s+(?:many|much))\b",
    re.IGNORECASE | re.DOTALL,
)


# One request for several things: "Compute: 1) $2+2$ 2) $3+4$".
_ENUMERATED = re.compile(
    rf"{_START}(?:{_VERBS})(?:\s+(?:each\s+of\s+)?the\s+(?:following|values?\s+of))?\s*:"
    r"\s*\(?1\)\s*\S.*?[\s;,.$]\(?2\)\s*\S",
    re.IGNORECASE | re.DOTALL,
)


def _multi_part(text: str, answer: str) -> Finding | None:
    if match := _ENUMERATED.search(text):
        return Finding("multi_part", f"parts 1) 2): {match[0][:60]!r}")
    if finding := _labeled_parts(text) or _second_question(text):
        return finding
    answers = [part for part in answer.split(";") if part.strip()]
    asked = [s for s in _sentences(text) if s.rstrip(" )$").endswith(("?", "？"))]
    if len(answers) > 1 and len(asked) == len(answers):
        return Finding("multi_part", f"{len(answers)} questions and as many answers")
    return None


def _labeled_parts(text: str) -> Finding | None:
    for style, pattern in _LABELS.items():
        # Labels start a line or a sentence: "f(a)" and "case (i)" are not labels.
        labels = list(
            re.finditer(rf"(?:^|(?<=[.?!:;\n]\s)|(?<=\n))\s*{pattern}", text, re.I | re.M)
        )
        parts = _in_order(labels)
        if len(parts) < 2:
            continue
        ends = [*(m.start() for m in parts[1:]), len(text)]
        if sum(_asks(text[m.end() : end]) for m, end in zip(parts, ends, strict=True)) > 1:
            return Finding("multi_part", f"parts {style}")
    return None


def _second_question(text: str) -> Finding | None:
    for match in _ALSO.finditer(text):
        before, after = text[: match.start() + 1], text[match.end() :]
        first = _sentences(after)[0] if after.strip() else ""
        if _requests(before) and (
            _direct(first) or (match[0].rstrip().endswith(":") and _asks(after))
        ):
            return Finding("multi_part", f"a second question: {first[:60]!r}")
    return None


def _in_order(labels: Sequence[re.Match[str]]) -> list[re.Match[str]]:
    """The labels that form a sequence: a, b, c or i, ii, iii or 1, 2, 3."""
    for order in ("abcdefgh", _ROMAN, "12345678"):
        run: list[re.Match[str]] = []
        for label in labels:
            if len(run) < len(order) and label[1].lower() == order[len(run)]:
                run.append(label)
        if len(run) > 1:
            return run
    return []


def _asks(part: str) -> bool:
    """True if a sentence of the part is a question, or begins like a request."""
    return any("?" in s or "？" in s or _direct(s) for s in _sentences(part))


def _direct(sentence: str) -> bool:
    return bool(_DIRECT.match(_ABOUT_ANSWER.sub("", sentence)))


# --------------------------------------------------------------------------------- incomplete

_PICTURE = (
    r"(?:figures?|diagrams?|pictures?|drawings?|images?|illustrations?|sketch|graphs?|grids?|maps?)"
)
_MISSING_FIGURE = re.compile(
    rf"\b(?:in|from|of|on|at|by|see|to|using|with)\s+(?:the|this|these|each)\s+"
    rf"(?:(?:following|given|above|adjoining|accompanying|adjacent|attached|right|left|below)\s+)?"
    rf"(?:figures?|diagrams?|illustrations?)\b(?!\s+(?:skat|out|of\s+speech))"
    rf"|\bin\s+(?:the|this)\s+image\b"
    rf"|\b(?:the|this|these)\s+{_PICTURE}\s+(?:\w+\s+)?"
    r"(?:below|above|shows?|shown|drawn|at\s+(?:the\s+)?(?:right|left)|to\s+the\s+(?:right|left)|here)\b"
    rf"|\b(?:following|accompanying|attached|adjoining)\s+{_PICTURE}\b(?!\s*(?:of|out))"
    r"|\b(?:on|in)\s+this\s+(?:grid|diagram|map|picture)\b(?!\s+of)"
    r"|\bas\s+(?:is\s+)?(?:shown|pictured|depicted|illustrated|drawn|indicated|labell?ed|in\s+the\s+figure)\b"
    r"|\b(?:shown|pictured|drawn|depicted|given|seen|illustrated|sketched)\s+(?:\w+\s+){0,2}(?:below|above|here"
    r"|at\s+(?:the\s+)?(?:right|left)|to\s+the\s+(?:right|left))\b"
    r"|\b(?:is|are)\s+(?:shown|pictured|depicted|drawn\s+below)\s*[.,?]"
    r"|\b(?:square|triangle|circle|rectangle|trapezoid|quadrilateral|hexagon|pentagon|octagon|polygon"
    r"|parallelogram|cube|prism|pyramid|cylinder|cone|region|segments?|lines?|angles?|points?|lattice"
    r"|pattern|solid|curve|parabola|function)\s*(?:\$[^$]{1,30}\$\s*,?\s*)?(?:as\s+)?(?:shown\b|below\b(?!\s+(?:the|a)\b|\s+\d))"
    r"|^\s*below\s+(?:is|are)\b"
    r"|\b(?:this|the|following)\s+(?:pie\s+chart|bar\s+(?:graph|chart)|histogram)\b"
    r"|\bshaded\b|\bunshaded\b|\bnot\s+(?:drawn\s+)?to\s+scale\b|\bthe\s+labell?ed\s+(?:points?|sides?)"
    r"|\bthe\s+(?:two\s+|three\s+|four\s+|five\s+|six\s+)?labell?ed\s+\w+"
    r"|\b(?:sur|dans)\s+la\s+figure|\bci-(?:dessous|contre)\b|\ben\s+la\s+figura|\bnella\s+figura"
    r"|\bin\s+der\s+(?:abbildung|zeichnung|figur)|\bна\s+рисунке|如图|图中|下图",
    re.IGNORECASE,
)
_MISSING_TABLE = re.compile(
    r"\b(?:the|this|these|following)\s+(?:\w+\s+)?(?:table|chart|data|list|array|spinner|number\s+line)s?\s+"
    r"(?:below|above|shows?|shown|gives|lists|summarizes|represents)\b"
    r"|\b(?:in|from|to|using|complete)\s+(?:the|this)\s+(?:(?:following|given)\s+)?(?:table|chart)s?\b"
    r"(?=\s*(?:below|above|,|\.|\?|shown|to\s+the))|\b(?:table|chart)\s+below\b"
    r"|\bin\s+der\s+tabelle|\bdans\s+le\s+tableau|\ben\s+la\s+tabla|\bв\s+таблице|下表",
    re.IGNORECASE,
)
# Objects shown only in a figure.
_ONLY_SHOWN = re.compile(
    r"\b(?:directions?\s+of|along|follow(?:ing)?)\s+the\s+arrows?\b"
    r"|\b(?:squares?|circles?|triangles?|rectangles?|polygons?|shapes?|cards|spinners?|dartboard|grid"
    r"|solid|manner|net|period|arrangement|stack|blocks|tiles)\s+shown\b"
    r"|\baccording\s+to\s+(?:the|this)\s+(?:graph|chart|diagram|figure|map|picture)\b"
    r"|\bfollowing\s+(?:spinner|dartboard|diagonal|shape|polygons?|maze|net|pattern\s+of\s+(?:dots|tiles))\b"
    r"|\b(?:polygons?|shapes?|squares|triangles|circles|rectangles|hexagons|spinner|net|pattern)\s+below\b",
    re.IGNORECASE,
)
_THIS_SHAPE = re.compile(
    r"\b(?:of|in|on|around|for)\s+this\s+(?:(?:right|isosceles|regular|shaded)\s+)?"
    r"(trapezoid|triangle|rectangle|square|parallelogram|quadrilateral|pentagon|hexagon|octagon"
    r"|polygon|circle|prism|pyramid|solid|grid|spinner|dartboard|net)\b",
    re.IGNORECASE,
)
_ASKED_LETTER = re.compile(
    r"\b(?:value|measure|number\s+of\s+degrees|degrees\s+are|length)\b[^.?$]{0,40}\b(?:of|in)\s+(?:angle\s+)?"
    r"\$\\?(?:angle\s*)?([A-Za-z])\s*[.?]?\$\s*[?.]?",
    re.IGNORECASE,
)
_HAS_FIGURE = re.compile(r"\[asy\]|tikz|\\includegraphics|!\[|<svg|<img|https?://|picture\}", re.I)
_HAS_TABLE = re.compile(
    r"\\begin\{(?:tabular|array|[a-z]*matrix|align|tabularx)|\\hline|\\bullet|\n\s*\|.*\||<table",
    re.I,
)
# The figure follows as text: "as shown: 1, 2, 4", "the lattice below. $\bullet$ Row 1".
_FOLLOWS = re.compile(
    r"[^.?!]{0,80}:\s*(?:\S|$)|[^?]{0,200}(?:\\\[|\$\$|\\begin|\\bullet|\n\s*[-*•])", re.S
)


def _missing(statement: str) -> Finding | None:
    if _HAS_FIGURE.search(statement):
        return None
    for pattern, what in ((_MISSING_FIGURE, "figure"), (_MISSING_TABLE, "table")):
        for match in pattern.finditer(statement):
            if _HAS_TABLE.search(statement) or _FOLLOWS.match(statement, match.end()):
                continue
            return Finding("incomplete", f"no {what}: {match[0].strip()!r}")
    return _shown_only(statement)


def _shown_only(statement: str) -> Finding | None:
    """The finding for a statement about objects that it never introduces, if it is one."""
    if _HAS_TABLE.search(statement):
        return None
    match = _ONLY_SHOWN.search(statement)
    if match and not _FOLLOWS.match(statement, match.end()):
        return Finding("incomplete", f"no figure: {match[0].strip()!r}")
    for match in _THIS_SHAPE.finditer(statement):
        if match[1].lower() not in statement[: match.start()].lower():
            return Finding("incomplete", f"no figure: {match[0].strip()!r}")
    for match in _ASKED_LETTER.finditer(statement):
        rest = statement[: match.start()] + " " + statement[match.end() :]
        formulas = " ".join(re.findall(r"\$+[^$]*\$+|\\\[.*?\\\]", rest, re.DOTALL))
        if match[1] not in re.sub(r"\\[A-Za-z]+", "", formulas):
            return Finding("incomplete", f"nothing is said about {match[1]!r}")
    return None


_OF_FOLLOWING = re.compile(
    r"\b(?:which|what)\b[^.?]{0,200}\b(?:following|choices|options)\b|\bof\s+the\s+following\b",
    re.I,
)


def _missing_choices(text: str, answer: str) -> Finding | None:
    # `A` and `B` in the text may be objects of the problem.
    labels = all(re.search(rf"(?<![A-Za-z]){letter}(?![A-Za-z])", text) for letter in "AB")
    if answer_letter(answer) and (match := _OF_FOLLOWING.search(text)) and not labels:
        return Finding("incomplete", f"no choices: {match[0][:80]!r}")
    return None


_DANGLING = re.compile(
    r"\b(?:a|an|the|of|to|by|in|on|at|for|from|with|and|or|nor|but|if|is|are|was|were|be|been|has|have|had"
    r"|that|which|who|whose|when|where|what|how|than|then|as|into|over|under|between|such|so|each|every|its"
    r"|their|his|her|let|given|find|compute|express|will|would|can|could|should|does|do|did|not|exactly|only"
    r"|least|most|both|either|because|while|since|until|per|this|these|those|any|all|some|no)\s*$",
    re.IGNORECASE,
)
_MID_FORMULA = re.compile(
    r"(?:[,:(\-+*/^=<>]|\\(?:le|ge|lt|gt|leq|geq|neq?|times|cdot|in|to|frac|sqrt))\s*(?:\$|\\\])*\s*$"
)
# An option's letter without its option.
_BARE_OPTION = re.compile(r"\(([A-F])\)\s*$")
_QUESTION = re.compile(
    r"(?:[^.?!]*,\s*)?(?:(?:in|for|of|at|to|by|from)\s+)?(?:what|how\s+(?:many|much|long|far))\b",
    re.IGNORECASE,
)
_TERMINAL = re.compile(r"(?:[.?!。？！…]|\\ldots|_{2,})(?:[\s\"'”’)\]}$*]|\\[,;! \])])*$")
_ITEM = re.compile(r"\s*(?:\$?\\bullet|[-*•]\s|\(?\w{1,2}[.)]\s).*")


def _breaks_off(text: str) -> Finding | None:
    text = text.strip()
    if not text:
        return Finding("incomplete", "no statement")
    end = text[-40:]
    if what := _unbalanced(text):
        return Finding("incomplete", f"breaks off: {what}: …{end!r}")
    if _TERMINAL.search(text):
        return None
    last = _sentences(text)[-1]
    # "17 + 25 =" and "then $f(3) =$" are questions.
    value = re.search(r"\bthen\b", last) or len(_ENGLISH.findall(text)) < 2
    sums = value and re.search(r"=\s*\$?\s*$", text)
    option = _BARE_OPTION.search(text) and re.search(r"(?:^|\s|\])\(A\)", text)
    if not sums and (option or _MID_FORMULA.search(text) or _DANGLING.search(text)):
        return Finding("incomplete", f"breaks off: …{end!r}")
    if text.count("(") + text.count("[") > text.count(")") + text.count("]"):
        return Finding("incomplete", f"breaks off within brackets: …{end!r}")
    if _QUESTION.match(last) and not re.search(r"(?:\$\$|\\\]|\\end\{\w+\*?\})\s*$", text):
        return Finding("incomplete", f"a question without its mark: …{end!r}")
    # A formula, number or bracket may end a statement. In a language that closes its sentences a
    # bare word does not, except in a request ("Find x and y").
    word = re.search(r"(?<![\\A-Za-z])([^\W\d_]{2,})$", text)
    listed = _ITEM.fullmatch(text.rpartition("\n")[2])
    if word and word[1].isascii() and not listed and "\\" not in text[word.start() - 1 :]:
        return Finding("incomplete", f"breaks off: …{end!r}")
    return None


def _unbalanced(text: str) -> str:
    r"""A description of a formula or figure that is not closed (`$`, `\[`, `\begin`, `[asy]`);
    empty if none."""
    bare = re.sub(r"\\[\\$]", "", text)
    pairs = ((r"\[", r"\]"), (r"\(", r"\)"), (r"\begin{", r"\end{"), ("[asy]", "[/asy]"))
    for opening, closing in pairs:
        if bare.count(opening) > bare.count(closing):
            return f"{opening} without {closing}"
    # Dollar signs next to numbers are money.
    money = all(
        re.match(r"\s*\.?\d", bare[m.end() :]) or bare[: m.start()][-1:].isdigit()
        for m in re.finditer(r"\$", bare)
    )
    if bare.count("$") % 2 and not money:
        return "$ without $"
    # "$a$$b$" is two formulas.
    displays = re.sub(r"\$\$.*?\$\$", "", re.sub(r"\\[\\$]", "…", text), flags=re.DOTALL)
    opened = displays.rpartition("$$")
    return "$$ without $$" if opened[1] and "$" not in opened[0] + opened[2] else ""


_ENGLISH = re.compile(r"\b(?:the|is|are|of|and|has|have|in|that|with|for|if|let|was|were)\b", re.I)


def _asks_nothing(text: str) -> Finding | None:
    # A bare formula asks for its value; only English is checked.
    english = len(_ENGLISH.findall(text)) > 1 or re.match(
        r"\s*(?:if|let|given|suppose)\b", text, re.I
    )
    if _requests(text) or not english:
        return None
    return Finding("incomplete", "asks nothing")


# ------------------------------------------------------------------------------- unverifiable

_NO_ANSWER = re.compile(
    r"(?:see|refer to)\b.*|(?:answers?|solutions?)\s+(?:may|will|can|could)?\s*var(?:y|ies).*"
    r"|n/?a\.?|none\.?|null|nan|proof.*|omitted.*|q\.?e\.?d\.?|\?+|-+|unknown|no\s+answer.*"
    r"|not\s+(?:given|available).*",
    re.IGNORECASE | re.DOTALL,
)
MAX_ANSWER_WORDS = 8


def _unverifiable(answer: str) -> Finding | None:
    if not answer.strip():
        return Finding("unverifiable", "no answer")
    if _NO_ANSWER.fullmatch(answer.strip()):
        return Finding("unverifiable", f"no answer: {answer[:80]!r}")
    words = re.findall(r"[^\W\d_]{2,}", re.sub(r"\\[a-zA-Z]+", " ", answer))
    if len(words) > MAX_ANSWER_WORDS:
        return Finding("unverifiable", f"an answer in prose: {answer[:80]!r}")
    return None


def _sentences(text: str) -> list[str]:
    return re.split(r"(?:(?<=[.?!。？…])|(?<=[.?!][$)]))\s+(?=\S)|\n\s*\n", text.strip())
