"""The page's answers: who gets them, and what they say of runs that are known."""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlparse

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("fastapi", reason="the page is not installed: 'tramontane-rl[view]'")

from tests.view.pages import (
    GROUPS,
    HOSTILE,
    SIZE,
    TOKEN,
    UPDATES,
    Page,
    group,
    make_run,
    served,
    write_update,
)
from tramontane import loopback
from tramontane.errors import InputError
from tramontane.pages import STYLE
from tramontane.run.columns import SPAN
from tramontane.tokens import ELSEWHERE, INSERTED
from tramontane.view import server
from tramontane.view.search import Query, Searches

ALL = UPDATES * GROUPS * SIZE


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / name, name=name).path for name in ("one", "two")]


@pytest.fixture(scope="module")
def page(runs: list[Path]) -> Iterator[Page]:
    with served(*runs) as found:
        yield found


@pytest.mark.parametrize("path", ["", "api/runs", "app.js", f"{TOKEN}x/", f"{TOKEN[:-1]}/api/runs"])
def test_without_the_token_nothing_is_answered(page: Page, path: str) -> None:
    base = page.address.removesuffix(f"{TOKEN}/")
    status, headers, content = page.answer(base + path)
    assert status == 403
    assert b"made-up" not in content and "script-src 'self'" in headers["Content-Security-Policy"]


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1.example.org:80", "10.0.0.1", "evil"])
def test_another_host_name_is_refused(page: Page, host: str) -> None:
    status, _, _ = page.answer(page.address + "api/runs", {"Host": host})
    assert status == 400


@pytest.mark.parametrize("host", ["localhost:9", "127.0.0.1:1234", "localhost", "[::1]:80"])
def test_any_port_of_the_loopback_names_is_answered(page: Page, host: str) -> None:
    # A forwarded port (ssh -L) may have another number.
    assert page.answer(page.address + "api/runs", {"Host": host})[0] == 200


def test_every_answer_has_the_policy(page: Page) -> None:
    for name in ("", "app.js", "style.css", "api/runs", "api/nothing"):
        _, headers, _ = page.answer(page.address + name)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'") and "trusted-types 'none'" in policy
        assert (
            headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
        )


def test_the_page_names_no_other_address(page: Page) -> None:
    static = Path(server.__file__).with_name("static")
    for file in [*static.iterdir(), STYLE]:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        text = text.replace("/*! https://github.com/leeoniya/uPlot (v1.6.32) */", "")
        assert "http" not in text.replace("https:", "http:"), file.name
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text


def test_metrics_continue_where_they_ended(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", updates=2)
    with served(folder.path) as page:
        first = page.get("metrics", run=0)
        assert [row["update"] for row in first["rows"]] == [1, 2]
        with folder.metrics_file.open("a") as file:
            file.write('{"update": 3, "rew')  # being written
        place = {"offset": first["offset"], "mark": first["mark"]}
        assert page.get("metrics", run=0, **place)["rows"] == []
        with folder.metrics_file.open("a") as file:
            file.write('ard": NaN}\n')
        third = page.get("metrics", run=0, **place)
        assert third["rows"] == [{"update": 3, "reward": None}] and not third["reset"]
        place = {"offset": third["offset"], "mark": third["mark"]}
        assert page.get("metrics", run=0, **place)["rows"] == []
        folder.rewind(1)
        again = page.get("metrics", run=0, **place)
        assert again["reset"] and [row["update"] for row in again["rows"]] == [1]


def test_metrics_of_another_session_begin_anew_in_a_longer_file_of_the_same_inode(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path / "run", updates=2)
    with served(folder.path) as page:
        first = page.get("metrics", run=0)
        place = {"offset": first["offset"], "mark": first["mark"]}
        rows = [row | {"wall_seconds": row["wall_seconds"] + 0.25} for row in first["rows"]]
        rows += [rows[-1] | {"update": update} for update in (3, 4)]
        folder.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        again = page.get("metrics", run=0, **place)
        assert again["reset"] and again["rows"] == rows


def test_a_broken_line_of_metrics_is_left_out_and_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", updates=3)
    lines = folder.metrics_file.read_bytes().splitlines(keepends=True)
    lines[1:2] = [b"\x00\xff garbage\n", b"[1]\n", b'{"reward": 1}\n']
    folder.metrics_file.write_bytes(b"".join(lines))
    with served(folder.path) as page:
        found = page.get("metrics", run=0)
        assert [row["update"] for row in found["rows"]] == [1, 3]
        assert len(found["damaged"]) == 3
        assert f"metrics.jsonl: the line at byte {len(lines[0])} " in found["damaged"][0]
        place = {"offset": found["offset"], "mark": found["mark"]}
        again = page.get("metrics", run=0, **place)
        assert again["rows"] == again["damaged"] == [] and not again["reset"]


def found(page: Page, **query: Any) -> list[tuple[int, int]]:
    answer = page.get("rollouts", run=0, limit=200, **query)
    assert answer["done"] and answer["count"] == len(answer["rows"])
    return [(row["group"], row["index"]) for row in answer["rows"]]


def test_searches_find_what_fulfills_all_conditions(page: Page) -> None:
    everything = [(g, i) for g in range(UPDATES * GROUPS) for i in range(SIZE)]
    assert sorted(found(page)) == everything

    def expected(condition: Any) -> list[tuple[int, int]]:
        return [(g, i) for g, i in everything if condition(g, i)]

    cases: list[tuple[dict[str, Any], Any]] = [
        ({"verdict": "right"}, lambda g, i: i % 2),
        ({"verdict": "right,wrong", "language": "fr"}, lambda g, i: g % 2),
        ({"reason": "DIFFERS"}, lambda g, i: i % 2 == 0),
        ({"reward": "0.5..", "tokens": "12..13"}, lambda g, i: i == 3),
        ({"update": "2..3"}, lambda g, i: 3 <= g < 9),
        ({"update": "4"}, lambda g, i: 9 <= g < 12),
        ({"trained": "filtered"}, lambda g, i: g % 3 == 2),
        ({"trained": "no diversity"}, lambda g, i: g % 3 == 2),
        ({"trained": "trained"}, lambda g, i: g % 3 < 2),
        ({"version": 4}, lambda g, i: g >= 12),
        ({"version": "3.."}, lambda g, i: g >= 9),
        ({"version": 10**20}, lambda g, i: False),
        ({"text": "ADDS 3", "language": "en"}, lambda g, i: g % 2 == 0 and i == 3),
        ({"problem": "what is 7 +"}, lambda g, i: g == 7),
        ({"problem": "problem-3", "text": "adds 2"}, lambda g, i: g % 7 == 3 and i == 2),
        ({"text": "no such text"}, lambda g, i: False),
    ]
    for query, condition in cases:
        assert sorted(found(page, **query)) == expected(condition), query


def test_results_come_in_order_and_in_pages(page: Page) -> None:
    by_length = page.get("rollouts", run=0, sort="tokens", descending=False, limit=200)["rows"]
    assert [row["tokens"] for row in by_length] == sorted(row["tokens"] for row in by_length)
    newest = page.get("rollouts", run=0, limit=5)["rows"]
    assert [row["update"] for row in newest] == [UPDATES] * 5
    pages = [page.get("rollouts", run=0, limit=25, offset=25 * n)["rows"] for n in range(3)]
    assert sum(map(len, pages)) == ALL
    assert len({(r["update"], r["row"]) for rows in pages for r in rows}) == ALL
    advantages = page.get("rollouts", run=0, sort="advantage", limit=200)["rows"]
    last = [row["advantage"] for row in advantages][-ALL // 3 :]
    assert last == [None] * (ALL // 3)  # filtered groups have none


def test_groups_are_rows_with_their_completions(page: Page) -> None:
    found = page.get("rollouts", run=0, by="group", limit=200)
    assert found["count"] == len(found["rows"]) == UPDATES * GROUPS
    assert [row["update"] for row in found["rows"]] == [
        update for update in range(UPDATES, 0, -1) for _ in range(GROUPS)
    ]
    every = page.get("rollouts", run=0, limit=200)["rows"]
    for row in found["rows"]:
        members = [r for r in every if r["group"] == row["group"]]
        assert [m["row"] for m in row["members"]] == [m["row"] for m in members]
        assert row["reward"] == pytest.approx(sum(m["reward"] for m in members) / SIZE)
        assert row["right"] == sum(m["verdict"] == "right" for m in members)
        assert row["problem"] == members[0]["problem"]
    by_reward = page.get("rollouts", run=0, by="group", sort="reward", limit=200)["rows"]
    assert [row["reward"] for row in by_reward] == sorted(
        (row["reward"] for row in by_reward), reverse=True
    )
    second = page.get("rollouts", run=0, by="group", limit=4, offset=4)["rows"]
    assert second == found["rows"][4:8]
    right = page.get("rollouts", run=0, by="group", verdict="right", limit=200)["rows"]
    assert right and all(row["right"] == len(row["members"]) for row in right)


def test_a_range_that_is_none_is_explained(page: Page) -> None:
    status, _, content = page.answer(f"{page.address}api/rollouts?run=0&reward=high")
    assert status == 422 and b"low..high" in content


@pytest.mark.parametrize("among", ["", ",", "²", "0,x", "1" * 5000])
def test_a_comparison_of_no_runs_is_refused(page: Page, among: str) -> None:
    assert page.answer(f"{page.address}api/problems?{urlencode({'among': among})}")[0] == 422


def test_a_text_search_continues_until_it_is_done(runs: list[Path]) -> None:
    from tramontane.view.rollouts import Rollouts

    searches = Searches(Rollouts(runs[0] / "rollouts"))
    search = searches.find(Query(text="adds 3"))
    assert not search.done and search.page("update", True, 0, 10)["scanned"] == 0
    search.advance(60.0)
    assert search.done and len(search.found) == UPDATES * GROUPS
    assert searches.find(Query(text="adds 3")) is search


def test_a_completion_comes_with_its_tokens_and_its_group(page: Page) -> None:
    one = page.get("rollout", run=0, update=3, row=2)
    assert (one["group"], one["index"], one["advantage"]) == (6, 2, -1.0)
    count = len(one["token_ids"])
    assert count == 12 == len(one["tokens_text"]) == len(one["logprobs"]) == len(one["versions"])
    assert one["log_ratios"] == pytest.approx([0.1] * count, abs=1e-6)
    assert one["versions"] == [1] * 4 + [2] * 8 and one["missing"] == []
    assert [r["row"] for r in one["group_rows"]] == [0, 1, 2, 3]
    assert [r["centered"] for r in one["group_rows"]] == [-0.5, 0.5, -0.5, 0.5]
    assert page.answer(f"{page.address}api/rollout?run=0&update=3&row=99")[0] == 404
    assert page.answer(f"{page.address}api/rollout?run=5&update=3&row=0")[0] == 404


def test_a_group_s_reward_is_the_mean_of_what_could_be_judged(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", updates=1)
    part, whole = group(0, 1, False), group(1, 1, False)
    part.verdicts[0] = replace(part.verdicts[0], verdict="unscorable")
    whole.verdicts = [replace(v, verdict="unscorable", reward=0.0) for v in whole.verdicts]
    folder.write_rollouts(1, [(part, None), (whole, None)], ["correctness"])
    with served(folder.path) as page:
        rows = page.get("rollouts", run=0, by="group", sort="reward")["rows"]
        assert {row["group"]: row["reward"] for row in rows} == {0: pytest.approx(2 / 3), 1: None}
        assert page.get("problems", among="0:training,0:training")["each"] == [1, 1]


def test_groups_have_the_advantage_of_each_completion(page: Page) -> None:
    answer = page.get("groups", run=0, update=2)
    assert [g["group"] for g in answer["groups"]] == [3, 4, 5]
    assert [g["filtered"] for g in answer["groups"]] == [None, None, "no diversity"]
    first = [c["advantage"] for c in answer["groups"][0]["completions"]]
    assert first == [-1.0, 1.0, -1.0, 1.0]


def test_texts_that_a_model_wrote_come_as_they_are(page: Page) -> None:
    one = page.get("rollout", run=0, update=2, row=1)
    assert HOSTILE in one["text"]


def test_two_runs_are_compared_on_the_problems_of_both(page: Page) -> None:
    shared = page.get("problems", among="0,1")
    assert shared["count"] == 7
    assert all(row["counts"][0] == row["counts"][1] for row in shared["rows"])
    answers = page.get("answers", run=1, problem_id="problem-3")
    assert {(row["update"], row["group"]) for row in answers["rows"]} == {(2, 3), (4, 10)}
    assert answers["problem"].startswith("What is")


def test_answers_before_and_after_training_are_counted_apart(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", updates=2)
    for name, verdicts in (
        ("before", ["wrong", "wrong", "unscorable"]),
        ("after", ["right", "wrong"]),
    ):
        rows = [{"problem_id": "problem-0", "verdict": verdict} for verdict in verdicts]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder.path / f"evaluation_{name}.jsonl").write_text(lines)
    with served(folder.path) as page:
        found = page.get("problems", among="0:before,0:after")
        assert found["rows"] == [
            {"problem_id": "problem-0", "counts": [{"n": 2, "right": 0}, {"n": 2, "right": 1}]}
        ]
        assert found["choices"][0] == ["training", "before", "after"]
        assert page.get("problems", among="0,0:nothing")["sources"] == ["after", "after"]
        assert page.get("problems", among="0:training")["each"] == [6]


def test_the_timeline_has_waits_weights_and_deaths(page: Page) -> None:
    found = page.get("timeline", run=0)
    lanes = {lane["worker"]: lane for lane in found["lanes"]}
    assert [a["activity"] for a in lanes["trainer"]["activities"]] == ["wait for a batch", "step"]
    assert lanes["generator 0"]["losses"][0]["reason"].startswith("generator 0 died")
    assert lanes["generator 0"]["versions"][0]["version"] == 0 and found["missing"] == []


def test_findings_lead_to_their_completions(runs: list[Path], page: Page) -> None:
    assert not page.get("audit", run=1)["audited"]
    file = "rollouts/update_000003.parquet"
    row = {"kind": "hedge", "file": file, "line": 6, "problem_id": "p", "verdict": "right"}
    (runs[1] / "audit.jsonl").write_text(json.dumps(row) + "\n")
    found = page.get("audit", run=1)
    assert found["audited"] and (found["rows"][0]["update"], found["rows"][0]["row"]) == (3, 5)
    assert {"kind": "hedge", "count": 1}.items() <= found["kinds"][0].items()


def test_new_updates_are_seen_and_rewritten_ones_are_read_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", updates=2)
    with served(folder.path) as page:
        assert page.get("facets", run=0)["total"] == 2 * GROUPS * SIZE
        write_update(folder, 3)
        assert page.get("facets", run=0)["updates"] == [1, 2, 3]
        folder.rewind(1)
        assert page.get("facets", run=0)["total"] == GROUPS * SIZE
        assert page.get("rollouts", run=0)["count"] == GROUPS * SIZE


def spoil(file: Path, column: str) -> None:
    """Overwrite the pages of a column's data."""
    metadata = pq.read_metadata(file)
    with file.open("r+b") as handle:
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            for place in range(group.num_columns):
                chunk = group.column(place)
                if chunk.path_in_schema.split(".")[0] == column:
                    first = chunk.dictionary_page_offset or chunk.data_page_offset
                    handle.seek(first)
                    handle.write(b"\xff" * chunk.total_compressed_size)


def test_opening_and_filtering_read_no_texts_and_no_tokens(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", updates=2)
    for file in folder.rollouts.iterdir():
        for column in ("text", "token_ids", "logprobs", "log_ratios", "problem"):
            spoil(file, column)
    with served(folder.path) as page:
        facets = page.get("facets", run=0)
        assert facets["total"] == 2 * GROUPS * SIZE and facets["damaged"] == {}
        answer = page.get("rollouts", run=0, verdict="right", tokens="11..")
        assert answer["count"] == 2 * GROUPS * SIZE // 2
        assert len(answer["unreadable"]) == 2  # the texts of the rows that are shown
        assert page.get("rollouts", run=0, text="adds")["count"] == 0


def test_tokens_that_the_run_did_not_sample_have_no_version() -> None:
    import pyarrow as pa

    from tramontane.view.rollouts import _from_spans

    rows = [
        [{"version": 4, "tokens": 3}, {"version": INSERTED, "tokens": 2}],
        [],
        [{"version": ELSEWHERE, "tokens": 5}],
        [{"version": 1, "tokens": 1}, {"version": 3, "tokens": 1}],
    ]
    found = _from_spans(pa.array(rows, pa.list_(SPAN)))
    assert {name: column.to_pylist() for name, column in found.items()} == {
        "tokens": [5, 0, 5, 2],
        "oldest": [4, None, None, 1],
        "newest": [4, None, None, 3],
    }


def test_a_damaged_file_is_named_and_the_others_open(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", updates=3)
    file = folder.rollouts / "update_000002.parquet"
    file.write_bytes(file.read_bytes()[:100])
    with served(folder.path) as page:
        facets = page.get("facets", run=0)
        assert facets["total"] == 2 * GROUPS * SIZE and [*facets["damaged"]] == [file.name]


def damage_parquet(run: Path) -> str:
    file = run / "rollouts/update_000001.parquet"
    for column in ("text", "problem"):
        spoil(file, column)
    return file.name


def without_spans(run: Path) -> str:
    file = run / "rollouts/update_000001.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["version_spans"]), file)
    return file.name


def rewards_in_words(run: Path) -> str:
    file = run / "rollouts/update_000001.parquet"
    table = pq.read_table(file)
    place = table.schema.get_field_index("reward")
    pq.write_table(table.set_column(place, "reward", pa.array(["x"] * len(table))), file)
    return file.name


def append(name: str, row: dict[str, Any]) -> Callable[[Path], str]:
    def change(run: Path) -> str:
        with (run / name).open("a") as file:
            file.write(json.dumps(row) + "\n")
        return name

    return change


def config(text: str) -> Callable[[Path], str]:
    def change(run: Path) -> str:
        (run / "config.yaml").write_text(text)
        return "config.yaml"

    return change


def deep(name: str) -> Callable[[Path], str]:
    def change(run: Path) -> str:
        with (run / name).open("a") as file:
            file.write("[" * 100_000 + "\n")
        return name

    return change


ROLLOUT, GROUPS_OF_1 = "rollout?run=0&update=1&row=0", "groups?run=0&update=1"
COMPARED = ["problems?among=0,1", "answers?run=0&problem_id=x"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two runs, to be copied."""
    folder = tmp_path_factory.mktemp("two")
    for name in ("one", "two"):
        make_run(folder / name, name=name)
    return folder


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (damage_parquet, [ROLLOUT, GROUPS_OF_1, "answers?run=0&problem_id=problem-0"]),
        (without_spans, [ROLLOUT, GROUPS_OF_1]),
        (rewards_in_words, [ROLLOUT, GROUPS_OF_1]),
        (append("timeline.jsonl", {"worker": "trainer"}), ["timeline?run=0"]),
        (append("workers.jsonl", {"process": 1}), ["timeline?run=0"]),
        (append("evaluation_after.jsonl", {"verdict": "right"}), COMPARED),
        (append("audit.jsonl", {"file": "rollouts/update_x.parquet", "line": 1}), ["audit?run=0"]),
        (config("trainer: {objective: magistral}\npipeline: [1]\n"), []),
        (config("name: 2024-01-01\npipeline: {updates: 2024-01-01, n_batch: {}}\nmodel: [1]"), []),
        (config("name: [" * 5000), []),
        (config("a: !!timestamp x"), []),
        (config("a: &a [*a]"), []),
        (config(""), []),
        (config("- 1"), []),
        (config("model: " + "x" * 5000), []),
        (deep("metrics.jsonl"), []),
        (deep("timeline.jsonl"), ["timeline?run=0"]),
        (deep("evaluations.jsonl"), ["evaluations?run=0"]),
    ],
)
def test_a_damaged_file_is_named_where_it_is_needed_and_nothing_else_fails(
    two: Path, tmp_path: Path, change: Callable[[Path], str], refused: list[str]
) -> None:
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    paths = [tmp_path / "one", tmp_path / "two"]
    name = change(paths[0])
    other = "rollout?run=0&update=2&row=0", "groups?run=0&update=2"
    asked = ["runs", *other, *COMPARED, *refused, ROLLOUT, GROUPS_OF_1, "problems?among=1"]
    views = ("metrics", "evaluations", "facets", "rollouts", "audit", "timeline")
    asked += [f"{view}?run={run}" for view in views for run in (0, 1)] + ["rollouts?run=0&text=x"]
    with served(*paths) as page:
        for path in dict.fromkeys(asked):
            status, _, content = page.answer(f"{page.address}api/{path}")
            if path in refused:
                assert status == 422 and name in json.loads(content)["detail"], path
            else:
                assert status == 200, (path, content)


def test_a_folder_that_is_no_run_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    good = make_run(tmp_path / "good").path
    (tmp_path / "empty").mkdir()
    with served(tmp_path / "empty", good, tmp_path / "missing") as page:
        assert [run["path"] for run in page.get("runs")][1] == str(good)
        for run, faults in ((0, 1), (1, 0), (2, 1)):
            damaged = page.get("metrics", run=run)["damaged"]
            assert len(damaged) == faults and all("not a run folder" in fault for fault in damaged)


def test_lost_metrics_are_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", updates=1)
    folder.metrics_file.unlink()
    with served(folder.path) as page:
        [fault] = page.get("metrics", run=0)["damaged"]
        assert fault.startswith(f"{folder.metrics_file}: lost")


def test_a_file_that_a_resume_removes_meanwhile_is_named(tmp_path: Path) -> None:
    from tramontane.view.rollouts import Rollouts

    folder = make_run(tmp_path / "run", updates=1)
    rollouts = Rollouts(folder.rollouts)
    [part] = rollouts.refresh()
    folder.rewind(0)
    with pytest.raises(InputError, match=r"update_000001.parquet: damaged or gone"):
        rollouts.texts(part, [0])


def test_a_run_of_an_earlier_version_opens_and_says_what_it_lacks(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", updates=1)
    (folder.path / "timeline.jsonl").unlink()
    file = folder.rollouts / "update_000001.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["advantage", "log_ratios"]), file)
    with served(folder.path) as page:
        assert page.get("facets", run=0)["missing"] == ["advantage", "log_ratios"]
        one = page.get("rollout", run=0, update=1, row=0)
        assert one["log_ratios"] is None and len(one["missing"]) == 2
        assert page.get("groups", run=0, update=1)["missing"] == ["advantage"]
        assert "timeline.jsonl" in page.get("timeline", run=0)["missing"][0]


def test_token_texts_join_to_the_decoded_text() -> None:
    from importlib import resources

    from tokenizers import Tokenizer

    from tramontane.view.tokens import token_texts

    file = resources.files("tramontane") / "tiny_base" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    for text in ("<think>3 + 4 is 7.</think>\n\\boxed{7}", "Привет, 世界 🙂 — ça va?"):
        ids = tokenizer.encode(text).ids
        texts = token_texts(tokenizer, ids)
        assert len(texts) == len(ids)
        assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_folder_of_runs_stands_for_all_of_them(runs: list[Path]) -> None:
    from tramontane.view.runs import load_runs

    assert [run.path for run in load_runs([runs[0].parent])] == runs
    with pytest.raises(InputError, match=r"not a run folder"):
        load_runs([runs[0] / "rollouts"])


def test_the_address_is_on_the_loopback_with_a_token_of_its_own(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import uvicorn

    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    addresses: list[str] = []
    for _ in range(2):
        server.view(runs, on_address=addresses.append)
    parts = [urlparse(address) for address in addresses]
    assert {part.hostname for part in parts} == {"127.0.0.1"}
    tokens = {part.path for part in parts}
    assert len(tokens) == 2 and all(len(token) >= 43 for token in tokens)  # 32 bytes


def test_without_the_extra_the_command_says_what_to_install(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loopback, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'tramontane-rl\[view\]'"):
        server.view(runs)


def test_numbers_that_json_lacks_become_null() -> None:
    from tramontane.view.runs import dumps

    assert json.loads(dumps({"a": [math.nan, math.inf, 1.5], "t": time.time() > 0})) == {
        "a": [None, None, 1.5],
        "t": True,
    }
