import csv
import gzip
import json
import os
import subprocess
import sys
import time

import datasets
import pyarrow
import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from tests.run.hub import TOKEN, served_hub
from tramontane.data.files import read_rows, shuffled
from tramontane.errors import InputError

ROWS = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(50)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def test_jsonl_gzip_and_parquet_hold_the_same_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.jsonl.gz", "a.parquet"):
        assert [row for _, row in read_rows(str(tmp_path / name))] == ROWS


def test_columns_of_json_in_parquet_are_values(tmp_path):
    """As `datasets` 5 writes columns of mixed types (its feature `Json`), alone or in others."""
    values = [[{"role": "user", "content": "1+1?"}], {"type": "stdio", "cases": []}, "2", 3, None]
    texts = pyarrow.array([None if value is None else json.dumps(value) for value in values])
    column = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), texts)
    nested = pyarrow.StructArray.from_arrays([column], ["a"])
    listed = pyarrow.ListArray.from_arrays([0, 1, 2, 3, 4, 5], column)
    table = pyarrow.table({"plain": column, "nested": nested, "listed": listed, "text": texts})
    parquet.write_table(table, tmp_path / "a.parquet")
    read = [row for _, row in read_rows(str(tmp_path / "a.parquet"))]
    assert [row["plain"] for row in read] == values
    assert [row["nested"] for row in read] == [{"a": value} for value in values]
    assert [row["listed"] for row in read] == [[value] for value in values]
    assert read[3]["text"] == "3"


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_of_json_is_a_source(tmp_path, indent):
    for name, pack in (("a.json", bytes), ("a.json.gz", gzip.compress)):
        text = "\n " + json.dumps(ROWS, indent=indent)
        (tmp_path / name).write_bytes(pack(b"\xef\xbb\xbf" + text.encode()))
        found = list(read_rows(str(tmp_path / name)))
        assert [row for _, row in found] == ROWS
        assert found[7][0] == f"{tmp_path / name}[7]"


CELLS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(
    st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=5),
    st.sampled_from(",;\t"),
    st.sampled_from(["\n", "\r\n"]),
)
def test_csv_is_read_as_it_was_written(tmp_path_factory, rows, separator, ending):
    """Also with separators, quotes and line breaks in cells; rows without text are left out."""
    file = tmp_path_factory.mktemp("csv") / "a.csv"
    with file.open("w", newline="", encoding="utf-8") as sink:
        writer = csv.writer(sink, delimiter=separator, lineterminator=ending, quoting=csv.QUOTE_ALL)
        writer.writerows([("problem", "the answer"), *rows])
    written = [{"problem": a or None, "the answer": b or None} for a, b in rows if a or b]
    if written:
        assert [row for _, row in read_rows(str(file))] == written
    else:
        with pytest.raises(InputError, match="there are no rows"):
            list(read_rows(str(file)))


def test_rows_of_csv_are_located_by_their_first_line(tmp_path):
    file = tmp_path / "a.csv.gz"
    file.write_bytes(gzip.compress(b'\xef\xbb\xbfproblem, answer\r\n"1 +\n1?",2\n\n2 + 2?,\n'))
    assert list(read_rows(str(file))) == [
        (f"{file}:2", {"problem": "1 +\n1?", "answer": "2"}),
        (f"{file}:5", {"problem": "2 + 2?", "answer": None}),
    ]


def test_rows_given_as_objects_are_named_as_such(tmp_path):
    for name, given_as in (("data", "data[1]"), ("eval", "data['eval'][1]")):
        file = tmp_path / f"{name}.python.jsonl"
        file.write_text('{"n": 1}\n{"n": 2}\n')
        assert list(read_rows(str(file)))[1] == (given_as, {"n": 2})


def test_locations_count_blank_lines_and_a_byte_order_mark_is_ignored(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"n": 1}\n\n{"n": "\xc3\xa9"}')
    assert list(read_rows(str(file))) == [(f"{file}:1", {"n": 1}), (f"{file}:3", {"n": "é"})]


def test_a_copy_of_a_hugging_face_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    copy = tmp_path / "org" / "sums"
    copy.mkdir(parents=True)
    (copy / "train.jsonl").write_text(LINES)
    (copy / "test.jsonl").write_text(LINES.splitlines()[7])
    assert [row for _, row in read_rows(str(copy), "train")] == ROWS
    assert list(read_rows(str(copy), "test")) == [(f"{copy}[0]", ROWS[7])]
    with pytest.raises(InputError, match=r"split 'dev'.*dev"):
        list(read_rows(str(copy), "dev"))


def test_a_dataset_in_json_keeps_its_values(tmp_path, monkeypatch):
    """`datasets` itself reads a time, floats, and the numbers 7, nothing and true."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    answers = ["2024-05-01", 12345678901234567890123, "007", 7, "null", "true", "[1, 2]", [1, 2]]
    rows = [{"answer": answer} for answer in answers] + [{"answer": "x", "later": 1}]
    for name, part in (("train-0.jsonl", rows[:2]), ("train-1.jsonl", rows[2:])):
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    source = str(tmp_path / "copy")
    assert list(read_rows(source)) == [(f"{source}[{i}]", row) for i, row in enumerate(rows)]


def test_a_dataset_in_json_is_fetched_from_the_hub(tmp_path):
    """In a process of its own, since the hub's client reads its address when it is imported."""
    with served_hub() as hub:
        files = {"train.jsonl": b'{"answer": "007"}\n{"answer": 7}\n', "test.json": b'[{"n": 1}]'}
        hub.repositories["dataset", "me/sums"] = {"a" * 40: files}
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path)}
        environment |= {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*", "HF_HUB_OFFLINE": "0"}
        script = (
            "from tramontane.data.files import read_rows\n"
            "print([row for split in ('train', 'test') for row in read_rows('me/sums', split)])"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
    where = [f"me/sums[{i}]" for i in (0, 1, 0)]
    found = list(zip(where, [{"answer": "007"}, {"answer": 7}, {"n": 1}], strict=True))
    assert done.stdout.strip() == str(found), done.stderr


def test_a_dataset_in_json_with_types_of_its_own_has_them(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    copy = tmp_path / "sums"
    copy.mkdir()
    (copy / "train.jsonl").write_text('{"answer": 7}\n')
    features = "dataset_info:\n  features:\n  - name: answer\n    dtype: string\n"
    (copy / "README.md").write_text(f"---\n{features}---\n")
    assert [row for _, row in read_rows(str(copy))] == [{"answer": "7"}]


def test_a_dataset_that_cannot_be_loaded(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"'nobody/nothing': no such file, and as a Hugging Face"):
        list(read_rows("nobody/nothing"))


def test_truncated_gzip_says_after_which_line(tmp_path):
    file = tmp_path / "cut.jsonl.gz"
    whole = gzip.compress(LINES.encode())
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"cut\.jsonl\.gz: the gzip file is cut off after line \d"):
        list(read_rows(str(file)))


def test_corrupt_gzip(tmp_path):
    file = tmp_path / "bad.jsonl.gz"
    whole = bytearray(gzip.compress(LINES.encode()))
    whole[30:60] = b"\xff" * 30
    for content in (bytes(whole), LINES.encode()):
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"bad\.jsonl\.gz: damaged after line"):
            list(read_rows(str(file)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"n": 1}\n{"n": 2\n', r"a\.jsonl:2: not JSON .*one JSON object"),
        ("a.jsonl", b'{"n": 1}\n[1, 2]\n', r"a\.jsonl:2: a list; every line"),
        ("a.jsonl", b'{"n": 1}\n{"n": "\xff"}\n', r"a\.jsonl: not UTF-8"),
        ("a.jsonl", b'{"n": 1}\n{"n": 1, "n": 2}', r"a\.jsonl:2: key 'n' is given twice"),
        ("a.jsonl", b'{"m": [{"r": 1, "r": 1}]}', r"a\.jsonl:1: key 'r' is given twice"),
        ("a.json", b'[{"n": 1},\n {"n": 1},\n{"n": 1, "n": 2}]', r"a\.json:3: key 'n' is given"),
        ("a.json", b'\n[{"m": {"r": 1, "r": 1}}]', r"a\.json:2: key 'r' is given twice"),
        ("a.jsonl", b"", r"a\.jsonl': there are no rows"),
        ("a.jsonl", b"\n \n", r"a\.jsonl': there are no rows"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), r"a\.jsonl\.gz': there are no rows"),
        ("a.parquet", b"PAR1 and nothing else", r"a\.parquet: damaged after row 0"),
        ("a.txt", b"1+1=2", r"a\.txt': not a file that can be read; give \.jsonl, .*\.parquet$"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", r"a\.csv:3: 3 cells, where the header has 2 \(a, b\)"),
        ("a.csv", b'a,b\n"1\n\n",2\n1\n', r"a\.csv:5: 1 cells, where the header has 2"),
        ("a.csv", b"a,a\n1,2\n", r"a\.csv:1: a header needs different names"),
        ("a.csv", b"a,\n1,2\n", r"a\.csv:1: a header needs different names"),
        ("a.csv", b'a,b\n1,2\n"1,2\n', r"a\.csv:3: not CSV \(unexpected end"),
        ("a.csv", b"a,b\n1,\xff\n", r"a\.csv: not UTF-8"),
        ("a.csv", b"a,b\n", r"a\.csv': there are no rows"),
        (
            "a.csv.gz",
            gzip.compress(b"a,b\n" * 999, mtime=0)[:-9],
            r"a\.csv\.gz: the gzip file is cut off",
        ),
        ("a.json", b'[{"n": 1}, 2]', r"a\.json\[1\]: a int; the array must hold objects"),
        ("a.json", b'[{"n": 1}, {"n": ]', r"a\.json: begins with \[ and is not a JSON array"),
        ("a.json", b"[]", r"a\.json': there are no rows"),
        ("a.json", b'{\n"n": 1\n}', r"a\.json:1: not JSON .*or a \.json file one array of them"),
        ("a.json", b'[{"n": "\\ud800"}]', r"a\.json\[0\]: field 'n' has half of a surrogate"),
        ("a.jsonl", b'{"n": 1}\n{"n": "\\uDC80x"}', r"a\.jsonl:2: field 'n' has half of a surro"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(read_rows(str(tmp_path / name)))


def test_a_column_given_twice(tmp_path):
    column = pyarrow.array([1])
    table = pyarrow.Table.from_arrays([column, column, column], names=["n", "m", "n"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: column 'n' is given twice"):
        list(read_rows(str(tmp_path / "a.parquet")))


def test_an_unreachable_hub_is_asked_once(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("tramontane.models.names.getproxies", dict)
    began = time.monotonic()
    with pytest.raises(InputError, match=r"dataset 'nobody/gsm8k': no such file or folder, and"):
        list(read_rows("nobody/gsm8k#main"))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("sums", r"dataset 'sums': .*; did you mean 'sums\.jsonl'\?$"),
        ("sums.jsonll", r"dataset 'sums\.jsonll': .*; did you mean 'sums\.jsonl'\?$"),
        ("[a.jsonl, b.jsonl]", r"neither a file nor the name of a dataset .*one source"),
        ("https://example.org/a.jsonl", r"an address; download the file"),
    ],
)
def test_a_source_that_is_none(tmp_path, monkeypatch, source, message):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("tramontane.models.names.getproxies", dict)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text(LINES)
    with pytest.raises(InputError, match=message):
        list(read_rows(source))


def test_truncated_parquet(tmp_path):
    file = tmp_path / "cut.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"cut\.parquet: damaged"):
        list(read_rows(str(file)))


def test_a_missing_file_names_its_nearest_neighbor(tmp_path):
    (tmp_path / "train.jsonl").write_text(LINES)
    with pytest.raises(InputError, match=r"no such file; did you mean '.*train\.jsonl'"):
        list(read_rows(str(tmp_path / "trian.jsonl")))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(InputError, match=r"folder\.jsonl': a folder; name a file in it"):
        list(read_rows(str(tmp_path / "folder.jsonl")))
    with pytest.raises(InputError, match=r"no such file$"):
        list(read_rows(str(tmp_path / "nowhere" / "train.jsonl")))


@pytest.mark.parametrize("source", ["playgroud:", "playground", "reasoning-gym:chain_sum"])
def test_a_misspelt_source_names_the_nearest(source):
    near = "reasoning_gym:" if "gym" in source else "playground:"
    with pytest.raises(InputError, match=f"did you mean '{near}'"):
        list(read_rows(source))


def test_the_seed_decides_the_shuffled_order():
    items = list(range(100))
    assert shuffled(items, 1) == shuffled(items, 1) != shuffled(items, 2)
    assert sorted(shuffled(items, 1)) == items == list(range(100))
