"""Folders that tests read from."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
# Real problems and verifier cases next to a checkout; tests that read them skip if it is absent.
DATA = ROOT.parent / "shared/data"
