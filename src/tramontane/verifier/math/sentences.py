r"""Reads references that are sentences and end in a value: `Hence 2`, `The value is 2`."""

from __future__ import annotations

import re

from tramontane.verifier.math.wording import FUNCTIONS, unwrap

BE = (  # in a regular expression of whole words
    r"is|are|equals|equal\s+to|ist|sind|lautet|beträgt|est|sont|es|son|è|é|sono"
    r"|равен|равна|равно|равны"
)

# Other verbs that a value follows.
_VERBS = (
    r"be|was|were|have|becomes?|gives?|gets?|yields?|makes?|obtains?|totals?|leaves?|finds?"
    r"|(?:comes?|amounts?|sums?|adds\s+up|evaluates?|simplifies|reduces|works\s+out)\s+to"
    r"|donne|vaut|fait|égale|obtient|ergibt|macht|gleich|erhalten|da|vale|resulta|dà|fa|vira|dá"
    r"|получаем|получится|составляет"
)
_LATIN = (
    r"so|hence|thus|therefore|then|finally|consequently|accordingly|altogether|overall"
    r"|in\s+(?:total|all|conclusion)|as\s+a\s+result|donc|ainsi|alors|finalement|daher|somit"
    r"|folglich|also|damit|insgesamt|luego|entonces|finalmente|por\s+(?:lo\s+)?tanto|así|quindi"
    r"|dunque|perciò|pertanto|portanto|logo|assim|значит|следовательно|итак|поэтому"
    r"|таким\s+образом"
)
_CJK = "所以|因此|故|从而|よって|したがって|ゆえに|따라서|그러므로"
_THUS = (  # `SO(3)` does not conclude anything
    rf"(?:(?!(?-i:[A-Z]{{2}}))(?:{_LATIN})(?:\s*[,:—–]\s*|\s+)|(?:{_CJK})\s*[,，、:]?\s*)"
)
_CONCLUSION = re.compile(
    rf"(?is)(?:.*[.!;。；！\n]\s*)?(?:and\s+)?{_THUS}(?P<rest>(?=[^\n]*[\d$\\])\S[^\n]*)"
)
_SENTENCE = re.compile(
    r"(?i)(?P<subject>(?:[^\n\d\\{}<>=:：;+*/^|()\[\].,!?。，；$]|\$[A-Za-z]\$)+?)"
    rf"(?:(?<![^\W_])(?:{BE}|{_VERBS})\s+|(?:[是为為はは은는]|等于|得到?|应为)\s*)"
    r"(?P<value>(?:[A-Za-z]\s*=\s*)?(?:[^\W\d_]{0,2}[^\w\s]*\d|\$|\\)[^\n]*)"
)
# What makes another statement of the sentence than that the answer is the value.
_HEDGES = re.compile(
    r"(?i)(?<![^\W_])(?:no|not|non|n[ãa]o|ne|pas|nie|never|nicht|kein\w*|nessun\w*|ningun\w*"
    r"|nenhum\w*|aucune?|не|нет|if|when\w*|unless|except|only|where\w*|or|either|neither|and|than"
    r"|what|let|suppose|assum\w*|given|since|because|as|while|until|for|every|each|any|wenn|falls"
    r"|nur|weil|si|sauf|quand|cuando|se|quando|если|когда|или|oder|ou|und|et|but)(?![^\W_])"
    r"|n['’]t|n['’]e|[不没非若当仅或且]|如果|除"
)
_WORDS = re.compile(r"(?<![\\\w{^])[^\W\d_]{2,}|[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")
_NAMES = re.compile(rf"\\text\w*\s*\{{[^{{}}\d]*\}}|\\[A-Za-z]+|{FUNCTIONS.pattern}|\bpi\b")
_UNIT = re.compile(r"(?<=[\d})$])\s*(?:[a-zµ]{1,3}[23²³]?|degrees|percent|units?|dollars|euros)$")
_END = re.compile(r"\s*(?:です|だ|である|입니다|이다)?[.。]?$")


def concluded(text: str) -> str:
    """What a sentence says that the answer is; unchanged text if it is none, or says more.

    Two layers are taken off, one at a call: a word of conclusion, with the sentences before it
    (`We add them. Hence x = 2`), and a subject with a verb before a value (`The value is 2`).
    """
    if (found := _CONCLUSION.fullmatch(text)) and not _HEDGES.match(found["rest"]):
        return found["rest"]
    found = _SENTENCE.fullmatch(text)
    if found is None or _HEDGES.search(found["subject"]):
        return text
    value = _END.sub("", found["value"]).strip()
    return text if _WORDS.search(_NAMES.sub(" ", _UNIT.sub("", unwrap(value)))) else value
