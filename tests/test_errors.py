"""What the ground floor promises: errors, and imports without collections."""

import gc
import importlib
import sys

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


def test_what_was_imported_is_old_at_once() -> None:
    modules: list[list[int]] = []
    gc.unfreeze()  # what the test session froze
    try:
        with importing():
            modules += [[] for _ in range(50_000)]
        young = sum(len(gc.get_objects(generation=generation)) for generation in YOUNG)
    finally:
        gc.freeze()
    assert young < len(modules) // 2
