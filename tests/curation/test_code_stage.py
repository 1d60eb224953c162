"""Programming problems: solutions vote on tests, with faults planted in both."""

import gzip
import json
import random
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.curation.killing import kill_once_written, start
from tests.forked import end
from tests.paths import DATA
from tramontane.config import VerifierConfig
from tramontane.curation.agreement import (
    decisive,
    fate,
    most_telling,
    mutants,
    poll,
    several_outputs,
    steady,
    voters,
    with_checker,
)
from tramontane.curation.config import CodeConfig, CurateConfig
from tramontane.curation.inputs import mutations
from tramontane.curation.pipeline import curate
from tramontane.data.code import Solution
from tramontane.types import Problem

TOKENS = {"type": "stdio", "checker": "tokens"}
CONFIG = CodeConfig()
NAMES = ("kept.jsonl", "decisions.jsonl", "report.md", "report.html", "summary.json")

# The vote


def test_a_poll_counts_equal_outputs_by_the_checker():
    ballot = ["4\n", "4", "5", None, " 4 "]
    count = poll(ballot, "4", TOKENS)
    assert (count.votes, count.second, count.passed, count.confirmed) == (3, 1, 3, True)
    assert poll(ballot, "5", TOKENS)[1:] == (3, 1, 1, False)
    assert poll([None, None], "5", TOKENS)[1:] == (0, 0, 0, False)
    # In a tie the label's output is the mode.
    assert poll(["1", "2"], "2", TOKENS).mode == "2"
    floats = TOKENS | {"checker": "float", "float_tolerance": 1e-6}
    assert poll(["0.5", "0.50", "5e-1"], "0.5000000", floats).passed == 3


@pytest.mark.parametrize(
    ("ballot", "what"),
    [
        ("4444", "kept"),
        ("4455", "kept"),  # a tie, and the label is one of the two
        ("4555", "dropped"),  # one passes: who is right?
        ("5555", "relabeled"),
        ("5556", "dropped"),  # three of four are not 80 %
        ("55555555 6", "relabeled"),
        ("55", "dropped"),  # two are too few
        ("5678", "dropped"),
        ("xxx4", "dropped"),  # most solutions cannot run on it
        ("xx44", "kept"),
    ],
)
def test_fate_of_a_test_by_its_ballot(ballot, what):
    outputs = [None if c == "x" else c for c in ballot.replace(" ", "")]
    assert fate(poll(outputs, "4", TOKENS), len(outputs), CONFIG) == what


def test_solutions_that_are_wrong_or_do_not_run_have_no_vote():
    labels = ["1", "2", "3", "4"]
    right, wrong, crashes = labels, ["0", "0", "3", "0"], ["1", None, None, None]
    ballots = list(zip(right, wrong, crashes, right, strict=True))
    assert voters(ballots, labels, TOKENS) == [0, 3]
    # Labels may be wrong if solutions agree; of two solutions that differ, neither prevails.
    assert voters(list(zip(right, right, strict=True)), ["x"] * 4, TOKENS) == [0, 1]
    assert voters(list(zip(right, wrong, strict=True)), ["x"] * 4, TOKENS) == []


def test_output_of_only_one_of_two_runs_is_no_vote():
    once, again = [["8", "8", "1"], ["6", None, "2"]], [["8", "7", "1"], ["6", "6", None]]
    assert steady(once, again) == [["8", None, "1"], ["6", None, None]]


@pytest.mark.parametrize(
    ("runs", "several"),
    [
        (["abcd", "abcx", "abyd", "zbcd", "awcd"], True),  # each differs from the others somewhere
        (["abcd", "xyzw", "1234"], True),
        (["abcd", "abcd", "abcd", "xxxx", "yyyy"], False),  # right ones agree
        (["abcd", "abcx", "abcy"], False),  # one test is open, not the problem
        (["abcd", "xyzw"], False),  # one of two may be wrong
        (["abcd", None, None, "xyzw"], False),
    ],
)
def test_solutions_that_differ_everywhere_show_several_right_outputs(runs, several):
    ballots = list(zip(*([None] * 4 if run is None else run for run in runs), strict=True))
    assert several_outputs(ballots, TOKENS) is several


def test_mutants_are_programs_with_one_change():
    root = Solution("python", "n = int(input())\nprint(max(a for a in range(n + 1) if a * a <= n))")
    found = mutants([root], 20, "seed")
    codes = {solution.code for solution in found}
    assert found == mutants([root], 20, "seed") and len(codes) == len(found)
    assert root.code.replace("<=", "<") in codes and root.code.replace("max", "min") in codes
    assert root not in found and len(mutants([root], 2, "seed")) == 2


def test_tests_that_few_wrong_programs_pass_are_chosen():
    failed, sizes = [{1}, {1, 2}, {3}, set(), {1, 2}, set()], [1, 1, 1, 9, 1, 2]
    assert most_telling(failed, sizes, 3) == [1, 2, 3]  # the largest input, and two that find all
    assert most_telling(failed, sizes, 1, before=[{1, 2}]) == [2]
    assert most_telling(failed, sizes, 9) == [0, 1, 2, 3, 4, 5]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=12),
    st.sampled_from(["a", "b", "d"]),
)
def test_a_label_changes_only_if_no_voter_prints_it(ballot, label):
    count = poll(ballot, label, TOKENS)
    what = fate(count, len(ballot), CONFIG)
    if what == "relabeled":
        assert label not in ballot
        assert ballot.count(count.mode) >= max(3, 0.8 * len(ballot))
        assert decisive(count, len(ballot), CONFIG)
    if what == "kept":
        assert ballot.count(label) == max(ballot.count(x) for x in "abcd")
        assert ballot.count(label) >= len(ballot) / 2
    shuffled = list(reversed(ballot))
    assert fate(poll(shuffled, label, TOKENS), len(ballot), CONFIG) == what


def test_differently_spelt_decimals_are_compared_as_numbers():
    def chosen(label, output, **extra):
        tests = {"type": "stdio", "cases": [{"input": "", "output": label}], **extra}
        return with_checker(tests, [[output]], 1e-6).get("checker")

    assert chosen("0.50", "0.5") == "float"
    assert chosen("0.50", "0.50") is None
    assert chosen("0.50", "0.51") is None
    assert chosen("0.50", "0.5", checker="tokens") == "tokens"
    assert chosen("1000000", "1000001") is None  # within the tolerance, but without a decimal point
    assert chosen("3", "3.0") is None


# More inputs


def stdio(*inputs):
    return {"type": "stdio", "cases": [{"input": text, "output": ""} for text in inputs]}


def test_mutations_are_new_inputs_of_the_same_shape():
    texts = ["3\n10 20 30\n", "4\n5 6 7 81\n"]
    found = mutations(Problem("p", "code", "", tests=stdio(*texts)), 50)
    assert len(set(found)) == 50 and not set(found) & set(texts)
    for text in found:
        count, line = text.splitlines()
        assert int(count) == len(line.split())
        assert all(3 <= int(number) <= 81 for number in line.split())
    assert found == mutations(Problem("p", "code", "", tests=stdio(*texts)), 50)
    assert found != mutations(Problem("q", "code", "", tests=stdio(*texts)), 50)


@pytest.mark.parametrize(
    "text", ['[[25, -35, "ab"], true, {"key": null}]\n', '["wörter", 3.75]', "[[], 0]"]
)
def test_json_stays_json(text):
    found = mutations(Problem("p", "code", "", tests=stdio(text)), 20)

    def shape(value):
        if isinstance(value, list):
            return [shape(v) for v in value]
        if isinstance(value, dict):
            return [shape(v) for v in value.values()]
        return len(value) if isinstance(value, str) else type(value)

    assert {str(shape(json.loads(new))) for new in found} <= {str(shape(json.loads(text)))}
    assert found or text == "[[], 0]"


@pytest.mark.parametrize("text", ["", "true\n", "1\n"])
def test_inputs_without_anything_to_change_have_no_mutations(text):
    assert mutations(Problem("p", "code", "", tests=stdio(text)), 5) == []


# A whole stage

DOUBLE = ["print(int(input())*2)", "n=int(input());print(n+n)", "print(int(input())<<1)"]
HALF = [f"n=int(input());print({text})" for text in ("n/2", "'%.2f'%(n/2)", "str(n*.5)+'0'")]
ANY = [f"import os;print(int.from_bytes(os.urandom(8), 'big'), {i})" for i in range(3)]
HANG = "import signal\nwhile True: signal.pause()"
CRASH = "raise SystemExit('no')"
KILL = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)"


def doubles(*numbers, wrong=()):
    return [{"input": f"{n}\n", "output": f"{n + 1 if n in wrong else 2 * n}\n"} for n in numbers]


def row(name, cases, solutions, **extra):
    tests = {"type": "stdio", "cases": cases, "checker": "tokens"}
    return {"id": name, "problem": f"{name}?", "tests": tests, "solutions": solutions} | extra


# Tests that never call the program, check nothing, or pass a program that does nothing.
IDLE = [
    "", "assert 1 + 1 == 2", "def helper():\n    assert f() == 1", "print(f())",
    "assert isclose(sqrt(4), 2)", "def check(candidate):\n    pass", "assert not f()",
    "try:\n    assert f() == 1\nexcept Exception:\n    pass",
    "for x in []:\n    assert f() == x", "assert f() in [f()]",
]  # fmt: skip
# Rows, each with the reason that it is given.
PLANTED = [
    (row("good", doubles(3, 5, 7), DOUBLE), "asked_in_python"),
    (row("good_in_python", doubles(3, 5, 7), DOUBLE, language="python"), ""),
    (row("wrong_label", doubles(3, 5, 7, wrong=[5]), DOUBLE), "tests_relabeled"),
    (row("wrong_labels", doubles(3, 5, 7, wrong=[3, 5, 7]), DOUBLE), "tests_relabeled"),
    (row("one_solution", doubles(3, 5, 7, wrong=[5]), DOUBLE[:1]), "tests_dropped"),
    (row("wrong_solution", doubles(3, 5), [*DOUBLE, "print(7)"], language="python"), ""),
    (row("hostile", doubles(3), [HANG, *DOUBLE, CRASH, KILL], language="python"), ""),
    (row("only_hangs", doubles(3), [HANG]), "no_agreement"),
    (row("random", doubles(3, 5, 7), ANY), "no_agreement"),
    (
        row("open_end", [*doubles(3, 5, 7), {"input": "x\n", "output": "?\n"}],
            [f"n=input()\nprint({i} if n=='x' else 2*int(n))" for i in range(3)]),
        "tests_dropped",
    ),
    (
        row("order_of_a_set", [*doubles(3, 5, 7), {"input": "x\n", "output": "?\n"}],
            [f"n=input()\nprint(*set('abcdefg') if n=='x' else [2*int(n)])#{i}" for i in range(3)]),
        "tests_dropped",
    ),
    (row("decimals", [{"input": "1\n", "output": "0.50\n"}], HALF, tests={
        "type": "stdio", "cases": [{"input": "1\n", "output": "0.50\n"}]}, language="python"),
     "float_checker"),
    (row("tokens", [{"input": "1\n", "output": "0.500\n"}], HALF[:1]), "no_agreement"),
    (row("no_tests", [], DOUBLE, tests=None, domain="code"), "no_tests"),
    (row("no_solutions", doubles(3), [{"language": "java", "code": "x"}]), "no_solutions"),
    (row("function", [], ["def f(): return 1", "def f(): return 2"],
         tests={"type": "python_assert", "code": "assert f() == 1", "entry_point": "f"}), ""),
    (row("no_function", [], ["def g(): return 1"],
         tests={"type": "python_assert", "code": "assert f() == 1", "entry_point": "f"}),
     "no_agreement"),
    *((row(f"idle_{i}", [], ["def f(): return 1"],
           tests={"type": "python_assert", "code": code, "entry_point": "f"}), "idle_tests")
      for i, code in enumerate(IDLE)),
    (row("no_output", [{"input": "1\n", "output": "\n"}], ["input()"]), "idle_tests"),
    ({"id": "maths", "problem": "What is $1+1$?", "answer": "2"}, ""),
]  # fmt: skip
SETTINGS = CodeConfig(want_tests=0, verifier=VerifierConfig(workers=2, code_timeout_s=4))
# For rows without hanging programs: none may be late because the machine is busy.
PATIENT = CodeConfig(want_tests=0, verifier=VerifierConfig(workers=2, code_timeout_s=60))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(folder, rows, settings=PATIENT, **extra):
    source = write(folder / "raw.jsonl", rows)
    config = CurateConfig(
        inputs=(source,), out=str(folder / "out"), stages=("code",), code=settings, **extra
    )
    return curate(config).summary, folder / "out"


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    rows = [row for row, _ in PLANTED]
    summary, out = run(tmp_path_factory.mktemp("planted"), rows, SETTINGS, chunk_rows=7)
    return summary, lines(out / "decisions.jsonl"), lines(out / "kept.jsonl"), out


@pytest.mark.slow
def test_each_fault_is_found(planted):
    summary, decisions, _, out = planted
    found = {d["id"]: d for d in decisions}
    wanted = {row["id"]: reason for row, reason in PLANTED}
    assert {name: found[name]["reason"] for name in wanted} == wanted
    for name, reason in wanted.items():
        dropped = reason.startswith(("no_", "idle"))
        assert found[name]["decision"] == (
            "dropped" if dropped else "rewritten" if reason else "kept"
        )
    assert "1 without a vote: timed out after 8 s, most of it" in found["only_hangs"]["detail"]
    assert "relabeled test 2 ('6' → '10')" in found["wrong_label"]["detail"]
    assert found["open_end"]["detail"].endswith("dropped test 4")
    text = (out / "report.md").read_text()
    for reason in set(wanted.values()) - {""}:
        assert f"### {reason}: " in text
    assert summary["stages"][1]["dropped"]["no_agreement"] == 4


@pytest.mark.slow
def test_kept_rows_have_the_right_labels(planted):
    kept = {k["id"]: k for k in planted[2]}
    cases = {
        name: k["tests"]["cases"]
        for name, k in kept.items()
        if k["domain"] == "code" and "cases" in k["tests"]
    }
    for name in ("good", "good_in_python", "wrong_label", "wrong_labels"):
        assert cases[name] == doubles(3, 5, 7)
    assert cases["one_solution"] == doubles(3, 7)
    assert cases["open_end"] == doubles(3, 5, 7)
    assert kept["wrong_label"]["relabeled_tests"] == [{"test": 2, "was": "6\n"}]
    assert kept["decimals"]["tests"]["checker"] == "float"


@pytest.mark.slow
def test_problems_in_any_language_are_asked_in_python_and_in_cpp(planted):
    summary, decisions, kept, _ = planted
    ids = [k["id"] for k in kept]
    assert len(set(ids)) == len(ids)
    by_id = {k["id"]: k for k in kept}
    python, cpp = by_id["good"], by_id["good-cpp"]
    assert ids.index("good-cpp") == ids.index("good") + 1
    assert python["problem"] == "good?\n\nWrite the program in Python."
    assert cpp["problem"] == "good?\n\nWrite the program in C++."
    assert python["original_problem"] == cpp["original_problem"] == "good?"
    assert (python["programming_language"], cpp["programming_language"]) == ("python", "cpp")
    assert python["tests"] == cpp["tests"]
    assert "good_in_python-cpp" not in by_id and "function-cpp" not in by_id
    assert by_id["good_in_python"]["problem"] == "good_in_python?"
    copies = [d for d in decisions if d["id"].endswith("-cpp")]
    assert summary["copies"] == len(copies) == len(decisions) - len(PLANTED) > 3
    assert summary["rows"] == len(PLANTED)
    assert summary["stages"][-1]["left"] == len(kept)
    assert {d["source"] for d in copies} < {d["source"] for d in decisions if d not in copies}


@pytest.mark.slow
def test_problems_with_few_tests_get_more(tmp_path):
    rows = [row("many_solutions", doubles(3, 40), DOUBLE), row("one", doubles(3, 40), DOUBLE[:1])]
    settings = PATIENT.model_copy(update={"want_tests": 6, "min_tests": 4, "languages": ()})
    _, out = run(tmp_path, rows, settings)
    decisions = {d["id"]: d for d in lines(out / "decisions.jsonl")}
    assert decisions["one"]["reason"] == "few_tests"
    assert decisions["many_solutions"]["reason"] == "tests_added"
    (kept,) = lines(out / "kept.jsonl")
    cases = kept["tests"]["cases"]
    assert cases[:2] == doubles(3, 40) and len(cases) == 6
    assert len({case["input"] for case in cases}) == 6
    assert cases == doubles(*(int(case["input"]) for case in cases))
    assert kept["problem"] == "many_solutions?"


ROOT = ["n=int(input())\nprint(max(a for a in range(n+1) if a*a<=n))",
        "import math\nprint(math.isqrt(int(input())))",
        "n=int(input())\na=0\nwhile (a+1)*(a+1)<=n: a+=1\nprint(a)"]  # fmt: skip
ANY_SUM = "n=int(input())\nprint({}, n-({}))"  # two numbers with the sum n
SUMS = [ANY_SUM.format(text, text) for text in ("1", "n-2", "n//2", "n")]
CHECK = """
import sys
n, a, b = (int(open(sys.argv[1]).read()), *map(int, open(sys.argv[2]).read().split()))
sys.exit(a + b != n)
"""


@pytest.mark.slow
def test_problems_with_many_tests_keep_those_that_tell_programs_apart(tmp_path):
    # Only a square tells `<=` from `<`.
    numbers = [*(n for n in range(2, 30) if n not in (4, 9, 16, 25)), 49]
    cases = [{"input": f"{n}\n", "output": f"{int(n**0.5)}\n"} for n in numbers]
    settings = SETTINGS.model_copy(update={"max_tests": 3, "languages": ()})
    wrong = ["n=int(input())\nprint(max(a for a in range(n+1) if a*a<n))"]
    rows = [row("root", cases, ROOT, incorrect_solutions=wrong)]
    _, out = run(tmp_path, rows, settings)
    [decision] = lines(out / "decisions.jsonl")
    assert decision["reason"] == "tests_chosen" and "left out 22" in decision["detail"]
    [kept] = lines(out / "kept.jsonl")
    assert len(kept["tests"]["cases"]) == 3
    assert {"input": "49\n", "output": "7\n"} in kept["tests"]["cases"]


@pytest.mark.slow
def test_several_right_outputs_are_flagged_and_a_checker_program_decides(tmp_path):
    cases = [{"input": f"{n}\n", "output": f"1 {n - 1}\n"} for n in (5, 7, 9)]
    checked = {"type": "stdio", "cases": cases, "checker": "program", "checker_code": CHECK}
    rows = [row("open", cases, SUMS, tests={"type": "stdio", "cases": cases}),
            row("checked", cases, SUMS, tests=checked, language="python"),
            row("wrong", cases, ["print(1, 1)"] * 1, tests=checked)]  # fmt: skip
    _, out = run(tmp_path, rows)
    found = {d["id"]: (d["decision"], d["reason"]) for d in lines(out / "decisions.jsonl")}
    assert found["open"] == ("dropped", "several_outputs")
    assert found["checked"] == ("kept", "")
    assert found["wrong"] == ("dropped", "no_agreement")


@pytest.mark.slow
def test_a_curation_killed_repeatedly_ends_with_the_same_results(tmp_path):
    rows = [row(f"p{i}", doubles(3, 4 + i), DOUBLE) for i in range(4)]
    (tmp_path / "whole").mkdir()
    _, whole = run(tmp_path / "whole", rows, chunk_rows=3)
    out, done = tmp_path / "killed", b""
    config = CurateConfig(
        inputs=(str(tmp_path / "whole/raw.jsonl"),), out=str(out), stages=("code",),
        code=PATIENT, chunk_rows=3,
    )  # fmt: skip
    journal = out / "work/1-code/asked-000000000-finished.jsonl"
    for finished in (1, 2):
        kill_once_written(start(config), journal, lines=finished)
        assert journal.read_bytes().startswith(done)  # nothing is run twice
        done = journal.read_bytes()[: journal.read_bytes().rindex(b"\n") + 1]
        journal.write_bytes(done + b'["3 ", [')  # and an incomplete line
    assert end(start(config)) == 0
    for name in NAMES:
        assert (out / name).read_bytes() == (whole / name).read_bytes().replace(
            str(whole).encode(), str(out).encode()
        )


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.slow
def test_solutions_in_cpp_vote_too(tmp_path):
    cpp = "#include <iostream>\nint main() { long n; std::cin >> n; std::cout << 2 * n; }"
    rows = [row("mixed", doubles(3, 5, wrong=[3]), [*DOUBLE[:2], cpp])]
    _, out = run(tmp_path, rows)
    (kept, copy) = lines(out / "kept.jsonl")
    assert kept["tests"]["cases"] == copy["tests"]["cases"] == doubles(3, 5)


def test_rows_of_other_domains_pass(tmp_path):
    _, out = run(tmp_path, [PLANTED[-1][0]])
    assert [k["id"] for k in lines(out / "kept.jsonl")] == ["maths"]


@pytest.mark.slow
def test_real_problems_with_planted_faults(tmp_path):
    """All changed labels are found, and no other label is changed."""
    file = DATA / "mbpp_stdio.jsonl.gz"
    if not file.is_file():
        pytest.skip(f"no {file}: the shared data are not there")
    rng, rows, truth = random.Random(0), [], {}
    with gzip.open(file, "rt") as text:
        source = [json.loads(line) for line in text][:6]
    for i, problem in enumerate(source):
        cases = problem["tests"]["cases"]
        if i % 2:
            wrong = rng.randrange(len(cases))
            truth[problem["id"], wrong] = cases[wrong]["output"]
            cases[wrong] = cases[wrong] | {"output": json.dumps(f"not {i}") + "\n"}
        spelt = [f"{problem['solution']}\n# {n}" for n in range(3)]
        rows.append(problem | {"solutions": [*spelt, source[i - 1]["solution"]]})
    _, out = run(tmp_path, rows)
    found = {
        (k["id"], change["test"] - 1): k["tests"]["cases"][change["test"] - 1]["output"]
        for k in lines(out / "kept.jsonl")
        for change in k.get("relabeled_tests", [])
    }
    assert {key: json.loads(new) for key, new in found.items()} == {
        key: json.loads(old) for key, old in truth.items()
    }
    assert len(lines(out / "kept.jsonl")) == len(rows)
    assert not any("dropped" in d["detail"] for d in lines(out / "decisions.jsonl"))
