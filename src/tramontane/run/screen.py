"""Display of a run's progress: a live page on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tramontane.placement.printed import printable
from tramontane.run.figures import (
    Metrics,
    before_after,
    clock,
    facts,
    known,
    number,
    share,
    shortened,
    sparkline,
)
from tramontane.run.sample import MODEL, Sample


class Screen(Protocol):
    """Shows the progress of a run; `LiveDisplay` is the default.

    Methods are called from the pipeline's thread and from the caller's. Metrics are an update's
    line in `metrics.jsonl`, `summary` is the content of `summary.json`. `phase` is also called
    before `start`, while a run is prepared, with a `total` of 0. `header` says what is trained, and
    `sizes` how much of what.
    """

    def start(
        self,
        config_title: str,
        header: Mapping[str, str],
        total_updates: int,
        sizes: Mapping[str, str],
    ) -> None: ...

    def phase(self, name: str, done: int, total: int) -> None: ...

    def status(self, values: Mapping[str, Any]) -> None: ...

    def update(self, metrics: Mapping[str, Any]) -> None: ...

    def warn(self, text: str) -> None: ...

    def sample(self, sample: Sample) -> None: ...

    def summary(self, summary: Mapping[str, Any], files: Mapping[str, str | Path]) -> None: ...

    def close(self) -> None: ...


class QuietScreen:
    """Shows nothing; the run's folder has everything that a screen would show."""

    def close(self, *_: Any, **__: Any) -> None:
        """Do nothing, like every method here."""

    start = phase = status = update = warn = sample = summary = close


PLAIN_WIDTH = 140  # columns of a plain line, at most
WORKERS_WIDTH = 46  # columns of the panel of the workers: its longest figures
LABEL = 16  # characters of a reward's name on a live page
LABELS_WIDTH = 29  # columns of the panel of learning without its sparklines, at most
HISTORY = 24  # updates in a sparkline
REFRESHES_PER_SECOND = 2  # a frame takes some 10 ms of a core that the workers use
SAMPLE_LINES = 7  # of the sample on a live page, at least

COLORS = {"right": "green", "wrong": "red", "malformed": "yellow", "unscorable": "magenta"}


# (label, metrics key, formatter, True if indented as a part of the row above)
_Figure: TypeAlias = "tuple[str, str, Callable[[float], str], bool]"
_LEARNING: list[_Figure] = [
    ("reward", "reward", number, False),
    ("correctness", "reward_correctness", number, True),
    ("format", "reward_format", number, True),
    ("language", "reward_language", number, True),
    ("length", "reward_length", number, True),
    ("pass rate", "pass_rate", share, False),
    ("completion tokens", "completion_tokens", number, False),
    ("thinking tokens", "thinking_tokens", number, False),
    ("entropy", "entropy", number, False),
    ("clipped above", "clip_fraction_high", share, False),
    ("clipped below", "clip_fraction_low", share, False),
]
_WORKERS = [
    ("generator", "generator_tokens_per_second", "generator_idle_fraction", "tok/s"),
    ("trainer", "trainer_tokens_per_second", "trainer_idle_fraction", "tok/s"),
    ("verifier", "verifier_verdicts_per_second", "verifier_idle_fraction", "verdicts/s"),
]


class LiveDisplay(AbstractContextManager["LiveDisplay"]):
    """Shows a run: on a terminal as a page that refreshes itself, elsewhere as a line per update.

    Methods may be called from any thread. Metrics may lack any key; missing figures are not shown.

    Args:
        console: the output; standard output by default.
        verbose: also print the sizes of the run when it starts.
    """

    def __init__(self, console: Console | None = None, *, verbose: bool = False) -> None:
        self.console, self.verbose = console or Console(), verbose
        self._opened = False  # True once the run has started
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._live: Live | None = None
        self._lock = threading.Lock()
        self._title = "tramontane"
        self._total = 0
        self._started = self._phase_started = time.monotonic()
        self._phase, self._done, self._of = "starting", 0, 0
        self._first = 0  # units done before the phase began (in a resumed run)
        self._metrics: dict[str, Any] = {}
        self._history: dict[str, deque[float]] = {}
        self._status: dict[str, Any] = {}
        self._sample: Sample | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self,
        config_title: str,
        header: Mapping[str, str],
        total_updates: int,
        sizes: Mapping[str, str],
    ) -> None:
        """Print the title and the header of the run, and open the page."""
        self._title, self._total = printable(config_title), total_updates
        self._started = self._phase_started = time.monotonic()
        facts = {**header, **(sizes if self.verbose else {})}
        if not self.live:
            self._line(
                f"tramontane · {self._title} · {total_updates} update{'s' * (total_updates != 1)}"
            )
            for key, value in facts.items():
                self.console.print(Text(printable(f"  {key}: {value}")), soft_wrap=True)
            self._opened = True
            return
        self.console.print(facts_table(facts))
        self._opened = True
        self._live = Live(
            get_renderable=self._render,
            console=self.console,
            refresh_per_second=REFRESHES_PER_SECOND,
            # Warnings printed meanwhile appear above the page.
            redirect_stdout=True,
            redirect_stderr=True,
        )
        self._live.start()

    def phase(self, name: str, done: int, total: int) -> None:
        """Show the progress of a phase, e.g. `evaluation before`, in its own units; before the run
        starts, print its name."""
        if not total and not self._opened:
            self.console.print(Text(f"{name} …", style="dim"))
            return
        with self._lock:
            fresh = name != self._phase
            before = 0 if fresh or not self._of else self._done * 4 // self._of
            self._set_phase(name, done, total)
        if not self.live and (fresh or (total and done * 4 // total > before)):
            self._line(f"{name} {done}/{total}{self._remaining(', ')}")

    def update(self, metrics: Metrics) -> None:
        """Show the metrics of one update (a line of metrics.jsonl)."""
        with self._lock:
            update = int(metrics["update"])
            stage = f", stage {metrics['stage']}" if metrics.get("stage") else ""
            self._set_phase(f"training{stage}", update, self._total)
            self._metrics = dict(metrics)
            for _, key, _, _ in self._rows():
                if metrics.get(key) is not None:
                    self._history.setdefault(key, deque(maxlen=HISTORY)).append(metrics[key])
        if not self.live:
            self._line(self._update_line(metrics))

    def status(self, values: Mapping[str, Any]) -> None:
        """Show figures that change between updates, such as queue lengths; only on the live
        page."""
        with self._lock:
            self._status = dict(values)

    def warn(self, text: str) -> None:
        """Print a warning; further lines hold its details."""
        headline, *details = printable(text, keep="\n").split("\n")
        self.console.print(Text(headline, style="bold yellow"), soft_wrap=True)
        for line in details:
            self.console.print(Text(line), soft_wrap=True)

    def sample(self, sample: Sample) -> None:
        """Show one completion: its messages, a line for each, and its reward."""
        with self._lock:
            self._sample = sample
        if self.live:
            return
        for role, text in sample.messages:
            line = f"  │ {role}: {shortened(' '.join(text.split()))}"
            self.console.print(Text(printable(line)), soft_wrap=True)
        judgment = Text(printable(f"  └ {sample.judgment}"), style=COLORS[sample.verdict])
        self.console.print(judgment, soft_wrap=True)

    def summary(self, summary: Mapping[str, Any], files: Mapping[str, str | Path]) -> None:
        """Close the page, and print the before/after table and the run's `files`, by what they
        hold; `summary` is summary.json's content."""
        self.close()
        rows = before_after(summary)
        if self.live and rows:
            table = Table(box=box.SIMPLE_HEAD, title=Text(self._title), title_style="bold")
            table.add_column("")
            for column in ("before", "after", "change"):
                table.add_column(column, justify="right")
            for name, before, after, change in rows:
                style = "green" if change.startswith("+") else "red"
                table.add_row(name, before, Text(after, style="bold"), Text(change, style=style))
            self.console.print(table)
        else:
            for name, before, after, change in rows:
                self._line(f"{name}: {before} → {after}{f' ({change})' if change else ''}")
        if found := " · ".join(f"{name} {value}" for name, value in facts(summary)):
            self.console.print(Text(found, style="dim"), soft_wrap=not self.live)
        named = [f"{name}: {path}" for name, path in files.items()]
        for line in filter(None, (*named[:1], " · ".join(named[1:]))):  # the report stands alone
            self.console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        """Stop refreshing, and leave the last page on the screen; may be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    # ------------------------------------------------------------------------ plain lines

    def _line(self, text: str) -> None:
        text = printable(text)
        if cell_len(text) > PLAIN_WIDTH:
            text = set_cell_size(text, PLAIN_WIDTH - 1) + "…"
        self.console.print(Text(text), soft_wrap=True)

    def _update_line(self, m: Metrics) -> str:
        fields = [f"update {m['update']}/{self._total}{self._remaining(', ')}"]
        if m.get("stage"):
            fields.append(f"stage {m['stage']}")
        for name, key, show in [
            ("reward", "reward", number),
            ("pass", "pass_rate", share),
            ("tokens", "completion_tokens", lambda x: f"{x:,.0f}"),
            ("entropy", "entropy", lambda x: f"{x:.2f}"),
            ("clip", "clip_fraction_high", share),
        ]:
            if m.get(key) is not None:
                fields.append(f"{name} {show(m[key])}")
        if kept := _kept(m):
            fields.append(f"kept {kept}")
        for name, key in [("gen", "generator"), ("train", "trainer")]:
            rate = m.get(f"{key}_tokens_per_second") or 0
            if rate >= 0.5:  # at the end, the generator has nothing to do
                fields.append(f"{name} {rate:,.0f}/s")
        if m.get("skipped_steps"):
            fields.append(f"skipped {m['skipped_steps']:.0f}")
        if m.get("staleness_mean") is not None:
            fields.append(f"stale {m['staleness_mean']:.1f}")
        return "  ".join(fields)

    # -------------------------------------------------------------------------- live page

    def _render(self) -> RenderableType:
        with self._lock:
            columns = Table.grid(expand=True)
            columns.add_column(ratio=1)
            columns.add_column(width=WORKERS_WIDTH)
            height = len(self._rows()) + 2
            columns.add_row(
                _panel(self._learning(), "learning", height),
                _panel(self._workers(), "workers", height),
            )
            parts: list[RenderableType] = [self._progress(), columns]
            width = self.console.width
            if self._sample:
                parts.append(self._sample_panel(width, self._sample))
            page = Table.grid()
            page.add_column(width=width)
            page.add_row(Group(*parts))
            return page

    def _progress(self) -> RenderableType:
        row = Table.grid(padding=(0, 1), expand=True)
        for justify in ("left", "left", "default", "right", "right"):
            row.add_column(justify=justify, no_wrap=True)  # type: ignore[arg-type]
        row.columns[2].ratio = 1
        row.add_row(
            Text.assemble(("tramontane", "bold cyan"), (f" {self._title}", "bold")),
            Text(self._phase, style="cyan"),
            ProgressBar(max(1, self._of), self._done, complete_style="cyan"),
            Text(f"{self._done}/{self._of}"),
            Text(f"{clock(time.monotonic() - self._started)}{self._remaining(' · ')}", style="dim"),
        )
        return row

    def _learning(self) -> Table:
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(ratio=1, no_wrap=True)
        room = max(1, self.console.width - WORKERS_WIDTH - LABELS_WIDTH)
        for label, key, show, part in self._rows():
            value = self._metrics.get(key)
            history = list(self._history.get(key, ()))
            table.add_row(
                Text(f"  {label}" if part else label, style="dim" if part else ""),
                Text("–" if value is None else show(value), style="" if part else "bold"),
                Text(sparkline(history[-room:]) if history else "", "blue" if part else "cyan"),
            )
        return table

    def _rows(self) -> list[_Figure]:
        """The rows of the panel of learning, with the parts of this run's reward."""
        known = [key for _, key, _, _ in _LEARNING]
        own = [key for key in self._metrics if key.startswith("reward_") and key not in known]
        place = known.index("pass_rate")
        parts = [(printable(key[7:][:LABEL]), key, number, True) for key in own]
        rows = [*_LEARNING[:place], *parts, *_LEARNING[place:]]
        return [row for row in rows if not self._metrics or not row[3] or row[1] in self._metrics]

    def _workers(self) -> Table:
        m = self._metrics
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True, ratio=1)
        table.add_column(justify="right", no_wrap=True)
        for name, rate, idle, unit in _WORKERS:
            speed = f"{m[rate]:,.0f} {unit}" if (m.get(rate) or 0) >= 0.5 else "–"
            idle_text = "" if m.get(idle) is None else f"idle {m[idle]:4.0%}"
            table.add_row(name, Text(speed, style="bold"), Text(idle_text, style="dim"))
        facts = {
            "kept groups": _kept(m),
            "staleness": known(m, "staleness_mean", "mean {:.2f}"),
            "weight update": known(m, "weight_update_pause_ms", "{:.1f} ms pause"),
            "padding": known(m, "padding_fraction", "{:.1%}"),
            **{key: f"{value:,}" if isinstance(value, int) else str(value)
               for key, value in list(self._status.items())[:4]},
        }  # fmt: skip
        for name, value in facts.items():
            more = known(m, "staleness_max", "max {:.0f}") if name == "staleness" else ""
            table.add_row(printable(name), Text(printable(value) or "–"), Text(more, style="dim"))
        return table

    def _sample_panel(self, width: int, sample: Sample) -> Panel:
        """The messages of a sample; the middle is left out where the page has no room for it."""
        shown: list[Text] = []
        for role, text in sample.messages:
            body = Text(printable(text.strip(), keep="\n"), style="" if role == MODEL else "bold")
            shown += Text.assemble((f"{role}: ", "dim"), body).wrap(self.console, width - 4)
        judged = Text(printable(sample.judgment), COLORS[sample.verdict])
        judgment = judged.wrap(self.console, width - 4)
        room = max(SAMPLE_LINES, self.console.height - len(self._rows()) - 6 - len(judgment))
        if len(shown) > room:
            first = room // 3
            shown = [*shown[:first], Text("…", style="dim"), *shown[first + 1 - room :]]
        return _panel(Group(*shown, *judgment), "sample")

    def _set_phase(self, name: str, done: int, total: int) -> None:
        if name != self._phase:
            self._phase, self._first, self._phase_started = name, done, time.monotonic()
        self._done, self._of = done, total

    def _remaining(self, before: str) -> str:
        """Remaining time of the phase at its mean speed so far; empty if unknown."""
        fresh = self._done - self._first
        if fresh <= 0 or self._done >= self._of:
            return ""
        seconds = (time.monotonic() - self._phase_started) / fresh * (self._of - self._done)
        return f"{before}{clock(seconds)} left"


def facts_table(facts: Mapping[str, str]) -> Table:
    """Facts by name, with long ones wrapped beside their names."""
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(Text(name, style="dim"), Text(printable(value)))
    return table


def _panel(content: RenderableType, title: str | Text, height: int | None = None) -> Panel:
    style = box.ROUNDED
    return Panel(content, style, title=title, title_align="left", border_style="dim", height=height)


def _kept(m: Metrics) -> str:
    if m.get("groups_kept") is None:
        return ""
    return f"{m['groups_kept']}/{m['groups_kept'] + m.get('groups_filtered', 0)}"
