"""Function calls: rows of BFCL's simple, multiple and parallel layouts, its rules of equality."""

import pytest

from tramontane.verifier.calls import Call, NoCalls, judge, parse_calls


def function(name, required=(), **types):
    properties = {key: {"type": kind, "description": ""} for key, kind in types.items()}
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

CASES = [
    (SIMPLE, "[calculate_triangle_area(base=10, height=5)]", ""),
    (SIMPLE, 'calculate_triangle_area(base=10, height=5, unit="units")', ""),
    (SIMPLE, "calculate_triangle_area(base=10, height=5, unit='')", ""),  # as if left out
    (SIMPLE, "```python\n[calculate_triangle_area(height=5, base=10)]\n```", ""),
    (SIMPLE, "[calculate_triangle_area(base=10)]", "no argument height"),
    (SIMPLE, "[calculate_triangle_area(base=10, height=6)]", "height=6 is not accepted"),
    (SIMPLE, "[calculate_triangle_area(base=10, height='5')]", "height='5' is no integer"),
    (SIMPLE, "[calculate_triangle_area(base=10, height=5.0)]", "height=5.0 is no integer"),
    (SIMPLE, "[calculate_triangle_area(base=10, height=True)]", "height=True is no integer"),
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
    (TRIP, "[trip(date='April 1, 2024', stops=('Milan', 'Rome'))]", ""),
    (TRIP, "[trip(date='April 1, 2024', stops=['Milan'])]", "stops=['Milan'] is not accepted"),
    (TRIP, "[trip(date='April 1, 2024', people={'adults': 2})]", ""),
    (TRIP, "[trip(date='April 1, 2024', people={'adults': 2, 'children': 1})]", ""),
    (TRIP, "[trip(date='April 1, 2024', people={'children': 1})]", "is not accepted"),
    (TRIP, "[trip(date='April 1, 2024', people={'adults': 2, 'dogs': 1})]", "is not accepted"),
    (TRIP, "[trip(date='April 1, 2024', fast=true)]", ""),
    (TRIP, "[trip(date='April 1, 2024', fast=1)]", "fast=1 is no boolean"),
    (TRIP, "[trip(date='April 1, 2024', scale=SIZE)]", ""),  # a variable
    (SIMPLE, '<tool_call>\n{"name": "calculate_triangle_area", '
             '"arguments": {"base": 10, "height": 5}}\n</tool_call>', ""),
    (SIMPLE, '[TOOL_CALLS] [{"name": "calculate_triangle_area", '
             '"arguments": "{\\"base\\": 10, \\"height\\": 5}"}]', ""),
    (SIMPLE, '[{"calculate_triangle_area": {"base": 10, "height": 5}}]', ""),
    (SIMPLE, '[{"calculate_triangle_area": ', "no JSON"),
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


def test_a_row_without_its_fields():
    with pytest.raises(ValueError, match="needs `function` and `ground_truth`"):
        judge({"function": []}, "[f()]")
