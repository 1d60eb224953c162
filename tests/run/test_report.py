"""The report of a made-up run: its figures, its plots, and missing parts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tramontane.models.loading import load_tokenizer
from tramontane.run.folder import RunFolder
from tramontane.run.report import write_report
from tramontane.types import Completion, FilterReason, Group, Problem, Verdict

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


def rollout(index: int, versions: list[int]) -> tuple[Completion, Verdict]:
    words = [f"{'' if i == 0 else ' '}{w}" for i, w in enumerate(HOSTILE.split())]
    tokens = ["<think>", *words, *[f" {i} + {i + 1} = {2 * i + 1}," for i in range(len(versions))]]
    text = "".join([*tokens, "</think>", "\n", "\\boxed{12}"])
    ids = load_tokenizer("tiny")(text)["input_ids"]
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
    before[0]["text"] = f"The answer is {HOSTILE}"
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


def plot_titles(page: str) -> list[str]:
    return re.findall(r"<figcaption><h3>([^<]*)</h3>", page)


def test_a_finished_run(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path))
    assert path == tmp_path / "report.html"
    page = path.read_text()
    for number in ["0.310", "[0.260, 0.360]", "0.853", "[0.810, 0.890]"]:
        assert number in page
    for number in ["0.985", "from 0.852", "0.971", "81.2", "from 33.0", "4 min 7 s", "4,412"]:
        assert number in page
    for number in ["12.4 ms (p99 19.7)", "0.80 versions (max 2)", "4.2%", "3.1%"]:
        assert number in page
    assert "has not ended" not in page
    assert plot_titles(page) == [
        "Reward",
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
    assert page.count("<svg ") == 15
    # The staleness histogram's shares: 300, 600 and 100 of 1000 tokens per update.
    assert all(f">{share}</text>" in page for share in ("30.0%", "60.0%", "10.0%"))
    # From the completions themselves: one of four right, less the malformed one.
    assert "pass@4" in page
    assert "maj@4" in page


def test_base_start_and_end_stand_side_by_side(tmp_path: Path) -> None:
    file = make_run(tmp_path) / "summary.json"
    estimates = [{"value": v, "low": v - 0.05, "high": v + 0.05} for v in (0.05, 0.37, 0.75)]
    models = {
        name: {"pass_at_1": estimate, "format_rate": rate, "gsm8k": estimate}
        for name, estimate, rate in zip(("base", "sft", "rl"), estimates, (0, 0.96, 1), strict=True)
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | models))
    (table,) = re.findall(r"<h3>Models</h3>(.*?)</table>", write_report(tmp_path).read_text(), re.S)
    rows = [re.findall(r"[\w.-]+", re.sub(r"<[^>]*>", " ", row)) for row in table.split("<tr>")]
    assert rows[1:] == [
        ["base", "sft", "rl"],
        [
            "held-out",
            "problems",
            "0.05",
            "0.00",
            "0.10",
            "0.37",
            "0.32",
            "0.42",
            "0.75",
            "0.70",
            "0.80",
        ],
        ["gsm8k", "0.05", "0.00", "0.10", "0.37", "0.32", "0.42", "0.75", "0.70", "0.80"],
        ["format", "0.00", "0.96", "1.00"],
    ]


def test_nothing_is_fetched(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text()
    linked = re.findall(r"""(?:\bsrc|<link[^>]*|\bhref)=["']([^"']*)""", page)
    assert all(target.startswith("#") for target in linked)
    assert "@import" not in page
    assert not re.findall(r"url\((?!#)", page)


def test_completions_are_escaped(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text()
    assert "<script" not in page
    assert "<b>bold" not in page
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; &lt;b&gt;bold&lt;/b&gt;" in page


def test_plots_have_ids_of_their_own_and_repeat(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text()
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert write_report(tmp_path).read_text() == page
    # Colours come from the page, so that dark mode reaches the plots.
    assert "var(--c0)" in page
    assert "#0102" not in page


def test_tokens_are_shaded_by_version(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path)).read_text()
    assert page.count("weights version<b") == 3
    legend = re.findall(r"weights version((?:<b class=\"v\d\">\d+</b>)+)", page)
    assert [re.findall(r">(\d+)<", item) for item in legend] == [
        ["0", "1"],
        ["3", "4", "5", "6"],
        ["9", "10", "11", "12"],
    ]
    assert '<span class="v0" title="version 9, log-prob -0.100">&lt;think&gt;</span>' in page


def test_an_interrupted_run(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "summary.json").unlink()
    (tmp_path / "evaluation_after.jsonl").unlink()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:40])
    page = write_report(tmp_path).read_text()
    assert "has not ended" in page
    assert "after update 5 of 12" in page
    assert "Pass rate" in plot_titles(page)
    # Seven problems, each right once in four samples, but for the first: (6 · 1/4) / 7.
    assert "<b>0.214</b>" in page


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
    assert plot_titles(write_report(tmp_path).read_text()) == ["Reward"]


def test_excerpts_of_evaluations_are_shown_without_tables(tmp_path: Path) -> None:
    make_run(tmp_path)
    keys = ("problem", "language", "text", "reward", "parts", "verdict")
    for name, right in [("before", 1), ("after", 3)]:
        rows = [{key: row[key] for key in keys} for row in evaluation(right)]
        write_jsonl(tmp_path / f"evaluation_{name}.jsonl", rows)
    page = write_report(tmp_path).read_text()
    assert "pass@4" not in page
    assert "Completions before and after" in page
