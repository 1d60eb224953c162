r"""Decides whether an answer (for math, the content of the last `\boxed{}`) equals the reference
(arXiv 2506.10910, section 2.2).

Both sides are normalized (`normalize`). Cheap and exact rules come first: words (`wording`), lists
and tuples item by item (`items`), numbers (`numbers`) and their units (`units`). Only the rest is
parsed as LaTeX and compared by value (`symbolic`, `regions`, `values`). Every step has a cap
(`structure`), and the worker process is killed from outside when late. The policies are in
docs/math-answers.md.
"""

from __future__ import annotations

import re
from functools import lru_cache, partial

from tramontane.config import MathConfig
from tramontane.types import Judgment
from tramontane.verifier.math import (
    calendar,
    cases,
    conversions,
    descriptions,
    equations,
    families,
    items,
    numbers,
    onward,
    quantities,
    sets,
    structure,
    units,
    wording,
)
from tramontane.verifier.math.counts import with_counts
from tramontane.verifier.math.equations import refuse_contradiction, refuse_unsolved
from tramontane.verifier.math.modular import same_remainder, without_kinds
from tramontane.verifier.math.normalize import normalize
from tramontane.verifier.math.reference import stated

DEFAULT = MathConfig()


def judge_answer(prediction: str, reference: str | None, policy: MathConfig = DEFAULT) -> Judgment:
    """Compare two answers as strings: LaTeX or plain text, without the box.

    Equal spellings are right whatever their length; only others must stay within the limits
    (`structure`). A prediction that makes a library raise is wrong: otherwise a policy could learn
    answers that are not graded.

    Raises:
        Exception: the reference makes a library raise, whatever the prediction.
    """
    try:
        judged = _judge(prediction, reference, policy)
        if judged.outcome == "unscorable" and can_judge(reference, policy):
            return judged._replace(outcome="wrong")  # for this prediction alone
        return judged
    except Exception as error:
        if not can_judge(reference, policy):
            raise
        return Judgment("wrong", f"the answer cannot be judged: {type(error).__name__}")


def can_judge(reference: str | None, policy: MathConfig = DEFAULT) -> bool:
    """True if a plain answer can be judged against a reference."""
    try:
        return _judge(_PLAIN_ANSWER, reference, policy).outcome != "unscorable"
    except Exception:
        return False


def can_read(reference: str, policy: MathConfig = DEFAULT) -> bool:
    """False for a reference that cannot be parsed: only its own spelling equals it."""
    return not _judge(_PLAIN_ANSWER, reference, policy).reason.startswith("the reference cannot")


_PLAIN_ANSWER = "17x+3"  # parsed, and compared by value with most references


def _judge(prediction: str, reference: str | None, policy: MathConfig) -> Judgment:
    if reference is None or not reference.strip():
        return Judgment("unscorable", "the problem has no reference answer")
    given, reference = reference, stated(reference)
    if len(prediction) > max(structure.MAX_LENGTH, 2 * len(reference)):
        return _too_long()
    if "matrix" in reference:
        prediction = items.as_rows(prediction)
    gold, pred = numbers.with_decimal_commas(
        *numbers.with_thousands(normalize(reference), normalize(prediction))
    )
    written = descriptions.as_families(reference, prediction, gold, pred)
    if written != (reference, prediction):
        reference, prediction = written
        gold, pred = normalize(reference), normalize(prediction)
    gold, pred = without_kinds(gold, pred)
    if families.of_others(reference, prediction):
        return Judgment("wrong", "not the reference", prediction)
    if policy.log == "natural":
        pred, gold = (_LOG.sub(r"\\ln ", side) for side in (pred, gold))
    if "I" in pred:
        pred = equations.with_imaginary_unit(gold, pred)
    if policy.explained == "right":
        pred = wording.without_reason(gold, pred)
    answer = wording.chosen(gold, pred) or None
    if not gold:
        return Judgment("unscorable", "the reference is empty", answer)
    if not pred:
        return Judgment("wrong", "the box is empty", answer)
    if families.domains_clash(reference, prediction) or families.is_unused(reference, prediction):
        return Judgment("wrong", "its letters stand for other numbers", answer)
    if structure.is_unfinished(prediction, reference):
        return Judgment("wrong", "an unfinished answer", answer)
    if reason := structure.why_unclear(prediction, reference):
        return Judgment("wrong", reason, answer)
    if items.are_alternatives(reference, gold, prediction, pred):
        return Judgment("wrong", "alternatives, not values of several names", answer)
    spelt = {gold} if given == reference else {gold, normalize(given)}
    if pred in spelt or _compact(pred) in map(_compact, spelt):
        is_long = len(prediction) > structure.MAX_LENGTH
        return Judgment("right", "", None if is_long else answer, 1.0)
    if len(prediction) > structure.MAX_LENGTH:
        return _too_long()
    if len(reference) > structure.MAX_LENGTH:
        reason = f"the reference is longer than {structure.MAX_LENGTH:,} characters"
        return Judgment("unscorable", reason)
    if structure.nesting(pred) > structure.MAX_NESTING:
        return Judgment("wrong", f"brackets nested deeper than {structure.MAX_NESTING}", answer)
    if structure.nesting(gold) > structure.MAX_NESTING:
        reason = f"the reference nests brackets deeper than {structure.MAX_NESTING}"
        return Judgment("unscorable", reason, answer)
    try:
        equal = partial(_equal, places=policy.rounded_places)
        as_families = families.same_family((reference, prediction), gold, pred, equal)
        right = as_families
        if right is None:
            right = any(equal(gold, side) for side in equations.with_constants(gold, pred))
    except structure.Refused as refused:
        return Judgment("wrong", str(refused), answer)
    except structure.Unscorable as unscorable:
        as_written = isinstance(unscorable, structure.Unreadable) and policy.unreadable == "wrong"
        return Judgment("wrong" if as_written else "unscorable", str(unscorable), answer)
    if right and policy.unevaluated == "wrong" and is_unevaluated(pred, gold):
        return Judgment("wrong", "unevaluated arithmetic", answer)
    if right:
        return Judgment("right", "", answer, 1.0)
    return Judgment("wrong", "not the reference", answer)


def _too_long() -> Judgment:
    return Judgment("wrong", f"the answer is longer than {structure.MAX_LENGTH:,} characters")


def warm_up() -> None:
    """Import the parser and build its tables, so that the first verdict is as fast as the
    others."""
    _equal_by_value("x+1", "1+x", [(1, 1)], None)


def _equal(gold: str, pred: str, places: int | None) -> bool:
    """Compare normalized answers. Each step accepts, rejects, or defers to the next."""
    equal = partial(_equal, places=places)
    if gold == pred or _compact(gold) == _compact(pred) or gold == rf"\mathbb{{{pred}}}":
        return True
    if (decided := wording.choice(gold, pred)) is not None:
        return decided
    texts = wording.without_choice(gold, pred)
    if texts != (gold, pred) and equal(*texts):
        return True
    pred = quantities.with_cents(gold, wording.with_separate_choices(gold, pred))
    for rule in (calendar.same_day, wording.same_parts, wording.same_segment, wording.same_text):
        if (decided := rule(gold, pred)) is not None:
            return decided
    if "\\boxed" in pred:
        raise structure.Refused("a box within the box")
    if (decided := quantities.same_quantities(gold, pred, equal)) is not None:
        return decided
    if ":" in gold + pred and (decided := quantities.same_ratio(gold, pred, equal)) is not None:
        return decided
    gold, pred, built = items.without_builder(gold, pred)
    if (decided := items.same_builder(gold, pred, equal)) is not None:
        return decided
    for compare in (sets.same_sets, onward.same_integers):
        if (decided := compare(gold, pred)) is not None:
            return decided
    if any(built):
        from tramontane.verifier.math import symbolic  # SymPy takes a second to import

        if symbolic.same_set(gold, pred, built):
            return True
    if structure.is_unfinished(pred, gold):
        raise structure.Refused("an unfinished item")
    pred = equations.with_bound_letter(gold, equations.with_constant(gold, pred))
    gold, pred = equations.with_index(gold, items.without_indices(gold, pred))
    gold = equations.value_last(equations.exact(gold), is_reference=True)
    pred = equations.value_last(equations.exact(pred))
    if (decided := cases.same_cases(gold, pred, equal)) is not None:
        return decided
    gold, pred = items.with_factor(gold, pred), items.with_factor(pred, gold)
    if (decided := items.same_vector(gold, pred, equal)) is not None:
        return decided
    structure.refuse_notation(gold, pred)
    if (decided := same_remainder(gold, pred, equal)) is not None:
        return decided
    if (decided := items.same_structure(gold, pred, equal)) is not None:
        return decided
    refuse_contradiction(pred, equal)
    refuse_unsolved(gold, pred, equal)
    without_names = equations.values(gold, pred)
    if without_names != (gold, pred):
        return equal(*without_names)
    return _equal_quantities(gold, pred, places)


def _equal_quantities(gold: str, pred: str, places: int | None) -> bool:
    """Compare single values with their units, as plain numbers if both are."""
    if (decided := numbers.same_numeral(gold, pred)) is not None:
        return decided
    gold, pred = with_counts(gold, pred), with_counts(pred, gold)
    gold, gold_unit, pred, pred_unit = _split_units(gold, pred)
    if (decided := units.same_angle(gold, gold_unit, pred, pred_unit)) is not None:
        return decided
    ratio = None
    if units.units_clash(gold_unit, pred_unit):
        ratio = conversions.ratio(gold_unit, pred_unit)
        if ratio is None:
            raise structure.Refused(f"the unit is {pred_unit}, not {gold_unit}")
    if (decided := numbers.same_ratio(gold, pred)) is not None:
        return decided
    if "\\overline" in gold:
        places = None  # a period that is written out is exact
    scales = units.percent_scales(gold_unit, pred_unit)
    if ratio is not None:
        scales = [(ratio.numerator, ratio.denominator)]
    gold_number, pred_number = numbers.read_numbers(gold, pred)
    is_share = gold_number is None or abs(gold_number) < 1
    if len(scales) > 1 and pred_unit == "%" and is_share and gold_number != 0:
        scales = scales[1:]  # 0.05% is not 0.05, and x% and \ln 2% are not x and \ln 2
    if gold_number is not None and pred_number is not None:
        wanted = (gold_number * scale / other for scale, other in scales)
        return any(numbers.same_number(n, pred_number, pred, places) for n in wanted)
    if gold_number is not None:
        structure.refuse_more_than_a_number(pred)
    return _equal_by_value(gold, pred, scales, places)


def _split_units(gold: str, pred: str) -> tuple[str, str, str, str]:
    """(reference, its unit, prediction, its unit).

    Letters beside the prediction's number (`3s`) are a unit if the reference has no variables; in a
    reference they are one only if the prediction names it as a unit. Words that are not units are
    removed if both sides end in them.
    """
    gold_body, gold_unit = units.split_unit(gold)
    pred_body, pred_unit = units.split_unit(pred, attached=not equations.variables(gold_body))
    if pred_unit and _TWO_UNITS.search(pred_body):
        raise structure.Refused("two units")
    if gold_unit and not pred_unit:
        pred_body, pred_unit = units.split_unit(pred, named=gold_unit)
    if pred_unit and not gold_unit:
        body, unit = units.split_unit(gold, attached=True)
        if unit == pred_unit:
            return body, unit, pred_body, pred_unit
    words = _LAST_WORDS.search(gold)
    if words and not (gold_unit or pred_unit) and pred.endswith(words[0].strip()):
        return gold[: words.start()], "", pred.removesuffix(words[0].strip()), ""
    return gold_body, gold_unit, pred_body, pred_unit


def _equal_by_value(
    gold: str, pred: str, scales: list[tuple[int, int]], places: int | None
) -> bool:
    from tramontane.verifier.math import symbolic  # SymPy takes a second to import

    with_vectors = [side for side in (gold, pred) if "\\vec" in side]
    if len(with_vectors) == 1 and "\\vec" in with_vectors[0].rpartition("=")[2]:
        gold, pred = _without_vectors(gold), _without_vectors(pred)
    if "\\det" in gold and "\\det" not in pred:
        pred = _BARS.sub(r"\\det \1", pred)
    return symbolic.equal(gold, pred, scales, places)


@lru_cache(maxsize=4096)
def is_unevaluated(answer: str, reference: str) -> bool:
    """True for an answer with unevaluated arithmetic, unless the reference has some too."""
    from tramontane.verifier.math import symbolic

    undone, known = (
        any(with_counts(value, "") != value or symbolic.has_arithmetic(value) for value in values)
        for values in map(_values, (answer, reference))
    )
    return undone and not known


def _values(answer: str) -> list[str]:
    """The values of an answer's items, without names and units."""
    shape = structure.read_shape(normalize(answer))
    members = (structure.split(equations.exact(item), "=") or [""] for item in shape.items)
    return [units.split_unit(values[-1])[0] for values in members]


def _without_vectors(text: str) -> str:
    r"""`\vec{i}` as `i`, as in answers without bold letters, unless the text has both."""
    plain = _VECTOR.sub(" ", text)
    return text if set(_VECTOR.findall(text)) & set(plain) else _VECTOR.sub(r"\1", text)


_LAST_WORDS = re.compile(r"(?<=\d)\s*(?:\\text\s*\{[^{}]*[^\W\d_]{3}[^{}]*\}|\s[^\W\d_]{4,})$")
_TWO_UNITS = re.compile(r"(?:\\[%$]|\\circ\s*\})\s*$")
_ARROW = re.compile(r"\\(?:(?:[lL]ong)?[rR]ightarrow|implies|to)(?![A-Za-z])")
_BARS = re.compile(r"\|\s*([A-Z]+)\s*\|")  # of a matrix
_LOG = re.compile(r"\\log(?![A-Za-z])(?!\s*_)\s*")
_VECTOR = re.compile(r"\\vec\{(\w)\}(?!\s*\^)")
_SPACE = re.compile(r"(?<!\d) | (?!\d)")  # "5 6" is not 56


def _compact(text: str) -> str:
    """An answer without spaces, text commands and a final full stop."""
    if "\\" in text:
        text = _ARROW.sub(r"\\to ", text.replace("\\mid", "|"))
    return _SPACE.sub("", wording.unwrap(text)).rstrip(".")
