r"""The rules of spelling, which `normalize` applies in turn: each a pattern and what replaces it.

A rule is tried only where the text has the characters that its matches need.
"""

from __future__ import annotations

import importlib
import re
import sys
import unicodedata
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from tramontane.verifier.math.numbers import DECIMAL, TEXT

RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣʸᶻᵃᵇᶜᵈᵏᵐᵖʳˢᵗ"
SUPER = str.maketrans(RAISED, "0123456789+-()nixyzabcdkmprst")
SUB = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙᵢ", "0123456789+-()ni")
_GREEK_NAMES = """
    αalpha βbeta γgamma δdelta εepsilon ζzeta ηeta θtheta ιiota κkappa λlambda μmu νnu ξxi πpi
    ρrho σsigma τtau υupsilon φphi χchi ψpsi ωomega ϵepsilon ϑtheta ϕphi ϱrho ΓGamma ΔDelta
    ΘTheta ΛLambda ΞXi ΠPi ΣSigma ΦPhi ΨPsi ΩOmega
"""
_VULGAR = {c: Fraction(unicodedata.numeric(c)).limit_denominator(10) for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞⅐⅑⅒"}
_COMMANDS = """
    ×times ✕times ·cdot ⋅cdot ∙cdot ∞infty ≤le ⩽le ≥ge ⩾ge ≠neq ≈approx ±pm ∓mp ∪cup ∩cap ∈in
    ∅emptyset ∖setminus …ldots ⟨langle ⟩rangle \u00b5mu \u2126Omega ∧land ∨lor ∣mid ∀forall ⌊lfloor
    ⌋rfloor ⌈lceil ⌉rceil ∼sim ≡equiv ∄nexists ¬neg
"""
SYMBOLS = str.maketrans(
    {chr(c): chr(c - 0xFEE0) for c in range(0xFF01, 0xFF5F)}
    | dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u200a\u202f\u3000\t\n\r", " ")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u2061\u2062", "")
    | dict.fromkeys("−–—﹣‐‑", "-")
    | {entry[0]: f"\\{entry[1:]} " for entry in (_GREEK_NAMES + _COMMANDS).split()}
    | {c: rf" \frac{{{x.numerator}}}{{{x.denominator}}}" for c, x in _VULGAR.items()}
    | {c: rf"\mathbb{{{letter}}}" for c, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)}
    | dict(zip("÷∕⁄∗。、٫′∶\u212b\u212a", "///*.,.':ÅK", strict=True))
    | {"°": r"^{\circ}", "º": r"^{\circ}", "℃": r"^{\circ}C", "℉": r"^{\circ}F"}
)

_BASED = rf"[)}}]*\s*(?:_|{TEXT}?\s*\{{?[\s(]*base)"  # `3E8_{16}`, `3E8 (base 16)`
_BARE = r"(?:\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+)"
_ARGUMENT = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
_VECTOR = "mathbf|boldsymbol|bm|vec|overrightarrow"
PLAIN_FUNCTIONS = (
    "arcsinh|arccosh|arctanh|arcsin|arccos|arctan|arccot|asin|acos|atan|sinh|cosh|tanh|coth|sin|cos|tan"
    "|cot|sec|csc|ln|log|exp|max|min|gcd|lcm"
)
GREEK_LETTERS = "|".join(sorted((e[1:] for e in _GREEK_NAMES.split()), key=len, reverse=True))
_TRIG = "sin|cos|tan|cot|sec|csc|ln|log"
_TO = rf"\s*(?:{TEXT}\s*\{{\s*to\s*\}}|\bto\b)\s*"
_OTHER_NAMES = {
    "lg": "log_{10}", "arctg": "arctan", "tg": "tan", "co?tg": "cot", "cotan": "cot",
    "cosec": "csc", "Ln": "ln", "asin": "arcsin", "acos": "arccos",
    "atan": "arctan",
    "arcco?tg": "operatorname{arccot}",
}  # fmt: skip
_RULES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        # Layout only.
        (r"^\s*\\(?:therefore|implies|(?:Long)?[rR]ightarrow)(?![A-Za-z])", " "),
        (r"\\(?:left|right|middle|mathopen|mathclose|[bB]igg?[lr]?)(?![A-Za-z])\.?", " "),
        (r"\\[hv]?phantom\s*(?:\{[^{}]*\}|\S)", " "),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|hfill)(?![A-Za-z])", " "),
        (r"\\(?:tiny|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])", " "),
        (
            r"\\(?:textcolor|colorbox|color)\s*"
            r"(?:\[\w+\]\s*\{[\w.,\s]*\}|\{\s*[A-Za-z][\w!.-]*\s*\})|\\fcolorbox(?:\s*\{\w+\}){2}",
            " ",
        ),
        (r"\\(?:bf|bfseries|em|it)(?![A-Za-z])", " "),
        # A brace with a name; one with a number counts what is under it.
        (
            r"\\(?:under|over)brace\s*\{((?:(?!\\[lc]?dots|\.\.)[^{}]|\{[^{}]*\})*)\}\s*[_^]\s*"
            r"(?:\{\s*\\text\s*\{(?!\s*not)[^{}\d]*\}\s*\}|\{?\s*[A-Za-z]\s*\}?|\\text\s*\{(?!\s*not)[^{}\d]*\})",
            r"\1",
        ),
        # One spelling for the determinant, trace, rank, … of a letter.
        (r"\\(?:operatorname|text|mathrm)\s*\{\s*(det|dim|ker|tr|rank)\s*\}", r"\\\1 "),
        (r"\\(det|dim|ker|tr|rank)\s*(?:\(\s*([A-Z])\s*\)|\{\s*([A-Z])\s*\})", r"\\\1 \2\3"),
        (r"\\pmb(?![A-Za-z])", r"\\boldsymbol"),
        (r"\\(?:fbox|framebox|bbox)(?![A-Za-z])(?:\s*\[[^\]]*\])?", r"\\boxed"),
        (r"\\(?:[dtcs]|nice)frac(?![A-Za-z])", r"\\frac"),
        (r"\\sqrt\s*(\[\d+\])\s*(\w)", r"\\sqrt\1{\2}"),
        (
            rf"^\s*{TEXT}\s*\{{\s*(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is)?\s*:?\s*\}}"
            r"\s*(?=[-\d\\(])",
            "",
        ),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\var(epsilon|theta|phi|rho|kappa)(?![A-Za-z])", r"\\\1"),
        (r"(?<![\d!])(\d+|[a-z])\s*!\s*\^", r"(\1!)^"),
        (r"\\wedge(?![A-Za-z])", r"\\land "),
        (r"\\(?:mathbb|Bbb|mathbf)(?:\s*\{\s*|\s+)([RNZQC])(?![A-Za-z])\s*\}?", r"\\mathbb{\1}"),
        (r"\\in\s*R(?![A-Za-z_^])", r"\\in \\mathbb{R}"),
        (r"\\mathbb\{R\}\s*(?:\^\s*\{?\s*\+\s*\}?|_\s*\{?\s*(?:\+|>\s*0)\s*\}?)", r"(0,\\infty)"),
        (r"\\mathbb\{R\}\s*(?:\^\s*\{?\s*-\s*\}?|_\s*\{?\s*(?:-|<\s*0)\s*\}?)", r"(-\\infty,0)"),
        (r"\\mathbb\{R\}\s*_\s*\{?\s*(?:\\ge|>=)\s*0\s*\}?", r"[0,\\infty)"),
        (
            r"(\\mathbb\{[RNZQC]\})\s*(?:-|\\backslash(?![A-Za-z])|\\)\s*(?=\\?\{|[(\[])",
            r"\1\\setminus ",
        ),
        (
            r"\\mathbb\{([ZN])\}\s*(?:\^\s*\{?\s*\+\s*\}?|_\s*\{?\s*(?:\+|>\s*0)\s*\}?)",
            r"\\mathbb{\1}_{>0}",
        ),
        (r"\\\{\s*\\\}", r"\\emptyset "),
        (r"\\?\{\s*[a-z]\s*\\in\s*(\\mathbb\{[RZNQC]\})\s*\\?\}", r"\1"),
        (
            rf"\\?\{{\s*([a-z])\s*(?:\||:|\\mid(?![A-Za-z]))\s*\1\s*(?:{TEXT}\s*\{{)?\s*is\s+"
            r"(?:an?y?\s+)?real(?:\s+number)?\s*(?:\}\s*)?\\?\}",
            r"\\mathbb{R}",
        ),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\{\s*([^{}\\]+?)\s*\\choose\s*([^{}\\]+?)\s*\}", r"\\binom{\1}{\2}"),
        (r"^\s*(\w+)\s*\\choose\s*(\w+)\s*$", r"\\binom{\1}{\2}"),
        # The numbers of a letter in a relation, which `families.domains_clash` compares.
        (
            rf"^\s*(?:{TEXT}\s*\{{)?\s*(?:for )?(?:all|any|every|each)"
            r"(?: (?:(?:positive|negative|non-?negative) )?"
            r"(?:integers?|reals?(?: numbers?)?|natural numbers?))?"
            r"(?: (?:of|with|such that|satisfying))?\s*\}?\s*"
            r"(?=[a-z]\s*(?:[<>=]|\\(?:[lg]e|neq|equiv|in)(?![A-Za-z])))",
            "",
        ),
        (r"\\binom\s*(\w)(?!\w*\})", r"\\binom{\1}"),
        (r"(\\binom\s*\{[^{}]*\})\s*(\w)", r"\1{\2}"),
        (
            rf"(?<![\w.])(\d+|[a-z])\s+(?:choose\s+|{TEXT}\s*\{{\s*choose\s*\}}\s*)(\d+|[a-z])(?![\w.])",
            r"\\binom{\1}{\2}",
        ),
        *(
            (
                rf"(:\d\d)\s*({TEXT}\s*\{{)?\s*[{half}]\.?\s*[mM]\.?(?(2)\s*\}})(?=\s*\}}?\s*$)",
                rf"\1 {half[0]}m",
            )
            for half in ("aA", "pP")
        ),
        # The name of an angle or triangle, whose letters are not a product.
        (r"^\s*\\(angle|triangle)\s*([A-Z]{2,4})\s*$", r"\\text{\1 \2}"),
        (r"\\lbrack(?![A-Za-z])", "["),
        # Functions as named elsewhere.
        *(
            (
                rf"(?:{TEXT}\s*\{{\s*|\\|(?<![A-Za-z\\])){name}(?:\s*\}}|(?![A-Za-z]))"
                r"(?=[\s({\\^\d]|[a-z](?![a-z]))",
                rf"\\{usual} ",
            )
            for name, usual in _OTHER_NAMES.items()
        ),
        *(
            (
                rf"\\(?:(?:operatorname|mathrm)\s*\{{\s*{name}\s*\}}|{name}(?![A-Za-z]))",
                rf"\\{usual} ",
            )
            for name, usual in (("sh", "sinh"), ("ch", "cosh"), ("th", "tanh"), ("cth", "coth"))
        ),
        (
            rf"{TEXT}\s*\{{\s*((?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp)\s*\}}"
            r"(?!\s*[.,]?\s*$)",  # seconds
            r"\\\1 ",
        ),
        (rf"(?:{TEXT}\s*\{{\s*cis\s*\}}|\\?\bcis)\s*\(({_ARGUMENT})\)", r"e^{i\\cdot (\1)}"),
        (
            rf"(?:{TEXT}\s*\{{\s*cis\s*\}}|\\?\bcis)\s*(\\frac\s*\{{[^{{}}]*\}}\s*\{{[^{{}}]*\}}|\d+(?:\s*\^\s*\{{?\\circ\}}?)?|\\(?!frac|sqrt)[a-z]+|[a-z])",
            r"e^{i\\cdot (\1)}",
        ),
        (r"(?<=e\^\{i\\cdot \()(\d+)\s*\^\s*\{?\\circ\s*\}?(?=\)\})", r"\\frac{\1\\pi}{180}"),
        # Money.
        (r"(?<![A-Za-z}\]])\{\s*(\\[A-Za-z]+)\s*\}(?=\s*[_^])", r"\1"),
        (r"\\pounds(?![A-Za-z])", "£"),
        (r"\\(?:text)?euro(?![A-Za-z])", "€"),
        (r"\s*(?:¢|\\(?:text)?cent(?![A-Za-z]))", r"\\text{ cents}"),
        (rf"{TEXT}\s*\{{\s*(Rs|USD|EUR|GBP|INR)\.?\s*\}}\s*(?=\d)", r"\1 "),
        (rf"{TEXT}\s*\{{\s*([£€¥₹]|(?:US\s*)?\\\$)\s*\}}", r"\1"),
        (r"\bUS\s*(?=\\\$)", ""),
        (r"\bper[ -]cents?\b", "percent"),
        (r"(\d)\u0307", r"\\dot{\1}"),
        (r"(\d)\u0305(?![\d\u0305])", r"\\overline{\1}"),
        # `0.\dot{1}4285\dot{7}`, digits with a base, `1'000`.
        (r"(\.\d*)\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", r"\1\\overline{\2\3\4}"),
        (r"(\.\d*)\\dot\s*\{?(\d)\}?(?!\d)", r"\1\\overline{\2}"),
        (r"\\overline\s*\{\s*(\w+)\s*\}(?=\s*_)", r"\1"),
        (
            r"(?<![\d.])([1-9]\d{0,2})['’](\d{3})(?:['’](\d{3}))?(?:['’](\d{3}))?(?![\d'’])",
            r"\1\2\3\4",
        ),
        (r"(?<![\d.,])([1-9]\d{0,2})\.(\d{3})\.(\d{3})(?:\.(\d{3}))?(?![\d.,])", r"\1\2\3\4"),
        (r"(?<![\d.,])([1-9]\d{0,2})\.(\d{3})(?:\.(\d{3}))?,(\d{1,2})(?![\d.,])", r"\1\2\3.\4"),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r":=|\\coloneqq(?![A-Za-z])", "="),
        (r"\\geq(?:slant)?(?![A-Za-z])", r"\\ge "),
        (r"\\leq(?:slant)?(?![A-Za-z])", r"\\le "),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\(?:overline|bar)\s*(\d)(?!\d)", r"\\overline{\1}"),
        (r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]|\\(?:cr|tabularnewline|newline)(?![A-Za-z])"
            r"|\\\\\*", r"\\\\"),
        (r"\\(?:hline|(?:top|mid|bottom)rule)(?![A-Za-z])|\\cline\s*\{[^{}]*\}", " "),
        (r"\\([pbB]?matrix)\s*\{([^{}]*)\}", r"\\begin{\1}\2\\end{\1}"),
        (r"(?<!\\)\\(?:\(|\)|\[|\])|\$\$", " "),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"\\Pr(?![A-Za-z])|\\(?:mathrm|mathbb|text|operatorname)\s*\{\s*Pr?\s*\}(?=\s*\()", "P"),
        (
            r"\bP\s*\(([^()|]+?)\s*(?:\||\\(?:mid|vert)(?![A-Za-z]))\s*([^()|]+)\)",
            r"P(\1\\mid \2)",
        ),
        (rf"^\s*(\d+){_TO}(\d+){_TO}(\d+)\s*$", r"\1:\2:\3"),
        (rf"^\s*(\d+){_TO}(\d+)\s*$", r"\1:\2"),
        (
            rf"^\s*(\d+)\s*(?:{TEXT}\s*\{{\s*(?:out of|in)\s*\}}|\b(?:out of|in)\b)\s*(\d+)\s*$",
            r"\\frac{\1}{\2}",
        ),
        (r"\.{2,}|\\dots(?:c|b)?(?![A-Za-z])|\\cdots(?![A-Za-z])", r"\\ldots "),
        (r"\\frac\s*(\\(?!frac|sqrt|text|left)[A-Za-z]+|\w)", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\\(?!frac|sqrt|text|left)[A-Za-z]+|\w)", r"\1{\2}"),
        (
            rf"\\sqrt\s*(\[\d+\])?\s*(\\frac\s*\{{[^{{}}]*\}}\s*\{{[^{{}}]*\}}|\\(?:{GREEK_LETTERS})(?![A-Za-z]))",
            r"\\sqrt\1{\2}",
        ),
        (r"\{\s*(\w+|\\pi)\s*\\over\s*(\w+|\\pi)\s*\}", r"\\frac{\1}{\2}"),
        (r"\{([/:])\}", r"\1"),
        # A decimal comma, unless it may be a thousands separator.
        (r"(?<![\d.,])([-+]?0)\{,\}(?=\d)", r"\1."),
        (r"(?<=\d)\{,\}(?=\d)(?!\d{3}(?!\d))", "."),
        (r"^(\s*[-+]?[1-9]\d{0,2})\{,\}(\d{3}\s*)$", r"\1,\2"),  # see `read_numbers`
        (r"^(\s*[-+]?\d+),(?!\d{3}\D)(\d+\s*\\?%\s*)$", r"\1.\2"),
        # Thousands: `1{,}000`, `1,\!000`, `1\,000`, `1 000`.
        (r"(?<=\d)(?:\{,\}|, ?\\!|\\,|\\;|\\:|\\ |~)\s*(?=\d{3}(?!\d))", "\ue000"),
        (r"(?<![\d.])(\d{1,3}) (?=\d{3}(?: \d{3})*(?![\d/]))", "\\1\ue000"),
        (r"\ue000", ""),
        (r"(?<!\\)\\[,;:! ]|~|\\q?quad(?![A-Za-z])", " "),
        # Plain-text notation of humans and programs.
        (r"\*\*", "^"),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=|\\not\s*(?:=|\\eq(?![A-Za-z]))", r"\\neq "),
        (r"\\not\s*\\in(?![A-Za-z])", r"\\notin "),
        (
            r"(?<=[\w})\]|'])(?<!matrix\})(\s*)\\equiv(?![A-Za-z])(?!.*mod)"
            r"(?=\s*(?:[\w{([|.+-]|\\(?!end)[A-Za-z]))",
            r"\1=",
        ),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"==+", "="),
        (rf"(?<![A-Za-z\\])(?:sqrt|√|\\sqrt)\s*\(({_ARGUMENT})\)", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])(?:sqrt|√)\s*\{", r"\\sqrt{"),
        (r"(?<![A-Za-z\\])(max|min|gcd|lcm)\s*\\?\{([^{}\\]*)\\?\}", r"\1(\2)"),
        (r"\\(max|min|gcd)\s*\\\{([^{}\\]*)\\\}", r"\\\1(\2)"),
        (r"(?<![A-Za-z])\\?log_\{?e\}?(?![A-Za-z])", r"\\ln "),
        (r"(?<![A-Za-z\\])(ln|log)\s?(\d+)(?=\s*/\s*(?:ln|log))", r"\1(\2)"),
        (rf"(?<![A-Za-z\\])(?:cbrt|∛)\s*\(({_ARGUMENT})\)", r"\\sqrt[3]{\1}"),
        (
            rf"(?:(?<![A-Za-z\\])[aA]bs|\\operatorname\s*\{{\s*abs\s*\}})\s*\(({_ARGUMENT})\)",
            r"|\1|",
        ),
        (rf"(?<![A-Za-z\\])floor\s*\(({_ARGUMENT})\)", r"\\lfloor \1\\rfloor "),
        (rf"(?<![A-Za-z\\])ceil(?:ing)?\s*\(({_ARGUMENT})\)", r"\\lceil \1\\rceil "),
        (r"(?<![A-Za-z\\])log_?(2|10)\s*(?=\()", r"\\log_{\1}"),
        # xsin(x), nlogn
        (rf"(?<![A-Za-z\\])([b-z])(?=(?:{PLAIN_FUNCTIONS})(?:\s*\(|[nxyz](?![A-Za-z])))", r"\1 "),
        (rf"(?<![A-Za-z\\])(?:sqrt|√)\s*({_BARE})", r"\\sqrt{\1}"),
        (r"√", r"\\sqrt "),
        (rf"∛\s*\(?({_BARE})\)?", r"\\sqrt[3]{\1}"),
        (r"(?<![A-Za-z\\])[pP]i(?![A-Za-z])", r"\\pi "),
        (rf"^\s*(?:{TEXT}\s*\{{)?\s*(?:positive|plus)\s+infinity\s*\}}?\s*$", r"\\infty "),
        (rf"^\s*(?:{TEXT}\s*\{{)?\s*(?:negative|minus)\s+infinity\s*\}}?\s*$", r"-\\infty "),
        (r"^\s*\+\s*\\infty\s*$", r"\\infty "),
        (r"(?<![A-Za-z\\])(?:infinity|infty|inf|oo)(?![A-Za-z])", r"\\infty "),
        (rf"^\s*{TEXT}\s*\{{\s*(?:it )?converges to\s*\}}\s*(?=[-+\d\\])", ""),
        (r"^\s*(?:it )?converges to\s+(?=[-+\d\\])", ""),
        (r"\\mathcal\s*\{?\s*N\s*\}?(?=\s*(?:\(|\\left))", "N"),
        (r"^\s*([a-z])\s*:\s*([a-z])\s*\\mapsto(?![A-Za-z])\s*", r"\1(\2)="),
        (
            rf"^\s*(?:{TEXT}\s*\{{)?\s*(?:diverges|tends|goes) to"
            r"\s*\}?\s*([-+]?\\infty)\s*\}?\s*$",
            r"\1",
        ),
        (
            r"^\s*([a-z])\s*\\neq\s*(?:\\pm\s*(\d+))\s*$",
            r"\1\\neq \2, \1\\neq -\2",
        ),
        (
            r"^\s*([a-z])\s*\\neq?(?![A-Za-z])\s*([-\d./]+)"
            r"\s*(?:,|\\text\s*\{\s*(?:and|or)\s*\})\s*"
            r"([-\d./]+)\s*$",
            r"\1\\neq \2, \1\\neq \3",
        ),
        # The argument of a function ends before another.
        (
            rf"\\({_TRIG})\s*([a-z]|\\[a-z]+)\s*\\(?:cdot|times)\s*(?=\\(?:{_TRIG})(?![A-Za-z])|e\s*\^)",
            r"\\\1(\2)\\cdot ",
        ),
        # Divisible by a number.
        (
            rf"^\s*(?:{TEXT}\s*\{{)?\s*(?:all |the |any )?"
            r"(?:(?:integer|number)s? )?(?:that are )?(?:multiples of|divisible by)"
            r"\s*\}?\s*(\d+)\s*\}?\s*$",
            r"n\\equiv 0\\pmod{\1}",
        ),
        (r"^\s*([a-z])\s*\|\s*(\d+)\s*$", r"\1\\mid \2"),
        (r"^\s*(\d+)\s*(?:\||\\mid(?![A-Za-z]))\s*([a-z])\s*$", r"\2\\equiv 0\\pmod{\1}"),
        (
            rf"^\s*(?:{TEXT}\s*\{{)?\s*([a-z])\s*\}}?\s*(?:{TEXT}\s*\{{)?\s*"
            r"(?:(?:is|are|must be)\s+)?"
            r"(?:divisible by|an? multiples? of)\s*\}?\s*(\d+)\s*\}?\s*$",
            r"\1\\equiv 0\\pmod{\2}",
        ),
        (r"\^\(([^()]*)\)", r"^{\1}"),
        (r"(?<![A-Za-z\\])e\^\s*-\s*(\d*)\s*([a-z])(?![A-Za-z^_(])", r"e^{-\1\2}"),
        (r"\^\s*([+-])\s*(\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z])|\\pi(?![A-Za-z]))", r"^{\1\2}"),
        (r"\^\s*(\d{2,})(?![\d.])", r"^{\1}"),
        (r"(?<=[\d.])\s*[xX]\s*(?=10\s*\^)", r" \\times "),
        # `1/2 x` is half of x: read from left to right, as in programs.
        (
            r"(?<![\d.^_A-Za-z])(\d+)\s*/\s*(\d+)(?=\s*(?:\\(?:pi|sqrt)|[a-z](?![a-z])))",
            r"\\frac{\1}{\2}",
        ),
        # Scientific notation, millions.
        (
            rf"(?<![A-Za-z\d])({DECIMAL})[eE]([+-]?\d+)(?![\dA-Za-z.]|{_BASED})",
            r"\1 \\times 10^{\2}",
        ),
        # Degrees, percent and text that only wraps a number or a letter.
        (r"\^\s*\{\s*\\circ\s*\}", r"^{\\circ}"),
        (r"(?:\^\s*)?\\degree(?![A-Za-z])|\^\s*\\circ(?![A-Za-z])", r"^{\\circ}"),
        (rf"{TEXT}\s*\{{\s*([-+]?\d[\d.,]*)\s*\}}", r"\1"),
        (rf"^\s*{TEXT}\s*\{{\s*(\(?[A-Za-z]\)?)\s*\}}\s*$", r"\1"),
        (rf"^\s*{TEXT}\s*\{{\s*([-+]?\d[\d.,]*)\s+([^{{}}]+)\}}\s*$", r"\1 \\text{\2}"),
        (rf"^\s*{TEXT}\s*\{{((?:[A-Z\d]{{1,5}}\s*,\s*)+[A-Z\d]{{1,5}})\s*\}}\s*$", r"\1"),
        (r"^\s*\\nexists\s*$", r"\\text{does not exist}"),
        (rf"({TEXT}\s*\{{[A-Za-z ]+)\^\s*\{{?([23])\}}?\s*\}}", r"\1}^{\2}"),
        (r"\\(?:mathrm|text|rm)\s*\{\s*([ei])\s*\}", r"\1"),
        (r"\{\s*\\rm\s+([^{}]*)\}", r"\\text{\1}"),
        # One mark for vectors and unit vectors; \mathbf{R} is a set.
        (
            r"\\(hat|widehat|bar|tilde|widetilde|d?dot)\s+\\?([A-Za-z])(?:math)?(?![A-Za-z])",
            r"\\\1{\2}",
        ),
        (
            rf"\\(hat|widehat|bar|tilde|widetilde|vec|d?dot)\s*\\({GREEK_LETTERS})(?![A-Za-z])",
            r"\\\1{\\\2}",
        ),
        (r"\\(?:wide)?hat\s*\{\s*\\?([ijk])(?:math)?\s*\}", r"\\vec{\1}"),
        (r"\\(?:wide)?hat\s*\{\s*(\\vec\{[ijk]\})\s*\}", r"\1"),
        (rf"\\(?:{_VECTOR})\s*\{{\s*\\?([A-MO-PS-Ya-z])(?:math)?\s*\}}", r"\\vec{\1}"),
        (rf"\\(?:{_VECTOR})\s+\\?([A-MO-PS-Ya-z])(?:math)?(?![A-Za-z])", r"\\vec{\1}"),
        (rf"\\(?:{_VECTOR})\s*\{{\s*\\vec\{{(\w)\}}\s*\}}", r"\\vec{\1}"),
    ]
]  # fmt: skip


_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")


def _needed(pattern: re.Pattern[str]) -> frozenset[str]:
    """Characters that every text with a match of a pattern has."""

    def of(items: Iterable[Any]) -> set[str]:
        found: set[str] = set()
        for operation, argument in items:
            match str(operation), argument:
                case "LITERAL", code:
                    found.add(chr(code))
                case "SUBPATTERN", (*_, inner):
                    found |= of(inner)
                case "ASSERT", (_, inner):
                    found |= of(inner)
                case "MAX_REPEAT" | "MIN_REPEAT", (least, _, inner) if least:
                    found |= of(inner)
                case "BRANCH", (_, branches):
                    found |= set.intersection(*map(of, branches))
        return found

    parsed = [] if pattern.flags & re.IGNORECASE else _parser.parse(pattern.pattern)
    return frozenset(of(parsed))


_NEEDED = [_needed(pattern) for pattern, _ in _RULES]


@lru_cache(maxsize=4096)
def _possible(characters: frozenset[str]) -> list[int]:
    """The rules that can match a text with these characters."""
    return [number for number, needed in enumerate(_NEEDED) if needed <= characters]


_MENTIONED = frozenset().union(*_NEEDED)


def rewritten(text: str) -> str:
    """The text after each of `_RULES` in turn; those that cannot match are not tried."""
    done = -1
    while True:
        before = text
        for number in _possible(_MENTIONED.intersection(text)):
            if number > done:
                pattern, replacement = _RULES[number]
                text, done = pattern.sub(replacement, text), number
                if text != before:  # it may have characters that other rules need
                    break
        else:
            return text
