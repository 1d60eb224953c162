"""The classes of spellings that references and predictions come in, and near misses of each."""

import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.verifier import processor
from tramontane.verifier.math.grade import judge_answer
from tramontane.verifier.math.numbers import to_number

LINES = (Path(__file__).parent / "spellings.txt").read_text(encoding="utf-8").splitlines()
DRAWN = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def cases():
    """(class, reference, prediction, outcome) of each entry of spellings.txt."""
    name = ""
    for line in LINES:
        if line.startswith("## "):
            name = line[3:]
        elif line and not line.startswith("#"):
            right, _, wrong = line.partition(" ‖ ")
            reference, *predictions = right.split(" ¦ ")
            yield from ((name, reference, p, "right") for p in predictions)
            yield from ((name, reference, p, "wrong") for p in wrong.split(" ¦ ") if p)


CASES = {}
for _name, *_case in cases():
    CASES.setdefault(_name, []).append(_case)


@pytest.mark.parametrize("name", sorted(CASES))
def test_spellings_of_a_class(name):
    failures = []
    for reference, prediction, outcome in CASES[name]:
        judgment = judge_answer(prediction, reference)
        if judgment.outcome != outcome:
            failures.append((reference, prediction, judgment))
    assert not failures


def right(prediction, reference):
    judgment = judge_answer(prediction, reference)
    assert judgment.outcome == "right", (prediction, reference, judgment.reason)


def wrong(prediction, reference):
    judgment = judge_answer(prediction, reference)
    assert judgment.outcome == "wrong", (prediction, reference)


# ----------------------------------------------------------------------------------- decimals

numerators = st.integers(1, 10**6)
denominators = st.integers(3, 10**5).filter(lambda n: n % 3 == 0 or n % 7 == 0)
constants = st.sampled_from(
    [(r"\pi", math.pi), (r"\sqrt{2}", math.sqrt(2)), ("e", math.e), (r"\ln 2", math.log(2))]
)
signs = st.sampled_from(["", "-"])


def is_repeating(value):
    rest = value.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return rest > 1


def shown(exact, places):
    """The decimal of a number, rounded at so many places, without an exponent."""
    scaled = round(abs(exact) * 10**places)
    digits = str(scaled).rjust(places + 1, "0")
    return f"{digits[:-places]}.{digits[-places:]}"


@DRAWN
@given(numerators, denominators, signs, st.integers(6, 12))
def test_rounded_decimals_of_fractions_at_every_magnitude(a, b, sign, places):
    exact = Fraction(a, b)
    assume(is_repeating(exact))
    reference = rf"{sign}\frac{{{exact.numerator}}}{{{exact.denominator}}}"
    decimal = shown(exact, places)
    significant = len(decimal.replace(".", "").lstrip("0"))
    assume(significant >= 4)
    right(sign + decimal, reference)
    right(f"x = {sign}{decimal}", reference)
    right(f"{sign}{float(exact)!r}", reference)
    wrong(("" if sign else "-") + decimal, reference)
    if significant < 15:  # beyond, it may be the error of a float
        wrong(sign + shown(exact + Fraction(2, 10**places), places), reference)
    wrong(sign + shown(exact * 10, places), reference)
    wrong(sign + shown(exact, 3), reference)


@DRAWN
@given(constants, st.integers(-8, 8), signs)
def test_rounded_decimals_of_constants_at_every_magnitude(constant, power, sign):
    name, value = constant
    reference = rf"{sign}10^{{{power}}}\cdot {name}" if name != "e" else rf"{sign}10^{{{power}}}e"
    mantissa = f"{value:.12f}"
    right(rf"{sign}{mantissa}\times 10^{{{power}}}", reference)
    right(f"{sign}{mantissa}e{power}", reference)
    right(f"{sign}{float(f'{value!r}e{power}')!r}", reference)
    wrong(f"{sign}{value:.2f}e{power}", reference)
    wrong(f"{sign}{mantissa}e{power + 1}", reference)
    wrong(f"{sign}{value * 1.000001:.12f}e{power}", reference)


@DRAWN
@given(st.integers(1, 10**9), st.integers(0, 8))
def test_a_decimal_that_ends_is_exact_up_to_the_error_of_a_float(digits, places):
    reference = shown(Fraction(digits, 10**places), places) if places else str(digits)
    value = float(reference)
    right(repr(math.nextafter(value, math.inf)), reference)
    wrong(repr(value * (1 + 1e-12)), reference)
    if value < 10**5:
        wrong(shown(Fraction(reference) + Fraction(1, 10**10), 10), reference)


# ---------------------------------------------------------------------------------- equations

NAMES = [
    "x",
    "C",
    r"\theta",
    "AB",
    "|AB|",
    r"\angle ABC",
    "f(3)",
    "S_{ABC}",
    "a_5",
    "P(A)",
    r"\overline{AB}",
    r"\text{Area}",
    "x+y",
    r"m\angle B",
    r"n(A \cup B)",
    r"\vec{v}",
]
VALUES = ["5", r"\frac12", r"2\pi", r"3\sqrt{2}", "-7", "0.25"]
names, value_texts = st.sampled_from(NAMES), st.sampled_from(VALUES)


@DRAWN
@given(names, value_texts, value_texts)
def test_a_value_may_stand_on_either_side_of_its_name(name, value, other):
    for prediction in (f"{name} = {value}", f"{value} = {name}", f"{name} = {value} = {value}"):
        right(prediction, value)
    if value != other:
        for prediction in (
            f"{other} = {name}",
            f"{name} = {other}",
            f"{name} = {other} = {value}",
            f"{value} = {name} = {other}",
            f"{other} = {value}",
        ):
            wrong(prediction, value)


@DRAWN
@given(st.sampled_from(["2x", "x^2", "x-1", "3-x", r"\sqrt{x}", r"2\theta", "3AB"]), value_texts)
def test_an_equation_that_is_not_solved_is_no_answer_in_either_order(unsolved, value):
    wrong(f"{unsolved} = {value}", value)
    wrong(f"{value} = {unsolved}", value)


@DRAWN
@given(
    st.sampled_from(["y", "f(x)", "f'(x)", r"\frac{dy}{dx}", r"g_1(x)"]),
    st.sampled_from(["2x", "x^2+1", r"\frac{x}{3}", "x-1"]),
)
def test_an_expression_may_stand_on_either_side_of_its_name(name, expression):
    right(f"{name} = {expression}", expression)
    right(f"{expression} = {name}", expression)
    wrong(f"{expression} + 1 = {name}", expression)


# --------------------------------------------------------------------------------- remainders

MODULUS = [
    r"{a} \bmod {m}",
    r"{a} \mod {m}",
    r"{a} \pmod {m}",
    r"{a} \pmod{{{m}}}",
    "{a} (mod {m})",
    r"x \equiv {a} \pmod{{{m}}}",
    r"{a} \;(\text{{mod }} {m})",
    r"{a}\ (\mathrm{{mod}}\ {m})",
]


@DRAWN
@given(st.integers(2, 10**6), st.integers(2, 500), st.integers(2, 99), st.sampled_from(MODULUS))
def test_remainders_are_evaluated(base, exponent, m, form):
    remainder = pow(base, exponent, m)
    power = f"{base}^{{{exponent}}}"
    right(form.format(a=power, m=m), str(remainder))
    wrong(form.format(a=power, m=m), str(remainder + 1))
    right(rf"{power} \bmod {m} = {remainder}", str(remainder))
    right(rf"{power} \equiv {remainder} \pmod{{{m}}}", str(remainder))
    wrong(rf"{power} \equiv {remainder + 1} \pmod{{{m}}}", str(remainder + 1))
    right(rf"{remainder + m} \pmod{{{m}}}", rf"x \equiv {remainder} \pmod{{{m}}}")
    wrong(rf"{remainder + 1} \pmod{{{m}}}", rf"x \equiv {remainder} \pmod{{{m}}}")
    wrong(rf"{remainder} \pmod{{{m + 1}}}", rf"x \equiv {remainder} \pmod{{{m}}}")


# -------------------------------------------------------------------------- bases, intervals

NUMERALS = [
    "{d}_{b}",
    "{d}_{{{b}}}",
    "({d})_{b}",
    "({d})_{{{b}}}",
    "x = ({d})_{{{b}}}",
    r"{d} \text{{ (base {b})}}",
    r"{d}_{{\text{{base }} {b}}}",
    "{d} base {b}",
]


def digits_of(number, base):
    digits = ""
    while number:
        number, last = divmod(number, base)
        digits = "0123456789ABCDEF"[last] + digits
    return digits


@DRAWN
@given(st.integers(100, 10**6), st.integers(2, 9), st.sampled_from(NUMERALS))
def test_numerals_in_every_notation_of_their_base(number, base, form):
    reference = f"{digits_of(number, base)}_{{{base}}}"
    right(form.format(d=digits_of(number, base), b=base), reference)
    right(digits_of(number, base), reference)
    right(f"{number} = " + form.format(d=digits_of(number, base), b=base), reference)
    wrong(form.format(d=digits_of(number + 1, base), b=base), reference)
    wrong(form.format(d=digits_of(number, base), b=base + 1), reference)
    wrong(form.format(d=digits_of(number, base), b=base), str(number))
    wrong(str(number), reference)


@pytest.mark.parametrize(("prefix", "base"), [("0x", 16), ("0b", 2), ("0o", 8)])
def test_prefixes_of_programs_name_a_base(prefix, base):
    for number in (42, 255, 1000):
        digits = digits_of(number, base)
        right(prefix + digits.lower(), f"{digits}_{{{base}}}")
        right(f"({digits})_{{{base}}}", prefix + digits)
        wrong(prefix + digits_of(number + 1, base), f"{digits}_{{{base}}}")
        wrong(prefix + digits, str(number))
        wrong(prefix + digits, "0")


ENDS = st.integers(-20, 20)


@DRAWN
@given(ENDS, ENDS, st.sampled_from(["()", "[)", "(]", "[]"]), st.sampled_from([",", ";"]))
def test_intervals_with_brackets_turned_outwards(a, b, kind, separator):
    assume(a < b)
    turned = {"(": "]", "[": "[", ")": "[", "]": "]"}
    reference = f"{kind[0]}{a}, {b}{kind[1]}"
    european = f"{turned[kind[0]]}{a}{separator} {b}{turned[kind[1]]}"
    right(european, reference)
    right(reference, european)
    right(rf"\left{turned[kind[0]]}{a}{separator}{b}\right{turned[kind[1]]}", reference)
    right(
        rf"{european} \cup {turned['(']}{b + 1}{separator}{b + 2}{turned[')']}",
        rf"{reference} \cup ({b + 1}, {b + 2})",
    )
    for other in ("()", "[)", "(]", "[]"):
        if other != kind:
            wrong(european, f"{other[0]}{a}, {b}{other[1]}")
    wrong(european, f"{kind[0]}{a}, {b + 1}{kind[1]}")


# ------------------------------------------------------------------------- vectors, units


@DRAWN
@given(st.lists(st.integers(-9, 9), min_size=2, max_size=4))
def test_a_vector_is_a_column_a_row_or_a_tuple(entries):
    column = r"\begin{pmatrix}" + r"\\".join(map(str, entries)) + r"\end{pmatrix}"
    row = r"\begin{bmatrix}" + "&".join(map(str, entries)) + r"\end{bmatrix}"
    plain = ", ".join(map(str, entries))
    for reference in (column, row, f"({plain})", rf"\langle {plain} \rangle"):
        right(f"({plain})", reference)
        right(rf"\left\langle {plain} \right\rangle", reference)
        right(rf"\vec{{v}} = ({plain})", reference)
        wrong(rf"({plain}, 1)", reference)
        wrong(f"({', '.join(map(str, [entries[0] + 1, *entries[1:]]))})", reference)
        if entries[::-1] != entries:
            wrong(f"({', '.join(map(str, entries[::-1]))})", reference)
        wrong(plain, reference)
    right(f"{row}^T", column)
    right(column, f"({plain})")
    wrong(row, column)
    wrong(column, row)


@DRAWN
@given(st.integers(2, 500), st.sampled_from("mshgLJW"))
def test_a_letter_attached_to_a_number_follows_one_policy(number, unit):
    right(f"{number}{unit}", f"{number}")
    right(f"{number}{unit}", f"{number} {unit}")
    right(rf"{number}\text{{ {unit}}}", f"{number}{unit}")
    wrong(f"{number}", f"{number}{unit}")  # the reference may be algebra
    wrong(f"{number + 1}{unit}", f"{number}")
    wrong(f"{number}{unit}", f"{number}x")
    for variable in "xyzabnkt":
        wrong(f"{number}{variable}", f"{number}")


SYMBOLS = st.sampled_from(
    ["m", "s", "g", "kg", "km", "cm", "N", "J", "W", "V", "Pa", "Hz", "mol", "kJ", "kPa", "mA", "K"]
)
WRAPPERS = st.sampled_from(
    [r"\text{{ {}}}", r"\mathrm{{{}}}", r"\,\mathrm{{~{}}}", r"\ \text{{{}}}"]
)


@DRAWN
@given(st.integers(2, 500), SYMBOLS, SYMBOLS, st.integers(1, 3), WRAPPERS)
def test_compound_units_in_every_notation(number, above, below, power, wrap):
    assume(above != below)
    exponent = f"^{power}" if power > 1 else ""
    quotient = rf"{number} \text{{ {above}/{below}{exponent}}}"
    spellings = [
        number,
        f"{number}{wrap.format(f'{above}/{below}{exponent}')}",
        rf"{number}\,\mathrm{{{above} \cdot {below}^{{-{power}}}}}",
        rf"{number} \text{{ {above}}}\,\text{{{below}}}^{{-{power}}}",
        rf"{number}\frac{{\text{{{above}}}}}{{\text{{{below}}}{exponent}}}",
    ]
    for spelling in spellings:
        right(str(spelling), quotient)
        right(quotient, str(spelling))
    wrong(rf"{number} \text{{ {below}/{above}{exponent}}}", quotient)
    wrong(rf"{number} \text{{ {above}}}", quotient)
    wrong(rf"{number} \text{{ {above} {below}{exponent}}}", quotient)
    wrong(rf"{number + 1} \text{{ {above}/{below}{exponent}}}", quotient)


# Words that make another number of the number before them, or are nothing that can be counted.
CHANGED = [
    "thirds",
    "halves",
    "quarters",
    "fifths",
    "tenths",
    "hundredths",
    "doubled",
    "tripled",
    "halved",
    "squared",
    "negative",
    "k",
    "bn",
    "gross",
    "score",
    "dozen",
    "pairs",
    "fold",
    "factorial",
    "minus",
    "plus",
    "hundred-ish",
    "or-so",
    "maybe",
    "not",
    "zillion",
    "percentiles",
    "sevenths",
    "times-two",
    "M",
    "B",
    "lakh",
    "crore",
    "grand",
    "short",
    "over",
]


@DRAWN
@given(st.integers(2, 500), st.sampled_from(CHANGED), st.booleans())
def test_words_that_are_no_unit_are_no_part_of_a_number(number, word, in_text):
    word = word.replace("-", " ")
    changed = rf"{number} \text{{ {word}}}" if in_text else f"{number} {word}"
    wrong(changed, str(number))
    wrong(str(number), changed)
    right(changed, changed)


VARIABLES = st.lists(st.sampled_from("abcdefijknpqrtuvxyz"), min_size=1, max_size=3).map(sorted)


@DRAWN
@given(st.integers(2, 500), VARIABLES, st.sampled_from(["", " ", r"\,"]), st.integers(1, 3))
def test_variables_are_no_units(number, letters, space, power):
    product = f"{number}{space}{space.join(letters)}" + (f"^{power}" if power > 1 else "")
    wrong(str(number), product)
    wrong(product, str(number))
    wrong(rf"{number}\mathbf{{{letters[0]}}}", str(number))
    wrong(str(number), rf"{number}\mathbf{{{letters[0]}}}")
    wrong(str(number), rf"{number}\hat{{{letters[0]}}}")


@DRAWN
@given(st.integers(30, 400), st.integers(2, 4), st.integers(1, 9))
@pytest.mark.slow
def test_cancellation_of_large_terms_is_seen(digits, root, added):
    small = rf"\sqrt[{root}]{{10^{{{root * digits}}}+{added}}}-10^{{{digits}}}"
    wrong(small, "0")
    wrong("0", small)
    right(rf"\sqrt[{root}]{{10^{{{root * digits}}}}}-10^{{{digits}}}", "0")


@DRAWN
@given(
    names.filter(lambda name: name != "x+y"),
    st.sampled_from(["1.31", "0.5", "12.57", "3e-5"]),
    st.sampled_from(["approx", "simeq"]),
)
def test_a_name_is_no_answer_for_its_approximation(name, value, sign):
    reference = rf"{name} \{sign} {value}"
    right(value, reference)
    right(rf"{name} \approx {value}", value)
    right(f"{name} = {value}", reference)
    wrong(name, reference)
    wrong(rf"{name} \approx 7{value}", value)


ORDERS = st.sampled_from(["<", ">", r"\le", r"\ge", r"\neq"])
BARS = st.sampled_from([r"\mid", "|", ":", r"\;\middle|\;", r"\text{ such that }"])


@DRAWN
@given(ENDS, ORDERS, BARS, st.sampled_from(["x", r"x \in \mathbb{R}"]), st.sampled_from("xtm"))
def test_a_set_is_its_condition(end, order, bar, element, letter):
    condition = f"x {order} {end}"
    built = rf"\{{{element} {bar} {condition}\}}".replace("x", letter).replace(
        "te" + letter + "t", "text"
    )
    right(built, condition)
    right(condition, built)
    wrong(built.replace(f"{end}", f"{end + 1}"), condition)
    wrong(rf"\{{x \in \mathbb{{Z}} \mid {condition}\}}", condition)


# ------------------------------------------------- counts, angles, solutions, repeating decimals

COUNTS = [
    "C({n},{k})", "C_{{{n}}}^{{{k}}}", "{{}}_{{{n}}}C_{{{k}}}", "{n}C{k}", "{n}C_{{{k}}}",
    r"\binom{{{n}}}{{{k}}}", r"\mathrm{{C}}_{{{n}}}^{{{k}}}", "^{{{n}}}C_{{{k}}}",
]  # fmt: skip


@DRAWN
@given(st.integers(3, 20), st.integers(1, 9), st.sampled_from(COUNTS), st.sampled_from(COUNTS))
def test_combinations_in_every_notation(n, k, form, other):
    assume(k < n)
    count = math.comb(n, k)
    spelt = form.format(n=n, k=k)
    right(spelt, str(count))
    right(str(count), spelt)
    right(other.format(n=n, k=k), spelt)
    right(f"x = {spelt}", str(count))
    wrong(spelt, str(count + 1))
    wrong(spelt, f"{count}x")
    wrong(form.format(n=n + 1, k=k), str(count))
    if "binom" not in form:
        permutations = spelt.replace("C", "P")
        right(permutations, str(math.perm(n, k)))
        wrong(permutations, str(math.perm(n, k) + 1))
        wrong(f"{permutations} x", f"{math.perm(n, k)} x")


@DRAWN
@given(st.integers(-48, 48).filter(bool), st.integers(1, 60))
def test_degrees_are_multiples_of_pi(turns, other):
    radians = rf"\frac{{{turns}\pi}}{{12}}"
    right(rf"{15 * turns}^\circ", radians)
    right(radians, rf"{15 * turns}^\circ")
    wrong(f"{15 * turns}", radians)
    wrong(rf"{15 * turns + other}^\circ", radians)
    wrong(rf"{radians}^\circ", radians)


@settings(DRAWN, max_examples=20)
@given(ENDS, ENDS, st.sampled_from([("<", "()"), (r"\le", "[]")]), st.booleans())
def test_a_quadratic_condition_is_its_interval(a, b, order, expanded):
    assume(a < b)
    sign, (left, right_end) = order
    product = f"x^2 + ({-a - b})x + ({a * b})" if expanded else f"(x - ({a}))(x - ({b}))"
    built = rf"\{{x : {product} {sign} 0\}}"
    right(built, f"{left}{a}, {b}{right_end}")
    right(f"{left}{a}, {b}{right_end}", built)
    wrong(built, f"({a}, {b}]")
    wrong(built, f"{left}{a}, {b + 1}{right_end}")
    wrong(f"{product} {sign} 0", f"{left}{a}, {b}{right_end}")


BLOCKS = st.sampled_from(["3", "12", "142857", "07", "09", "381", "6"])


@DRAWN
@given(BLOCKS, st.sampled_from(["0.", "2.4", "0.25", ".", "-1.0"]), st.integers(3, 5))
def test_dots_continue_a_block_that_stands_there_three_times(block, before, times):
    exact = to_number(f"{before}({block})")
    fraction = rf"{exact.numerator}/{exact.denominator}"
    for dots in (r"\ldots", "...", "…", r"\dots"):
        right(before + block * times + dots, fraction)
        wrong(before + block * 2 + dots, fraction)
        wrong(before + block * times + "8" + dots, fraction)
    right(before + block * times + "...", rf"{before}\overline{{{block}}}")


# -------------------------------------------------------------------------------------- length


@DRAWN
@given(st.sampled_from(["1+", "x+", r"\frac{1}{2}+", "("]), st.integers(300, 900))
def test_an_answer_equal_to_its_reference_is_right_at_any_length(part, count):
    reference = part * count + "1" + (")" * count if part == "(" else "")
    assume(len(reference) > 700)
    right(reference, reference)
    right(f" ${reference}$. ", reference)
    assert judge_answer(f"{reference}+1", reference).outcome != "right"


def test_a_long_answer_costs_no_more_than_its_reference_allows():
    with processor.at_most(1):
        wrong("1" * 10**6, "5")
        assert judge_answer("1+" * 10**5 + "2", "1+" * 10**5 + "1").outcome != "right"
    assert re.search("longer", judge_answer("1" * 2000, "5").reason)
