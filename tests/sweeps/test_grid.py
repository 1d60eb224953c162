"""The cells of a sweep: values, ranges, draws and names."""

import math
from collections import Counter
from random import Random

import pytest

from tramontane.errors import InputError
from tramontane.sweeps.grid import axis_of, cell_name, cells_of


def cells(*texts, **options):
    return cells_of([axis_of(text) for text in texts], **options)


def test_a_grid_has_every_combination_in_the_order_of_the_values():
    found = cells("trainer.learning_rate=1e-4,3e-4", "seed=0,1")
    assert [tuple(cell.values()) for cell in found] == [
        ("1e-4", "0"),
        ("1e-4", "1"),
        ("3e-4", "0"),
        ("3e-4", "1"),
    ]


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ("[1,2],[3,4]", ("[1,2]", "[3,4]")),
        ("{a: 1, b: [2,3]},null", ("{a: 1, b: [2,3]}", "null")),
        ("'a,b',\"c,[\"", ("'a,b'", '"c,["')),
        ("a.b=c,d", ("a.b=c", "d")),
        ("it's,that's", ("it's", "that's")),
        ("[it's, 'a,b'],{k: 'c,d}'}", ("[it's, 'a,b']", "{k: 'c,d}'}")),
        ("'it''s, ok',b", ("'it''s, ok'", "b")),
        ("tiny", ("tiny",)),
    ],
)
def test_commas_inside_brackets_and_quotes_belong_to_the_value(given, values):
    assert axis_of(f"key={given}").values == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed", "write it as key=value,value"),
        ("=1", "write it as"),
        ("seed=", "write it as"),
        ("seed=0,,1", "an empty value"),
        ("seed=0,1,0", "0 is given twice"),
        ("a=[1,2", r"\[ is not closed"),
        ("a=(1]", r"\] without \["),
        ("a='x", "' is not closed"),
        ("a=3..1", "must be in order"),
        ("a=log:0..1", "above 0"),
        ("a=1e..2", "are numbers"),
    ],
)
def test_what_is_no_list_of_values_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        axis_of(text)


@pytest.mark.parametrize(
    ("texts", "random", "message"),
    [
        (["seed=0,1", "seed=2"], None, "seed: given twice"),
        (["a=0..1"], None, "--random N draws from a range"),
        (["seed=0..9"], 3, "seed: give its values"),
        (["a=1,2", "b=1,2"], 5, "no more than 4 different cells"),
        (["a=1,2"], 0, "draw at least 1"),
        (["a=1..3"], 4, "no more than 3 different cells"),
    ],
)
def test_cells_that_cannot_be_are_refused(texts, random, message):
    with pytest.raises(InputError, match=message):
        cells(*texts, random=random)


def test_draws_differ_repeat_by_seed_and_begin_alike():
    texts = "a=log:1e-5..1e-3", "b=2..9", "c=x,y"
    many = cells(*texts, random=40)
    assert len({tuple(cell.values()) for cell in many}) == 40
    assert cells(*texts, random=10) == many[:10]
    assert cells(*texts, random=40, draw_seed=1) != many
    logs = [math.log10(float(cell["a"])) for cell in many]
    assert all(-5 <= each <= -3 for each in logs)
    assert sum(each < -4 for each in logs) in range(10, 31)  # half of them, by the logarithm
    assert {int(cell["b"]) for cell in many} <= set(range(2, 10))


def test_every_drawn_cell_runs_with_every_seed():
    found = cells("a=0.0..1.0", "seed=3,4", random=5)
    assert len(found) == 10
    assert [cell["seed"] for cell in found] == ["3", "4"] * 5
    assert len({cell["a"] for cell in found}) == 5


def test_names_have_the_keys_that_vary_and_lead_nowhere_else():
    axes = [axis_of(t) for t in ("trainer.learning_rate=1e-4,3e-4", "seed=0", "model=a/b,../c")]
    name = cell_name(axes, {"trainer.learning_rate": 1e-4, "seed": 0, "model": "../c"})
    assert name.startswith("learning_rate=0.0001,model=..-c-") and "/" not in name
    other = cell_name(axes, {"trainer.learning_rate": 1e-4, "seed": 0, "model": "..-c"})
    assert name != other
    same = [axis_of("trainer.dtype=float32,bfloat16"), axis_of("generator.dtype=float32,bfloat16")]
    assert (
        cell_name(same, {"trainer.dtype": "float32", "generator.dtype": "bfloat16"})
        == "trainer.dtype=float32,generator.dtype=bfloat16"
    )


def test_whole_numbers_of_a_range_are_equally_likely():
    random, axis = Random(0), axis_of("key=1..3")
    counts = Counter(axis.draw(random) for _ in range(3000))
    assert set(counts) == {"1", "2", "3"}
    assert min(counts.values()) > 900
    drawn = [int(axis_of("key=log:1..8").draw(random)) for _ in range(3000)]
    assert {1, 8} <= set(drawn) <= set(range(1, 9))


def test_a_long_name_is_cut_and_stays_unique():
    axes = [axis_of(f"data.key{n}=a,b") for n in range(9)]
    names = {
        cell_name(axes, {axis.key: f"{value}{'x' * 50}" for axis in axes}) for value in ("a", "b")
    }
    assert len(names) == 2 and all(len(name) < 150 for name in names)
