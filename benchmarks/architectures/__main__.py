"""What runs of each architecture of transformers, on tiny random models; writes docs/models.md and
docs/wrapped-models.md.

    python -m benchmarks.architectures [ROW ...] [--newer] [--page]

A row has a process of its own. Rows that benchmarks/architectures.json has for the installed
transformers are kept, so an interrupted run resumes; rows that are named are measured again.
With a newer transformers than that file's, --newer measures those that only the newer one has.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

import transformers

from benchmarks.architectures.page import write
from benchmarks.architectures.report import Report
from benchmarks.architectures.rows import every_row
from benchmarks.architectures.trial import isolated

PROCESSES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rows", nargs="*", help="rows to measure again, by the names on the pages")
    parser.add_argument("--newer", action="store_true", help="measure what the file's lacks")
    parser.add_argument("--page", action="store_true", help="write the pages from the file alone")
    args = parser.parse_args()
    report = Report.committed() if args.newer else Report.load()
    rows = [row for row in every_row() if not (args.newer and row.name in report.rows)]
    names = [row.name for row in rows]
    if unknown := [name for name in args.rows if name not in names]:
        sys.exit(f"no row {unknown[0]!r}; choose from {'; '.join(names)}")
    if not args.page:
        wanted = [row for row in rows if row.name in (args.rows or report.missing(names))]
        order = [*report.rows] if args.newer else names
        with ThreadPoolExecutor(PROCESSES) as pool:
            trials = {pool.submit(isolated, row.kind, row.changed): row for row in wanted}
            for count, done in enumerate(as_completed(trials), 1):
                row, found = trials[done], done.result()
                if args.newer and "cells" in found:
                    release = {"release": transformers.__version__}
                    about = {"known": row.known, "wrapped": row.wrapped}
                    report.newer[row.name] = release | about | found
                elif not args.newer:
                    report.rows[row.name] = found
                report.save(order)
                print(f"{count}/{len(trials)} {row.name}: {found}", flush=True)
    write(report)


if __name__ == "__main__":
    main()
