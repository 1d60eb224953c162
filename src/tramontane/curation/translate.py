"""Stage `translate`: translates a share of the English problems (arXiv 2506.10910, 2.2.4).

A hash of seed and problem selects the problem and its language, independently of other rows. A
translation must keep every formula and number, and pass the language check used in training. A
failed translation is requested again; after the last attempt the problem stays in English, with the
note `untranslated`. So do problems with an answer in words, which would need a translation too.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tramontane.asking import Answer, Prompt, conclusion
from tramontane.curation.rows import ModelStage, Row
from tramontane.types import Problem
from tramontane.verifier import language
from tramontane.verifier.format import fences

NAMES = {
    "fr": "French",
    "es": "Spanish",
    "it": "Italian",
    "de": "German",
    "zh": "Chinese (simplified)",
    "ru": "Russian",
}
REQUEST = """\
Translate the problem below into {language}. Do not solve it. Copy every formula, all LaTeX, all \
code and every number exactly as they stand, digits as digits and words as words, with their \
decimal points and commas; translate everything else. Write the translation between <translation> \
and </translation>.
{earlier}
<problem>
{problem}
</problem>
"""
EARLIER = "\nAn earlier translation could not be used: {fault}.\n"
_TRANSLATION = re.compile(r"<translation>(.*?)</translation>", re.DOTALL)
_FORMULA = re.compile(
    r"\[asy\].*?\[/asy\]|\\begin\{(\w+\*?)\}.*?\\end\{\1\}|" + language.MATH.pattern, re.DOTALL
)
_NUMBER = re.compile(r"\d+(?:[.,:/]\d+)*")
_SPACE = re.compile(r"\s+")


class Translate(ModelStage):
    """Translates a share of the English problems.

    A translated row keeps its English statement in `english_problem`.
    """

    name = "translate"

    def decide(self, rows: Sequence[Row]) -> list[Row]:
        decided = list(rows)
        languages = {i: lang for i, row in enumerate(rows) if (lang := self.language(row.task))}
        faults = dict.fromkeys(languages, "")  # rows without a translation so far
        for attempt in range(self.config.attempts):
            prompts = {i: _prompt(rows[i].task, languages[i], attempt, faults[i]) for i in faults}
            if not prompts:
                break
            for i, [answer] in self.ask(rows, prompts, 1, f"answers-{attempt}"):
                old, lang = rows[i].task, languages[i]
                text, faults[i] = read_translation(old.problem, answer, lang)
                if not faults[i]:
                    metadata = {**old.metadata, "english_problem": old.problem}
                    new = replace(old, problem=text, language=lang, metadata=metadata)
                    decided[i] = rows[i].rewrite(self.name, "translated", f"into {lang}", new)
            faults = {i: fault for i, fault in faults.items() if fault}
        for i, last_fault in faults.items():
            fault, old = f"{languages[i]}: {last_fault}", rows[i].task
            # In the metadata too, since a row rewritten by an earlier stage keeps its first reason.
            noted = replace(old, metadata={**old.metadata, "untranslated": fault})
            decided[i] = replace(rows[i], problem=noted).note(self.name, "untranslated", fault)
        return decided

    def language(self, problem: Problem) -> str | None:
        """The target language of a problem; None if it is not translated."""
        text = f"{self.config.seed}/{problem.id}/{problem.problem}".encode()
        draw = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "big")
        chance, choice = divmod(draw, 2**64)
        if chance >= self.config.share * 2**64 or _in_words(problem.answer or ""):
            return None
        if (problem.language or language.detect(problem.problem)) != "en":
            return None
        return str(self.config.languages[choice % len(self.config.languages)])


def read_translation(old: str, answer: Answer, lang: str) -> tuple[str, str]:
    """(translation, fault) of an answer; one of them is empty."""
    if answer.fault:
        return "", answer.fault
    translations = _TRANSLATION.findall(conclusion(answer.text))
    new = translations[-1].strip() if translations else ""
    if not new:
        return "", "there was nothing between <translation> and </translation>"
    for what, extract in (("formulas", formulas), ("numbers", numbers)):
        before, after = extract(old), extract(new)
        if before != after:
            lost, added = (
                ", ".join((a - b).elements()) for a, b in ((before, after), (after, before))
            )
            return "", f"its {what} differ (lost: {lost or 'none'}; new: {added or 'none'})"[:300]
    share = language.on_target_share(new, lang)
    if share < language.THRESHOLD or language.detect(new) not in (lang, None):
        return "", f"it does not seem to be in {NAMES[lang]}"
    return new, ""


def formulas(text: str) -> Counter[str]:
    """LaTeX, code and figures with their counts; differences in white space are ignored."""
    blocks = [block.body for block in fences(text)]
    rest = _without_fences(text)
    spans = [*blocks, *(match[0] for match in _FORMULA.finditer(rest))]
    return Counter(_SPACE.sub(" ", span).strip() for span in spans)


def numbers(text: str) -> Counter[str]:
    """Numbers outside formulas and code, with their counts."""
    return Counter(_NUMBER.findall(_FORMULA.sub(" ", _without_fences(text))))


def _without_fences(text: str) -> str:
    for block in reversed(fences(text)):
        text = f"{text[: block.start]}\n{text[block.end :]}"
    return text


def _prompt(problem: Problem, lang: str, attempt: int, fault: str) -> Prompt:
    earlier = EARLIER.format(fault=fault) if fault else ""
    text = REQUEST.format(language=NAMES[lang], earlier=earlier, problem=problem.problem)
    return Prompt(f"{problem.id}/{lang}/{attempt}", text)


def _in_words(answer: str) -> bool:
    r"""True if an answer contains words, also within `\text{}`."""
    plain = re.sub(r"\\(?:begin|end)\s*\{\w+\*?\}|\\[A-Za-z]+", " ", answer)
    return re.search(r"[^\W\d_]{3,}", plain) is not None
