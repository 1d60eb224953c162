"""The images of a run's problems, recorded and shown."""

import io
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.view.pages import group, served
from tests.vision import picture, png, uri
from tramontane.data.prompts import PLACE
from tramontane.models.images import content_of
from tramontane.run.folder import RunFolder
from tramontane.types import Message, TurnRecord
from tramontane.view import details, drawn
from tramontane.view.report import answers, write_report
from tramontane.view.runs import Run

ONE, OTHER = uri(picture(800, 400)), uri(picture(20, 20, seed=1))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.rollouts.mkdir()
    (tmp_path / "config.yaml").write_text("name: pictured\nmodel: tiny\n")
    for update in (1, 2):
        made = group(update, update, learned=True)
        made.problem = replace(made.problem, images=[ONE, OTHER])
        folder.write_rollouts(update, [(made, None)], ["correctness"])
    return folder


def test_an_image_is_recorded_once_by_its_content(folder: RunFolder) -> None:
    contents = {file.read_bytes() for file in folder.images.iterdir()}
    assert contents == {content_of(ONE), content_of(OTHER)}
    assert len([*folder.images.iterdir()]) == 2


def test_a_completion_is_shown_with_its_images(folder: RunFolder) -> None:
    found = details.rollout(Run(folder.path, 0), 2, 0)
    images = [Image.open(io.BytesIO(content_of(image))) for image in found["images"]]
    assert [image.size for image in images] == [(384, 192), (20, 20)]
    shown = drawn.completion(found, "logprob").plain
    assert all(f"images/{name}" in shown for name in found["image_files"])


def test_images_of_turns_are_recorded_and_shown_where_they_came(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.rollouts.mkdir()
    (tmp_path / "config.yaml").write_text("name: pictured\nmodel: tiny\n")
    made = group(1, 1, learned=False)
    shown: Message = {"role": "user", "content": f"Now {PLACE}?", "images": [OTHER]}
    for each in made.completions:
        each.turns, each.ending, each.images = (
            [TurnRecord(0, 1, 0, "x", [shown])],
            "completed",
            [ONE],
        )
    folder.write_rollouts(1, [(made, None)], ["correctness"])
    found = details.rollout(Run(folder.path, 0), 1, 0)
    [message] = found["turns"][0]["messages"]
    assert message["content"] == "Now <image>?"
    for images, size in ((found["images"], (384, 192)), (message["images"], (20, 20))):
        assert [Image.open(io.BytesIO(content_of(image))).size for image in images] == [size]
    assert f"images/{message['image_files'][0]}" in drawn.completion(found, "logprob").plain


def test_an_image_that_is_gone_is_named_and_the_rest_shown(folder: RunFolder) -> None:
    first, _ = details.rollout(Run(folder.path, 0), 1, 0)["image_files"]
    (folder.images / first).unlink()
    found = details.rollout(Run(folder.path, 0), 1, 0)
    assert len(found["images"]) == 1
    assert any(first in line for line in found["missing"])


def test_a_name_does_not_lead_out_of_the_folder(folder: RunFolder) -> None:
    (folder.path / "secret.png").write_bytes(png(picture()))
    file = min(folder.rollouts.glob("*.parquet"))
    table = pq.read_table(file)
    place = table.schema.get_field_index("image_files")
    names = pa.array([["../secret.png"]] * len(table))
    pq.write_table(table.set_column(place, "image_files", names), file, write_page_checksum=True)
    assert details.rollout(Run(folder.path, 0), 1, 0)["images"] == []


def test_the_report_holds_its_images(folder: RunFolder) -> None:
    found = answers(Run(folder.path, 0))
    shown = [value for name, value in found.items() if name.startswith("rollout?")]
    assert shown and all(len(row["images"]) == 2 for row in shown)


@pytest.mark.slow
def test_a_browser_draws_them(folder: RunFolder) -> None:
    pytest.importorskip("fastapi", reason="the page is not installed: 'tramontane-rl[view]'")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the page's tests need playwright: pip install playwright"
    )
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no Chromium is installed")
    report = write_report(folder.path)
    with served(folder.path) as page, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for address in (page.address, f"file://{report}"):
            tab = browser.new_page()
            tab.goto(f"{address}#rollout?run=0&update=2&row=0")
            tab.wait_for_selector(".pictures img")
            widths = tab.eval_on_selector_all(
                ".pictures img", "found => found.map((image) => image.naturalWidth)"
            )
            assert widths == [384, 20]
        browser.close()
