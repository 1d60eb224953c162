"""Function calls: rows of BFCL's simple, multiple and parallel layouts, its rules of equality."""

import pytest

from tramontane.config import VerifierConfig
from tramontane.types import Problem
from tramontane.verifier.calls import Call, NoCalls, judge, parse_calls
from tramontane.verifier.reward import grade


def function(name, required=(), **types):
    properties = {}
    for key, kind in types.items():  # e.g. `array of float`
        kind, _, items = kind.partition(" of ")
        properties[key] = {"type": kind} | ({"items": {"type": items}} if items else {})
    parameters = {"type": "dict", "properties": properties, "required": list(required)}
    return {"name": name, "description": "", "parameters": parameters}


AREA = function(
    "calculate_triangle_area", ("base", "height"), base="integer", height="integer", unit="string"
)
SIMPLE = {
    "function": [AREA],
    "ground_truth": [
        {"calculate_triangle_area": {"base": [10], "height": [5], "unit": ["units", ""]}}
    ],
}
MULTIPLE = {
    "function": [function("circle.area", ("radius",), radius="float"), AREA],
    "ground_truth": [{"circle.area": {"radius": [2.5, 2]}}],
}
PARALLEL = {
    "function": [
        function("spotify.play", ("artist", "duration"), artist="string", duration="integer")
    ],
    "ground_truth": [
        {"spotify.play": {"artist": ["Taylor Swift"], "duration": [20]}},
        {"spotify.play": {"artist": ["Maroon 5"], "duration": [15]}},
    ],
}
TRIP = {
    "function": [
        function(
            "trip",
            ("date",),
            date="string",
            stops="array",
            people="dict",
            fast="boolean",
            scale="any",
        )
    ],
    "ground_truth": [
        {
            "trip": {
                "date": ["April 1, 2024"],
                "stops": [["Rome", "Milan"], ["Milan", "Rome"], ""],
                "people": [{"adults": [2], "children": [1, ""]}, ""],
                "fast": [True, ""],
                "scale": ["SIZE", ""],
            }
        }
    ],
}

LISTS = {
    "function": [
        function("f", (), floats="array of float", pair="tuple of integer",
                 names="array of string", ids="array of integer"),
    ],
    "ground_truth": [
        {"f": {"floats": [[1.0, 2.0]], "pair": [[1, 2]],
               "names": [["a B", "C"], ""], "ids": [[4], ""]}},
    ],
}  # fmt: skip

CASES = [
    (SIMPLE, "[calculate_triangle_area(base=10, height=5)]", ""),
    (SIMPLE, 'calculate_triangle_area(base=10, height=5, unit="units")', ""),
    (SIMPLE, "calculate_triangle_area(base=10, height=5, unit='')", ""),  # as if left out
    (SIMPLE, "```python\n[calculate_triangle_area(height=5, base=10)]\n```", ""),
    (SIMPLE, "[calculate_triangle_area(base=10)]", "no argument height"),
    (SIMPLE, "[calculate_triangle_area(base=10, height=6)]", "height=6 is not accepted"),
    (SIMPLE, "[calculate_triangle_area(base=10, height='5')]", "height='5' is not of type integer"),
    (SIMPLE, "[calculate_triangle_area(base=10, height=5.0)]", "height=5.0 is not of type integer"),
    (SIMPLE, "[calculate_triangle_area(base=10, height=True)]", "is not of type integer"),
    (SIMPLE, "[calculate_triangle_area(base=10, height=5, side=3)]", "unexpected argument side"),
    (SIMPLE, "[calculate_triangle_area(10, 5)]", "an argument without its name"),
    (SIMPLE, "[area(base=10, height=5)]", "call of area, calculate_triangle_area expected"),
    (SIMPLE, "[]", "0 calls, 1 expected"),
    (SIMPLE, "The area is 25.", "no function calls: invalid syntax"),
    (MULTIPLE, "[circle.area(radius=2.5)]", ""),
    (MULTIPLE, "[circle.area(radius=2)]", ""),  # an int where a float is described
    (MULTIPLE, "[calculate_triangle_area(base=1, height=2)]", "call of calculate_triangle_area"),
    (MULTIPLE, "[circle.area(radius=2), circle.area(radius=2)]", "2 calls, 1 expected"),
    (PARALLEL, "[spotify.play(artist='Maroon 5', duration=15), "
               "spotify.play(artist='Taylor Swift', duration=20)]", ""),
    (PARALLEL, "[spotify.play(artist='Maroon 5', duration=15), "
               "spotify.play(artist='Maroon 5', duration=15)]", "no call spotify.play as expected"),
    (TRIP, "[trip(date='april 1 2024')]", ""),  # case, spaces and commas are left out of account
    (TRIP, "[trip(date='April 2, 2024')]", "is not accepted"),
    (TRIP, "[trip(date='April 1, 2024', stops=['milan', 'rome'])]", ""),
    (TRIP, "[trip(date='April 1, 2024', stops=('Milan', 'Rome'))]",
     "stops=('Milan', 'Rome') is not of type array"),
    (TRIP, "[trip(date='April 1, 2024', stops=['Milan'])]", "stops=['Milan'] is not accepted"),
    (TRIP, "[trip(date='April 1, 2024', people={'adults': 2})]", ""),
    (TRIP, "[trip(date='April 1, 2024', people={'adults': 2, 'children': 1})]", ""),
    (TRIP, "[trip(date='April 1, 2024', people={'children': 1})]", "is not accepted"),
    (TRIP, "[trip(date='April 1, 2024', people={'adults': 2, 'dogs': 1})]", "is not accepted"),
    (TRIP, "[trip(date='April 1, 2024', fast=true)]", ""),
    (TRIP, "[trip(date='April 1, 2024', fast=1)]", "fast=1 is not of type boolean"),
    (TRIP, "[trip(date='April 1, 2024', scale=SIZE)]", ""),  # a variable
    (SIMPLE, '<tool_call>\n{"name": "calculate_triangle_area", '
             '"arguments": {"base": 10, "height": 5}}\n</tool_call>', ""),
    (SIMPLE, '[TOOL_CALLS] [{"name": "calculate_triangle_area", '
             '"arguments": "{\\"base\\": 10, \\"height\\": 5}"}]', ""),
    (SIMPLE, '[{"calculate_triangle_area": {"base": 10, "height": 5}}]', ""),
    (SIMPLE, '[{"calculate_triangle_area": ', "no JSON"),
    (SIMPLE, '[{"name": "calculate_triangle_area", "arguments": "not json"}]', "no JSON"),
    (SIMPLE, '[{"name": "calculate_triangle_area", "arguments": "[1]"}]', "arguments by name"),
    (SIMPLE, '{"name": "calculate_triangle_area"}', "no argument base"),
    (SIMPLE, '[{"name": "calculate_triangle_area", "arguments": ""}]', "no argument base"),
    (SIMPLE, '<tool_call>{"name": "a", "arguments": "{bad"}</tool_call>', "no JSON"),
    (SIMPLE, '[{"base": 10, "height": 5}]', "a call needs a name"),
    (SIMPLE, "[calculate_triangle_area(base=2*5, height=2**3 - 9//3)]", ""),  # arithmetic
    (SIMPLE, "[calculate_triangle_area(base=10, height=5/0)]", "'5 / 0' is not of type integer"),
    (SIMPLE, "[calculate_triangle_area(base=10, height=10/2)]", "is not of type integer"),
    (MULTIPLE, "[circle.area(radius=5/2)]", ""),
    (LISTS, "[f(floats=[1.0, 2.0], pair=(1, 2))]", ""),
    (LISTS, "[f(floats=[1, 2], pair=[1, 2])]", "floats=[1, 2] is not of type array of float"),
    (LISTS, "[f(floats=[1.0, 2.0], pair=(1.0, 2.0))]", "is not of type tuple of integer"),
    (LISTS, "[f(floats=[10/10, -(-2.0)], pair=(1, 2))]", ""),
    (LISTS, "[f(floats=(1.0, 2.0), pair=(1, 2))]", "floats=(1.0, 2.0) is not of type array"),
    (LISTS, "[f(floats=[1.0, 2.0], pair=(1, 2), names=['A b', 'c.'])]", ""),
    (LISTS, "[f(floats=[1.0, 2.0], pair=(1, 2), ids=[4.0])]", ""),  # as on the leaderboard
]  # fmt: skip


@pytest.mark.parametrize(("row", "answer", "reason"), CASES, ids=range(len(CASES)))
def test_a_case(row, answer, reason):
    right, found = judge(row, answer)
    assert right is not bool(reason)
    assert reason in found


def test_nothing_is_executed():
    [call] = parse_calls("[f(x=__import__('os').system('true'), y=-3)]")
    assert call == Call("f", {"x": "__import__('os').system('true')", "y": -3})
    for hostile in ("(" * 100_000, "-" * 100_000 + "1", "f(x=" + "[" * 5000, "\0"):
        with pytest.raises(NoCalls):
            parse_calls(hostile)


def test_arithmetic_is_bounded():
    [call] = parse_calls("[f(a=2**10, b=9**9**9, c=2**60*2**60, d=-(2.5), e=1e300*1e300)]")
    assert call.arguments == {
        "a": 1024, "b": "9 ** 9 ** 9", "c": 2**120, "d": -2.5, "e": "1e+300 * 1e+300",
    }  # fmt: skip


@pytest.mark.parametrize(
    "answer",
    [
        "f(n=" + "1+" * 20_000 + "1)",
        "f" + ".f" * 20_000 + "(n=1)",
        "f(n=" + "-" * 3000 + "1)",
        "f(n=0x" + "f" * 10_000 + ")",
        "f(n={[]: 1})",
        '[{"name": "f", "arguments": "' + "[" * 100_000 + '"}]',
    ],
)
def test_a_hostile_answer_is_wrong(answer):
    metadata = {
        "function": [function("f", ("n",), n="integer")], "ground_truth": [{"f": {"n": [1]}}],
    }  # fmt: skip
    problem = Problem("p", "calls", "Call f.", metadata=metadata)
    assert grade(problem, answer, 10, VerifierConfig(), 100, 0).verdict == "wrong"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"function": []}, "`function` must be a list of objects"),
        ({"function": [{"name": "a"}]}, "`function` must be a list of objects"),
        ({"ground_truth": None}, "`ground_truth` must be a list"),
        ({"ground_truth": [{"b": {}}]}, "calls 'b', which `function` does not offer"),
        ({"ground_truth": [{"calculate_triangle_area": {"base": 10}}]}, "needs a list of values"),
    ],
)
def test_a_row_that_cannot_be_judged(changed, message):
    with pytest.raises(ValueError, match=message):
        judge({**SIMPLE, **changed}, "[f()]")
