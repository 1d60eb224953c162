"""The journal of results: what a killed process leaves, and what a hand has damaged."""

from pathlib import Path

import pytest

from tramontane import InputError
from tramontane.curation.backend.journal import Journal


def test_a_damaged_line_is_named_and_may_be_removed(tmp_path: Path) -> None:
    """Also where the length of the valid part is known from before the removal."""
    file = tmp_path / "j.jsonl"
    with Journal(file) as journal:
        end = journal.add([1], [2], [3])
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b"[2\n" + lines[2])
    with Journal(file, end - 1) as journal, pytest.raises(InputError, match=r"j\.jsonl:2: damaged"):
        list(journal)
    file.write_bytes(lines[0] + lines[2])
    with Journal(file, end) as journal:
        assert list(journal) == [[1], [3]]
        journal.add([4])
        assert list(journal) == [[1], [3], [4]]


def test_an_incomplete_last_line_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "j.jsonl"
    file.write_bytes(b'[1]\n["cut')
    with Journal(file) as journal:
        journal.add([2])
        assert list(journal) == [[1], [2]]
