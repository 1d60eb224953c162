"""Problems that the playground draws."""

import re
from random import Random

import numpy as np
import pytest

from tramontane.data.playground import LANGUAGES, drawings, examples, problems
from tramontane.data.playground.arithmetic import apply
from tramontane.data.playground.drawings import IN_WORDS, KINDS, SIDE, SQUARES, _shortest
from tramontane.data.playground.language import language
from tramontane.errors import InputError
from tramontane.models.images import decode


def draw(kind, seed=0, split="train", level=4, languages=("en",), count=20):
    return list(problems(split, seed, (level, level), languages, (kind,), count=count))


ENGLISH = {name: shape for code in LANGUAGES for shape, name in language(code).shapes.items()}


def words(problem):
    """What is shown, in English."""
    found = problem.metadata["text"].removesuffix(f"\n{problem.problem}")
    return ", ".join(ENGLISH.get(word, word) for word in found.split(", "))


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_draws_the_same_and_another_something_else(kind):
    first, again, other = draw(kind), draw(kind), draw(kind, seed=1)
    assert first == again
    assert [p.images for p in first] != [p.images for p in other]


@pytest.mark.parametrize("kind", KINDS)
def test_no_test_problem_is_in_training_in_any_language(kind):
    sets = [
        {words(p) for p in draw(kind, seed, split, languages=LANGUAGES, count=25)}
        for split in ("train", "test")
        for seed in (0, 1)
    ]
    assert not (sets[0] | sets[1]) & (sets[2] | sets[3])


@pytest.mark.parametrize("kind", IN_WORDS)
def test_the_same_problems_are_there_in_words(kind):
    drawn, told = (draw(name, languages=LANGUAGES) for name in (f"drawn_{kind}", kind))
    assert [p.metadata["text"] for p in drawn] == [p.problem for p in told]
    assert [p.answer for p in drawn] == [p.answer for p in told]
    assert not any(p.images for p in told)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", LANGUAGES)
def test_every_language_asks_and_hides_nothing_in_the_question(kind, code):
    for level in (1, 8):
        for problem in draw(kind, level=level, languages=(code,), count=3):
            assert "{" not in problem.problem
            picture = np.asarray(decode(problem.images[0]))
            assert picture.shape == (SIDE, SIDE, 3)
            assert (picture != picture[0, 0]).any()


ANSWERS = {
    "drawn_sums": lambda text, question: eval(text),
    "drawn_bars": lambda text, question: abs(
        int.__sub__(
            *(
                int(re.search(rf"{name}: (\d+)", text)[1])
                for name in re.findall(r"\b[A-H]\b", question)
            )
        )
    ),
    "drawn_shapes": lambda text, question: text.split(", ").count(question.split()[-1].rstrip("?")),
    "drawn_clocks": lambda text, question: (
        int(text.split(":")[0]) % 12 * 60 + int(text.split(":")[1])
    ),
    "drawn_tables": lambda text, question: sum(
        int(line.split()["ABCDEFGH".index(re.search(r"column (\w)", question)[1])])
        for line in text.splitlines()[1:]
    ),
    "drawn_mazes": lambda text, question: _shortest(
        {
            (x, y)
            for y, line in enumerate(text.splitlines())
            for x, sign in enumerate(line)
            if sign == "#"
        },
        len(text.splitlines()),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_words_have_the_answer(kind):
    for problem in draw(kind):
        assert int(problem.answer) == ANSWERS[kind](words(problem), problem.problem)


@pytest.mark.parametrize("kind", ["sums", "bars", "tables"])
@pytest.mark.parametrize("level", [1, 8])
def test_what_is_written_stands_in_squares_of_its_own(kind, level):
    for seed in range(20):
        drawn = drawings.draw(Random(seed), kind, language("en"), level)
        places = [(row, column) for _, row, column in drawn.written]
        assert len({*places}) == len(places)
        assert all(0 <= place < SQUARES for pair in places for place in pair)
        in_order = "".join(glyph.char for glyph in sorted(drawn.written, key=lambda g: g[1:]))
        if kind != "bars":
            assert in_order == re.sub(r"\s", "", drawn.words)


@pytest.mark.parametrize("kind", ["drawn_sums", "drawn_bars", "drawn_tables", "bars", "tables"])
def test_the_steps_lead_to_the_answer(kind):
    for problem in draw(kind):
        steps = problem.metadata["steps"]
        assert all(apply(a, op, b) == c for a, op, b, c in steps)
        assert str(steps[-1][3]) == problem.answer


def test_hands_differ_and_a_hand_is_the_same_again():
    drawn = drawings.draw(Random(0), "sums", language("en"), 2)
    hands = [drawn._replace(hand=hand).picture() for hand in (0.1, 0.2, 0.5, 0.9, 0.9)]
    assert len({*hands}) == 4


def test_the_shortest_way_through_a_maze():
    assert _shortest({(1, 0), (1, 1)}, 3) == 4
    assert _shortest({(1, 0), (1, 1), (1, 2)}, 3) is None


def test_a_bar_is_as_high_as_its_value():
    for problem in draw("drawn_bars", level=1, count=5):
        values = [int(value) for value in re.findall(r": (\d+)", words(problem))]
        picture = np.asarray(decode(problem.images[0])).astype(int)
        columns = picture[:, [35, 85]]  # in the middle of each of two bars
        foot = columns[SIDE - 16]
        heights = (np.abs(columns - foot).sum(-1) == 0).sum(0)
        assert np.argsort(heights).tolist() == np.argsort(values).tolist() or values[0] == values[1]


def test_there_are_no_examples_to_learn_from():
    with pytest.raises(InputError, match="bars"):
        next(examples(0, 1, kinds=("sums", "bars")))
