"""What the ground floor promises: errors, and imports without collections."""

import gc
import importlib
import sys
from pathlib import Path

import pytest

from tramontane.errors import importing

YOUNG = range(1 if sys.version_info >= (3, 14) else 2)  # generations; 3.14 has one of them


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_not_collected_during_imports(collects: bool) -> None:
    def fail() -> None:
        with importing(), importing():
            assert not gc.isenabled()
            importlib.import_module("tramontane.no_such_module")

    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(ImportError, match="no_such_module"):
            fail()
        assert gc.isenabled() == collects
    finally:
        gc.enable()


@pytest.mark.parametrize("imported", [True, False])
def test_what_was_imported_is_old_at_once_and_nothing_else(
    imported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_lists.py").write_text("lists = [[] for _ in range(50_000)]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    lists: list[list[int]] = []
    gc.unfreeze()  # what the test session froze
    try:
        with importing():
            if imported:
                lists = importlib.import_module("imported_lists").lists
            else:
                lists += [[] for _ in range(50_000)]
        young = sum(len(gc.get_objects(generation=generation)) for generation in YOUNG)
    finally:
        gc.freeze()
        sys.modules.pop("imported_lists", None)
    assert young < len(lists) // 2 if imported else young >= len(lists)
