"""The page in a headless Chromium: every view, the keyboard, a phone's width, hostile texts."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the page is not installed: pip install 'tramontane[view]'")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="the page's tests need playwright: pip install playwright"
)

from tests.view.pages import GROUPS, SIZE, UPDATES, make_run, served, write_update
from tramontane.run.folder import RunFolder

pytestmark = pytest.mark.slow
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PHONE = {"width": 390, "height": 844}
CURVE = ".chart:has-text('Reward: total') .series path"
VIEWS = ["curves", "rollouts", "groups", "compare", "audit", "timeline"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / name, name=name) for name in ("one", "two")]


@pytest.fixture(scope="module")
def address(runs: list[RunFolder]) -> Iterator[str]:
    with served(*(run.path for run in runs)) as page:
        yield page.address


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield from opened(context)


@pytest.fixture
def phone(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)
    yield from opened(context)


def opened(context: Any) -> Iterator[Any]:
    """A tab that reports no error; requests to other addresses fail the test."""
    context.set_default_timeout(60_000)
    page, problems = context.new_page(), list[str]()
    page.on("pageerror", lambda error: problems.append(str(error)))
    refused = "status of 422"  # a search that the test makes wrong
    page.on(
        "console",
        lambda m: problems.append(m.text) if m.type == "error" and refused not in m.text else None,
    )
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.on("request", lambda r: None if "//127.0.0.1:" in r.url else problems.append(r.url))
    yield page
    assert problems == []
    context.close()


def test_every_view_shows_its_content(tab: Any, address: str) -> None:
    tab.goto(address)
    tab.wait_for_selector(CURVE)
    assert tab.locator(".chip").count() == 2
    assert "Reward: total" in tab.locator(".chart h3").all_inner_texts()
    # The run was measured once: a lone point has one label below it.
    measured = tab.locator(".chart", has_text="pass@1, held-out")
    assert measured.locator("text[text-anchor=middle]").all_text_contents() == ["0"]
    tab.goto(f"{address}#rollouts")
    tab.wait_for_selector("table.rows tbody tr")
    assert f"{UPDATES * GROUPS * SIZE} of" in tab.inner_text(".count")
    tab.goto(f"{address}#groups?run=0&update=2")
    tab.wait_for_selector(".card")
    assert tab.locator(".card").count() == GROUPS
    assert tab.locator(".card.filtered").count() == 1
    assert "−1.00" in tab.inner_text(".card >> nth=0")
    tab.goto(f"{address}#compare?a=0&b=1&problem=problem-3")
    tab.wait_for_selector(".side >> nth=1")
    tab.wait_for_selector(".side >> nth=1 >> pre.completion")
    assert tab.inner_text(".side >> nth=0 >> pre") == tab.inner_text(".side >> nth=1 >> pre")
    tab.goto(f"{address}#audit?run=0")
    tab.wait_for_selector(".empty")
    assert "tramontane audit" in tab.inner_text("main")
    tab.goto(f"{address}#timeline?run=0")
    tab.wait_for_selector('rect[data-kind="step"]')
    assert "trainer" in tab.inner_text("table.plain")
    assert "generator 0 died: killed <b>hard</b>" in tab.inner_text(".events")


def test_what_a_model_wrote_is_text_and_nothing_else(tab: Any, address: str) -> None:
    tab.goto(f"{address}#rollouts?text=script")
    tab.wait_for_selector("table.rows tbody tr")
    assert "<script>document.title='owned'</script>" in tab.inner_text(".snippet >> nth=0")
    tab.goto(f"{address}#rollout?run=0&update=2&row=1")
    tab.wait_for_selector(".tokens")
    tab.goto(f"{address}#compare?a=0&b=1&problem=problem-3")
    tab.wait_for_selector(".side >> nth=1 >> pre.completion")
    pick = tab.locator(".side select").first
    texts = tab.locator(".side option").all_inner_texts()
    pick.select_option(
        index=next(i for i, t in enumerate(texts) if t.startswith("update 2, comp") and " 1:" in t)
    )
    tab.wait_for_selector("text=Answer: <script>")
    assert tab.locator("main script, main img, main b:has-text('bold')").count() == 0
    assert "owned" not in tab.title()


def test_a_completion_is_shaded_by_each_figure(tab: Any, address: str) -> None:
    tab.goto(f"{address}#rollout?run=0&update=3&row=3")
    tab.wait_for_selector(".tokens")
    shades = "spans => spans.map(s => getComputedStyle(s).backgroundColor)"

    def colours(kind: str) -> list[str]:
        tab.locator(f".segments input[value={kind}]").check(force=True)
        return list(tab.locator(".token").evaluate_all(shades))

    by_logprob = colours("logprob")
    assert len(by_logprob) == 13 and len(set(by_logprob)) > 10  # each less likely than the last
    assert len(set(colours("ratio"))) == 1 and len(set(colours("advantage"))) == 1
    versions = colours("version")
    assert versions[:4] == [versions[0]] * 4 and versions[4:] == [versions[4]] * 9
    assert versions[0] != versions[4]
    assert set(colours("none")) == {"rgba(0, 0, 0, 0)"}


def test_the_search_narrows_and_is_in_the_address(tab: Any, address: str) -> None:
    tab.goto(f"{address}#rollouts")
    tab.wait_for_selector("table.rows tbody tr")
    tab.keyboard.press("/")
    tab.keyboard.type("adds 3")
    tab.wait_for_selector(f"text={UPDATES * GROUPS} of {UPDATES * GROUPS * SIZE} completions")
    assert "text=adds+3" in tab.url
    assert tab.inner_text("mark >> nth=0") == "adds 3"
    tab.reload()
    tab.wait_for_selector(f"text={UPDATES * GROUPS} of {UPDATES * GROUPS * SIZE} completions")
    tab.locator("label:has-text('Reward') input").fill("high")
    tab.wait_for_selector("text=not a number or a range")


def test_everything_is_reached_by_the_keyboard(tab: Any, address: str) -> None:
    tab.goto(address)
    tab.wait_for_selector(CURVE)
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "skip"
    for name in VIEWS:  # the tabs come next, in their order
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.dataset.view") == name
    tab.keyboard.press("?")
    tab.wait_for_selector("dialog[open] kbd")
    tab.keyboard.press("Escape")
    tab.wait_for_selector("dialog[open]", state="detached")
    chart = tab.locator(".chart:has-text('Reward: total')")
    chart.focus()
    tab.keyboard.press("ArrowRight")
    assert "update 1" in chart.locator(".readout").inner_text()
    tab.keyboard.press("2")
    tab.wait_for_selector("table.rows tbody tr")
    tab.keyboard.press("j")
    tab.keyboard.press("j")
    assert tab.evaluate("document.activeElement.closest('tr').rowIndex") == 2
    tab.keyboard.press("Enter")
    tab.wait_for_selector(".tokens")
    first = tab.url
    tab.keyboard.press("s")
    assert tab.locator(".segments input[value=ratio]").is_checked()
    tab.locator(".tokens").focus()
    tab.keyboard.press("ArrowRight")
    assert "token 1 of" in tab.inner_text(".token-facts")
    tab.locator("h2").first.click()
    tab.keyboard.press("j")
    tab.wait_for_selector("text=completion 2")
    assert tab.url != first
    tab.keyboard.press("Escape")
    tab.wait_for_selector("table.rows")
    for number, name in enumerate(VIEWS, 1):
        tab.keyboard.press(str(number))
        tab.wait_for_selector(f"main.{name} > *")


@pytest.mark.parametrize("view", [*VIEWS, "rollout?run=0&update=2&row=1"])
def test_a_phone_shows_it_without_scrolling_sideways(phone: Any, address: str, view: str) -> None:
    phone.goto(f"{address}#{view}")
    phone.wait_for_selector(f"main.{view.partition('?')[0]} > *")
    width = phone.evaluate("document.documentElement.scrollWidth")
    assert width <= PHONE["width"]
    tab = phone.locator("#tabs a[aria-current]").bounding_box()  # of all tabs, the open one is seen
    assert tab["x"] >= 0
    assert tab["x"] + tab["width"] <= PHONE["width"]
    small = phone.evaluate(
        "[...document.querySelectorAll('main *')].filter(e => e.children.length === 0 "
        "&& e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 10.5).length"
    )
    assert small == 0


def test_curves_grow_while_the_run_trains(tab: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "live", name="live", updates=2)
    with served(folder.path) as page:
        tab.goto(page.address)
        tab.wait_for_selector("text=update 2 of 2")
        write_update(folder, 3)
        tab.wait_for_selector("text=update 3 of 2")
        (folder.path / "summary.json").write_text("{}")
        write_update(folder, 4)
        tab.wait_for_selector(".chip >> text=finished")


def test_a_damaged_run_is_named_and_the_others_are_shown(tab: Any, tmp_path: Path) -> None:
    damaged, whole = (make_run(tmp_path / name, name=name) for name in ("damaged", "whole"))
    for name in ("metrics.jsonl", "evaluations.jsonl", "timeline.jsonl"):
        file = damaged.path / name
        file.write_text("garbage\n" + file.read_text())
    with served(damaged.path, whole.path) as page:
        tab.goto(page.address)
        tab.wait_for_selector(CURVE)
        assert tab.locator(CURVE).count() == 2
        metrics, evaluations = tab.locator(".error").all_inner_texts()
        assert str(damaged.path / "metrics.jsonl") in metrics
        assert str(damaged.path / "evaluations.jsonl") in evaluations
        tab.goto(f"{page.address}#timeline")
        tab.wait_for_selector(".error >> text=timeline.jsonl:1")


def test_colours_follow_the_choice(tab: Any, address: str) -> None:
    tab.goto(f"{address}#audit")
    tab.wait_for_selector("main > *")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(paper)
    tab.keyboard.press("t")
    tab.keyboard.press("t")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    assert tab.evaluate(paper) != light
