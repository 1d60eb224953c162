"""Suites by name, and several models side by side."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import tramontane
from tramontane.data.catalog import CATALOG
from tramontane.errors import InputError
from tramontane.evaluation.comparison import compare as compare_plan
from tramontane.evaluation.comparison import labels, markdown, suites
from tramontane.evaluation.settings import SUITES, settings_for
from tramontane.models.loading import load_model, load_tokenizer


def test_the_papers_protocols():
    """arXiv 2506.10910, section 5."""
    for name in ("aime24", "aime25", "aime26"):
        assert (SUITES[name].samples, SUITES[name].max_tokens, SUITES[name].top_p) == (64, 40000, 1)
    for name in ("livecodebench_v5", "livecodebench_v6"):
        suite = SUITES[name]
        assert (suite.samples, suite.max_tokens, suite.top_p) == (16, 40000, 0.95)
    for name in ("math500", "gpqa"):
        assert (SUITES[name].max_tokens, SUITES[name].top_p) == (32000, 1)
    assert {suite.temperature for suite in SUITES.values()} == {0.7}
    assert set(SUITES) - set(CATALOG) == {"playground"}


def test_a_suite_brings_its_protocol_and_an_option_replaces_a_part():
    found = settings_for("tiny", "aime24@mine.jsonl", None, [], {})
    assert found.config.data.eval == "aime24@mine.jsonl"
    assert (found.sampling.samples, found.sampling.max_tokens) == (64, 40000)
    found = settings_for("tiny", "livecodebench_v6", None, [], {"samples": 2})
    assert (found.sampling.samples, found.sampling.top_p) == (2, 0.95)
    assert settings_for("tiny", "playground", None, [], {}).config.data.eval == "playground:"


def test_labels():
    run = "runs/a/checkpoints/update_8/weights"
    found = labels(["tiny", run, "base=org/model"])
    assert found == {"tiny": "tiny", "a-update_8": run, "base": "org/model"}
    with pytest.raises(
        InputError, match=r"b/x: another model, a/x, is called 'x'; write LABEL=b/x"
    ):
        labels(["a/x", "b/x"])
    with pytest.raises(InputError, match="a label has letters"):
        labels(["a b=x"])
    for label in ("..", "../b", "/b", ""):
        with pytest.raises(InputError, match="a label has letters, digits"):
            labels({label: "tiny"})


def test_suites_have_different_names():
    sources = ["aime24@a.jsonl", "playground:", "org/A.v1", "org/A.v2", "x/test.jsonl.gz"]
    names = ["aime24", "playground", "A.v1", "A.v2", "test"]
    assert list(suites(sources)) == names
    assert suites(["x/test.jsonl", "y=y/test.jsonl"]) == {
        "test": "x/test.jsonl",
        "y": "y/test.jsonl",
    }
    with pytest.raises(
        InputError,
        match=r"y/test.jsonl: another source of problems, x/test.jsonl, is called 'test'; "
        r"write NAME=y/test.jsonl",
    ):
        suites(["x/test.jsonl", "y/test.jsonl"])


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """The tiny base with noise on its weights."""
    folder = tmp_path_factory.mktemp("noisy") / "noisy"
    model = load_model("tiny", dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.15 * weight.std() * torch.randn_like(weight)
    model.save_pretrained(folder)
    load_tokenizer("tiny").save_pretrained(folder)
    return folder


@pytest.fixture
def gsm8k(tmp_path):
    file = tmp_path / "gsm8k.jsonl"
    rows = [
        {"question": f"What is {a} + {b}?", "answer": f"Add.\n#### {a + b}"}
        for a in (2, 3, 5)
        for b in (1, 4)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"gsm8k@{file}"


def compare(noisy, gsm8k, out, **options):
    options = {"samples": 2, "max_tokens": 96, "problems": 6, "device": "cpu"} | options
    return tramontane.compare(
        {"tiny": "tiny", "noisy": noisy}, ["playground", gsm8k], out, **options
    )


@pytest.mark.slow
def test_two_models_on_two_suites_and_an_interrupted_comparison_continues(noisy, gsm8k, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    found = compare(noisy, gsm8k, whole)
    assert list(found) == ["playground", "gsm8k"]
    for suite, models in found.items():
        assert models["tiny"].difference is None
        measured = models["noisy"]
        assert measured.difference.value == pytest.approx(
            measured.result.pass_at_1.value - models["tiny"].result.pass_at_1.value
        )
        rows = (whole / suite / "noisy.jsonl").read_text().splitlines()
        assert len(rows) == 12
        card = yaml.safe_load((whole / "noisy.card.yaml").read_text())["model-index"]
        values = {
            result["dataset"]["name"]: result["metrics"][0]["value"]
            for result in card[0]["results"]
            if result["metrics"][0]["name"] == "pass@1"
        }
        assert values[suite] == round(100 * measured.result.pass_at_1.value, 2)
    page = (whole / "comparison.html").read_text()
    assert page.count("<tr>") == 9 and not re.search(r"(src|href)=", page)
    assert (whole / "comparison.md").read_text() == markdown(found)

    # A process that was killed: one whole file, one cut within a line, two that are missing.
    shutil.copytree(whole, cut)
    for name in ("tiny", "noisy"):
        (cut / f"gsm8k/{name}.jsonl").unlink()
    torn = cut / "playground/noisy.jsonl"
    content = torn.read_bytes().splitlines(keepends=True)
    torn.write_bytes(b"".join(content[:7]) + content[7][:20])
    again = compare(noisy, gsm8k, cut)
    assert again == found
    for file in ("playground/noisy.jsonl", "gsm8k/tiny.jsonl"):
        assert (cut / file).read_bytes() == (whole / file).read_bytes()


def sums(file, *numbers, words=""):
    rows = [{"problem": f"What is {n} + 1?{words}", "answer": f"{n + 1}"} for n in numbers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


SHORT = {"samples": 1, "max_tokens": 8, "device": "cpu"}


def test_another_basis_is_refused_before_any_work(tmp_path):
    out, source = tmp_path / "out", sums(tmp_path / "sums.jsonl", 1, 2)
    tramontane.compare(["tiny"], [source], out, **SHORT)
    before = (out / "sums/tiny.jsonl").read_bytes()

    def refused(match, **changed):
        with pytest.raises(InputError, match=match):
            tramontane.compare(["tiny"], [source], out, **SHORT | changed)
        assert (out / "sums/tiny.jsonl").read_bytes() == before

    refused(r"tiny\.json: .*made with different settings\.sampling\.temperature", temperature=0.5)
    tramontane.compare(["tiny"], [source], out, **SHORT, slots=1)  # decides the speed alone
    assert (out / "sums/tiny.jsonl").read_bytes() == before
    sums(tmp_path / "sums.jsonl", 1, 3)
    refused(r"made with different problems; name another place \(--out\), or remove both")
    sums(tmp_path / "sums.jsonl", 1, 2)
    record = (out / "sums/tiny.json").read_text()
    (out / "sums/tiny.json").write_text(record[:50])
    refused(r"tiny\.json: not the record of tiny\.jsonl, or damaged")


def test_a_bad_source_is_found_before_any_work(tmp_path):
    good = sums(tmp_path / "sums.jsonl", 1)
    with pytest.raises(InputError, match="no such file"):
        tramontane.compare(["tiny"], [good, "typo.jsonl"], tmp_path / "out", **SHORT)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="sums.jsonl is a file; name a folder"):
        tramontane.compare(["tiny"], [good], tmp_path / "sums.jsonl/out", **SHORT)


def test_models_of_runs_with_other_seeds_are_not_compared_on_other_problems(tmp_path):
    own = ["evaluation.problems_seed=null"]
    plan = {
        "playground": {
            name: settings_for("tiny", "playground", None, own, {"seed": seed, "problems": 2})
            for name, seed in (("a", 0), ("b", 1))
        }
    }
    said = "playground: a and b would be measured on different problems"
    with pytest.raises(InputError, match=said):
        compare_plan(plan, tmp_path / "out")


def test_prompts_that_are_too_long_for_one_model_are_left_out_for_all(tmp_path):
    small = tmp_path / "small"
    model = load_model("tiny")
    model.config.max_position_embeddings = 80
    model.save_pretrained(small)
    load_tokenizer("tiny").save_pretrained(small)
    source = tmp_path / "sums.jsonl"
    text = "".join(
        Path(sums(tmp_path / "part.jsonl", n, words=words)).read_text()
        for n, words in ((1, ""), (2, " Think carefully about it." * 20), (3, ""))
    )
    source.write_text(text)
    found = tramontane.compare(
        ["tiny", str(small)],
        [str(source)],
        tmp_path / "out",
        overrides={"data.overlong_prompts": "drop"},
        **SHORT,
    )["sums"]
    assert [m.result.n_problems for m in found.values()] == [2, 2]
    assert [m.left_out for m in found.values()] == [1, 1]
    assert found["small"].difference.n_problems == 2
    assert len((tmp_path / "out/sums/tiny.jsonl").read_text().splitlines()) == 3  # all are kept
    for page in ("comparison.md", "comparison.html"):
        assert "1 problems are skipped: their" in (tmp_path / "out" / page).read_text()
