"""Looking at runs: the report."""

from tramontane.studies.report import write_report

__all__ = ["write_report"]
