"""The display: plain lines that scripts can read, a live page that fits a small terminal."""

import io
import math
import re
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from tramontane.run.figures import clock, number, share, sparkline
from tramontane.run.sample import Sample
from tramontane.run.screen import LiveDisplay

METRICS = {
    "reward": 0.712,
    "reward_format": 0.094,
    "reward_correctness": 0.531,
    "reward_language": 0.087,
    "reward_length": -0.004,
    "pass_rate": 0.59,
    "completion_tokens": 84.2,
    "thinking_tokens": 61.7,
    "groups_kept": 16,
    "groups_filtered": 4,
    "entropy": 0.463,
    "clip_fraction_low": 0.0012,
    "clip_fraction_high": 0.0043,
    "staleness_mean": 0.82,
    "staleness_max": 2,
    "generator_tokens_per_second": 6123.4,
    "generator_idle_fraction": 0.03,
    "trainer_tokens_per_second": 8877.0,
    "trainer_idle_fraction": 0.31,
    "verifier_verdicts_per_second": 142.0,
    "verifier_idle_fraction": 0.86,
    "weight_update_pause_ms": 12.34,
    "padding_fraction": 0.031,
}
SUMMARY = {
    "pass_at_1": {
        "before": {"value": 0.31, "low": 0.26, "high": 0.36},
        "after": {"value": 0.853, "low": 0.81, "high": 0.89},
    },
    "format_rate": {"before": 0.852, "after": 0.985},
    "language_rate": {"before": 0.804, "after": 0.971},
    "mean_thinking_tokens": {"before": 33.0, "after": 81.2},
    "wall_seconds": 247.0,
    "trained_tokens_per_second": 4412.0,
    "weight_update_pause_ms": {"p50": 12.4, "p99": 19.7},
    "staleness": {"mean": 0.8, "max": 2},
    "updates": 40,
    "number_types": {"trainer": "float32 (auto: float32, no bfloat16 instructions)"},
}
FILES = {name: f"runs/quickstart/{name}" for name in ("report", "weights", "metrics")}
HOSTILE = "<think>[bold]3 + 14[/bold] = 17\n\x1b[31m[/nothing] 是十七</think>\n\\boxed{17}"


def plain() -> tuple[LiveDisplay, io.StringIO]:
    file = io.StringIO()
    return LiveDisplay(Console(file=file, width=80)), file


def terminal() -> tuple[LiveDisplay, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, height=30, color_system=None)
    return LiveDisplay(console), file


def frame(display: LiveDisplay) -> list[str]:
    """The live page as lines of text."""
    console = Console(file=io.StringIO(), width=100, height=30, record=True)
    console.print(display._render())
    return console.export_text().splitlines()


def test_plain_has_one_line_an_update_with_its_numbers() -> None:
    display, file = plain()
    with display:
        display.start("quickstart", {"prompts a batch": "16 × 16 completions"}, 40, {})
        started = file.tell()
        for update in range(1, 41):
            display.status({"in flight": 512})
            display.update({"update": update, **METRICS})
        lines = file.getvalue()[started:].splitlines()
    assert "prompts a batch: 16 × 16 completions" in file.getvalue()
    assert len(lines) == 40
    assert "\x1b" not in file.getvalue()
    for update, line in enumerate(lines, 1):
        assert line.startswith(f"update {update}/40")
        assert len(line) <= 140
        for shown in ("reward 0.712", "pass 59%", "tokens 84", "entropy 0.46", "kept 16/20"):
            assert shown in line
        for shown in ("clip 0.43%", "gen 6,123/s", "train 8,877/s", "stale 0.8"):
            assert shown in line


def test_a_generator_with_nothing_left_to_make_has_no_speed() -> None:
    display, file = plain()
    display.start("quickstart", {}, 1, {})
    display.update({"update": 1, **METRICS, "generator_tokens_per_second": 0.0})
    assert file.getvalue().startswith("tramontane · quickstart · 1 update\n")
    assert "gen " not in file.getvalue()
    assert "train 8,877/s" in file.getvalue()


def test_plain_shows_a_phase_by_quarters() -> None:
    display, file = plain()
    for done in range(0, 257, 8):
        display.phase("evaluation before", done, 256)
    display.phase("evaluation after", 0, 256)
    assert re.sub(r", \d.*", "", file.getvalue()).splitlines() == [
        *(f"evaluation before {done}/256" for done in (0, 64, 128, 192, 256)),
        "evaluation after 0/256",
    ]


def test_plain_lines_of_a_sample_are_whole_and_harmless() -> None:
    display, file = plain()
    parts = {"format": 0.1, "correctness": 0.9, "length": 0.0}
    display.sample(Sample([("problem", "How many?"), ("model", HOSTILE)], "right", 1.0, parts))
    first, second, third = file.getvalue().splitlines()
    assert first == "  │ problem: How many?"
    assert second.startswith("  │ model: <think>[bold]3 + 14[/bold] = 17 ·[31m[/nothing]")
    assert second.endswith("\\boxed{17}")
    assert third == "  └ right, reward 1 = format +0.1 correctness +0.9"


def test_a_sample_is_a_conversation_as_the_model_read_it() -> None:
    display, file = plain()
    said = [("prompt", "<s>Spend 7."), ("model", "pear"), ("user", "4 are left."), ("model", "fig")]
    display.sample(Sample(said, "wrong", 0.0, {}, "not sold"))
    assert [line.strip() for line in file.getvalue().splitlines()] == [
        "│ prompt: <s>Spend 7.",
        "│ model: pear",
        "│ user: 4 are left.",
        "│ model: fig",
        "└ wrong (not sold), reward 0",
    ]


def test_a_long_message_keeps_its_start_and_its_end() -> None:
    display, file = plain()
    display.sample(Sample([("problem", "start " + "x" * 5000 + " end")], "wrong"))
    line = file.getvalue().splitlines()[0]
    assert len(line) < 700 and "start" in line and line.endswith(" end")


@pytest.mark.parametrize("width", [80, 200])
def test_the_live_page_has_the_terminals_width_and_both_ends_of_a_sample(width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=30, color_system=None)
    with LiveDisplay(console) as display:
        display.start("quickstart", {}, 40, {})
        display.update({"update": 1, **METRICS})
        turns = [("model", "why " * 300), ("user", "That is not sold here.")] * 3
        display.sample(Sample([("prompt", "Spend 7."), *turns, ("model", "END")], "right", 1.0, {}))
        shown = Console(file=io.StringIO(), width=width, height=30, record=True)
        shown.print(display._render())
    lines = shown.export_text().splitlines()
    assert len(lines) <= 30 and max(map(cell_len, lines)) == width
    page = "\n".join(lines)
    assert "prompt: Spend 7." in page and "model: END" in page and "right, reward 1" in page
    assert "142 verdicts/s" in page and "idle  86%" in page and "12.3 ms pause" in page


def test_the_live_page_shows_all_parts_of_a_reward_at_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80, height=40, record=True)
    display = LiveDisplay(console)
    display.update({"update": 1, **METRICS, "reward_brevity": 0.377, "reward_tone": -0.211})
    parts = {"format": 0.1, "correctness": 0.9, "brevity": 0.25, "tone": -0.125}
    reason = "the answer is that of the reference in other words"
    display.sample(Sample([("problem", "?"), ("model", "!")], "right", 1.125, parts, reason))
    console.print(display._render())
    page = console.export_text()
    assert re.search(r"brevity +0\.377 .*\n.*tone +-0\.211 .*\n.*pass rate", page)
    told = " ".join(re.sub("[│\n]", " ", page.partition("sample")[2]).split())
    assert f"right ({reason}), reward 1.12 = format +0.1" in told and "tone -0.125" in told


def test_sizes_are_shown_on_request() -> None:
    file = io.StringIO()
    for verbose in (False, True):
        with LiveDisplay(Console(file=file, width=80), verbose=verbose) as display:
            display.start("quickstart", {"model": "tiny"}, 40, {"KV cache": "1 MiB"})
        assert "model: tiny" in file.getvalue()
        assert ("KV cache: 1 MiB" in file.getvalue()) == verbose


def test_before_a_run_starts_its_display_says_what_is_done() -> None:
    for display, file in (plain(), terminal()):
        with display:
            display.phase("reading the data", 0, 0)
            assert "reading the data …" in file.getvalue()


def test_plain_summary() -> None:
    display, file = plain()
    needless = {"held_out": {"after": 0.75}, "easy": {"before": 0.312, "after": 0.102}}
    needless["game"] = {"before": 0.0, "after": 0.0}  # an environment without tools
    display.summary(SUMMARY | {"calls": needless}, FILES)
    text = file.getvalue()
    assert "calls: – → 0.750" in text and "calls, easy: 0.312 → 0.102 (-0.210)" in text
    assert "game" not in text
    assert "pass@1: 0.310 [0.260, 0.360] → 0.853 [0.810, 0.890] (+0.543)" in text
    assert "format: 0.852 → 0.985 (+0.133)" in text
    assert "thinking tokens: 33.0 → 81.2 (+48.2)" in text
    assert "wall time 4:07" in text and "trained tokens/s 4,412" in text
    assert "number type float32" in text
    assert text.endswith(
        "report: runs/quickstart/report\n"
        "weights: runs/quickstart/weights · metrics: runs/quickstart/metrics\n"
    )


def test_summary_of_a_run_with_levels_of_effort() -> None:
    def measured(value: float, tokens: float) -> dict[str, Any]:
        estimate = {"value": value, "low": value - 0.1, "high": value + 0.1}
        return {"pass_at_1": estimate, "mean_completion_tokens": tokens}

    display, file = plain()
    before = {"by_effort": {"low": measured(0.2, 30.0)}}
    after = {"by_effort": {"low": measured(0.3, 29.5), "high": measured(0.5, 80.0)}}
    display.summary(SUMMARY | {"evaluation": {"before": before, "after": after}}, FILES)
    text = file.getvalue()
    assert "pass@1, low effort: 0.200 [0.100, 0.300] → 0.300 [0.200, 0.400] (+0.100)" in text
    assert "tokens, low effort: 30.0 → 29.5 (-0.5)" in text
    assert "pass@1, high effort: – → 0.500 [0.400, 0.600]\n" in text
    assert "tokens, high effort: – → 80.0\n" in text


def test_summary_of_a_run_that_was_cut_short() -> None:
    display, file = plain()
    display.summary({"pass_at_1": {"before": SUMMARY["pass_at_1"]["before"]}}, {})  # type: ignore[index]
    assert "pass@1: 0.310 [0.260, 0.360] → –" in file.getvalue()
    assert "report" not in file.getvalue()


def test_live_page_holds_every_number_and_fits() -> None:
    display, _ = terminal()
    assert display.live
    display.start("quickstart", {"staleness at most": "2 versions"}, 40, {})
    for update in range(1, 24):
        display.update({"update": update, **METRICS, "reward": 0.3 + update / 100})
    display.status({"in flight": 512, "groups to grade": 3})
    display.sample(
        Sample([("problem", "Anna hat 3 Äpfel."), ("model", HOSTILE * 9)], "right", 1.0, {})
    )
    lines = frame(display)
    display.close()
    page = "\n".join(lines)
    assert len(lines) <= 30
    assert max(map(cell_len, lines)) <= 100
    for shown in [
        "tramontane quickstart training",
        "23/40",
        "0.530",
        "0.531",
        "0.094",
        "0.087",
        "-0.004",
        "59%",
        "84.2",
        "61.7",
        "0.463",
        "0.43%",
        "6,123 tok/s idle   3%",
        "8,877 tok/s idle  31%",
        "142 verdicts/s idle  86%",
        "16/20",
        "mean 0.82",
        "max 2",
        "12.3 ms pause",
        "3.1%",
        "512",
        "▁▁▂",
        "▇██",
        "right, reward 1",
        "[bold]3 + 14[/bold] = 17",
        "Anna hat 3 Äpfel.",
    ]:
        assert shown in page
    assert "\x1b[31m" not in page


def test_live_page_before_any_update() -> None:
    display, _ = terminal()
    display.start("quickstart", {}, 40, {})
    display.phase("evaluation before", 100, 1024)
    assert "evaluation before" in "\n".join(frame(display))
    display.close()
    display.close()


def test_live_output_ends_with_the_summary() -> None:
    display, file = terminal()
    with display:
        display.start("quickstart", {"staleness at most": "2 versions"}, 1, {})
        display.update({"update": 1, **METRICS})
        display.summary(SUMMARY, FILES)
    text = file.getvalue()
    assert "staleness at most" in text
    end = text[text.rindex("before") :]
    for shown in ("0.853 [0.810, 0.890]", "+0.543", "0.985", "+48.2", *FILES.values()):
        assert shown in end


def test_time_left_is_at_the_phases_own_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("tramontane.run.screen.time.monotonic", lambda: now)
    display, file = plain()
    display.start("resumed", {}, 40, {})
    now = 200.0
    display.update({"update": 21})  # the first of a resumed run: its speed is not known yet
    now = 205.0
    display.update({"update": 22})
    assert file.getvalue().splitlines()[1:] == ["update 21/40", "update 22/40, 1:30 left"]


def test_formats_of_numbers() -> None:
    assert [number(x) for x in (0.1234, -0.004, 12.345, 8876.5)] == [
        "0.123",
        "-0.004",
        "12.3",
        "8,876",
    ]
    assert [share(x) for x in (0.0, 0.0043, 0.59)] == ["0%", "0.43%", "59%"]
    assert [clock(x) for x in (0, 65.4, 3723)] == ["0:00", "1:05", "1:02:03"]
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert (sparkline([math.nan, 0.0, 1.0]), sparkline([math.inf])) == ("▁█", "▁")
