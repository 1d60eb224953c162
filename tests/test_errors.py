"""What the ground floor promises: errors, and imports without collections."""

import gc
import importlib

import pytest

from tramontane.errors import importing


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
