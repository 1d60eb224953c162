"""A run in the terminal: progress, curves, and rollouts, live while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import Screen
from textual.widgets import (
    Checkbox,
    DataTable,
    Footer,
    Header,
    Input,
    OptionList,
    ProgressBar,
    Static,
    TabbedContent,
    TabPane,
)

from tramontane.errors import InputError
from tramontane.run.figures import clock
from tramontane.view import drawn
from tramontane.view.details import rollout
from tramontane.view.runs import Run
from tramontane.view.search import SECONDS, Query
from tramontane.view.table import flattened, run_row, whole_rows
from tramontane.view.timeline import events_of

Row = dict[str, Any]
POLL_SECONDS = 2.0  # between two looks at the run's files
MOST_ROWS = 500  # completions in the list
MOST_EVENTS = 50
FIELDS = tuple(Query.__dataclass_fields__)
COLUMNS = ("update", "group", "verdict", "reward", "tokens", "problem", "completion")


def query_of(text: str) -> Query:
    """The search that a line asks for: `field=value` words, and the rest as part of the completion.

    Raises:
        InputError: an unknown field.
    """
    found: dict[str, str] = {}
    words = []
    for word in text.split():
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            if name not in FIELDS:
                raise InputError(f"{word}: no such field; choose from {', '.join(FIELDS)}")
            found[name] = value
        else:
            words.append(word)
    return Query(**{"text": " ".join(words)} | found)


class Completion(Screen[None]):
    """One completion with its tokens; a conversation turn by turn.

    Args:
        run: its run.
        rows: (update, row) of the completions of the list.
        place: the first to show.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "app.pop_screen", "back"),
        Binding("s", "shade", "shading"),
        Binding("j,n", "move(1)", "next"),
        Binding("k,p", "move(-1)", "previous"),
    ]

    def __init__(self, run: Run, rows: list[tuple[int, int]], place: int) -> None:
        super().__init__()
        self.run_shown, self.rows, self.place = run, rows, place
        self.kind = drawn.SHADINGS[0]

    def compose(self) -> ComposeResult:
        yield Header()
        with VerticalScroll():
            yield Static(id="completion")
        yield Footer()

    def on_mount(self) -> None:
        self.show()
        self.query_one(VerticalScroll).focus()

    def show(self) -> None:
        """Show the completion, or the error of its file."""
        update, row = self.rows[self.place]
        self.sub_title = f"{self.place + 1} of {len(self.rows)}, shaded by {self.kind}"
        try:
            text = drawn.completion(rollout(self.run_shown, update, row), self.kind)
        except (InputError, KeyError) as error:  # damaged, or taken back by a resumed run
            text = Text(str(error), "red")
        self.query_one("#completion", Static).update(text)

    def action_shade(self) -> None:
        kinds = drawn.SHADINGS
        self.kind = kinds[(kinds.index(self.kind) + 1) % len(kinds)]
        self.show()

    def action_move(self, step: int) -> None:
        self.place = min(len(self.rows) - 1, max(0, self.place + step))
        self.show()
        self.query_one(VerticalScroll).scroll_home(animate=False)


class Look(App[None]):
    """The run of a folder, read again every `POLL_SECONDS`.

    Args:
        folder: the run's folder.

    Raises:
        InputError: not a run folder, or a damaged config.
    """

    TITLE = "Tramontane"
    CSS = """
    #metrics { width: 34; }
    #curve { padding: 1 2; height: 1fr; width: 1fr; }
    #facts { padding: 1 2; height: auto; }
    #events { padding: 0 2; }
    #list { height: 1fr; }
    #found { padding: 0 1; color: $text-muted; }
    ProgressBar { padding: 0 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "tab('progress')", "progress"),
        Binding("2", "tab('curves')", "curves"),
        Binding("3", "tab('rollouts')", "rollouts"),
        Binding("slash", "search", "search"),
        Binding("l", "log", "log axis"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.run_shown = Run(folder.resolve(), 0)
        if self.run_shown.fault:
            raise InputError(self.run_shown.fault)
        self.updates: list[Row] = []
        self.metric = "reward"
        self.rows: list[tuple[int, int]] = []
        self.asked = ""

    def compose(self) -> ComposeResult:
        yield Header()
        with TabbedContent(initial="progress"):
            with TabPane("Progress", id="progress"):
                yield Static(id="facts")
                yield ProgressBar(id="bar", show_eta=False)
                with VerticalScroll():
                    yield Static(id="events", markup=False)
            with TabPane("Curves", id="curves"), Horizontal():
                yield OptionList(id="metrics")
                with VerticalScroll():
                    yield Checkbox("logarithmic axis", id="log")
                    yield Static(id="curve")
            with TabPane("Rollouts", id="rollouts"):
                yield Input(
                    placeholder="words, verdict=wrong, update=10..20, reward=..0.5", id="asked"
                )
                yield Static(id="found", markup=False)
                yield DataTable(id="list", cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        self.sub_title = str(self.run_shown.config.get("name", self.run_shown.path.name))
        self.query_one("#list", DataTable).add_columns(*COLUMNS)
        self.look()
        self.set_interval(POLL_SECONDS, self.look)

    # ------------------------------------------------------------------------------ reading

    def look(self) -> None:
        """Read what the run has written since the last look."""
        if not self.query("#facts"):  # the page is being closed
            return
        before = len(self.updates)
        self.updates = [
            flattened(row)
            for row in whole_rows(self.run_shown.path / "metrics.jsonl")
            if isinstance(row.get("update"), int)
        ]
        self.show_progress()
        if before != len(self.updates):
            self.show_metrics()
            self.show_curve()
            self.search(self.asked)

    def show_progress(self) -> None:
        row = run_row(self.run_shown.path, self.run_shown.keys)
        results = [
            f"{name} {figure['value']:.3f}"
            + (f" [{figure['low']:.3f}, {figure['high']:.3f}]" if "low" in figure else "")
            for name, figure in row["results"].items()
        ]
        facts = [f"{row['state']}, update {row['update']} of {row['updates']}"]
        facts += [f"wall time {clock(row['seconds'])}"] if row["seconds"] is not None else []
        facts += [row["machine"], *results, row["fault"]]
        self.query_one("#facts", Static).update(Text("\n".join(filter(None, facts))))
        total = row["updates"] if isinstance(row["updates"], int) else None
        self.query_one("#bar", ProgressBar).update(total=total, progress=row["update"])
        events = [event["text"] for event in events_of(self.run_shown.path)[-MOST_EVENTS:]]
        self.query_one("#events", Static).update("\n".join(reversed(events)))

    def show_metrics(self) -> None:
        options = self.query_one("#metrics", OptionList)
        names = sorted({k for row in self.updates for k, v in row.items() if _is_number(v)})
        shown = [str(option.prompt) for option in options.options]
        if names != shown:
            options.clear_options().add_options(names)
            if self.metric in names:
                options.highlighted = names.index(self.metric)

    def show_curve(self) -> None:
        curve, log = self.query_one("#curve", Static), self.query_one("#log", Checkbox).value
        points = [
            (row["update"], row[self.metric])
            for row in self.updates
            if _is_number(row.get(self.metric))
        ]
        width, height = max(40, self.size.width - 44), max(8, self.size.height - 14)
        last = f"{self.metric}: {points[-1][1]:.4g}" if points else self.metric
        text = Text(f"{last}\n\n", "bold")
        curve.update(text.append(drawn.plot(points, width, height, log)))

    @work(exclusive=True, thread=True)
    def search(self, asked: str) -> None:
        """Search the rollouts, and show what is found, the newest first."""
        try:
            search = self.run_shown.searches.find(query_of(asked))
            while True:
                search.advance(SECONDS)
                found = search.page("update", True, 0, MOST_ROWS)
                self.call_from_thread(self.show_found, asked, found)
                if search.done or asked != self.asked:
                    return
        except InputError as error:
            self.call_from_thread(self.query_one("#found", Static).update, str(error))

    def show_found(self, asked: str, found: Row) -> None:
        if asked != self.asked:
            return
        table = self.query_one("#list", DataTable)
        rows = [(row["update"], row["row"]) for row in found["rows"]]
        at = self.rows[table.cursor_row] if 0 <= table.cursor_row < len(self.rows) else None
        self.rows = rows
        table.clear()
        for row in found["rows"]:
            reward = None if row["reward"] is None else f"{row['reward']:.3g}"
            cells = [row["update"], row["group"], row["verdict"], reward, row["tokens"]]
            texts = [" ".join(row[name].split())[:60] for name in ("problem", "snippet")]
            table.add_row(*(Text("" if c is None else str(c)) for c in [*cells, *texts]))
        if at in rows:
            table.move_cursor(row=rows.index(at))
        of = "" if found["done"] else f", {found['scanned']} of {found['files']} files searched"
        text = f"{found['count']:,} of {found['total']:,} completions{of}"
        self.query_one("#found", Static).update(text)

    # ------------------------------------------------------------------------------ the keyboard

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Whether a key is there: those of the tabs are not while a completion covers them."""
        return action not in ("tab", "search", "log") or not isinstance(self.screen, Completion)

    def action_tab(self, name: str) -> None:
        self.query_one(TabbedContent).active = name
        focus = {"curves": "#metrics", "rollouts": "#list"}.get(name)
        if focus:
            self.query_one(focus).focus()

    def action_search(self) -> None:
        self.action_tab("rollouts")
        self.query_one("#asked").focus()

    def action_log(self) -> None:
        self.query_one("#log", Checkbox).toggle()

    @on(Checkbox.Changed, "#log")
    def _on_axis(self) -> None:
        self.show_curve()

    @on(OptionList.OptionHighlighted, "#metrics")
    def _on_metric(self, event: OptionList.OptionHighlighted) -> None:
        self.metric = str(event.option.prompt)
        self.show_curve()

    @on(Input.Submitted, "#asked")
    def _on_asked(self, event: Input.Submitted) -> None:
        self.asked = event.value
        self.search(event.value)
        self.query_one("#list").focus()

    @on(DataTable.RowSelected, "#list")
    def _on_chosen(self, event: DataTable.RowSelected) -> None:
        self.push_screen(Completion(self.run_shown, self.rows, event.cursor_row))

    def on_resize(self) -> None:
        self.show_curve()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def look(folder: Path) -> None:
    """Show a run in this terminal until `q`.

    Raises:
        InputError: not a run folder, or a damaged config.
    """
    Look(folder).run()
