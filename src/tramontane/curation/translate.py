"""Stage 6: some of the English problems into the paper's other languages (arXiv 2506.10910, 2.2.4).

Which problems, and into which language, is drawn by hashes of seed and problem, so that it depends
on nothing around it. A translation must keep every formula and every number as it is, and be in the
language that was asked for, by the check that rewards language in training. Else it is asked for
again, and in the end the problem stays in English, with the note `untranslated`. Problems whose
answer is in words stay too: it would have to be translated with them.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tramontane.curation.backend import Answer, Prompt
from tramontane.curation.backend.stage import ModelStage, conclusion
from tramontane.curation.rows import Row
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
    """Translates a share of the English problems; the statement it had becomes
    `english_problem`."""

    name = "translate"

    def decide(self, rows: Sequence[Row]) -> list[Row]:
        decided = list(rows)
        languages = {i: lang for i, row in enumerate(rows) if (lang := self.language(row.task))}
        faults = dict.fromkeys(languages, "")  # of those that are still to be translated
        for attempt in range(self.config.attempts):
            asked = list(faults)
            prompts = [_prompt(rows[i].task, languages[i], attempt, faults[i]) for i in asked]
            if not prompts:
                break
            for place, [answer] in self.ask(rows, prompts, 1, f"answers-{attempt}"):
                i = asked[place]
                old, lang = rows[i].task, languages[i]
                text, faults[i] = read_translation(old.problem, answer, lang)
                if not faults[i]:
                    decided[i] = self._translated(rows[i], text, lang)
            faults = {i: fault for i, fault in faults.items() if fault}
        for i, fault in faults.items():
            decided[i] = self._left(rows[i], f"{languages[i]}: {fault}")
        return decided

    def language(self, problem: Problem) -> str | None:
        """What a problem is to be translated into; None: it stays as it is."""
        text = f"{self.config.seed}/{problem.id}/{problem.problem}".encode()
        draw = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "big")
        chance, choice = divmod(draw, 2**64)
        if chance >= self.config.share * 2**64 or _in_words(problem.answer or ""):
            return None
        if (problem.language or language.detect(problem.problem)) != "en":
            return None
        return str(self.config.languages[choice % len(self.config.languages)])

    def _translated(self, row: Row, text: str, lang: str) -> Row:
        metadata = {**row.task.metadata, "english_problem": row.task.problem}
        problem = replace(row.task, problem=text, language=lang, metadata=metadata)
        return row.rewrite(self.name, "translated", f"into {lang}", problem)

    def _left(self, row: Row, why: str) -> Row:
        # In the metadata too: a row that was rewritten before keeps that as its reason.
        metadata = {**row.task.metadata, "untranslated": why}
        row = replace(row, problem=replace(row.task, metadata=metadata))
        return row.note(self.name, "untranslated", why)


def read_translation(old: str, answer: Answer, lang: str) -> tuple[str, str]:
    """(the translation, what is wrong with it) of an answer; either is empty."""
    if answer.fault:
        return "", answer.fault
    found = _TRANSLATION.findall(conclusion(answer.text))
    new = found[-1].strip() if found else ""
    if not new:
        return "", "there was nothing between <translation> and </translation>"
    for what, of in (("formulas", formulas), ("numbers", numbers)):
        before, after = of(old), of(new)
        if before != after:
            lost, added = (
                ", ".join((a - b).elements()) for a, b in ((before, after), (after, before))
            )
            return "", f"its {what} differ (lost: {lost or 'none'}; new: {added or 'none'})"[:300]
    share = language.on_target_share(new, lang)
    if share < language.THRESHOLD or language.detect(new) not in (lang, None):
        return "", f"it is not in {NAMES[lang]}, as far as can be told"
    return new, ""


def formulas(text: str) -> Counter[str]:
    """LaTeX, code and figures, each as often as it is there; white space aside."""
    blocks = [block.body for block in fences(text)]
    rest = _without_fences(text)
    spans = [*blocks, *(match[0] for match in _FORMULA.finditer(rest))]
    return Counter(_SPACE.sub(" ", span).strip() for span in spans)


def numbers(text: str) -> Counter[str]:
    """Numbers outside formulas and code, each as often as it is there."""
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
    r"""Whether an answer says something in English, also within `\text{}`."""
    plain = re.sub(r"\\(?:begin|end)\s*\{\w+\*?\}|\\[A-Za-z]+", " ", answer)
    return re.search(r"[^\W\d_]{3,}", plain) is not None
