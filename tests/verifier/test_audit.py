"""The audit finds what was planted, and nothing where all is well."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tramontane
from tramontane.cli import app
from tramontane.config import VerifierConfig
from tramontane.errors import InputError
from tramontane.verifier import score_file
from tramontane.verifier.audit import hedges, occurs
from tramontane.verifier.opinions import same_number, same_string

KINDS = ["hedge", "boxes", "not in thoughts", "disputed", "unscorable", "majority"]


def rollout(text, verdict, answer="5", group=1, **more):
    row = {"update": 1, "group": group, "index": 0, "problem_id": f"p{group}", "problem": "?"}
    return row | {"answer": answer, "text": text, "verdict": verdict, "reason": ""} | more


def text(box, thoughts="two and three are 5"):
    return f"<think>{thoughts}</think>So \\boxed{{{box}}}."


GOOD = [rollout(text(b), v, index=i) for i, (b, v) in enumerate([("5", "right"), ("6", "wrong")])]
PLANTED = [
    (rollout(text("5 or 6"), "right", group=2), {"hedge", "not in thoughts", "disputed"}),
    (
        rollout(text(5) + " or \\boxed{6}", "right", group=3),
        {"boxes", "not in thoughts", "disputed"},
    ),
    (rollout(text(5, "I guess."), "right", group=4), {"not in thoughts"}),
    (rollout(text(5), "wrong", group=5), {"disputed"}),
    (rollout(text("x", "x"), "unscorable", group=6, reason="timed out"), {"unscorable"}),
    *[
        (rollout(text(7), "wrong", group=7, index=i), {"majority"} if i == 0 else set())
        for i in range(3)
    ],
    (rollout("no tags", "malformed", group=8), set()),
    (rollout("<think>a</think>```python\n1\n```", "right", answer=None, group=9), set()),
    # math-verify would expand it for minutes: it must be stopped from outside.
    (rollout(text("(x+y+z+w)^{200}", "(x+y+z+w)^{200}"), "right", "x+1", group=10), {"disputed"}),
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def findings(folder):
    return [json.loads(line) for line in (folder / "audit.jsonl").open(encoding="utf-8")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    (run / "rollouts").mkdir()
    write(run / "rollouts" / "update_000001.jsonl", GOOD)
    write(run / "rollouts" / "update_000002.jsonl", [row for row, _ in PLANTED])
    return run, tramontane.audit(run, config=VerifierConfig(timeout_s=1.0))


def test_each_planted_row_is_found_under_its_kinds(run):
    folder, result = run
    found = [(f["file"], f["line"], f["kind"]) for f in findings(folder)]
    expected = [
        ("rollouts/update_000002.jsonl", line, kind)
        for line, (_, kinds) in enumerate(PLANTED, 1)
        for kind in kinds
    ]
    assert sorted(found) == sorted(expected)
    assert result.undecided == 1  # the one that had to be stopped
    assert result.completions == len(GOOD) + len(PLANTED)
    assert result.unscorable_rates == {"p6": (1, 1)}
    assert result.share("majority") == "11.1 % of 9 groups"


def test_disputes_name_who_disputes(run):
    details = {f["problem_id"]: f["detail"] for f in findings(run[0]) if f["kind"] == "disputed"}
    everyone = "string equality, numeric comparison, math-verify, grading again: right"
    assert details["p5"] == everyone
    assert "numeric comparison" not in details["p2"] and details["p2"].endswith("wrong")


def test_the_report_links_to_the_rollouts(run):
    page = (run[0] / "audit.md").read_text(encoding="utf-8")
    assert all(f"| {kind} | " in page for kind in KINDS)
    link = "[rollouts/update_000002.jsonl:1](<rollouts/update_000002.jsonl#L1>)"
    assert f"| {link} | `p2` | `5 or 6` | `5` | `says “or”` |" in page


def test_what_score_wrote_is_joined_with_what_it_read(tmp_path):
    row = {"id": "a", "domain": "math", "problem": "2+3?", "answer": 5, "response": text(5)}
    rows = [row, {"id": 7}, row | {"response": text(5, "Hm.")}, row | {"response": text(6)}]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    score_file(source, out)
    with pytest.raises(InputError, match=r"out\.jsonl:1: text is missing.*--rows"):
        tramontane.audit(out)
    tramontane.audit(out, rows=source)
    assert [(f["kind"], f["line"]) for f in findings(tmp_path)] == [("not in thoughts", 2)]
    write(source, rows[:1])
    with pytest.raises(InputError, match=r"out\.jsonl:2: id 'a' is not in"):
        tramontane.audit(out, rows=source)


def test_an_evaluation_whose_answer_is_what_was_extracted(tmp_path):
    row = {"group": 0, "index": 0, "problem_id": "e", "domain": "math", "reference": "5"}
    row |= {"text": text(6), "verdict": "right", "reason": "", "answer": "6"}
    file = write(tmp_path / "evaluation_after.jsonl", [row])
    result = tramontane.audit(file)
    assert {f.kind for f in result.findings} == {"not in thoughts", "disputed"}


def test_the_sample_bounds_what_others_look_at(tmp_path):
    rows = [rollout(text(i), "wrong", str(i), group=i) for i in range(10)]
    result = tramontane.audit(write(tmp_path / "in.jsonl", rows), sample=3)
    assert len(result.of("disputed")) == 3
    assert result.totals["disputed"][0] == 3


def test_the_command(tmp_path):
    file = write(tmp_path / "[bold]`x|.jsonl", [row for row, _ in PLANTED[:5]])
    (out := tmp_path / "out").mkdir()
    done = CliRunner().invoke(app, ["audit", str(file), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert (out / "audit.md").is_file() and not (tmp_path / "audit.md").exists()
    assert all(kind in done.stdout for kind in KINDS)
    (found, *_) = findings(out)
    assert (out / found["file"]).resolve() == file.resolve()


def test_bad_input(tmp_path):
    for path, out, message in [
        (tmp_path, None, "no rollouts"),
        (tmp_path / "none.jsonl", None, "no such file"),
        (write(tmp_path / "bad.jsonl", [{"id": 1}]), None, r"bad\.jsonl:1: text is missing"),
        (tmp_path, tmp_path / "nowhere", "no such folder"),
    ]:
        with pytest.raises(InputError, match=message):
            tramontane.audit(path, out)
    assert not Path(tmp_path / "audit.md").exists()


@pytest.mark.parametrize(
    ("box", "reference", "found"),
    [
        ("5 or 6", "5", True),
        (r"5 \text{ or more}", "5", True),
        ("1 = 2 = 5", "5", True),
        ("5, 6, 7", "5", True),
        ("5,6", "5", True),
        (r"\pm 5", "5", True),
        ("5 oder 6", "5", True),
        ("5", "5", False),
        (r"\frac{10}{2} = 5", "5", False),
        ("x = 5", "5", False),
        ("1,000", "1000", False),
        (r"1{,}000", "1000", False),
        ("1, 2", r"\{1, 2\}", False),
        ("x=1 or x=2", "x=1 or x=2", False),
        ("1000,99", "1000.99", False),
        (r"\binom{5}{2} = 10", "10", False),
        ("(0,1)", "0<f(x)<1", False),
        (r"19, 46, \text{ and } 82", "19, 46, and 82", False),
        (r"\text{orange}", "orange", False),
        ("(C) 12", "C", False),
    ],
)
def test_hedges(box, reference, found):
    assert bool(hedges(box, reference)) == found


@pytest.mark.parametrize(
    ("answer", "thoughts", "found"),
    [
        ("5", "it is 5.", True),
        ("5", "it is 15 or 51 or 2.5", False),
        ("1{,}000", "gives 1,000 m", True),
        ("1000", "gives 1,000 m", True),
        (r"\frac{1}{2}", "so 0.5 it is", True),
        ("0.5", r"so \dfrac{1}{2} it is", True),
        ("-2", "3 - 5 = −2", True),
        ("12", "12 / 4 = 3", True),
        ("4", "４", True),
        (r"\text{odd}", "It is odd", True),
        ("x + 1", "we get x+1", True),
        ("7", "", False),
    ],
)
def test_occurs(answer, thoughts, found):
    assert occurs(answer, thoughts) == found


def test_plain_opinions():
    assert same_string(" x+ 1", "x +1") is True
    assert same_string("5", "5.0") is None
    assert same_number("5.0", "$5$") is True
    assert same_number("1,000", "1000") is True
    assert same_number("1/3", "0.333") is False
    for box in ("1e999999999", "1/0", "x", "5 cm", "1,00", ""):
        assert same_number(box, "5") is None
