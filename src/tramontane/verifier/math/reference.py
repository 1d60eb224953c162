r"""Reads the answer that a reference states: data give `Answer: 2`, `<answer>2</answer>` or `The
answer is \boxed{2}.` where a box holds `2`. Only references are read so, never a model's answers.
"""

from __future__ import annotations

import re
from functools import lru_cache

from tramontane.verifier.format import boxes
from tramontane.verifier.math.numbers import to_number
from tramontane.verifier.math.sentences import BE, concluded
from tramontane.verifier.math.structure import MAX_LENGTH
from tramontane.verifier.math.wording import FUNCTIONS, unwrap

MAX_STEPS = 8  # layers that are taken off, such as a tag around a box in a sentence
CLOSE = 0.01  # relative difference of a value and its approximation in brackets
SENTENCE = 8  # so many words are a sentence

_NOUN = (
    r"(?<![^\W_])(?:answers?|ans|solutions?|results?|réponse|résultat|antwort|ergebnis|lösung|respuesta"
    r"|resultado|solución|risposta|risultato|soluzione|resposta|solução|ответ|результат)(?![^\W_])"
    r"|答案|答え|解答|结果|结论|答|정답|답|الجواب|الإجابة"
)
_IS = rf"(?<![^\W_])(?:{BE})(?![^\W_])|это(?![^\W_])|等于|应为|[是为为はは은는]|[=—–]|-(?=\s)|هو|هي"
_CHOICE = r"(?<![^\W_])(?:option|choice)(?=\s*(?:is\b|:))"
_STATED = re.compile(
    rf"(?is).*(?P<noun>{_NOUN}|{_CHOICE})[^\n\d$\\{{}}:：=]{{0,40}}?\s*(?:{_IS}|[:：])"
    r"\s*[:：]?[\s}*_]*(?P<stated>\S[^\n]*)"
)
_ABRUPT = re.compile(  # `Ans. 2`, `Ответ 2`: a noun, and one value with a digit
    rf"(?is)(?:(?:the\s+)?final\s+)?(?:{_NOUN})\s*[.→⇒]?\s+(?P<value>\$[^$]+\$|\S*\d\S*)"
)
_NONE = re.compile(  # before a noun: `no real solutions, as the discriminant is negative`
    r"(?i)(?<![^\W_])(?:no|not|without|zero|kein\w*|aucune?|ningun[ao]?|nessun[ao]?|nenhum[ao]?|sem|нет)"
    r"(?:\s+[^\W\d_]+){0,3}\s*$"
)
_LABELED = re.compile(
    r"(?:.*\n)?(?P<label>(?:\\text\w*\{)?[^\n\d:：$\\{}<>=+/^|()\[\]]{2,60})[:：][\s}*_]*"
    r"(?P<value>[^\n]*\d[^\n]*)",
    re.DOTALL,
)
_LETTERS = re.compile(r"[^\W\d_]")
_OTHER_COLON = re.compile(r"(?<!\d)[:：]|[:：](?!\d)")
_TAIL = re.compile(r"(?<=[\d$})])\s*(?:です|だ|である|입니다|이다|है)?\s*[.。]?\s*$")
_AFTERWORD = re.compile(r"(?<=[\w$})*])[.。!]\s+[^\W\d_][^\d$\\]*$")
_TAGGED = re.compile(r"(?s).*<([A-Za-z]\w*)>([^<>]*)</\1>[\s.。]*")
_PAIRS = re.compile(
    r"(?s)(?:\*\*(?P<bold>[^*]+)\*\*|__(?P<under>[^_]+)__|\*(?P<star>[^*]+)\*|`+(?P<code>[^`]+)`+"
    r"|\"(?P<plain>[^\"]+)\"|'(?P<single>[^']+)'|«(?P<french>[^»]+)»|[“„](?P<curly>[^”“]+)[”“]"
    r"|「(?P<corner>[^」]+)」)[.。]?"
)
_BEFORE = re.compile(r"(?:#{1,6}\s+|[=∴]\s*)(?=\S)")
_FRAME = re.compile(r"\\(?:fbox|framebox|bbox(?:\[[^]]*\])?|answer|ans)(?=\s*\{)")
_STYLED = re.compile(  # `\underline{2}`, `\textcolor{red}{2}`, `{\bf 2}`, `\color{red} 2`
    r"(?s)\\(?:uu?line|underline)\s*\{(?P<lined>[^A-Za-z{}]+)\}"
    r"|\\(?:textcolor|colorbox|color)\s*\{\w+\}\s*\{(?P<colored>(?:[^{}]|\{[^{}]*\})+)\}"
    r"|\{\s*\\(?:bf|bfseries|em|it|tt|large|Large|huge)\b(?P<braced>(?:[^{}]|\{[^{}]*\})+)\}"
    r"|\\(?:bf|bfseries|large|Large|huge|displaystyle|color\s*\{\w+\})(?![A-Za-z])(?P<rest>.+)"
)
_DISPLAYED = re.compile(
    r"(?s)\\begin\{(equation|align|aligned|gather|gathered|displaymath|math|center)(\*?)\}"
    r"(?P<displayed>.*)\\end\{\1\2\}"
)
_ALIGNED = re.compile(r"&(?==)|(?<==)&")
_BRACKETED = re.compile(r"(?is)\[(ans|answer|solution)\]\s*(?P<inside>[^\[\]]+?)\s*(?:\[/\1\])?")
_LISTED = re.compile(r"(?s)\[\s*(['\"])(?P<listed>[^'\"]+)\1\s*\]")
_LEAD = re.compile(
    r"(?:(?:&nbsp;|[→⇒✅✓✔∴&]|[=-]+>|\\(?:Rightarrow|implies|therefore)(?![A-Za-z])|<br\s*/?>)\s*)+"
)
_MARK = re.compile(  # of the end of a proof, or of a right answer
    r"(?i)(?:\s+(?:QED|Q\.E\.D\.)|\s*(?:[∎■□✓✔✅]|\\(?:blacksquare|square|Box|qed|checkmark)|&nbsp;"
    r"|<br\s*/?>|\[ans(?:wer)?\]))+\s*$"
)
_OPEN_BOX = re.compile(r"\\boxed\s+([^\s{}$.,]+)")
_DIGITS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
_TENS = "fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty"
_NUMERALS = f"{_DIGITS} {_TENS} ninety hundred thousand million minus and".replace(" ", "|")
_SPELLED = re.compile(
    rf"(?i)([-−]?\d[\d,.]*)\s*(?:\\text\{{\s*)?[(（](?:(?:{_NUMERALS})[\s-]*|[〇零一二两三四五六七八九十百千万])+[)）]\}}?\.?"
)
_ABOUT = (
    "approximately|approx|about|around|roughly|exactly|rounded|equals|that is|i\\.e|or|environ|soit"
    "|etwa|ungefähr|circa|ca|aproximadamente|aprox|приблизительно|примерно|около|约|大约|≈|~|="
)
_AGAIN = re.compile(
    rf"(?is)(\S.*?)\s*[(（]\s*(?:(?:{_ABOUT})[.:,]?\s*)+\$?([^()（）$]*)\$?[)）]\.?"
)
# What is left of a reference after its answer is read.
_PLAIN = re.compile(r"[-+\d.,/\s]+")
_MISSING = re.compile(r"(?i)n/?a|nan|null|tbd|#n/a|\?+|-+|\.+|<[\w ]*>")  # signs of an empty cell
_TEXT = re.compile(r"\\text\w*\s*\{[^{}\d]*\}")  # of units, names and lists, which are compared
_NAMES = re.compile(rf"\\[A-Za-z]+|{FUNCTIONS.pattern}|\bpi\b")
_VALUE = re.compile(r"\d|\$|(?<![^\W_])\(?[A-J]\)|\\(?!text)[a-z]")
_WORD = re.compile(
    r"(?<![\\\w{^])(?![A-Z]+(?![^\W\d_]))[^\W\d_]{3,}(?!\w)|[^\W\da-zA-Z_]{2,}|"
    r"[\u0370-\u03ff\u0400-\u04ff\u0600-\u06ff\u0900-\u097f\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]{2,}"
)
_SHORT = re.compile(r"(?<![^\s])(?:[A-Z]?[a-z]{1,2}(?<=..))(?= [\w$])|(?<=\w )[a-z]{2}(?=\s|$)")
_FOREIGN = re.compile(r"[\"`~#@«»“”„「」?]")  # in no answer
_ODD = re.compile(r"[\"'`~#@&«»“”„「」?]")
_NUMBER = re.compile(r"[-−]?\d+(?:[.,/]\d+)*(?:\s*\\?%)?")
_OPERATOR = re.compile(r"\\(?:[dt]?frac|sqrt|cdot|times|div|left|right|pm)(?![A-Za-z])")
_CAPITALS = re.compile(r"[A-Z]{2,}[.:]?\s+[-−]?\d[\d.,]*|Q\d+[.:]\s.*")  # `QED 2`, `Q1: 2`
_LAST = (
    re.compile(r"\$([^$]+)\$"),
    _NUMBER,
    re.compile(r"(?<![^\W_])\(?([A-J])\)?(?![^\W_])"),
)


@lru_cache(maxsize=4096)
def stated(reference: str) -> str:
    r"""The answer that a reference states.

    What is taken off: tags of which the last ends the text, the only box (or several alike), text
    up to `Answer:`, `La réponse est` or another label with a colon, a sentence that ends in a value
    (`Hence 2`, `The value is 2`), Markdown, styles (`{\bf 2}`), quotation marks, a leading `=` or
    arrow, a mark at the end (`2 ∎`), and a repetition in brackets (`2 (two)`, `1/3 (about 0.33)`).
    Any other text is unchanged.
    """
    text = reference.strip()
    for _ in range(MAX_STEPS):
        if (inner := _without_layer(text)) == text or not inner:
            break
        text = inner
    return text


def _without_layer(text: str) -> str:
    text = _OPEN_BOX.sub(r"\\boxed{\1}", _FRAME.sub(r"\\boxed", text.rpartition("####")[2].strip()))
    if (boxed := _boxed(text)) is not None:
        return boxed
    for pattern in (_TAGGED, _PAIRS, _STYLED, _DISPLAYED, _BRACKETED, _LISTED):
        if found := pattern.fullmatch(text):
            return _ALIGNED.sub("", found[found.lastgroup or 2]).strip()
    if (inner := _MARK.sub("", text)) != text:
        return inner.strip()
    for pattern in (_LEAD, _BEFORE):
        if found := pattern.match(text):
            return text[found.end() :]
    if found := _SPELLED.fullmatch(text):
        return found[1]
    if (found := _AGAIN.fullmatch(text)) and _are_close(found[1], found[2]):
        return found[1]
    return _introduced(text)


def _boxed(text: str) -> str | None:
    """The content of the only outermost box, or of several alike."""
    found, outer = boxes(text), set()
    for start, content, end in found:
        if not any(other < start and end < last for other, _, last in found):
            outer.add(text[content : end - 1].strip())
    return outer.pop() if len(outer) == 1 else None


def _introduced(text: str) -> str:
    """What follows the label of an answer; the unchanged text if nothing is labeled."""
    found = _STATED.fullmatch(text)
    if found and not _NONE.search(text[: found.start("noun")]):
        return _value(found["stated"])
    if found := _ABRUPT.fullmatch(text):
        return _value(found["value"])
    found = _LABELED.fullmatch(text)
    if found is None or _OTHER_COLON.search(found["value"]):
        return concluded(text)
    letters = "".join(_LETTERS.findall(unwrap(found["label"])))
    if len(letters) < 3 and letters.isascii():  # `x: 2`, and the ratio `AB : 2`
        return text
    return _value(found["value"])


def _value(text: str) -> str:
    text = _TAIL.sub("", _AFTERWORD.sub("", text.strip())).strip("*_ ")
    text = text.removesuffix(".").rstrip("*_ ")
    if text.count("}") > text.count("{"):  # of the box of text that the label began
        text = text.removesuffix("}")
    return text.strip()


def _are_close(value: str, again: str) -> bool:
    """True for the same number, or one rounded from it."""
    sides = [to_number(_plain(side)) for side in (value, again)]
    if None in sides:
        return False
    first, second = map(float, sides)  # type: ignore[arg-type]
    return abs(first - second) <= CLOSE * abs(first)


def _plain(text: str) -> str:
    return re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text.strip().strip("$").strip())


def bare_answers(reference: str) -> list[str] | None:
    """Answers of a model, one of which should equal a reference with words around its answer: the
    reference without them, its last value, and its letter of a choice. None for a reference without
    such words; an empty list for a sentence without any value."""
    if _MISSING.fullmatch(reference.strip()):
        return []
    if _PLAIN.fullmatch(reference):
        return None
    text = stated(reference)
    if len(text) > MAX_LENGTH:
        return []
    is_computed = "=" in text and not re.search("[A-Za-z]", _OPERATOR.sub("", text))  # `1 + 1 = 2`
    if is_computed or _CAPITALS.fullmatch(text):
        return _NUMBER.findall(text)[-1:]
    outside = _NAMES.sub(" ", unwrap(_TEXT.sub(" ", text)))
    if not _VALUE.search(outside):
        is_sentence = len(_WORD.findall(unwrap(text))) >= SENTENCE
        return [] if is_sentence or text.endswith((":", "：")) else None
    if not (_WORD.search(outside) or _SHORT.search(outside) or _ODD.search(outside)):
        return None
    without = (_WORD.sub(by, _SHORT.sub(by, unwrap(text))) for by in (" ", " , "))
    parts = [" ".join(part.split()).strip(" ,;:.") for part in without]
    parts += (found[-1] for p in _LAST if (found := p.findall(text)))
    foreign = text if _FOREIGN.search(text) else ""
    return [part for part in dict.fromkeys(parts) if part not in ("", foreign)]
