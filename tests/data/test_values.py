"""Values of rows: what keeps its type, and what is refused by name."""

import json
import math
import re
from array import array
from datetime import date, datetime
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tramontane.data.objects import override_texts
from tramontane.data.values import UnknownType, is_encodable, plain, plain_row
from tramontane.errors import InputError

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)


@given(JSON)
def test_values_of_json_stay_as_they_are(value):
    assert repr(plain(value)) == repr(value)
    assert is_encodable(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(42), 42),
        (np.uint8(7), 7),
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array(5), 5),
        (np.array(["a", None], dtype=object), ["a", None]),
        (torch.tensor(3), 3),
        (torch.tensor([0.5, 1.5], requires_grad=True), [0.5, 1.5]),
        (torch.tensor([True, False]), [True, False]),
        (torch.tensor([1.5], dtype=torch.bfloat16), [1.5]),
        (array("i", [1, 2]), [1, 2]),
        (pandas.Series([1, 2]), [1, 2]),
        (pandas.NA, None),
        (pandas.NaT, None),
        (Decimal("42"), 42),
        (Decimal("1E+3"), 1000),
        (Decimal("0.1"), 0.1),
        ((1, (np.int32(2), "x")), [1, [2, "x"]]),
        ({"a": {"b": np.int8(1)}}, {"a": {"b": 1}}),
    ],
)
def test_numbers_arrays_and_tensors_keep_their_type(value, expected):
    assert repr(plain(value)) == repr(expected)  # 1 == 1.0 == True


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_a_decimal_becomes_the_same_number_or_is_refused(value):
    if -300 < value.adjusted() < 300 and (value == value.to_integral_value() or
            Decimal(repr(float(value))) == value):  # fmt: skip
        assert Decimal(repr(plain(value))) == value
    else:
        with pytest.raises(UnknownType, match=re.escape(str(value))):
            plain(value)


def test_decimals_that_are_not_finite():
    assert math.isnan(plain(Decimal("NaN")))
    assert plain(Decimal("-Infinity")) == -math.inf
    with pytest.raises(UnknownType, match=r"1E\+99999999"):
        plain(Decimal("1E+99999999"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1, 2}, r"type set: give a list, such as sorted"),
        (frozenset("a"), r"type frozenset: give a list"),
        (date(2025, 6, 12), r"type datetime\.date: give text, such as \.isoformat\(\)"),
        (datetime(2025, 6, 12), r"type datetime\.datetime: give text"),
        (pandas.Timestamp("2025-06-12"), r"Timestamp: give text, such as \.isoformat\(\)"),
        (np.datetime64("2025-06-12T00:00:00", "ns"), r"numpy\.datetime64"),
        (np.longdouble(1), r"numpy\.longdouble"),
        (b"bytes", r"type bytes: give text, such as \.decode\(\)"),
        (1j, r"type complex: give text, a number"),
        (np.complex128(1), r"type .*complex"),
        (iter([1]), r"type list_iterator"),
        (object(), r"type object"),
        ({1: "a"}, r"type int as a name in an object"),
        ([np.array([date(2025, 6, 12)], dtype=object)], r"type datetime\.date"),
        (Decimal("0.1234567890123456789012345"), r"the decimal 0\.12345.* give text \(str\)"),
    ],
)
def test_other_types_are_refused_by_name(value, message):
    with pytest.raises(InputError, match=r"^data\[3\]: field 'sum' holds .*" + message):
        plain_row({"problem": "1 + 1?", "sum": value}, "data[3]")


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"a": "x\ud800"}, "'a'"),
        ({"a": [1, {"b": "\udfff"}]}, "'a'"),
        ({"a": {"\udc00": 1}}, "'a'"),
        ({"a\ud800": 1}, r"'a\\\\ud800'"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(row, field):
    with pytest.raises(InputError, match=rf"^here: field {field} has half of a surrogate pair"):
        plain_row(row, "here")
    whole = json.loads('{"a": "\\ud83e\\udd86"}')
    assert plain_row(whole, "here") == {"a": "🦆"}


def test_an_object_in_place_of_its_class_is_refused_in_the_users_words():
    with pytest.raises(InputError, match="data.environment: an object; give its class"):
        override_texts({"data.environment": SimpleNamespace(start=print)})
