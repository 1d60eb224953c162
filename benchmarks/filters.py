"""The format filter on labeled statements, and on sets of one known kind.

    python benchmarks/filters.py [DATA_FOLDER]

Prints a confusion table for filter_cases.jsonl.gz and the decisions on the other sets, and writes
filters.json next to this file. `python benchmarks/filters.py DATA_FOLDER NAME` prints every problem
of the set NAME that is changed or dropped.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tramontane.curation.config import FilterConfig
from tramontane.curation.format_filter import FormatFilter
from tramontane.curation.load import read_problems
from tramontane.curation.rows import Row
from tramontane.data.load import RowRules
from tramontane.verifier.math.grade import judge_answer

HERE = Path(__file__).parent
CASES = "filter_cases.jsonl.gz"
SETS = {
    "aqua_mcq": "all multiple choice",
    "proof_problems": "all proofs but one",
    "gsm8k_train": "all good",
    "gsm8k_test": "all good",
    "math_train": "good; some multiple choice",
    "math_test_minus500": "good; some multiple choice",
    "math500": "good; some multiple choice",
    "olympiadbench": "good",
}


def decide(path: Path) -> list[tuple[Row, Row]]:
    rows = list(read_problems((str(path),), RowRules(gradable=False), "train"))
    with TemporaryDirectory() as folder:
        stage = FormatFilter(FilterConfig(), Path(folder))
        decided = stage.decide(rows)
        stage.close()
    return list(zip(rows, decided, strict=True))


def label_of(row: Row) -> str:
    """The decision about a row, in the labels' terms."""
    return {"": "ok", "open_question": "rewritten"}.get(row.reason, row.reason)


def confusion(path: Path) -> dict[str, Any]:
    table: dict[str, Counter[str]] = {}
    equal = rewritten = right = 0
    for before, after in decide(path):
        label = before.task.metadata["label"]
        table.setdefault(label, Counter())[label_of(after)] += 1
        if label_of(after) == "rewritten" and label == "multiple_choice":
            rewritten += 1
            reference = before.task.metadata["rewrite_answer"]
            equal += judge_answer(after.task.answer or "", reference).outcome == "right"
        right += label == label_of(after).replace("rewritten", "multiple_choice")
    total, good = sum(c.total() for c in table.values()), table["ok"]
    return {
        "rows": total,
        "accuracy": round(right / total, 4),
        "good_dropped": round(1 - (good["ok"] + good["rewritten"]) / good.total(), 4),
        "rewritten_answers_equal": f"{equal} of {rewritten}",
        "table": {label: dict(counts) for label, counts in table.items()},
    }


def main() -> None:
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[1] / "shared/data"
    if len(sys.argv) > 2:
        for before, after in decide(data / f"{sys.argv[2]}.jsonl.gz"):
            if label_of(after) != "ok":
                problem = before.task
                print(f"{label_of(after)} | {after.detail} | {problem.id} | {problem.problem!r}")
        return
    result = confusion(data / CASES)
    columns = ["ok", "rewritten", "multiple_choice", "proof", "multi_part", "incomplete"]
    columns.append("unverifiable")
    print(f"{'label':16}" + "".join(f"{name:>16}" for name in columns))
    for label, counts in result["table"].items():
        print(f"{label:16}" + "".join(f"{counts.get(name, 0):16}" for name in columns))
    print(
        f"accuracy {result['accuracy']:.3f} of {result['rows']}; good problems dropped "
        f"{result['good_dropped']:.1%}; rewritten answers equal: "
        f"{result['rewritten_answers_equal']}"
    )
    others = {}
    for name, kind in SETS.items():
        started = time.process_time()
        counts = Counter(label_of(after) for _, after in decide(data / f"{name}.jsonl.gz"))
        milliseconds = 1000 * (time.process_time() - started) / counts.total()
        others[name] = {"rows": counts.total(), **dict(counts.most_common())}
        print(
            f"{name:20} ({kind}) {others[name]}, {milliseconds:.2f} ms a row without the verifier"
        )
    report = {"cases": result, "sets": others}
    (HERE / "filters.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
