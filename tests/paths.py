"""Folders that tests read from."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
# Real problems and verifier cases beside a checkout; tests that read them skip where it is absent.
DATA = ROOT.parent / "shared/data"
