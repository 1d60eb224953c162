"""Data that several tests of the controller share."""

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def forty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of forty problems, p0 to p39."""
    path = tmp_path_factory.mktemp("data") / "forty.jsonl"
    rows = [{"id": f"p{i}", "problem": f"{i} + 0?", "answer": str(i)} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
