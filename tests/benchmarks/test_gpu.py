"""The measurements of `make gpu`: the arithmetic of their bounds, the page, and a rehearsal."""

import json
import signal
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import bounds, loop
from benchmarks.gpu.bench import SHAPES, Bench
from benchmarks.gpu.bounds import Rates, decode_bound, expected_step, train_flops
from benchmarks.gpu.decode import ITEMS as DECODE
from benchmarks.gpu.decode import best_mode
from benchmarks.gpu.page import page
from benchmarks.gpu.training import SETTINGS
from tests import fork_server, forked
from tests.paths import ROOT
from tramontane.config import load_config
from tramontane.placement import ranks

START_SECONDS = 600.0  # of a rehearsal, until its first figure
H100 = bounds.sheet("NVIDIA H100 80GB HBM3")
BENCH = Bench(tiny=False)
# Milliseconds of a decode step at 2,000 tokens, computed by hand from the counts of kernels and the
# data sheet, and the shares of the bandwidth.
COMPUTED = {
    ("Qwen2.5-1.5B", 64): {"eager": (15, 13), "graphs": (5.4, 37), "fused": (3.5, 57)},
    ("Qwen2.5-1.5B", 128): {"eager": (15, 21), "graphs": (7.0, 44), "fused": (5.1, 61)},
    ("Qwen2.5-1.5B", 256): {"eager": (15, 35), "graphs": (10.2, 52), "fused": (8.3, 64)},
    ("Qwen2.5-1.5B", 512): {"graphs": (17.8, 54), "fused": (15.8, 61)},
    ("Qwen2.5-7B", 64): {"eager": (15, 43), "graphs": (11.3, 57), "fused": (9.4, 68)},
    ("Qwen2.5-7B", 128): {"eager": (15, 58), "graphs": (14.3, 60), "fused": (12.4, 69)},
    ("Qwen2.5-7B", 256): {"graphs": (20.8, 62), "fused": (18.8, 69)},
    ("Qwen2.5-7B", 512): {"graphs": (39.0, 56), "fused": (36.9, 59)},
}


@pytest.mark.parametrize(("name", "rows"), COMPUTED)
def test_a_decode_step_reads_weights_and_cache_once(name, rows):
    bound = 1e3 * decode_bound(BENCH.shape(name), rows, 2000, H100)
    for mode, (milliseconds, percent) in COMPUTED[name, rows].items():
        assert 100 * bound / milliseconds == pytest.approx(percent, abs=1)
        expected = 1e3 * expected_step(BENCH.shape(name), rows, 2000, H100, mode)
        assert expected == pytest.approx(milliseconds, rel=0.07)


def test_the_bound_of_a_decode_step_in_closed_form():
    hidden, layers, width, vocabulary = 1536, 28, 8960, 151936
    attention = hidden * (1536 + 2 * 256) + (1536 + 2 * 256) + 1536 * hidden  # biases: q, k, v
    block = attention + 3 * hidden * width + 2 * hidden
    weights = vocabulary * hidden + layers * block + hidden
    cache = 64 * 2000 * 2 * layers * 2 * 128
    found = decode_bound(BENCH.shape("Qwen2.5-1.5B"), 64, 2000, Rates(1e30, 1e12, 1))
    assert found == pytest.approx(2 * (weights + cache) / 1e12, rel=1e-12)
    # With little memory to read, the products of all rows take longer.
    found = decode_bound(BENCH.shape("Qwen2.5-1.5B"), 64, 0, Rates(1e12, 1e30, 1))
    assert found == pytest.approx(2 * weights * 64 / 1e12, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "length", "percent"),
    [("full", 16384, 11.1), ("full", 65536, 26.8), ("lora", 16384, 10.9), ("lora", 65536, 25.2),
     ("sft", 8192, 16.8)],
)  # fmt: skip
def test_operations_of_a_trained_token_give_the_mfu_that_prime_rl_publishes(kind, length, percent):
    setting = next(
        s for s in SETTINGS if (s.name, s.kind, s.length) == ("Qwen3-0.6B", kind, length)
    )
    mfu = setting.published * setting.flops(BENCH) / H100.flops
    assert 100 * mfu == pytest.approx(percent, abs=0.06)


@given(
    st.sampled_from(sorted(SHAPES)),
    st.integers(1, 512),
    st.integers(1, 32768),
    st.sampled_from(sorted(bounds.KERNELS)),
)
def test_nothing_is_expected_to_be_faster_than_its_bound(name, rows, context, mode):
    shape = BENCH.shape(name)
    bound = decode_bound(shape, rows, context, H100)
    assert bound < expected_step(shape, rows, context, H100, mode)
    assert bound <= decode_bound(shape, rows + 1, context + 1, H100)
    # A run spends its time on decoding and on training.
    run = bounds.run_bound(shape, rows, context, H100)
    assert 1 / run == pytest.approx(bound / rows + train_flops(shape, context) / H100.flops)
    assert run < rows / bound


def test_bounds_of_whole_runs_are_of_the_shipped_configs():
    for name, path in (("quickstart", "quickstart"), ("SmolLM2", "real")):
        pipeline = load_config(ROOT / f"configs/{path}.yaml", ["model=tiny"]).pipeline
        run = loop.LOOPS[name]
        assert (run.rows, run.context) == (pipeline.n_async, pipeline.l_max / 2)


# --- the page


def rows_of(text: str, *cells: str) -> list[list[str]]:
    """Table rows that start with these cells."""
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines()]
    return [row for row in rows if row[: len(cells)] == list(cells)]


def test_the_page_in_docs_is_that_of_the_figures():
    figures = ROOT / "benchmarks/gpu.json"
    report = json.loads(figures.read_text()) if figures.is_file() else {}
    assert (ROOT / "docs/gpu.md").read_text() == page(report), (
        "write it again: python -m benchmarks.gpu --page"
    )


def report(**items):
    ceilings = {"flops": 5e14, "bandwidth": 2e12, "to_pinned": 5e10}
    return {
        "machine": {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.13.0", "tiny": False},
        "date": "2026-12-01",
        "items": {"ceilings": ceilings, **items},
    }


def test_figures_stand_beside_bounds_with_the_measured_rates():
    shape = BENCH.shape("Qwen2.5-1.5B")
    bound = 1e3 * decode_bound(shape, 64, 2000, Rates(5e14, 2e12, 5e10))
    step = {"wanted": 64, "rows": 64.0, "context": 2000.0, "ms": 2 * bound}
    setting = next(s for s in SETTINGS if s.published)
    speed = 0.25 * 5e14 / setting.flops(BENCH)
    trained = {"tokens_per_second": speed, "seconds": [1.0], "peak_gib": 12.5}
    made = report(
        **{f"decode Qwen2.5-1.5B {best_mode()}": {"steps": [step]}, setting.label: trained},
        tests={"tests": 9, "failures": 1, "errors": 0, "skipped": 2, "failing": ["a::b"]},
        SmolLM2={"lacks": "models/smollm2"},
        quickstart={"failed": "CUDA out of memory"},
        **{f"weights {name}": {"remark": "measured before"} for name in ("a", "b")},
    )
    text = page(made)
    assert "≈" not in text
    assert "NVIDIA H100 80GB HBM3" in text
    [row] = rows_of(text, "64", f"{bound:.1f}")
    columns = dict.fromkeys(bounds.KERNELS, "–") | {best_mode(): f"{2 * bound:.1f}, 50%"}
    assert row[2:] == [*columns.values(), f"{64e3 / (2 * bound):,.0f}"]
    [row] = rows_of(text, "Qwen3-0.6B", "full", "16,384", "yes")
    assert row[4:8] == [f"{4 * speed:,.0f}", f"{speed:,.0f}", "25%", "12.5"]
    assert row[8:] == ["11,896", f"{speed / 11896:.2f}"]
    [row] = rows_of(text, "a copy on the device, TB/s read and written")
    assert row[1:] == ["2.00", "3.35", "60%"]
    assert "- SmolLM2: lacks models/smollm2" in text
    assert "- weights a;\n  weights b: measured before" in text
    assert "- quickstart: failed: CUDA out of memory" in text
    kept = {promise: kept for promise, _, kept in command.promises(made)}
    assert kept == {
        "tests marked gpu pass": False,
        "Qwen2.5-1.5B decodes 64 rows at 55% of the bandwidth or more": False,
        f"{setting.label}: ahead of prime-rl's 11,896 tokens/s": True,
    }


def test_every_figure_that_a_part_measures_has_a_place_before_it_is_measured():
    text = page({})
    assert "Nothing on this page has been measured yet" in text
    for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B"):
        assert f"{name}:" in text
    assert len(rows_of(text, "512")) == 3
    for setting in SETTINGS:
        assert rows_of(text, setting.name, setting.kind, f"{setting.length:,}")
    for name in loop.LOOPS:
        assert rows_of(text, name)
    assert loop.LOOPS.keys() == loop.ITEMS.keys()


# --- the command


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so_and_exits_with_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "sees no NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_failure_is_recorded_and_the_part_goes_on(tmp_path):
    """On a machine without a GPU each of these fails, and ends its process; the second has failed
    before, and is tried again."""
    made = command.Report(tmp_path / "gpu.json")
    failing = ["facts", "ceilings"]
    others = command.items("facts").keys() - failing
    made.content["items"] = {name: {"took": 0.0} for name in others}
    made.items["ceilings"] = {"failed": "before"}
    made.write()
    command.run("facts", made, Bench(tiny=False))
    written = command.Report(made.path).items
    assert [name for name in written if "failed" in written[name]] == failing
    assert all("CUDA" in written[name]["failed"] for name in failing)
    assert made.missing("facts") == failing


def test_figures_of_another_machine_stay_and_the_error_says_where_new_ones_go(
    tmp_path, monkeypatch
):
    figures = tmp_path / "gpu.json"
    before = json.dumps(report())
    figures.write_text(before)
    monkeypatch.setattr(sys, "argv", ["gpu", "facts", "--tiny", f"--out={tmp_path}"])
    with pytest.raises(SystemExit, match=r"figures of .*H100.*, not of .*--out FOLDER"):
        command.main()
    assert figures.read_text() == before


@pytest.mark.parametrize("kernel", ["default", "fa3"])
def test_rows_of_another_kernel_are_on_the_page_once_they_are_measured(kernel):
    setting = next(s for s in SETTINGS if s.kernel == "fa3")
    other = setting._replace(kernel=kernel)
    made = page(report(**{other.label: {"tokens_per_second": 9000.0, "seconds": [1.0]}}))
    rows = rows_of(made, setting.name, "full, fa3")
    assert [row[5] for row in rows] == (["9,000"] if kernel == "fa3" else [])


def test_steps_in_fp8_stand_beside_those_in_bfloat16_once_they_are_measured():
    step = {"wanted": 64, "rows": 64.0, "context": 2000.0}
    whole, eight = ({"steps": [step | {"ms": ms}]} for ms in (10.0, 8.0))
    names = [f"decode Qwen2.5-1.5B {mode}" for mode in ("fused", "fp8")]
    made = page(report(**dict(zip(names, (whole, eight), strict=True))))
    assert rows_of(made, "Qwen2.5-1.5B", "64") == [["Qwen2.5-1.5B", "64", "10.0", "8.0", "1.25"]]
    assert "times as fast" not in page(report())


@pytest.mark.slow
def test_steps_in_fp8_are_rehearsed():
    found = DECODE["decode Qwen2.5-1.5B fp8"](Bench(tiny=True))
    assert [step["wanted"] for step in found["steps"]] == [1, 8]


def rehearse(arguments, server):
    # Workers in processes of their own are forks of the tests' server too.
    ranks.START_METHOD = fork_server.START_METHOD
    fork_server.share(server)
    sys.argv = ["benchmarks.gpu", *arguments]
    command.main()


@pytest.mark.slow(40)
def test_a_rehearsal_that_is_killed_continues(tmp_path):
    figures, arguments = tmp_path / "gpu.json", ["--tiny", f"--out={tmp_path}"]
    server = fork_server.address()
    process = forked.start(rehearse, [*arguments, "decode"], server)
    first = next(iter(DECODE))

    def items():
        return json.loads(figures.read_text())["items"] if figures.is_file() else {}

    deadline = time.monotonic() + START_SECONDS
    while first not in items():
        assert process.exitcode is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    assert forked.end(process) == -signal.SIGKILL
    before = items()
    assert forked.end(forked.start(rehearse, arguments, server)) == 0
    after = items()
    names = [name for part in command.PARTS for name in command.items(part)]
    assert sorted(after) == sorted(names)
    assert not any("failed" in item for item in after.values())
    assert {name: after[name] for name in before} == before
    text = (tmp_path / "gpu.md").read_text()
    assert "A rehearsal on a CPU" in text
    assert "≈" not in text
