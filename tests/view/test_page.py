"""The page in a headless Chromium: every view, the keyboard, a phone's width, hostile texts; and
the report, which is the page in one file."""

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("fastapi", reason="the page is not installed: 'tramontane-rl[view]'")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="the page's tests need playwright: pip install playwright"
)

from tests.view import test_report
from tests.view.pages import GROUPS, SIZE, UPDATES, make_run, served, write_update
from tramontane.run.folder import RunFolder
from tramontane.view.report import write_report

pytestmark = pytest.mark.slow
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PHONE = {"width": 390, "height": 844}
CURVE = ".chart:has-text('Reward: total') canvas"
VIEWS = ["summary", "curves", "rollouts", "groups", "compare", "audit", "timeline", "runs"]


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
    # A search that a test makes wrong, and markup that it adds.
    expected = ("status of 422", "requires 'Trusted")
    page.on(
        "console",
        lambda m: (
            problems.append(m.text)
            if m.type == "error" and not any(part in m.text for part in expected)
            else None
        ),
    )
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    own = ("http://127.0.0.1:", "file:///", "data:image/svg+xml;base64,")
    page.on("request", lambda r: None if r.url.startswith(own) else problems.append(r.url))
    yield page
    assert problems == []
    context.close()


def test_every_view_shows_its_content(tab: Any, address: str) -> None:
    tab.goto(address)
    tab.wait_for_selector(CURVE)
    assert tab.locator(".chip").count() == 2
    assert "Reward: total" in tab.locator(".chart h3").all_inner_texts()
    # Of several runs, shares are lines: their sum would say nothing.
    heights = "chart => chart.uplot.data.slice(1).map(ys => Math.max(...ys))"
    assert chart_of(tab, "Staleness").evaluate(heights) == [0.6, 0.6]
    # The run was measured once: a lone point has one label below it.
    measured = tab.locator(".chart", has_text="pass@1, held-out")
    assert measured.evaluate("chart => chart.uplot.axes[0]._values") == ["0"]
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

    def colors(kind: str) -> list[str]:
        tab.locator(f".segments input[value={kind}]").check(force=True)
        return list(tab.locator(".token").evaluate_all(shades))

    by_logprob = colors("logprob")
    assert len(by_logprob) == 13 and len(set(by_logprob)) > 10  # each less likely than the last
    assert len(set(colors("ratio"))) == 1 and len(set(colors("advantage"))) == 1
    versions = colors("version")
    assert versions[:4] == [versions[0]] * 4 and versions[4:] == [versions[4]] * 9
    assert versions[0] != versions[4]
    assert set(colors("none")) == {"rgba(0, 0, 0, 0)"}


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


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page over six runs: three seeds of two learning rates."""
    folder = tmp_path_factory.mktemp("sweep")
    for n in range(6):
        run = make_run(folder / f"run-{n}", name=f"run-{n}")
        config = {
            "name": f"run-{n}",
            "seed": n % 3,
            "trainer": {"learning_rate": (1e-4, 3e-4)[n // 3]},
            "pipeline": {"updates": UPDATES},
        }
        (run.path / "config.yaml").write_text(json.dumps(config))
        metrics = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
        for row in metrics:
            row["reward"] += (-0.5, 0.0, 0.5, 0.3, 0.3, 0.3)[n]
        run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in metrics))
        value = (0.2, 0.3, 0.4, 0.6, 0.6, 0.6)[n]
        passed = {"value": value, "low": value - 0.1, "high": value + 0.1}
        run.log_evaluation({"when": "after", "set": "held_out", "pass_at_1": passed})
    with served(folder) as page:
        yield page.address


def test_runs_are_sorted_filtered_and_chosen_for_a_comparison(tab: Any, sweep: str) -> None:
    tab.goto(sweep)  # of more than two runs, the first view
    rows = tab.locator(".runs-table tbody tr")
    tab.wait_for_selector(".runs-table tbody tr >> nth=5")
    assert tab.locator(".runs-table thead th").all_inner_texts()[1:6] == [
        *("run", "state", "seed", "learning_rate", "pass@1")
    ]
    tab.click("thead button:has-text('pass@1')")
    tab.click("thead button:has-text('pass@1')")
    assert "run-3" in rows.first.inner_text() and "0.6 [0.5, 0.7]" in rows.first.inner_text()
    tab.keyboard.press("/")
    tab.keyboard.type("seed=0 pass@1<0.5")
    assert rows.count() == 1 and "run-0" in rows.first.inner_text()
    assert "1 run of 6" in tab.inner_text(".count")
    tab.reload()  # the view is in the address
    tab.wait_for_selector(".runs-table tbody tr")
    assert rows.count() == 1
    tab.fill("input[name=filter]", "")
    for name in ("run-0", "run-3"):
        tab.check(f"input[aria-label='Choose {name}']")
    tab.click("text=Compare run-0 and run-3")
    tab.wait_for_selector(".side >> nth=1")
    assert "pass@1 of the right side, on these: 0.000 [−0.354, +0.354]" in tab.inner_text(".count")


def test_groups_of_runs_have_a_mean_and_a_band(tab: Any, sweep: str, tmp_path: Path) -> None:
    tab.goto(f"{sweep}#runs?group=trainer.learning_rate&metric=reward")
    tab.wait_for_selector(".swatch >> nth=1")
    # 0.3 ± 4.303 · 0.1 / √3
    assert "0.3 [0.052, 0.548]" in tab.inner_text(".runs-table tbody tr >> nth=0")
    assert "0.6 [0.6, 0.6]" in tab.inner_text(".runs-table tbody tr >> nth=1")
    drawn = "chart => [chart.uplot.data.length, chart.uplot.bands.length]"
    assert tab.locator(".chart").evaluate(drawn) == [7, 2]  # x, and a mean with two ends each
    # The means go from 0.358 to 0.892, so a wider band is cut 0.533 beyond; the axis has 6 % more.
    top = tab.locator(".chart").evaluate("chart => chart.uplot.scales.y.max")
    assert top == pytest.approx(0.892 + 0.533 + 0.06 * 3 * 0.533, abs=2e-3)
    tab.check("input[name=log]")
    assert tab.locator(".chart").evaluate("chart => chart.uplot.scales.y.distr") == 3
    assert "log=1" in tab.url

    def saved(button: str) -> Path:
        with tab.expect_download() as download:
            tab.click(button)
        file = tmp_path / download.value.suggested_filename
        download.value.save_as(file)
        return file

    tab.click(".save summary")
    values = saved(".save button:has-text('CSV')").read_text().splitlines()
    assert values[0].startswith("update,learning_rate 0.0001,learning_rate 0.0001 low")
    assert len(values) == 1 + UPDATES
    tab.click(".save summary")
    picture = ElementTree.fromstring(saved(".save button:has-text('SVG')").read_text())
    names = [each.tag.rpartition("}")[2] for each in picture.iter()]
    assert names.count("path") == 4  # two curves, two bands
    tab.click(".save summary")
    assert saved(".save button:has-text('PNG')").read_bytes().startswith(b"\x89PNG")
    table = saved("button:has-text('Markdown')").read_text().splitlines()
    assert table[0] == "| trainer.learning_rate | runs | pass@1 | reward | time |"
    assert table[2].startswith("| 0.0001 | 3 | 0.3 [0.052, 0.548] |")


def test_runs_of_every_kind_are_in_one_table(tab: Any, tmp_path: Path) -> None:
    """Names with commas and pipes, a run without updates, one without a key, values of 0."""
    rates = [{"seed": 0, "trainer": {"learning_rate": rate}} for rate in (1e-4, 3e-4)]
    names = ("a|b, c", "empty", "of another version")
    for name, config in zip(names, [*rates, {"seed": 1}], strict=True):
        run = make_run(tmp_path / "runs" / name, name=name)
        (run.path / "config.yaml").write_text(json.dumps({"name": name, **config}))
        rows = [{"update": n, "wall_seconds": n, "reward": 0.1 * (n - 1)} for n in (1, 2, 3)]
        lines = "" if name == "empty" else "".join(json.dumps(row) + "\n" for row in rows)
        (run.path / "metrics.jsonl").write_text(lines)
    with served(tmp_path / "runs") as page:
        tab.goto(f"{page.address}#runs?log=1")
        tab.wait_for_selector("text=2 of 6 values are 0 or below")
        with tab.expect_download() as csv_file:
            tab.click("button:has-text('CSV')")
        with tab.expect_download() as markdown_file:
            tab.click("button:has-text('Markdown')")
        tab.goto(f"{page.address}#runs?group=trainer.learning_rate")
        tab.wait_for_selector(".legend >> text=learning_rate not set")
        assert "not set" in tab.inner_text(".runs-table tbody tr >> nth=2")
    rows = list(csv.reader(Path(csv_file.value.path()).read_text().splitlines()))
    assert [row[0] for row in rows[1:]] == [*names]
    assert {len(row) for row in rows} == {len(rows[0])}
    assert "| a\\|b, c | stopped | 0 |" in Path(markdown_file.value.path()).read_text()


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
    tab.keyboard.press("3")
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


def test_a_phone_breaks_the_long_names_of_a_sweeps_runs(phone: Any, tmp_path: Path) -> None:
    names = [f"small-learning_rate=0.0001,batch_size=256,seed={seed}" for seed in (0, 1)]
    found = [make_run(tmp_path / name, name=name) for name in names]
    with served(*(run.path for run in found)) as page:
        for view, part in (("summary", "h1"), ("curves", ".chip")):
            phone.goto(f"{page.address}#{view}")
            phone.wait_for_selector(f"main.{view} {part}")
            assert phone.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


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


def test_a_view_that_is_loading_says_so(tab: Any, address: str) -> None:
    tab.goto(f"{address}#curves")
    tab.wait_for_selector("main.curves canvas")
    held = []
    tab.route("**/api/summary*", lambda route: held.append(route))
    tab.evaluate("location.hash = '#summary'")
    tab.wait_for_selector("#status >> text=Loading …")
    assert tab.locator("main").get_attribute("aria-busy") == "true"  # shown faintly
    held.pop().continue_()
    tab.wait_for_selector("main.summary .chart")
    tab.wait_for_selector("#status", state="hidden")
    tab.wait_for_selector("main:not([aria-busy])")


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
        assert (
            tab.locator(CURVE).evaluate("canvas => canvas.closest('figure').uplot.series.length")
            == 3
        )  # x, and a line for each run
        metrics, evaluations = tab.locator(".error").all_inner_texts()
        assert str(damaged.path / "metrics.jsonl") in metrics
        assert str(damaged.path / "evaluations.jsonl") in evaluations
        tab.goto(f"{page.address}#timeline")
        tab.wait_for_selector(".error >> text=timeline.jsonl:1")


def test_colors_follow_the_choice(tab: Any, address: str) -> None:
    tab.goto(f"{address}#audit")
    tab.wait_for_selector("main > *")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(paper)
    tab.keyboard.press("t")
    tab.keyboard.press("t")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    assert tab.evaluate(paper) != light


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report, whose only file is in its folder."""
    run = test_report.make_run(tmp_path_factory.mktemp("reported"))
    passed = json.loads((run / "summary.json").read_text())["pass_at_1"]
    folder = RunFolder(run)
    folder.log_event("a warning of <b>this</b> run")
    for when, version in (("before", 0), ("after", test_report.UPDATES)):
        figures = {"when": when, "set": "held_out", "version": version, "pass_at_1": passed[when]}
        folder.log_evaluation(figures)
    alone = tmp_path_factory.mktemp("alone") / "report.html"
    return write_report(run).rename(alone).as_uri()


def chart_of(tab: Any, title: str) -> Any:
    """The chart with this title."""
    heading = tab.get_by_role("heading", name=title, exact=True)
    return tab.locator(".chart").filter(has=heading)


HELD = ["summary", "curves", "groups", "timeline"]


def test_a_report_shows_the_run_without_a_server(tab: Any, report: str) -> None:
    tab.goto(report)
    tab.wait_for_selector(".summary .chart canvas")
    assert tab.locator("#tabs a").evaluate_all("tabs => tabs.map(t => t.dataset.view)") == HELD
    text = tab.inner_text("main")
    for figure in ["0.310 [0.260, 0.360]", "0.853 [0.810, 0.890]", "0.985", "from 0.852", "4,412"]:
        assert figure in text
    for heading in ["Evaluation", "Learning", "Completions before and after"]:
        assert heading in tab.locator("h2").all_inner_texts()
    assert "a warning of <b>this</b> run" in tab.inner_text(".events")
    assert tab.locator("article .tokens").count() == 3
    last = tab.locator("article", has=tab.locator(".tokens")).last
    assert last.locator(".scale i").count() == 4  # versions 9 to 12
    last.locator("a").click()
    tab.wait_for_selector("main.rollout .tokens")
    assert tab.locator("table.group a").count() == 2
    tab.goto(f"{report}#curves")
    tab.wait_for_selector("main.curves canvas")
    titles = tab.locator(".chart:visible h3").all_inner_texts()
    assert {"Pass rate", "Groups", "Staleness", "Idle share", "Generator against trainer"} <= {
        *titles
    }
    custom = chart_of(tab, "Custom rewards").locator(".plot").get_attribute("aria-label")
    assert custom == "Custom rewards; last values: brevity 0.1"
    assert chart_of(tab, "Custom rewards").locator(".legend").inner_text().strip() == "brevity"
    shares = chart_of(tab, "Staleness").locator(".plot").get_attribute("aria-label")
    assert shares == "Staleness; last values: share 10 %"
    assert chart_of(tab, "Pass rate").locator(".legend").inner_text().split() == [
        "training",
        "evaluation",
    ]


def test_what_a_model_wrote_is_text_in_a_report(tab: Any, report: str) -> None:
    tab.goto(report)
    tab.wait_for_selector(".summary .tokens")
    assert f"The answer is {test_report.HOSTILE}" in tab.inner_text(".pair >> nth=0")
    assert tab.locator("main script, main img, main b:has-text('bold')").count() == 0
    # Were a text ever read as HTML, the page's policy would refuse the script in it.
    tab.evaluate("""() => {
        try { document.body.insertAdjacentHTML("beforeend", "<script>owned = 1</script>"); }
        catch { /* trusted types */ }
    }""")
    script = "Object.assign(document.createElement('script'), { text: 'owned = 1' })"
    tab.evaluate(f"() => {{ try {{ document.body.append({script}); }} catch {{ /* refused */ }} }}")
    assert tab.evaluate("typeof owned") == "undefined"


@pytest.mark.parametrize("view", [*HELD, "rollout?update=12&row=1"])
def test_a_phone_shows_a_report_without_scrolling_sideways(
    phone: Any, report: str, view: str
) -> None:
    phone.goto(f"{report}#{view}")
    phone.wait_for_selector(f"main.{view.partition('?')[0]} > *")
    assert phone.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_a_chart_is_read_by_the_pointer_and_the_keys_and_zoomed(tab: Any, report: str) -> None:
    tab.goto(f"{report}#curves")
    chart = chart_of(tab, "Length")
    chart.scroll_into_view_if_needed()
    over = chart.locator(".u-over")
    box = over.bounding_box()
    tab.mouse.move(box["x"] + box["width"] - 2, box["y"] + 40)
    assert chart.locator(".readout").inner_text().split() == (
        ["update", "12", "completion", "110", "thinking", "85"]
    )
    chart.focus()
    tab.keyboard.press("Home")
    assert "update 1" in chart.locator(".readout .x").inner_text()
    tab.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] - 2, box["y"] + 40, steps=4)
    tab.mouse.up()
    assert chart.evaluate("chart => chart.uplot.scales.x.min") > 5
    over.dblclick()
    assert chart.evaluate("chart => chart.uplot.scales.x.min") == 1


@pytest.mark.parametrize("browser_tab", ["tab", "phone"])
def test_no_paper_is_blank_under_a_chart(
    request: pytest.FixtureRequest, report: str, browser_tab: str
) -> None:
    tab = request.getfixturevalue(browser_tab)
    tab.goto(f"{report}#curves")
    tab.wait_for_selector("main.curves canvas")
    blank, unfilled = tab.evaluate("""() => {
        const bottom = (e) => e.getBoundingClientRect().bottom;
        const charts = [...document.querySelectorAll(".chart")].filter((c) => c.uplot);
        const last = (c) => Math.max(...[...c.querySelectorAll(".plot, .note")].map(bottom));
        const plot = (c) => c.querySelector(".plot").clientHeight - c.uplot.height;
        return [charts.map((c) => bottom(c) - last(c)), charts.map(plot)]
            .map((all) => Math.max(...all));
    }""")
    assert blank < 20
    assert unfilled == 0


def test_a_chart_has_the_colors_of_the_page(tab: Any, report: str) -> None:
    tab.goto(f"{report}#curves")
    tab.wait_for_selector("main.curves canvas")
    chart = chart_of(tab, "Entropy")
    pixels = """chart => {
        const canvas = chart.querySelector("canvas");
        const found = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return found.reduce((sum, x, i) => (sum + x * (1 + (i % 4))) % 1000003, 0);
    }"""
    light = chart.evaluate(pixels)
    tab.keyboard.press("t")
    tab.keyboard.press("t")
    entropy = "[...document.querySelectorAll('.chart')].find(c => c.innerText.includes('Entropy'))"
    tab.wait_for_function(f"before => ({pixels})({entropy}) !== before", arg=light)
