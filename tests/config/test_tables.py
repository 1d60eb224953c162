"""The tables of the package, which are read without the checks of a user's YAML."""

from pathlib import Path

import pytest

import tramontane
from tramontane.config.yaml_text import read_own, read_yaml

PACKAGE = Path(tramontane.__file__).parent
TABLES = [file for file in PACKAGE.rglob("*.yaml") if "catalog" not in file.parts]


@pytest.mark.parametrize("file", sorted(TABLES), ids=lambda file: file.name)
def test_a_table_of_the_package_has_no_key_twice_and_is_read_whole(file):
    text = file.read_bytes()
    assert repr(read_own(text)) == repr(read_yaml(text, file.name))  # with the order of the keys
