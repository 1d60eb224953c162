import gzip
import json

import datasets
import pyarrow
import pytest
from pyarrow import parquet

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


def test_a_dataset_that_cannot_be_loaded(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
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
        ("a.jsonl", b"", r"a\.jsonl': there are no rows"),
        ("a.jsonl", b"\n \n", r"a\.jsonl': there are no rows"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), r"a\.jsonl\.gz': there are no rows"),
        ("a.parquet", b"PAR1 and nothing else", r"a\.parquet: damaged after row 0"),
        (
            "a.csv",
            b"problem,answer\n1+1,2\n",
            r"a\.csv': not a file that can be read; give \.jsonl",
        ),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(read_rows(str(tmp_path / name)))


def test_truncated_parquet(tmp_path):
    file = tmp_path / "cut.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"cut\.parquet: damaged"):
        list(read_rows(str(file)))


def test_a_missing_file_names_its_nearest_neighbour(tmp_path):
    (tmp_path / "train.jsonl").write_text(LINES)
    with pytest.raises(InputError, match=r"no such file; did you mean '.*train\.jsonl'"):
        list(read_rows(str(tmp_path / "trian.jsonl")))
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
