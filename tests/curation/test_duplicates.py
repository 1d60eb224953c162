import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tramontane.curation.config import CurateConfig, DecontaminateConfig, DeduplicateConfig
from tramontane.curation.duplicates import Decontaminate, Deduplicate, labels
from tramontane.curation.rows import Row
from tramontane.data.similarity import (
    SimilarityIndex,
    numbers,
    pieces,
    similarity,
    spelling,
)
from tramontane.errors import InputError
from tramontane.types import Problem

TRAIN = (
    "A train leaves the station at 9 o'clock and travels north at 60 km per hour. Another one "
    "follows it an hour later at 90 km per hour. After how many hours does it catch up?"
)


def rows(*texts, answers=None, first=0):
    answers = answers or ["1"] * len(texts)
    return [
        Row(i, f"x.jsonl:{i + 1}", Problem(f"p{i}", "math", text, answer))
        for i, (text, answer) in enumerate(zip(texts, answers, strict=True), first)
    ]


def decide(folder, batches, **options):
    folder.mkdir(exist_ok=True)
    stage = Deduplicate(DeduplicateConfig(**options), folder)
    decided = []
    for chunk, batch in enumerate(batch for batch in batches if batch):
        decided += stage.decide(batch)
        stage.save(chunk)
    stage.close()
    return decided


def reasons(decided):
    return [row.reason if row.decision == "dropped" else "" for row in decided]


# Spelling


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("What is $x + 1$?", "what  is $x+1$ ?"),
        ("Find \\( \\dfrac{1}{2} \\).", "Find $\\frac12$"),
        ("Is $a\\,b \\leq 3$?", "Is $a b \\le 3$?"),
        ("Pay $1,000$ now", "Pay $1{,}000$ now"),
        ("Ｆｉｎｄ ｘ", "Find x"),
        ("He said “no”.", 'He said "no".'),
        ("\\left( x \\right)", "( x )"),
    ],
)
def test_one_spelling(a, b):
    assert spelling(a) == spelling(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("5 6", "56"),
        ("2²", "22"),
        ("1½", "11/2"),
        ("x+1", "x-1"),
        ("1.5", "15"),
        ("(1,2)", "(12)"),
        ("f(x)", "f x"),
    ],
)
def test_different_texts_keep_different_spellings(a, b):
    assert spelling(a) != spelling(b)


def test_similarity_is_the_jaccard_index_of_pieces():
    # abcdefgh has the pieces abcde bcdef cdefg defgh; abcdefgx shares the first three of five.
    assert similarity("abcdefgh", "abcdefgx") == pytest.approx(3 / 5)
    assert len(pieces("abcdefgh")) == 4
    assert similarity("ab", "ab") == 1


@settings(deadline=None)
@given(st.text(max_size=80), st.text(max_size=80))
def test_similarity_is_symmetric_and_bounded(a, b):
    assert similarity(a, b) == similarity(b, a)
    assert 0 <= similarity(a, b) <= 1
    assert similarity(a, a) == 1


def test_numbers_are_counted_with_signs_and_words():
    assert numbers("12 of 3 and 3") == numbers("3 of 12 and 3")
    assert numbers("12 of 3") != numbers("12 of 3 and 3")
    assert numbers("x+3") != numbers("x-3")
    assert numbers("two men") != numbers("three men")
    assert numbers("\\sin x") != numbers("\\cos x")
    assert numbers("a well-known man") == numbers("a well known man")


def test_the_index_finds_pairs_at_its_threshold():
    """1 − (1 − tʳ)ᵇ ≥ 0.99: at similarity 0.8 hardly any of 300 pairs is missed."""
    rng = random.Random(0)
    index, found, total = SimilarityIndex(0.8, same_numbers=False), 0, 0
    for _ in range(300):
        base = "".join(rng.choices("abcdefghijklmnop", k=400))
        other = base[:356]  # 352 of 396 pieces
        other += "".join(rng.choices("qrstuvwxyz", k=44 - 5))
        like = similarity(base, other)
        total += 0.78 < like < 0.84
        a, b = index.keys(base), index.keys(other)
        found += bool((a == b).any()) and 0.78 < like < 0.84
    assert total > 250
    assert found / total > 0.97


def test_the_index_lists_items_in_the_order_of_adding():
    index = SimilarityIndex(0.8, same_numbers=True)
    for item in range(50):
        index.add(np.array([index.keys("the same text of some length here")]), [item])
    (found,) = index.find(np.array([index.keys("the same text of some length here")]))
    assert found == list(range(50))


# Duplicates


def test_planted_duplicates_are_found_and_the_first_is_kept(tmp_path):
    texts = [
        TRAIN,
        "How many primes are below 30?",
        TRAIN.upper(),  # exact, in another spelling
        TRAIN.replace("catch up", "overtake it"),  # a word
        TRAIN.replace("60", "70"),  # another problem
        TRAIN.replace("north", "to the north"),
    ]
    decided = decide(tmp_path / "a", [rows(*texts)])
    assert reasons(decided) == ["", "", "duplicate", "near_duplicate", "", "near_duplicate"]
    assert "of p0" in decided[3].detail
    # The size of the chunks changes nothing.
    batches = [[row] for row in rows(*texts)]
    assert decide(tmp_path / "b", batches) == decided


def test_numbers_may_be_ignored(tmp_path):
    texts = [TRAIN, TRAIN.replace("60", "70")]
    decided = decide(tmp_path, [rows(*texts)], same_numbers=False)
    assert reasons(decided) == ["", "near_duplicate"]


def test_only_exact_duplicates_at_threshold_one(tmp_path):
    texts = [TRAIN, TRAIN.replace("catch up", "overtake it"), TRAIN.lower()]
    assert reasons(decide(tmp_path, [rows(*texts)], threshold=1)) == ["", "", "duplicate"]


def test_conflicts(tmp_path):
    texts = [TRAIN, TRAIN.upper(), TRAIN.upper(), TRAIN.replace("catch up", "overtake it")]
    answers = ["1/2", "0.5", "3", "3"]
    decided = decide(tmp_path, [rows(*texts, answers=answers)])
    # Equal answers by the verifier; the same problem and a similar one with another answer.
    assert reasons(decided) == ["", "duplicate", "duplicate_conflict", ""]
    assert "'1/2'" in decided[2].detail and "'3'" in decided[2].detail
    assert (decided[3].decision, decided[3].reason) == ("kept", "near_conflict")


def test_tests_of_two_types_and_unanswered_rows_are_no_duplicates(tmp_path):
    case = {"input": "x", "output": "y"}
    tests = [{"type": "python_assert", "code": "x"}, {"type": "stdio", "cases": [case]}]
    problems = [Problem(f"c{i}", "code", TRAIN, tests=t) for i, t in enumerate(tests)]
    problems += [Problem("m0", "math", TRAIN, ""), Problem("m1", "math", TRAIN, "2")]
    batch = [Row(i, "x:1", problem) for i, problem in enumerate(problems)]
    assert reasons(decide(tmp_path, [batch])) == ["", "", "", ""]


LETTER = (
    "Write a program. Read a line of words from the standard input and print, on a line of its "
    "own, how often the letter {} occurs in all of the words together."
)


def programs(*pairs):
    """A row for each statement and its tests: a dict, input to output, or a function's tests."""
    problems = []
    for i, (text, tests) in enumerate(pairs):
        if isinstance(tests, str):
            tests = {"type": "python_assert", "code": tests}
        else:
            cases = [{"input": given, "output": wanted} for given, wanted in tests.items()]
            tests = {"type": "stdio", "cases": cases}
        problems.append(Row(i, f"x:{i}", Problem(f"c{i}", "code", text, tests=tests)))
    return problems


def test_programs_are_near_duplicates_only_if_their_tests_agree(tmp_path):
    a, e, polite = LETTER.format("a"), LETTER.format("e"), LETTER.format("a") + " Please."
    batch = programs(
        (a, {"sea eel\n": "1\n", "aa\n": "2\n", "bad\n": "1\n"}),
        (e, {"sea eel\n": "3\n", "aa\n": "0\n"}),  # another problem
        (polite, {"sea  eel": "1", "bee\n": "0\n"}),  # the same, by a common test
        (polite, {"cat\n": "1\n"}),  # no common test says that it is the same
        (a.upper(), {"dog\n": "0\n"}),  # the same spelling is enough
        (a.upper(), {"sea eel\n": "9\n", "aa\n": "9\n", "bad\n": "1\n"}),
    )
    decided = decide(tmp_path, [batch[:3], batch[3:]])
    expected = ["", "", "near_duplicate", "", "duplicate", "duplicate_conflict"]
    assert reasons(decided) == expected
    assert [row.reason for row in decided[:2]] == ["", "near_conflict"]
    assert decided[1].detail.endswith("tests expect another output for 2 of 2 common inputs")
    assert decided[3].detail.endswith("shares no test")
    assert "2 of 3 common inputs" in decided[5].detail


def test_assertions_are_a_functions_tests(tmp_path):
    text = LETTER.format("a").replace("program", "function count")
    batch = programs(
        (text, "def check(f):\n    assert f('aa') == 2\n    assert f('b') == 0\n"),
        (text.replace("letter a", "letter b"), "assert f('aa') == 0\nassert f('b') == 1\n"),
        (text + " Please.", "assert f('aa') == 2\n"),
    )
    assert reasons(decide(tmp_path, [batch])) == ["", "", "near_duplicate"]


def test_the_common_ones_of_many_tests_are_compared():
    """64 tests of each problem are remembered, the same ones of those in common."""
    both = {f"{i}\n": f"{i * i}\n" for i in range(500)}
    first, second = (
        labels(row.task.tests)
        for row in programs(("x", both), ("x", {k: both[k] for k in reversed([*both])}))
    )
    assert len(first) == 64 and first == second


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=20), st.randoms())
def test_the_order_does_not_change_how_many_exact_duplicates_are_kept(tmp_path_factory, names, rng):
    texts = [f"Problem {name}: what is it?" for name in names]
    shuffled = rng.sample(texts, len(texts))
    folder = tmp_path_factory.mktemp("order")
    for number, order in enumerate((texts, shuffled)):
        decided = decide(folder / str(number), [rows(*order[:7]), rows(*order[7:], first=7)])
        kept = [row.task.problem for row in decided if row.decision != "dropped"]
        assert sorted(kept) == sorted(set(texts))


def test_memory_survives_a_restart_without_uncommitted_rows(tmp_path):
    batches = [rows(TRAIN, "How many primes are below 30?"), rows("Is 7 prime?", first=2)]
    last = rows(TRAIN.upper(), "Is 7 prime?", "How many primes are below 30?", first=3)
    whole = decide(tmp_path / "whole", [*batches, last])
    decide(tmp_path / "cut", batches)
    with (tmp_path / "cut/seen.jsonl").open("ab") as file:
        file.write(b'["half a li')
    stage = Deduplicate(DeduplicateConfig(), tmp_path / "cut")
    stage.restore(2)
    assert stage.decide(last) == whole[3:]
    stage.save(2)
    stage.close()
    assert (tmp_path / "cut/seen.jsonl").read_bytes() == (
        tmp_path / "whole/seen.jsonl"
    ).read_bytes()


def test_a_damaged_line_of_the_memory_is_named(tmp_path):
    decide(tmp_path, [rows("Is 7 prime?", TRAIN)])
    seen = tmp_path / "seen.jsonl"
    first, second = seen.read_bytes().splitlines(keepends=True)
    seen.write_bytes(first + bytes(len(second)))
    stage = Deduplicate(DeduplicateConfig(), tmp_path)
    stage.restore(1)
    with pytest.raises(InputError, match=r"seen\.jsonl:2: damaged .*; remove the folder"):
        stage.decide(rows(TRAIN, first=2))
    stage.close()


# Contamination


def test_planted_contamination_is_found_with_the_problem_it_comes_from(tmp_path):
    poem = (
        "Let there be a garden with roses and tulips in which the gardener plants every spring as "
        "many new roses as there are tulips. How many flowers are there after the third spring?"
    )
    file = tmp_path / "eval.jsonl"
    texts = [TRAIN, poem, "Is 7 prime?"]
    file.write_text(
        "".join(json.dumps({"id": f"e{i}", "question": t}) + "\n" for i, t in enumerate(texts))
    )
    stage = Decontaminate(DecontaminateConfig(against=(str(file),)), tmp_path)
    decided = stage.decide(
        rows(
            TRAIN.lower(),
            TRAIN.replace("catch up", "overtake it"),
            f"Solve the following riddle for a friend who is ill. {poem} Write the number.",
            "IS 7 PRIME?",
            TRAIN.replace("60", "80").replace("90", "100"),
            "A garden has 5 roses. How many flowers are there after the third spring?",
        )
    )
    assert reasons(decided) == ["contaminated"] * 4 + ["", ""]
    assert [row.detail.split(",")[0] for row in decided[:4]] == ["e0", "e0", "e1", "e2"]


@pytest.mark.parametrize(
    ("evaluated", "contained", "other"),
    [
        (
            "What is the sum of 17, 25 and 9?",
            "Solve this one for a friend who asks. What is the sum of 17, 25 and 9? Give a number.",
            "Solve this one for a friend who asks. What is the sum of 17, 25 and 8? Give a number.",
        ),
        (
            "Compute 3x + 5 when x = 2.",
            "Alice has a function. Compute 3x+5 when x=2. Then add one to it, as Bob would.",
            "Alice has a function. Compute 3x-5 when x=2. Then add one to it, as Bob would.",
        ),
        (
            "求函数 f(x) 在区间 [0, 3] 上的最小值",
            "小明想知道答案,请帮助他:求函数 f(x) 在区间 [0, 3] 上的最小值,并说明理由",
            "小明想知道答案,请帮助他:求函数 f(x) 在区间 [0, 3] 上的最大值,并说明理由",
        ),
        (
            "Find the value of x.",
            "The angles of a triangle are 40, 60 and x degrees, none of them right. Find x.",
            "The angles of a triangle are 40, 60 and x degrees. Find the value of x.",
        ),
    ],
)
def test_a_short_statement_inside_of_another_is_contamination(
    tmp_path, evaluated, contained, other
):
    """But one that says nothing by itself is in many."""
    file = tmp_path / "eval.jsonl"
    file.write_text(json.dumps({"id": "e", "question": evaluated}) + "\n")
    stage = Decontaminate(DecontaminateConfig(against=(str(file),)), tmp_path)
    expected = "" if "value of x" in evaluated else "contaminated"
    assert reasons(stage.decide(rows(contained, other))) == [expected, ""]


def test_an_exact_copy_behind_many_near_ones_is_found(tmp_path):
    near = [f"{TRAIN} Tell {name} the hours." for name in "abcdefghijklmnopqrstuvwxyz"]
    near += [f"{TRAIN} Tell {name}{name} the hours." for name in "abcdefghijklmnopqrstuvwxyz"]
    near += [f"{TRAIN} Tell {name}q the hours." for name in "abcdefghijklmnopqrstuvwxyz"]
    index = SimilarityIndex(0.8, same_numbers=True)
    index.add(
        np.array([index.keys(spelling(text)) for text in [*near, TRAIN]]), range(len(near) + 1)
    )
    [found] = index.find(np.array([index.keys(spelling(TRAIN))]))
    assert found[0] == len(near)


def test_an_unreadable_evaluation_set_is_refused(tmp_path):
    (tmp_path / "eval.jsonl").write_text("nonsense\n")
    config = DecontaminateConfig(against=(str(tmp_path / "eval.jsonl"),))
    with pytest.raises(InputError, match=r"eval.jsonl:1: .*fix this evaluation set"):
        Decontaminate(config, tmp_path)


def test_stages_and_their_settings_belong_together():
    with pytest.raises(ValueError, match="no stage 'fliter'; did you mean 'filter'"):
        CurateConfig(stages=("fliter",))
    with pytest.raises(ValueError, match="name the stage in `stages` and the evaluation sets"):
        CurateConfig(stages=("decontaminate",))
