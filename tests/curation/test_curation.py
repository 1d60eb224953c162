"""A whole curation: its files, its counts, and the same results after kills."""

import gzip
import json
import random
import signal
from collections import Counter

import datasets
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from typer.testing import CliRunner

import tramontane
from tests.curation.killing import start
from tests.forked import end
from tramontane import InputError
from tramontane.cli import app
from tramontane.config import DataConfig
from tramontane.curation.config import CurateConfig
from tramontane.curation.pipeline import curate
from tramontane.data.load import load_problems

NAMES = ("kept.jsonl", "decisions.jsonl", "report.md", "report.html", "summary.json")
runner = CliRunner()


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def run(tmp_path, *inputs, name="out", **settings):
    config = CurateConfig(inputs=inputs, out=str(tmp_path / name), **settings)
    return curate(config).summary, tmp_path / name


def results(out):
    return {name: (out / name).read_bytes() for name in NAMES}


def sums(count, seed=0):
    """Small problems, among them duplicates, conflicts, proofs and multiple choice."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        a, b = rng.randint(100, 999_999), rng.randint(100, 999_999)
        row = {"id": f"s{i}", "problem": f"What is the sum of ${a}$ and ${b}$?", "answer": a + b}
        kind = i % 10
        if kind == 7:
            row = dict(rows[rng.randrange(len(rows))], id=f"s{i}")
        elif kind == 8:
            row["problem"] = f"Prove that ${a} + {b}$ is ${a + b}$."
        elif kind == 9:
            row["problem"] += f"\n(A) {a}\n(B) {a + b}\n(C) {b}"
            row["answer"] = "B"
        rows.append(row)
    return rows


def test_every_row_has_one_decision_in_the_order_of_the_input(tmp_path):
    source = write(tmp_path / "raw.jsonl", sums(60))
    summary, out = run(tmp_path, source, chunk_rows=7)
    decisions = lines(out / "decisions.jsonl")
    assert [d["source"] for d in decisions] == [f"{source}:{i}" for i in range(1, 61)]
    assert [d["id"] for d in decisions] == [f"s{i}" for i in range(60)]
    counts = Counter(d["decision"] for d in decisions)
    assert counts == {k: summary[k] for k in ("kept", "rewritten", "dropped")}
    assert sum(counts.values()) == summary["rows"] == 60
    assert counts["rewritten"] >= 5
    kept = lines(out / "kept.jsonl")
    assert [k["id"] for k in kept] == [d["id"] for d in decisions if d["decision"] != "dropped"]
    dropped = Counter(d["reason"] for d in decisions if d["decision"] == "dropped")
    of_stages = Counter()
    for step in summary["stages"]:
        of_stages.update(step["dropped"])
    assert dropped == of_stages
    assert summary["stages"][-1]["left"] == len(kept)
    assert {d["stage"] for d in decisions if d["reason"] == "proof"} == {"filter"}
    assert not (out / "work").exists()


def test_results_do_not_depend_on_the_chunks(tmp_path):
    source = write(tmp_path / "raw.jsonl", sums(50))
    _, a = run(tmp_path, source, name="a", chunk_rows=3, stages=("deduplicate",))
    _, b = run(tmp_path, source, name="b", chunk_rows=1000, stages=("deduplicate",))
    assert (a / "decisions.jsonl").read_bytes() == (b / "decisions.jsonl").read_bytes()
    assert (a / "kept.jsonl").read_bytes() == (b / "kept.jsonl").read_bytes()


def test_kept_rows_load_again_unchanged(tmp_path):
    tests = {"type": "stdio", "cases": [{"input": "1\n", "output": "2\n"}]}
    rows = [
        {
            "id": 5,
            "question": " What is  $1 + 1$? ",
            "answer": "2",
            "level": "Level 3",
            "hint": "x",
        },
        {"problem": "Add.", "tests": tests, "language": "python"},
        {"problem": "Was ist $1+2$?", "answer": 3, "language": "de", "difficulty": "hard"},
    ]
    source = write(tmp_path / "raw.jsonl", rows)
    _, out = run(tmp_path, source)

    def load(path):
        return load_problems(
            str(path), DataConfig(train="playground:"), split="train", limit=None, seed=0
        )

    before, after = load(source), load(out / "kept.jsonl")
    fields = ("id", "domain", "problem", "answer", "tests", "language", "difficulty", "source")
    for old, new in zip(before, after, strict=True):
        assert [getattr(old, f) for f in fields] == [getattr(new, f) for f in fields]
    assert after[0].metadata == {"hint": "x"}
    assert after[1].metadata == {"programming_language": "python"}
    assert after[2].metadata == {"difficulty": "hard"}
    # A second curation changes nothing.
    _, again = run(tmp_path, str(out / "kept.jsonl"), name="again")
    assert lines(again / "kept.jsonl") == lines(out / "kept.jsonl")


def test_all_kinds_of_sources(tmp_path):
    rows = [{"problem": f"What is $1 + {i}$?", "answer": str(i + 1)} for i in range(4)]
    plain = write(tmp_path / "a.jsonl", rows[:1])
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps(rows[1]) + "\n")
    parquet.write_table(pyarrow.Table.from_pylist(rows[2:3]), tmp_path / "c.parquet")
    datasets.Dataset.from_list(rows[3:]).to_parquet(str(tmp_path / "d/train.parquet"))
    sources = [plain, *(str(tmp_path / name) for name in ("b.jsonl.gz", "c.parquet", "d"))]
    _, out = run(tmp_path, *sources, stages=())
    assert [row["problem"] for row in lines(out / "kept.jsonl")] == [r["problem"] for r in rows]
    assert [d["source"] for d in lines(out / "decisions.jsonl")] == [
        f"{sources[0]}:1", f"{sources[1]}:1", f"{sources[2]}[0]", f"{sources[3]}[0]"
    ]  # fmt: skip


def test_bad_rows_are_named_and_the_rest_is_processed(tmp_path):
    good = json.dumps({"problem": "What is $1 + 1$?", "answer": 2}).encode()
    bad = [
        b"{not json", b"[1]", b'{"problem": "\xff"}', b'{"answer": 1}', b'{"problem": " "}',
        b'{"problem": "x", "tests": {"type": "?"}}', b'{"problem": "\\ud800", "answer": "1"}',
        b'{"problem": ' + b"[" * 100_000, b'{"problem": ["x"], "answer": 1}', b"9" * 5000,
    ]  # fmt: skip
    (tmp_path / "raw.jsonl").write_bytes(b"\n".join([good, *bad, b"", good]))
    summary, out = run(tmp_path, str(tmp_path / "raw.jsonl"), chunk_rows=4)
    decisions = lines(out / "decisions.jsonl")
    assert [d["source"].rpartition(":")[2] for d in decisions] == [*map(str, range(1, 12)), "13"]
    assert [d["reason"] for d in decisions] == ["", *["malformed"] * 10, "duplicate"]
    assert summary["malformed"] == 10
    assert f"{tmp_path}/raw.jsonl:2: not JSON" in summary["malformed_rows"][0]


def test_a_file_that_is_cut_off_ends_there_and_the_next_begins(tmp_path):
    rows = [{"problem": f"What is $1 + {i}$?", "answer": i + 1} for i in range(2000)]
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "no.parquet").write_bytes(b"PAR1 not really")
    last = write(tmp_path / "last.jsonl", rows[-1:])
    sources = (str(tmp_path / "cut.jsonl.gz"), str(tmp_path / "no.parquet"), last)
    summary, out = run(tmp_path, *sources, stages=())
    assert summary["malformed"] == 2
    assert 100 < summary["kept"] < 1900
    assert lines(out / "decisions.jsonl")[-1]["source"] == f"{last}:1"


def test_reports_tell_counts_reasons_and_examples(tmp_path):
    source = write(tmp_path / "raw.jsonl", [*sums(40), {"problem": "<b>|x", "answer": ""}])
    summary, out = run(tmp_path, source)
    text, page = (out / "report.md").read_text(), (out / "report.html").read_text()
    for step in summary["stages"]:
        for reason, count in step["dropped"].items():
            assert f"### {reason}: {count} dropped by {step['stage']}" in text
            assert f'id="{step["stage"]}-dropped-{reason}"' in page
    assert "&lt;b&gt;|x" in page and "<b>" not in page
    assert "\\|x" in text
    assert "→" in text  # an old form and the new one


# Killed


# Files that the process is about to complete when it is killed.
MOMENTS = (
    "0-load/part-000004.jsonl",
    "1-deduplicate/part-000002.jsonl",
    "1-deduplicate/part-000005.jsonl",
    "2-filter/part-000002.jsonl",
    "2-filter/part-000009.jsonl",
    "report.md",
)


@pytest.mark.slow
def test_a_curation_killed_repeatedly_ends_with_the_same_results(tmp_path):
    source = write(tmp_path / "raw.jsonl", sums(120))
    _, whole = run(tmp_path, source, name="whole", chunk_rows=10)
    out, done = tmp_path / "killed", {}
    config = CurateConfig(inputs=(source,), out=str(out), chunk_rows=10)
    for moment in (*MOMENTS, None):
        assert end(start(config, moment)) == (-signal.SIGKILL if moment else 0)
        if moment:
            now = {p: p.stat().st_mtime_ns for p in out.rglob("part-*.jsonl")}
            assert done.items() < now.items()  # nothing is done twice
            done = now
    assert results(out) == results(whole)


def test_a_damaged_row_of_an_unfinished_curation_is_named(tmp_path):
    source = write(tmp_path / "raw.jsonl", sums(20))
    config = CurateConfig(inputs=(source,), out=str(tmp_path / "out"))

    def stop(stage, chunks):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        curate(config, progress=stop)
    [part] = (tmp_path / "out/work").rglob("part-*.jsonl")
    whole = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join([whole[0], whole[1][:20], *whole[2:]]))
    with pytest.raises(InputError, match=r"part-000000\.jsonl:2: not JSON"):
        curate(config)


def test_a_finished_curation_is_not_repeated(tmp_path):
    source = write(tmp_path / "raw.jsonl", sums(20))
    summary, out = run(tmp_path, source)
    before = {name: (out / name).stat().st_mtime_ns for name in NAMES}
    again, _ = run(tmp_path, source)
    assert again == summary
    assert before == {name: (out / name).stat().st_mtime_ns for name in NAMES}


def test_a_folder_of_another_curation_is_refused(tmp_path):
    source = write(tmp_path / "raw.jsonl", sums(20))
    run(tmp_path, source)
    with pytest.raises(InputError, match="holds a curation with different stages;"):
        run(tmp_path, source, stages=("filter",))
    write(tmp_path / "raw.jsonl", sums(21))
    with pytest.raises(InputError, match="an input has changed since"):
        run(tmp_path, source)
    (tmp_path / "else").mkdir()
    (tmp_path / "else/thesis.tex").write_text("x")
    with pytest.raises(InputError, match="not an empty folder, and not a curation"):
        run(tmp_path, source, name="else")


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["nonsense", "[]", "{}", '{"problem": "Prove it."}']),
            st.tuples(st.integers(0, 9), st.integers(0, 3)).map(
                lambda n: json.dumps({"problem": f"What is $1 + {n[0]}$?", "answer": str(n[1])})
            ),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 10),
)
def test_every_row_is_accounted_for_once(tmp_path_factory, rows, chunk_rows):
    folder = tmp_path_factory.mktemp("rows")
    (folder / "raw.jsonl").write_text("\n".join(rows))
    summary, out = run(folder, str(folder / "raw.jsonl"), chunk_rows=chunk_rows)
    decisions = lines(out / "decisions.jsonl")
    assert len(decisions) == len(rows) == summary["rows"]
    assert len({d["source"] for d in decisions}) == len(rows)
    assert summary["kept"] + summary["rewritten"] + summary["dropped"] == len(rows)
    problems = {json.loads(row)["problem"] for row in rows if '"What' in row}
    assert len(lines(out / "kept.jsonl")) == len(problems)


# The command


def test_the_command(tmp_path):
    source = write(tmp_path / "raw.jsonl", sums(30))
    test = write(tmp_path / "test.jsonl", sums(3))
    out = tmp_path / "out"
    args = ["curate", source, "chunk_rows=10", f"out={out}", f"decontaminate.against=[{test}]"]
    result = runner.invoke(app, args)
    assert result.exit_code == 0, result.output
    reasons = Counter(d["reason"] for d in lines(out / "decisions.jsonl"))
    assert reasons["contaminated"] == 3
    assert "decontaminate" in result.output and "contaminated 3" in result.output
    with open(source, "a") as file:
        file.write("nonsense\n")
    result = runner.invoke(app, ["curate", source, "stages=[filter]", f"out={tmp_path / 'f'}"])
    assert result.exit_code == 1
    assert f"{source}:31: not JSON" in result.stderr
    summary = json.loads((tmp_path / "f/summary.json").read_text())
    assert [step["stage"] for step in summary["stages"]] == ["load", "filter"]


def test_a_config_and_its_errors(tmp_path):
    source = write(tmp_path / "raw.jsonl", [{"frage": "Was ist $1+1$?", "answer": 2}])
    config = tmp_path / "c.yaml"
    config.write_text(f"inputs: [{source}]\nfields: {{problem: frage}}\nout: {tmp_path}/o\n")
    (tmp_path / "empty").mkdir()  # a folder counts as a copy of a dataset
    assert tramontane.curate(config).kept == 1
    for arguments, message in [
        (
            {"overrides": ["filter.rewrit=false"]},
            "filter.rewrit: unknown key; did you mean 'rewrite'",
        ),
        ({"overrides": ["stages=[fliter]"]}, "no stage 'fliter'; did you mean 'filter'"),
        ({"overrides": ["fields.anwser=x"]}, "no such field; did you mean 'answer'"),
        ({"inputs": [str(tmp_path / "rw.jsonl")]}, "no such file; did you mean"),
        ({"inputs": ["playground:"]}, "curate reads files and datasets"),
        ({"overrides": ["inputs=[]"]}, "no inputs"),
        ({"inputs": [str(tmp_path / "empty")], "out": tmp_path / "n"}, "cannot be loaded"),
        ({"overrides": ["out=null"]}, "no output folder"),
    ]:
        with pytest.raises(InputError, match=message):
            tramontane.curate(config, **arguments)
