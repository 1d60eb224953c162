"""A run in the terminal, by textual's own pilot: what is shown, searched and shaded; live."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textual", reason="the terminal's view is not installed: 'tramontane-rl[look]'")
from textual.widgets import DataTable, Input, OptionList, ProgressBar, Static, TabbedContent

from tests.runs import small_config
from tests.view.pages import GROUPS, HOSTILE, SIZE, UPDATES, make_run, write_update
from tramontane import train
from tramontane.errors import InputError
from tramontane.run.folder import RunFolder
from tramontane.view.drawn import SHADINGS, plot, shaded
from tramontane.view.terminal import Completion, Look, query_of

SECONDS = 60.0  # limit of a wait


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("run") / "run", updates=UPDATES)


def piloted(
    folder: Path,
    script: Callable[[Look, Any], Awaitable[None]],
    size: tuple[int, int] = (120, 40),
) -> None:
    async def go() -> None:
        app = Look(folder)
        async with app.run_test(size=size) as pilot:
            await script(app, pilot)

    asyncio.run(go())


async def until(pilot: Any, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "nothing came"
        await pilot.pause(0.02)


def text(app: Any, name: str) -> str:
    return str(app.screen.query_one(name, Static).render())


def test_progress_curves_and_rollouts_are_shown(run: RunFolder) -> None:
    async def script(app: Look, pilot: Any) -> None:
        assert f"stopped, update {UPDATES} of {UPDATES}" in text(app, "#facts")
        assert app.query_one(ProgressBar).percentage == 1.0
        await pilot.press("2")
        assert app.query_one(TabbedContent).active == "curves"
        names = [str(o.prompt) for o in app.query_one(OptionList).options]
        assert "reward" in names and app.metric == "reward"
        await pilot.press("down")
        assert app.metric != "reward" and app.metric in text(app, "#curve")
        await pilot.press("3")
        table = app.query_one(DataTable)
        await until(pilot, lambda: table.row_count == UPDATES * GROUPS * SIZE)
        assert [str(cell) for cell in table.get_row_at(0)][:3] == [str(UPDATES), "12", "wrong"]

    piloted(run.path, script)


def test_a_search_narrows_and_a_wrong_one_is_explained(run: RunFolder) -> None:
    async def script(app: Look, pilot: Any) -> None:
        await pilot.press("slash")
        asked = app.query_one(Input)
        assert asked.has_focus
        asked.value = "adds 3 update=2..3"
        await pilot.press("enter")
        await until(pilot, lambda: text(app, "#found").startswith(f"{2 * GROUPS} of"))
        await pilot.press("slash")
        asked.value = "versions=3"
        await pilot.press("enter")
        await until(pilot, lambda: "no such field; choose from text," in text(app, "#found"))

    piloted(run.path, script)


def test_a_completion_is_shown_with_its_reward_and_shaded(run: RunFolder) -> None:
    async def script(app: Look, pilot: Any) -> None:
        await pilot.press("slash")
        app.query_one(Input).value = "update=2"
        await pilot.press("enter")
        await until(pilot, lambda: app.query_one(DataTable).row_count == GROUPS * SIZE)
        await pilot.press("down", "enter")
        await until(pilot, lambda: isinstance(app.screen, Completion))
        shown = text(app, "#completion")
        assert "update 2, completion 1" in shown and "reward 1  advantage 1" in shown
        for kind in (*SHADINGS[1:], SHADINGS[0]):
            await pilot.press("s")
            assert f"shaded by {kind}" in str(app.screen.sub_title)
            assert (HOSTILE in text(app, "#completion")) == (kind == "none")  # as a text
        await pilot.press("j")
        assert "completion 2" in text(app, "#completion")
        await pilot.press("escape")
        assert not isinstance(app.screen, Completion)

    piloted(run.path, script)


def test_eighty_columns_show_the_search_the_rows_and_the_keys_of_one(
    run: RunFolder,
) -> None:
    async def script(app: Look, pilot: Any) -> None:
        await pilot.press("3")
        table = app.query_one(DataTable)
        await until(pilot, lambda: table.row_count > 24)
        for row in range(table.row_count):
            assert len(str(table.get_row_at(row)[3])) <= 9  # the reward
        await pilot.press("end")
        assert app.query_one(Input).region.y > 0 and table.region.bottom < 24
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Completion))
        await pilot.press("1")  # a key of the tabs, which are covered
        assert isinstance(app.screen, Completion)
        assert app.query_one(TabbedContent).active == "rollouts"
        assert not {"1", "slash"} & {*app.screen.active_bindings}

    piloted(run.path, script, size=(80, 24))


def test_updates_appear_while_the_run_trains(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tramontane.view.terminal.POLL_SECONDS", 0.05)
    folder = make_run(tmp_path / "run", updates=2)

    async def script(app: Look, pilot: Any) -> None:
        table = app.query_one(DataTable)
        await until(pilot, lambda: table.row_count == 2 * GROUPS * SIZE)
        await pilot.press("3", "down", "down")
        at = app.rows[table.cursor_row]
        write_update(folder, 3)
        await until(pilot, lambda: table.row_count == 3 * GROUPS * SIZE)
        assert app.rows[table.cursor_row] == at  # the cursor stays at its completion
        assert "update 3 of 2" in text(app, "#facts")

    piloted(folder.path, script)


def test_a_folder_without_a_run_and_a_run_without_updates(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run folder"):
        Look(tmp_path)
    folder = make_run(tmp_path / "run", updates=0)

    async def script(app: Look, pilot: Any) -> None:
        await pilot.press("2")
        assert "nothing recorded yet" in text(app, "#curve")
        await pilot.press("3", "enter")

    piloted(folder.path, script)


@pytest.mark.slow
def test_a_real_run_is_shown(tmp_path: Path) -> None:
    train(small_config(tmp_path / "run"), quiet=True, report=False)

    async def script(app: Look, pilot: Any) -> None:
        await pilot.press("3")
        await until(pilot, lambda: app.query_one(DataTable).row_count > 0)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Completion))
        assert "<think>" in text(app, "#completion")

    piloted(tmp_path / "run", script)


def test_words_and_fields_make_a_search() -> None:
    found = query_of("the answer verdict=wrong 1+1=2 reward=..0.5")
    assert (found.text, found.verdict, found.reward) == ("the answer 1+1=2", "wrong", "..0.5")


def test_a_plot_has_its_ends_and_rises_with_its_values() -> None:
    lines = plot([(1, 1.0), (2, 10.0), (3, 100.0), (4, math.nan)], 30, 6).plain.splitlines()
    assert lines[0].split()[0] == "100" and lines[4].split()[0] == "1"
    assert lines[5].split() == ["1", "3"]
    log = plot([(1, 1.0), (2, 10.0), (3, 100.0)], 30, 6, log=True).plain.splitlines()
    middle = [line[10 + 8 : 10 + 12] for line in (lines[2], log[2])]
    assert middle[0].strip("⠀") == "" and middle[1].strip("⠀")  # only the logarithm is a line
    assert plot([(1, 0.0)], 30, 6, log=True).plain == "nothing recorded yet"


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    piece = {
        "text": "",
        "tokens_text": ["\x1b[2J", "ok\n"],
        "logprobs": [-5.0, 0.0],
        "versions": [0, 1],
    }
    found = shaded(piece, {"versions": [0, 1], "advantage": None}, "log-prob")
    assert found.plain == "\\x1b[2Jok\n"
    assert len(found.spans) == 1  # the certain token has no background
