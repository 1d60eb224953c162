"""The report of a made-up run: its figures, its charts, and missing parts."""

import base64
import hashlib
import json
import re
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.view.reports import answers_of
from tramontane.models.loading import load_tokenizer
from tramontane.run.folder import RunFolder
from tramontane.types import Completion, FilterReason, Group, Problem, Verdict
from tramontane.view import report
from tramontane.view.report import write_report
from tramontane.view.runs import Run

UPDATES = 12
HOSTILE = "<script>alert('x')</script> & <b>bold</b>"
ENDS = {"before": (0.31, 0.26, 0.36), "after": (0.853, 0.81, 0.89)}


def metrics(update: int) -> dict[str, Any]:
    f = update / UPDATES
    return {
        "update": update,
        "wall_seconds": 5.0 * update,
        "reward": 0.3 + 0.7 * f,
        "reward_format": 0.08 + 0.02 * f,
        "reward_correctness": 0.2 + 0.6 * f,
        "reward_length": -0.01 * f,
        "reward_language": 0.07 + 0.03 * f,
        "reward_brevity": 0.1 * f,
        "canaries": {"answers": 0.2 + 0.6 * f, "flattery": 0.5},
        "pass_rate": 0.25 + 0.6 * f,
        "unscorable_rate": 0.0,
        "completion_tokens": 60 + 50 * f + 4 * (update % 3),
        "thinking_tokens": 40 + 45 * f + 4 * (update % 3),
        "groups_kept": 16,
        "groups_filtered": update % 5,
        "entropy": 0.9 - 0.5 * f,
        "clip_fraction_low": 0.001 + 0.0002 * (update % 4),
        "clip_fraction_high": 0.004 + 0.001 * (update % 3),
        "loss": 0.01 * (-1) ** update,
        "grad_norm": 0.4 + 0.1 * (update % 4),
        "learning_rate": 1e-4,
        "staleness_mean": 0.8,
        "staleness_max": 2,
        "staleness_histogram": {"0": 300, "1": 600, "2": 100},
        "generator_tokens_per_second": 6100.0 + 40 * (update % 5),
        "generator_idle_fraction": 0.03,
        "trainer_tokens_per_second": 8700.0 + 70 * (update % 4),
        "trainer_idle_fraction": 0.3,
        "verifier_verdicts_per_second": 140.0 + update,
        "verifier_idle_fraction": 0.86,
        "weight_update_pause_ms": 12.0 + update % 3,
        "padding_fraction": 0.03,
        "mismatch_age_0": 2e-6,
        "mismatch_age_1": 0.011,
        "mismatch_age_2plus": 0.024,
    }


def evaluation(right: int) -> list[dict[str, Any]]:
    """Seven problems, one in each language, with four samples each of which `right` are right."""
    statements = {
        "en": "Tom has 3 apples and buys 14 more. He gives 5 away. How many are left?",
        "fr": "Léa a 3 pommes et en achète 14. Elle en donne 5. Combien en reste-t-il ?",
        "es": "Ana tiene 3 manzanas y compra 14 más. Regala 5. ¿Cuántas le quedan?",
        "it": "Anna ha 3 mele e ne compra 14. Ne regala 5. Quante ne restano?",
        "de": "Anna hat 3 Äpfel und kauft 14 weitere. Sie gibt 5 weg. Wie viele bleiben?",
        "zh": "小明有3个苹果，又买了14个，然后送出5个。还剩多少个？",
        "ru": "У Ани 3 яблока, она покупает ещё 14 и отдаёт 5. Сколько осталось?",
    }
    return [
        {
            "group": group,
            "index": index,
            "problem_id": f"p{group}",
            "problem": statement,
            "domain": "math",
            "language": language,
            "difficulty": 1 + group % 3,
            "reference": "12",
            "text": "<think>3 + 14 = 17, 17 - 5 = 12."
            f"</think>\nThe answer is \\boxed{{{12 if index < right else 13}}}.",
            "tokens": 40,
            "thinking_tokens": 30,
            "finish_reason": "stop",
            "reward": 1.1 if index < right else 0.2,
            "parts": {"format": 0.1, "correctness": 0.9, "length": 0.0, "language": 0.1},
            "verdict": "right" if index < right else "wrong",
            "reason": "",
            "answer": "12" if index < right else "13",
        }
        for group, (language, statement) in enumerate(statements.items())
        for index in range(4)
    ]


@cache
def token_ids(text: str) -> tuple[int, ...]:
    return tuple(load_tokenizer("tiny")(text)["input_ids"])


def rollout(index: int, versions: list[int]) -> tuple[Completion, Verdict]:
    words = [f"{'' if i == 0 else ' '}{w}" for i, w in enumerate(HOSTILE.split())]
    tokens = ["<think>", *words, *[f" {i} + {i + 1} = {2 * i + 1}," for i in range(len(versions))]]
    text = "".join([*tokens, "</think>", "\n", "\\boxed{12}"])
    ids = list(token_ids(text))
    spread = [versions[i * len(versions) // len(ids)] for i in range(len(ids))]
    completion = Completion(3, index, [1], ids, [-0.1] * len(ids), spread, "stop", text)
    return completion, Verdict(1.1, {}, "right")


def write_rollouts(folder: RunFolder, update: int, spanning: list[int]) -> None:
    """Two completions that were trained on, and one that was filtered."""
    problem = Problem("p", "math", f"What is {HOSTILE}?", "12", language="en", difficulty=2)
    trained = [rollout(0, [update] * 10), rollout(1, spanning)]
    filtered = [rollout(0, list(range(40)))]
    groups = [
        (Group(number, problem, [c for c, _ in pairs], [v for _, v in pairs]), reason)
        for number, (pairs, reason) in enumerate(
            [(trained, None), (filtered, FilterReason("no diversity"))]
        )
    ]
    folder.rollouts.mkdir(exist_ok=True)
    folder.write_rollouts(update, groups, ["correctness"])


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def make_run(folder: Path) -> Path:
    config = {"name": "quickstart", "model": "tiny", "data": {"train": "playground:"}}
    config["pipeline"] = {"updates": UPDATES}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    write_jsonl(folder / "metrics.jsonl", [metrics(u) for u in range(1, UPDATES + 1)])
    for update in (1, 6, UPDATES):
        old = max(0, update - 3)
        spanning = sorted(old + i * (update - old) // 39 for i in range(40))
        write_rollouts(RunFolder(folder), update, spanning)
    before, after = evaluation(1), evaluation(3)
    before[1]["text"] = f"The answer is {HOSTILE}"  # wrong, as most are
    before[0].update(verdict="malformed", reason="does not start with <think>", reward=0.0)
    write_jsonl(folder / "evaluation_before.jsonl", before)
    write_jsonl(folder / "evaluation_after.jsonl", after)
    passed = {
        when: {"value": value, "low": low, "high": high}
        for when, (value, low, high) in ENDS.items()
    }
    summary = {
        "pass_at_1": passed,
        "format_rate": {"before": 0.852, "after": 0.985},
        "language_rate": {"before": 0.804, "after": 0.971},
        "mean_thinking_tokens": {"before": 33.04, "after": 81.2},
        "wall_seconds": 247.0,
        "trained_tokens_per_second": 4412.3,
        "generator_idle_fraction": 0.031,
        "padding_fraction": 0.042,
        "weight_update_pause_ms": {"p50": 12.4, "p99": 19.7},
        "staleness": {"mean": 0.8, "max": 2},
        "updates": UPDATES,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def chart_titles(answers: dict[str, Any]) -> list[str]:
    """The charts that a report's metrics have a figure for."""
    present = {name for row in answers["metrics"]["rows"] for name in row}
    charts = [chart for section in answers["charts"] for chart in section["charts"]]
    others = present.difference(*(chart["keys"] for chart in charts))
    return [
        chart["title"]
        for chart in charts
        if present & chart["keys"].keys()
        or (chart["prefix"] and any(name.startswith(chart["prefix"]) for name in others))
    ]


class Elements(HTMLParser):
    """The elements of a page: (tag, attributes)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_finished_run(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path))
    assert path == tmp_path / "report.html"
    answers = answers_of(path)
    shown = answers["summary"]
    assert [(when, (e["value"], e["low"], e["high"])) for when, e in shown["passed"]] == [
        *ENDS.items()
    ]
    assert [(tile["before"], tile["after"]) for tile in shown["tiles"]] == [
        ("0.852", "0.985"),
        ("0.804", "0.971"),
        ("33.0", "81.2"),
    ]
    facts = dict(shown["facts"])
    assert facts["wall time"] == "4:07" and facts["trained tokens/s"] == "4,412"
    assert facts["weight-update pause"] == "12.4 ms (p99 19.7)"
    assert facts["staleness"] == "0.80 versions (max 2)"
    assert facts["padding"] == "4.2%" and facts["generator idle"] == "3.1%"
    assert shown["notes"] == []
    assert chart_titles(answers) == [
        "Reward",
        "Custom rewards",
        "Judge",
        "Pass rate",
        "Length",
        "Entropy",
        "Clipped tokens",
        "Gradient norm",
        "Loss",
        "Groups",
        "Staleness",
        "Weight-update pause",
        "Generator against trainer",
        "Throughput",
        "Verdicts",
        "Idle share",
        "Padding",
    ]
    rows = answers["metrics"]["rows"]
    assert [row["update"] for row in rows] == [*range(1, UPDATES + 1)]
    assert rows[-1]["canaries.answers"] == 0.8 and rows[-1]["canaries.flattery"] == 0.5
    assert rows[0]["staleness_histogram"] == {"0": 300, "1": 600, "2": 100}
    # From the completions themselves: one of four right, less the malformed one.
    samples = next(table for table in shown["tables"] if table["title"] == "Several samples")
    assert {"pass@4", "maj@4"} <= {key for key, _ in samples["rows"]}


def test_one_sample_a_problem_has_no_table_of_several(tmp_path: Path) -> None:
    make_run(tmp_path)
    for file in tmp_path.glob("evaluation_*.jsonl"):
        rows = {row["group"]: row for row in map(json.loads, file.read_text().splitlines())}
        file.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    tables = answers_of(write_report(tmp_path))["summary"]["tables"]
    titles = [table["title"] for table in tables]
    assert "By language" in titles and "Several samples" not in titles


def test_base_start_and_end_stand_side_by_side(tmp_path: Path) -> None:
    file = make_run(tmp_path) / "summary.json"
    estimates = [{"value": v, "low": v - 0.05, "high": v + 0.05} for v in (0.05, 0.37, 0.75)]
    models = {
        name: {"pass_at_1": estimate, "format_rate": rate, "gsm8k": estimate}
        for name, estimate, rate in zip(("base", "sft", "rl"), estimates, (0, 0.96, 1), strict=True)
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | models))
    table = answers_of(write_report(tmp_path))["summary"]["tables"][0]
    assert (table["title"], table["ends"]) == ("Models", ["base", "sft", "rl"])
    rows = dict(table["rows"])
    assert list(rows) == ["held-out problems", "gsm8k", "format"]
    for key in ("held-out problems", "gsm8k"):
        assert [cell["value"] for cell in rows[key]] == [0.05, 0.37, 0.75]
        assert [cell["low"] for cell in rows[key]] == [0.0, 0.32, 0.7]
    assert rows["format"] == [{"value": 0}, {"value": 0.96}, {"value": 1}]


def test_nothing_is_fetched(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text()
    for tag, attributes in Elements(page).found:
        for name in ("src", "href", "srcset", "data", "action"):
            target = attributes.get(name) or "#"
            assert target.startswith(("#", "data:image/svg+xml;base64,")), (tag, target)
    assert "@import" not in page
    assert not re.findall(r"url\((?!#)", page)


def test_completions_are_data_and_no_markup(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path))
    page = path.read_text()
    elements = Elements(page).found
    own = [attributes.get("type") for tag, attributes in elements if tag == "script"]
    assert own == [None, "module", "application/json"]  # uPlot, the page's, and the answers
    assert not [tag for tag, _ in elements if tag == "b"]
    data = page[page.index('id="answers">') :].partition(">")[2].partition("</script>")[0]
    assert "<" not in data
    # As they were written: the page shows them as text.
    assert HOSTILE in answers_of(path)["summary"]["samples"][0]["ends"][0][1]["answer"]


def test_only_the_page_s_own_scripts_and_styles_may_run(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text()
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', page)
    directives = {d.split()[0]: d.split()[1:] for d in policy.split(";")}
    assert directives["default-src"] == ["'none'"]
    assert "'unsafe-inline'" not in policy
    for tag, directive in [("script", "script-src"), ("style", "style-src")]:
        texts = re.findall(rf"<{tag}(?: type=.module.)?>(.*?)</{tag}>", page, re.S)
        hashes = [base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in texts]
        assert directives[directive] == [f"'sha256-{digest}'" for digest in hashes]


def test_it_repeats(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text()
    assert write_report(tmp_path).read_text() == page


def test_completions_of_three_updates_have_their_tokens(tmp_path: Path) -> None:
    answers = answers_of(write_report(make_run(tmp_path)))
    traces = answers["summary"]["traces"]
    assert [(trace["update"], trace["why"]) for trace in traces] == [
        (1, "typical"), (6, "typical"), (12, "typical"),
    ]  # fmt: skip
    shown = [answers[f"rollout?row={t['row']}&update={t['update']}"] for t in traces]
    assert [sorted({*completion["versions"]}) for completion in shown] == [
        [0, 1],
        [3, 4, 5, 6],
        [9, 10, 11, 12],
    ]
    last = shown[-1]
    assert (last["tokens_text"][0], last["versions"][0], last["logprobs"][0]) == (
        "<think>",
        9,
        -0.1,
    )
    # Its group is there too, with the completions that the table links to.
    (group,) = [g for g in answers["groups?update=12"]["groups"] if g["group"] == last["group"]]
    assert all(f"rollout?row={c['row']}&update=12" in answers for c in group["completions"])


def test_a_long_completion_is_cut_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answers_of(write_report(make_run(tmp_path)))
    monkeypatch.setattr(report, "MAX_COMPLETION", 20)
    monkeypatch.setattr(report, "MAX_TOKENS", 30)
    cut = answers_of(write_report(tmp_path))
    assert sum(key.startswith("rollout?") for key in cut) == 3  # of each update, the one shown
    for key in cut:
        if key.startswith("rollout?"):
            assert len(cut[key]["token_ids"]) == len(cut[key]["tokens_text"]) == 20
            assert cut[key]["left_out"] == len(whole[key]["token_ids"]) - 20 > 0


def test_an_interrupted_run(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "summary.json").unlink()
    (tmp_path / "evaluation_after.jsonl").unlink()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:40])
    answers = answers_of(write_report(tmp_path))
    ((heading, text),) = answers["summary"]["notes"]
    assert "has not ended" in heading
    assert "newest update is 5 of 12" in text
    assert "Pass rate" in chart_titles(answers)
    # Seven problems, each right once in four samples, but for the first: (6 · 1/4) / 7.
    ((when, passed),) = answers["summary"]["passed"]
    assert (when, passed["value"]) == ("before", pytest.approx(0.214, abs=5e-4))


def test_warnings_are_shown(tmp_path: Path) -> None:
    RunFolder(make_run(tmp_path)).log_event("nothing to learn from:\nmost completions are wrong")
    (event,) = answers_of(write_report(tmp_path))["summary"]["events"]
    assert event["text"] == "nothing to learn from:\nmost completions are wrong"


@pytest.mark.parametrize(
    "gone", [["config.yaml"], ["metrics.jsonl"], ["rollouts"], ["evaluation_before.jsonl"], ["*"]]
)
def test_missing_pieces(tmp_path: Path, gone: list[str]) -> None:
    make_run(tmp_path)
    for pattern in gone:
        for path in sorted(tmp_path.rglob(pattern), reverse=True):
            if path.is_dir():
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()
            else:
                path.unlink()
    assert "</html>" in write_report(tmp_path).read_text()


def test_absent_metrics_leave_their_plots_out(tmp_path: Path) -> None:
    make_run(tmp_path)
    write_jsonl(tmp_path / "metrics.jsonl", [{"update": 1, "reward": 0.5}, {"update": 2}])
    assert chart_titles(answers_of(write_report(tmp_path))) == ["Reward"]


def test_excerpts_of_evaluations_are_shown_without_tables(tmp_path: Path) -> None:
    make_run(tmp_path)
    keys = ("problem", "language", "text", "reward", "parts", "verdict")
    for name, right in [("before", 1), ("after", 3)]:
        rows = [{key: row[key] for key in keys} for row in evaluation(right)]
        write_jsonl(tmp_path / f"evaluation_{name}.jsonl", rows)
    shown = answers_of(write_report(tmp_path))["summary"]
    assert shown["tables"] == []
    assert len(shown["samples"]) == 7


def test_examples_are_of_the_usual_verdict_and_no_table_is_empty(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    shown = answers_of(write_report(path))["summary"]
    assert all(table["rows"] for table in shown["tables"])
    run = Run(path, 0)
    for trace in shown["traces"]:
        part = run.rollouts.of(trace["update"])
        assert part is not None
        kept = [row for row in part.table.to_pylist() if row["filtered"] is None]
        usual = Counter(row["verdict"] for row in part.table.to_pylist()).most_common(1)[0][0]
        verdict = part.table["verdict"][trace["row"]].as_py()
        assert verdict == usual or all(row["verdict"] != usual for row in kept)


def test_the_best_of_the_last_update_stands_beside_its_typical_one(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path))
    problem = Problem("p", "math", "1 + 1?", "2", language="en")
    completions = [rollout(index, [12] * 10)[0] for index in range(5)]
    verdicts = [Verdict(0.2, {}, "wrong")] * 3 + [Verdict(0.0, {}, "malformed")]
    group = Group(3, problem, completions, [*verdicts, Verdict(1.1, {}, "right")])
    folder.write_rollouts(12, [(group, None)], ["correctness"])
    answers = answers_of(write_report(tmp_path))
    last = [trace for trace in answers["summary"]["traces"] if trace["update"] == 12]
    shown = [answers[f"rollout?row={t['row']}&update=12"] for t in last]
    assert [(t["why"], c["verdict"], c["reward"]) for t, c in zip(last, shown, strict=True)] == [
        ("typical", "wrong", 0.2), ("best", "right", 1.1),
    ]  # fmt: skip


def test_of_a_problem_the_usual_verdict_is_shown_not_the_first(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    file = path / "evaluation_after.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    malformed = [
        row | {"verdict": "malformed"} if n % 4 == 0 else row for n, row in enumerate(rows)
    ]
    write_jsonl(file, malformed)
    for sample in answers_of(write_report(path))["summary"]["samples"]:
        after = dict(sample["ends"])["after"]
        assert (after["verdict"], after["right"], after["of"]) == ("right", 2, 4)


def test_several_pairs_are_shown_of_one_language(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    for file in path.glob("evaluation_*.jsonl"):
        rows = [json.loads(line) | {"language": "en"} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = answers_of(write_report(path))["summary"]["samples"]
    assert len(samples) == 3 and len({sample["problem"] for sample in samples}) == 3
