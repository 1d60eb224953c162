"""The images of a run's problems, recorded and shown."""

import io
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.pictures import picture, png, uri
from tests.view.pages import group, served
from tests.view.test_report import metrics
from tramontane.data.images import image_name, keep, named
from tramontane.evaluation.conversed import conversation_row
from tramontane.models.images import content_of
from tramontane.run.folder import RunFolder
from tramontane.types import PLACE, Message, TurnRecord
from tramontane.view import details, drawn
from tramontane.view.answers import answers as answers_of
from tramontane.view.report import answers, write_report
from tramontane.view.runs import Run
from tramontane.view.summary import summary

ONE, OTHER = uri(picture(800, 400)), uri(picture(20, 20, seed=1))
TOKENS = {ONE: 1234, OTHER: 1}


def sizes(shown: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """Width and height of the images that a page shows."""
    return [Image.open(io.BytesIO(content_of(each["image"]))).size for each in shown]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.rollouts.mkdir()
    (tmp_path / "config.yaml").write_text("name: pictured\nmodel: tiny\n")
    for update in (1, 2):
        made = group(update, update, learned=True)
        made.problem = replace(made.problem, images=[ONE, OTHER])
        folder.write_rollouts(update, [(made, None)], ["correctness"], TOKENS.__getitem__)
        folder.log(metrics(update))
    return folder


def test_an_image_is_recorded_once_by_its_content(folder: RunFolder) -> None:
    contents = {file.read_bytes() for file in folder.images.iterdir()}
    assert contents == {content_of(ONE), content_of(OTHER)}
    assert len([*folder.images.iterdir()]) == 2


def test_a_completion_is_shown_with_its_images(folder: RunFolder) -> None:
    found = details.rollout(Run(folder.path, 0), 2, 0)
    assert sizes(found["pictures"]) == [(384, 192), (20, 20)]
    assert [each["tokens"] for each in found["pictures"]] == [1234, 1]
    shown = drawn.completion(found, "logprob").plain
    first, second = (each["file"] for each in found["pictures"])
    assert f"images/{first}, 1,234 tokens\nimages/{second}, 1 tokens\n" in shown


def test_a_group_and_a_comparison_show_them(folder: RunFolder) -> None:
    run = Run(folder.path, 0)
    [of_group] = details.groups(run, 2)["groups"]
    assert sizes(of_group["pictures"]) == [(192, 96), (20, 20)]
    compared = answers_of(run, "problem-2")
    assert sizes(compared["pictures"]) == [(384, 192), (20, 20)]
    assert [each["tokens"] for each in compared["pictures"]] == [1234, 1]


def test_a_run_without_numbers_of_tokens_is_shown_without_them(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.rollouts.mkdir()
    (tmp_path / "config.yaml").write_text("name: pictured\nmodel: tiny\n")
    made = group(1, 1, learned=True)
    made.problem = replace(made.problem, images=[ONE])
    folder.write_rollouts(1, [(made, None)], ["correctness"])
    file = min(folder.rollouts.glob("*.parquet"))  # as earlier versions wrote it
    pq.write_table(pq.read_table(file).drop(["image_tokens"]), file, write_page_checksum=True)
    [shown] = details.rollout(Run(folder.path, 0), 1, 0)["pictures"]
    assert shown["tokens"] is None
    assert (
        f"images/{shown['file']}\n"
        in drawn.completion(details.rollout(Run(folder.path, 0), 1, 0), "none").plain
    )


def test_the_same_question_about_two_images_is_two_problems_of_the_summary(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.rollouts.mkdir()
    (tmp_path / "config.yaml").write_text("name: pictured\nmodel: tiny\n")
    folder.log(metrics(1))
    rows = [
        {"problem": "How many?", "problem_id": str(i), "index": 0, "language": "en", "reward": 1.0}
        | {"reference": str(i), "text": f"\\boxed{{{i}}}", "verdict": "right", "tokens": 3}
        | {"finish_reason": "stop", "parts": {}, "reason": "", "answer": str(i), "group": i}
        | {"domain": "math", "difficulty": 1, "effort": None, "thinking_tokens": 0}
        | named([image], TOKENS.__getitem__)
        for i, image in enumerate((ONE, OTHER))
    ]
    keep((ONE, OTHER), folder.images)
    (tmp_path / "evaluation_after.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    run = Run(folder.path, 0)
    shown = summary(run)["samples"]
    assert [sizes(each["pictures"]) for each in shown] == [[(384, 192)], [(20, 20)]]
    assert [each["reference"] for each in shown] == ["0", "1"]
    assert sizes(answers_of(run, "1")["pictures"]) == [(20, 20)]


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
    assert sizes(found["pictures"]) == [(384, 192)]
    assert sizes(message["pictures"]) == [(20, 20)]
    assert f"images/{message['pictures'][0]['file']}" in drawn.completion(found, "logprob").plain


def test_an_evaluation_names_the_images_of_turns_and_holds_none() -> None:
    [completion, *_] = group(1, 1, learned=False).completions
    said: Message = {"role": "user", "content": f"Now {PLACE}?", "images": [OTHER]}
    plain: Message = {"role": "user", "content": "Sure?"}
    completion.turns, completion.ending = [TurnRecord(0, 1, 0, "x", [said, plain])], "completed"
    [turn] = conversation_row(completion, TOKENS.__getitem__)["turns"]
    named_there = {"image_files": [image_name(OTHER)], "image_tokens": [1]}
    assert turn["messages"] == [{"role": "user", "content": "Now <image>?", **named_there}, plain]


def test_an_image_that_is_gone_is_named_and_the_rest_shown(folder: RunFolder) -> None:
    first, _ = (each["file"] for each in details.rollout(Run(folder.path, 0), 1, 0)["pictures"])
    (folder.images / first).unlink()
    found = details.rollout(Run(folder.path, 0), 1, 0)
    assert [each["image"] is None for each in found["pictures"]] == [True, False]
    assert any(first in line for line in found["missing"])


def test_a_name_does_not_lead_out_of_the_folder(folder: RunFolder) -> None:
    (folder.path / "secret.png").write_bytes(png(picture()))
    file = min(folder.rollouts.glob("*.parquet"))
    table = pq.read_table(file)
    place = table.schema.get_field_index("image_files")
    names = pa.array([["../secret.png"]] * len(table))
    table = table.set_column(place, "image_files", names).drop(["image_tokens"])
    pq.write_table(table, file, write_page_checksum=True)
    [shown] = details.rollout(Run(folder.path, 0), 1, 0)["pictures"]
    assert (shown["file"], shown["image"]) == ("secret.png", None)


def test_the_report_holds_its_images(folder: RunFolder) -> None:
    found = answers(Run(folder.path, 0))
    shown = [value for name, value in found.items() if name.startswith("rollout?")]
    assert shown and all(len(row["pictures"]) == 2 for row in shown)
    groups = [value for name, value in found.items() if name.startswith("groups?")]
    assert groups and all(len(each["pictures"]) == 2 for of in groups for each in of["groups"])


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
            captions = tab.eval_on_selector_all(
                ".pictures figcaption", "found => found.map((each) => each.textContent)"
            )
            assert captions == ["1234 tokens", "1 token"]
        browser.close()
