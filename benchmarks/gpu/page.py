"""The page docs/gpu.md, from the figures of gpu.json or, before there are any, from formulas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.gpu import bounds
from benchmarks.gpu.bench import APART, Bench
from benchmarks.gpu.bounds import EXPECTED_MFU, Rates, sheet
from benchmarks.gpu.decode import (
    CONTEXT,
    DECODED,
    EIGHT_BITS,
    OTHERS,
    ROWS,
    STRAGGLERS,
    STRAGGLING,
    best_mode,
)
from benchmarks.gpu.facts import ERROR_LIMIT, LAYERS
from benchmarks.gpu.loop import LOOPS
from benchmarks.gpu.training import SETTINGS, TRANSFERS

Found = Mapping[str, Any]  # figures of each item; none: a page of computed figures
EXPECTED = "h100"  # its data sheet stands in until there are figures
NOTHING = "–"
TRL_SYNC = 180.0  # milliseconds, published for 0.6 B on two H100


def page(report: Mapping[str, Any]) -> str:
    """The page, in Markdown; `report` is the content of gpu.json, empty before there is one."""
    found = report.get("items", {})
    bench, rates = Bench(report.get("machine", {}).get("tiny", False)), measured_rates(found)
    template = jinja2.Template(
        Path(__file__).with_suffix(".md.j2").read_text(encoding="utf-8"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return template.render(
        report,
        tiny=bench.tiny,
        measured=bool(found),
        found={"facts": {}, "ceilings": {}, "tests": {}} | found,
        facts=table(
            ["", ""], [[k, f"{v}"] for k, v in found.get("facts", {}).items() if k != "took"]
        ),
        ceilings=ceilings(found, report.get("machine", {"gpu": EXPECTED}).get("gpu", "")),
        attention=attention(found),
        context=f"{CONTEXT:,}",
        decoding=[
            (name, decoding(bench, name, found, rates))
            for name in DECODED
            if not found
            or any("steps" in found.get(f"decode {name} {m}", {}) for m in bounds.KERNELS)
        ],
        eight_bits=eight_bits(found),
        kernels={m: i for m in bounds.KERNELS if "kernels" in (i := found.get(f"kernels {m}", {}))},
        others=f"{OTHERS:,}",
        mode=best_mode(),
        stragglers=stragglers(bench, found, rates),
        training=training(bench, found, rates),
        trl_sync=f"{TRL_SYNC:.0f}",
        weights=weights(bench, found, rates),
        together=together(found),
        runs=runs(bench, found, rates),
        remarks=remarks(found),
    )


def remarks(found: Found) -> dict[str, list[str]]:
    """Failures, what is missing, and remarks on figures, each with the items that it is about. An
    item that is measured again loses its remark."""
    said: dict[str, list[str]] = {}
    for name, item in found.items():
        for state, before in {"failed": "failed: ", "lacks": "lacks ", "remark": ""}.items():
            if state in item:
                said.setdefault(before + item[state], []).append(name)
    return said


def measured_rates(found: Found) -> Rates:
    """The rates that bounds are computed with: those of this GPU, or of the H100's data sheet."""
    if found.get("ceilings", {}).keys() >= {"flops", "bandwidth", "to_pinned"}:
        return Rates(*(found["ceilings"][key] for key in ("flops", "bandwidth", "to_pinned")))
    rates = sheet(EXPECTED)
    assert rates is not None
    return rates


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure(value: float | None, form: str = ",.0f", expected: float | None = None) -> str:
    """A measured value, or the expected one marked as such."""
    if value is not None:
        return f"{value:{form}}"
    return NOTHING if expected is None else f"≈ {expected:{form}}"


def ratio(value: float | None, base: float | None, form: str = ".0%") -> str:
    return figure(value / base if value and base else None, form)


def ceilings(found: Found, gpu: str) -> str:
    known, rows = sheet(gpu), []
    kinds = (
        ("flops", "matrix products in bfloat16, TFLOP/s", 1e12),
        ("bandwidth", "a copy on the device, TB/s read and written", 1e12),
        ("to_pinned", "a copy to pinned memory, GB/s", 1e9),
    )
    for number, (key, title, unit) in enumerate(kinds):
        value = found.get("ceilings", {}).get(key)
        bound = known[number] if known else None
        cells = [figure(rate and rate / unit, ",.2f") for rate in (value, bound)]
        rows.append([title, *cells, ratio(value, bound)])
    return table(["", "measured", "data sheet", "share"], rows)


def attention(found: Found) -> str:
    rows = []
    for layer in LAYERS:
        item = found.get(layer.label, {})
        errors = [figure(item.get(way), ".4f") for way in ("forward", "backward")]
        rows.append([layer.label.removeprefix("attention "), *errors, f"{ERROR_LIMIT}"])
    return table(["heads/key-value heads × channels", "forward", "backward", "bound"], rows)


def step_of(found: Found, name: str, mode: str, rows: int) -> dict[str, float] | None:
    """The figures of a decode step, if it was measured."""
    steps = found.get(f"decode {name} {mode}", {}).get("steps", [])
    return next((step for step in steps if step["wanted"] == rows), None)


def decoding(bench: Bench, name: str, found: Found, rates: Rates) -> str:
    shape, rows = bench.shape(name), []
    for wanted in ROWS:
        steps = {mode: step_of(found, name, mode, wanted) for mode in bounds.KERNELS}
        measured = [step for step in steps.values() if step]
        if found and not measured:
            continue
        live = measured[0] if measured else {"rows": wanted, "context": CONTEXT}
        bound = 1e3 * bounds.decode_bound(shape, live["rows"], live["context"], rates)
        cells = []
        for mode, step in steps.items():
            guess = 1e3 * bounds.expected_step(shape, wanted, CONTEXT, rates, mode)
            value = step["ms"] if step else None
            text = figure(value, ".1f", None if found else guess)
            cells.append(text if text == NOTHING else f"{text}, {bound / (value or guess):.0%}")
        fastest = min((step["ms"] for step in measured), default=None)
        speed = ratio(1e3 * live["rows"], fastest, ",.0f")
        rows.append([f"{live['rows']:.0f}", f"{bound:.1f}", *cells, speed])
    return table(["rows", "bound", *bounds.KERNELS, "fastest, tokens/s"], rows)


def eight_bits(found: Found) -> str:
    """Steps with weights in FP8 beside those in bfloat16; empty before any is measured."""
    rows = []
    for name in EIGHT_BITS:
        for step in found.get(f"decode {name} fp8", {}).get("steps", []):
            whole = step_of(found, name, best_mode(), step["wanted"])
            before = whole and whole["ms"]
            cells = [figure(before, ".1f"), figure(step["ms"], ".1f")]
            rows.append([name, f"{step['wanted']}", *cells, ratio(before, step["ms"], ".2f")])
    return (
        table(["model", "rows", "bfloat16, ms", "fp8, ms", "times as fast"], rows) if rows else ""
    )


def stragglers(bench: Bench, found: Found, rates: Rates) -> str:
    shape, rows = bench.shape(STRAGGLING), []
    for count, longest in ((rows, n) for rows, lengths in STRAGGLERS.items() for n in lengths):
        steps = found.get(f"straggler {count}", {}).get("steps", [])
        item = next((step for step in steps if step["longest"] == longest), {})
        context = (longest + (count - 1) * OTHERS) / count
        live = {"rows": count, "context": context, "ms": None} | item
        bound = 1e3 * bounds.decode_bound(shape, live["rows"], live["context"], rates)
        guess = 1e3 * bounds.expected_step(shape, count, context, rates, best_mode())
        step = figure(live["ms"], ".1f", None if found else guess)
        rows.append([f"{count}", f"{longest:,}", f"{bound:.1f}", step, ratio(bound, live["ms"])])
    return table(["rows", "longest", "bound, ms", "step, ms", "share"], rows)


def training(bench: Bench, found: Found, rates: Rates) -> str:
    rows = []
    for setting in SETTINGS:
        item = found.get(setting.label, {})
        if setting.kernel != "default" and "tokens_per_second" not in item:
            continue
        speed, bound = item.get("tokens_per_second"), rates.flops / setting.flops(bench)
        recomputed = "yes" if setting.recomputed else "no"
        kind = setting.kind if setting.kernel == "default" else f"{setting.kind}, {setting.kernel}"
        cells = [setting.name, kind, f"{setting.length:,}", recomputed, f"{bound:,.0f}"]
        cells.append(figure(speed, expected=None if found else EXPECTED_MFU * bound))
        cells += [ratio(speed, bound), figure(item.get("peak_gib"), ".1f")]
        rows.append([*cells, figure(setting.published), ratio(speed, setting.published, ".2f")])
    header = ["model", "trained", "length", "recomputed", "bound", "tokens/s", "share", "peak GiB"]
    return table([*header, "prime-rl", "ours to prime-rl's"], rows)


def weights(bench: Bench, found: Found, rates: Rates) -> str:
    rows = []
    for name, kind in TRANSFERS:
        item = found.get(f"weights {name} {kind}", {})
        cells = [name, kind, figure(item.get("publish_ms"), ".1f")]
        least, expected = (
            bounds.update_bounds(bench.shape(name), each, processes=kind == APART)
            for each in (rates, bounds.reached(rates))
        )
        for key, bound, guess in zip(("arrive_ms", "pause_ms"), least, expected, strict=True):
            text = figure(item.get(key), ".1f", None if found else 1e3 * guess)
            cells += [f"{1e3 * bound:.1f}", text]
        rows.append(cells)
    return table(["model", "placement", "published", "bound", "arrived", "bound", "pause"], rows)


def together(found: Found) -> str:
    rows = []
    keys = ("decode_ms", "decode_beside_ms", "update_seconds", "update_beside_seconds", "work")
    for kind in ("thread", APART):
        item = found.get(f"together {kind}", {})
        forms = (".1f", ".1f", ".2f", ".2f", ".2f")
        cells = [figure(item.get(key), form) for key, form in zip(keys, forms, strict=True)]
        rows.append([kind, *cells, "1"])
    header = [
        "placement",
        "decode step, ms",
        "beside",
        "update, s",
        "beside",
        "work",
        "bound",
    ]
    return table(header, rows)


def runs(bench: Bench, found: Found, rates: Rates) -> str:
    rows = []
    for name, (model, live, context) in LOOPS.items():
        item = found.get(name, {})
        speed, scores = item.get("tokens_per_second"), item.get("pass_at_1", {})
        bound = bounds.run_bound(bench.shape(model), live, context, rates)
        cells = [name, f"{bound:,.0f}", figure(speed), ratio(speed, bound, ".1%")]
        cells += [figure(item.get(f"{worker}_idle"), ".0%") for worker in ("generator", "trainer")]
        cells.append(" → ".join(f"{score:.2f}" for score in scores.values()) or NOTHING)
        rows.append([*cells, figure(item.get("minutes"), ".1f")])
    header = ["run", "bound", "tokens/s", "share", "generator idle", "trainer idle", "pass@1"]
    return table([*header, "minutes"], rows)
