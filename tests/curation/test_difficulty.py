"""Pass rates, the rows dropped by them, and labels that the majority contradicts."""

import json
import re
from collections import Counter, defaultdict

import pytest
import torch

from tests.asking.server import Server, status
from tests.paths import ROOT
from tramontane import InputError
from tramontane.config import load_section, parse_settings
from tramontane.curation.config import CurateConfig
from tramontane.curation.pipeline import curate

torch.set_num_threads(1)  # the model is small: a second thread costs more than it brings


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(tmp_path, rows, server, *stages, name="out", **settings):
    """A curation whose every stage asks this server; its decisions and kept rows by id."""
    source = tmp_path / "raw.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    endpoint = {"url": server.url, "model": "m", "retries": 1, "backoff_s": 0.01}
    model = {"model": {"endpoint": endpoint, "max_tokens": 100}}
    raw = {stage: model | settings.pop(stage, {}) for stage in stages}
    for stage in {"difficulty", "regrade"} & raw.keys():
        # No verdict may be late because the machine is busy.
        limits = {"timeout_s": 60, "code_timeout_s": 60}
        raw[stage]["verifier"] = limits | raw[stage].get("verifier", {})
    raw |= {"inputs": [str(source)], "out": str(tmp_path / name), "stages": stages} | settings
    summary = curate(CurateConfig.model_validate(raw)).summary
    decisions = {d["id"]: d for d in lines(tmp_path / name / "decisions.jsonl")}
    return summary, decisions, {k["id"]: k for k in lines(tmp_path / name / "kept.jsonl")}


class Answers:
    """A server whose k-th reply about a problem is its k-th answer, boxed; answers repeat."""

    def __init__(self, by_problem, form="So \\boxed{{{}}}."):
        self.by_problem, self.form = by_problem, form
        self.count = Counter()

    def __call__(self, asked, before):
        problem = asked["messages"][-1]["content"]
        answers = self.by_problem[problem]
        if not isinstance(answers, list):
            return answers
        self.count[problem] += 1
        answer = answers[(self.count[problem] - 1) % len(answers)]
        return answer if not isinstance(answer, str) else self.form.format(answer)


def problem(name, answer="4", **more):
    return {"id": name, "problem": f"Problem {name}?", "answer": answer, **more}


def test_pass_rates_are_counted_and_thresholds_kept(tmp_path):
    right = {"never": 0, "once": 1, "half": 8, "edge": 12, "often": 13, "always": 16}
    mind = Answers({f"Problem {k}?": ["4.0"] * n + ["5"] * (16 - n) for k, n in right.items()})
    settings = {"max_pass_rate": 0.75}
    with Server(mind) as server:
        summary, decisions, kept = run(
            tmp_path, [problem(name) for name in right], server, "difficulty", difficulty=settings
        )
    assert set(mind.count.values()) == {16}
    reasons = {name: decisions[name]["reason"] for name in right}
    assert reasons == {
        "never": "unsolved", "once": "", "half": "", "edge": "", "often": "too_easy",
        "always": "too_easy",
    }  # fmt: skip
    assert decisions["often"]["detail"] == "solved 13 of 16"
    for name, row in kept.items():
        assert row["pass_rate"] == row["difficulty_pass_rate"] == right[name] / 16
        assert row["samples"] == row["difficulty_samples"] == 16
        assert row["difficulty_model"] == "m"
    # Every problem is in the histogram, dropped ones too; 8 of 16 is in the bin up to 50 %.
    bins = {b["solved"]: (b["kept"], b["dropped"]) for b in summary["pass_rates"]["difficulty"]}
    assert {k: v for k, v in bins.items() if v != (0, 0)} == {
        "0": (0, 1), "0–10 %": (1, 0), "40–50 %": (1, 0), "70–80 %": (1, 0), "80–90 %": (0, 1),
        "100 %": (0, 1),
    }  # fmt: skip
    report = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    assert "## Pass rates in difficulty" in report and "| 80–90 % | 0 | 1 |" in report
    assert "### too_easy: 2 dropped by difficulty" in report


def test_think_tags_count_only_if_required(tmp_path):
    thought = "<think>2 + 2</think>\\boxed{4}"
    answers = {
        "plain": ["4", "5"],
        "tagged": [{"content": thought}, {"content": thought.replace("{4}", "{5}")}],
        "in the prompt": [{"content": thought.removeprefix("<think>")}, "5"],
        "apart": [{"content": "\\boxed{4}", "reasoning_content": "2 + 2"}, "5"],
        "unfinished": [{"content": "<think>it is \\boxed{4}"}, "4"],
    }
    rows = [problem(name) for name in answers]
    rates = {}
    for tags in (False, True):
        mind = Answers({f"Problem {name}?": a for name, a in answers.items()})
        settings = {"samples": 2, "think_tags": tags, "max_pass_rate": 1}
        with Server(mind) as server:
            *_, kept = run(
                tmp_path, rows, server, "difficulty", difficulty=settings, name=str(tags)
            )
        rates[tags] = {name: row["pass_rate"] for name, row in kept.items()}
    assert rates[False] == dict.fromkeys(answers, 0.5)
    assert rates[True] == {"tagged": 0.5, "apart": 0.5}  # the other problems are never solved


def test_programs_are_run(tmp_path):
    def program(expression):
        return {"content": f"```python\nprint({expression})\n```"}

    tests = {
        "type": "stdio",
        "cases": [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in (3, 5)],
    }
    row = {"id": "double", "problem": "Double it.", "tests": tests}
    mind = Answers({"Double it.": [program("2 * int(input())"), program("6"), program("1 +")]})
    settings = {"samples": 3, "verifier": {"allow_unsandboxed": True}}
    with Server(mind) as server:
        *_, kept = run(tmp_path, [row], server, "difficulty", difficulty=settings)
    assert kept["double"]["pass_rate"] == 1 / 3


def test_missing_answers_are_recorded_and_stop_nothing(tmp_path):
    down = status(500, "out of memory")
    answers = {
        "dead": [down],
        "mostly": [down] * 6 + ["4", "5"],  # each is asked twice: 1 of 4 comes
        "partly": ["4", down, down, "5", "5"],
        "well": ["4", "5"],
    }
    rows = [problem(name) for name in answers] + [
        problem("bare", None),
        problem("odd", "\\frac{1}{"),
    ]
    answers["odd"] = ["4"]
    with Server(Answers({f"Problem {k}?": v for k, v in answers.items()})) as server:
        endpoint = {"url": server.url, "model": "m", "retries": 1, "backoff_s": 0.01}
        model = {"endpoint": endpoint | {"concurrency": 1}}
        settings = {"samples": 4, "model": model, "max_pass_rate": 1}
        _, decisions, kept = run(tmp_path, rows, server, "difficulty", difficulty=settings)
    reasons = {name: d["reason"] for name, d in decisions.items()}
    assert reasons == {
        "dead": "unanswered", "mostly": "unanswered", "partly": "", "well": "",
        "bare": "unscorable", "odd": "unscorable",
    }  # fmt: skip
    assert decisions["dead"]["detail"] == "4 of 4: HTTP 500: out of memory (tried 2 times)"
    assert (kept["partly"]["pass_rate"], kept["partly"]["samples"]) == (1 / 3, 3)
    assert kept["well"]["samples"] == 4


def test_a_label_is_disputed_by_value_and_not_by_spelling(tmp_path):
    half = ["0.5", "\\frac{1}{2}", "1/2", "x = \\frac{1}{2}", "\\tfrac12", ".50", "\\frac{2}{4}"]
    answers = {
        # Seven spellings of one half against one spelling of the label, four times.
        "wrong label": half + ["\\frac{3}{6}", "\\dfrac{1}{2}"] + ["4"] * 4 + ["7", "8", "9"],
        # Exactly half is not a majority.
        "tie": half + ["0.50"] + ["4"] * 8,
        # Most contradict the label, but not with one answer.
        "scattered": ["4"] * 2 + [str(n) for n in range(10, 24)],
        # The label in other spellings.
        "fine": ["4.0", "\\frac{8}{2}", "2^2", "x=4"] * 3 + ["5"] * 4,
        "unsolved": [str(n) for n in range(10, 26)],
        # One answer, and never the label: `label_disputed` precedes `unsolved`.
        "both": ["-1"] * 16,
        # Answers without a box do not vote, but count for the majority.
        "silent": ["0.5"] * 7 + ["4"] + [{"content": "I do not know."}] * 8,
    }
    mind = Answers({f"Problem {k}?": v for k, v in answers.items()})
    with Server(mind) as server:
        _, decisions, kept = run(tmp_path, [problem(k) for k in answers], server, "regrade")
    assert {name: d["reason"] for name, d in decisions.items()} == {
        "wrong label": "label_disputed", "tie": "", "scattered": "", "fine": "",
        "unsolved": "unsolved", "both": "label_disputed", "silent": "",
    }  # fmt: skip
    said = re.fullmatch(r"9 of 16 answer (.*); 4 the label 4", decisions["wrong label"]["detail"])
    # Answers arrive in any order: the first spelling that does stands for all nine.
    assert said and said[1] in answers["wrong label"][:9]
    assert decisions["both"]["detail"] == "16 of 16 answer -1; 0 the label 4"
    assert kept["fine"]["regrade_pass_rate"] == 0.75


def test_the_second_pass_measures_anew_and_remembers_the_first(tmp_path):
    weak, strong = (
        Answers({"Problem p?": ["4", "5", "5", "5"]}),
        Answers({"Problem p?": ["4", "5"]}),
    )
    with Server(weak) as server:
        *_, kept = run(
            tmp_path, [problem("p")], server, "difficulty", difficulty={"samples": 4}, name="first"
        )
    with Server(strong) as server:
        *_, kept = run(
            tmp_path, list(kept.values()), server, "regrade", regrade={"samples": 4}, name="second"
        )
    row = kept["p"]
    assert (row["pass_rate"], row["samples"]) == (0.5, 4)
    assert (row["difficulty_pass_rate"], row["regrade_pass_rate"]) == (0.25, 0.5)


def test_the_model_may_be_a_checkpoint(tmp_path, one_layer):
    source = tmp_path / "raw.jsonl"
    rows = [{"id": f"{n}", "problem": f"What is ${n} + 2$?", "answer": n + 2} for n in range(6)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"inputs=[{source}]", f"out={tmp_path}/out", "stages=[difficulty]", "difficulty.samples=4",
        f"difficulty.model.checkpoint.path={one_layer}", "difficulty.model.max_tokens=60",
        "difficulty.max_pass_rate=1", "difficulty.model.checkpoint.slots=8",
    ]  # fmt: skip
    config = parse_settings(CurateConfig, {}, overrides, "test")
    summary = curate(config).summary
    assert summary["rows"] == 6
    measured = sum(b["kept"] + b["dropped"] for b in summary["pass_rates"]["difficulty"])
    assert measured == 6
    assert all(row["samples"] == 4 for row in lines(tmp_path / "out/kept.jsonl"))


def test_missing_models_and_senseless_thresholds_are_refused():
    for stage in ("review", "difficulty", "regrade", "translate"):
        with pytest.raises(InputError, match=f"{stage}: give it one model: {stage}.model"):
            parse_settings(CurateConfig, {}, [f"stages=[{stage}]"], "test")
    with pytest.raises(InputError, match="min_pass_rate must be below max_pass_rate"):
        parse_settings(CurateConfig, {}, ["difficulty.min_pass_rate=0.9"], "test")
    with pytest.raises(InputError, match="endpoint.model: not given"):
        parse_settings(CurateConfig, {}, ["regrade.model.endpoint.url=http://x"], "test")


def test_the_shipped_config_runs_both_passes():
    config = ROOT / "configs/curate_difficulty.yaml"
    for stages in ("[difficulty]", "[regrade, translate]"):
        load_section(CurateConfig, config, [f"stages={stages}"])


def test_the_answers_of_finished_chunks_are_deleted(tmp_path):
    """Sixteen answers to each of a million problems would fill a disk."""
    names = [f"n{i}" for i in range(12)]
    most = []
    counts = defaultdict(int)

    def mind(asked, before):
        most.append(len(list((tmp_path / "out/work/1-difficulty").glob("asked-*answers.jsonl"))))
        counts[asked["messages"][-1]["content"]] += 1
        return f"\\boxed{{{counts[asked['messages'][-1]['content']] % 2 + 4}}}"

    with Server(mind) as server:
        rows = [problem(name) for name in names]
        run(tmp_path, rows, server, "difficulty", difficulty={"samples": 4}, chunk_rows=2)
    assert len(most) == 48 and max(most) == 1
