"""Memory, time and recall of a curation, on generated problems with planted duplicates.

    python benchmarks/curation.py [ROWS]

Of every hundred rows, 8 are an earlier row in another spelling, 4 an earlier row with a changed
word, 2 an earlier row with another number (no duplicate), 2 proofs and 2 multiple choice. Prints a
table and writes curation.json next to this file.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tramontane.curation.config import CurateConfig
from tramontane.curation.pipeline import curate

HERE = Path(__file__).parent
RECENT = 50_000  # rows that a planted row may repeat, which limits this script's memory
SYLLABLES = [c + v for c, v in zip("bdfglmnprstvwxzk", "oieuaiouaeiouaei", strict=True)]
KINDS = (
    ["new"] * 82 + ["exact"] * 8 + ["near"] * 4 + ["number"] * 2 + ["proof"] * 2 + ["choice"] * 2
)


def word(rng: random.Random) -> str:
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3)))


def new(rng: random.Random) -> tuple[str, int]:
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 99)
    name, things, town = word(rng).title(), word(rng), word(rng).title()
    story = [
        f"{name} has {a} boxes with {b} {things} each and finds {c} more on the way to {town}.",
        f"In {town} there are {a} streets. Each has {b} houses, and {name} builds {c} {things}.",
        f"A farmer called {name} grows {a} rows of {b} {things}; {c} others grow near {town}.",
    ]
    details = " ".join(word(rng) for _ in range(rng.randint(4, 14)))
    return f"{rng.choice(story)} Beside that, {details}. How many are there in all?", a * b + c


def write(path: Path, count: int) -> Counter[str]:
    rng, planted = random.Random(0), Counter[str]()
    recent: list[tuple[str, int]] = []
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            kind = rng.choice(KINDS) if len(recent) > 100 else "new"
            planted[kind] += 1
            text, answer = new(rng) if kind in ("new", "proof", "choice") else rng.choice(recent)
            if kind == "new":
                if len(recent) < RECENT:
                    recent.append((text, answer))
                else:
                    recent[rng.randrange(RECENT)] = (text, answer)
            elif kind == "exact":
                text = text.upper().replace(" ", "  ")
            elif kind == "near":
                text = text.replace("How many are there in all?", "How many are there altogether?")
            elif kind == "number":
                text, answer = f"{text[:-1]} after {rng.randint(100, 999)} days?", answer
            elif kind == "proof":
                text = text.replace("How many are there in all?", "Prove that this is prime.")
            else:
                text += f"\n(A) {answer + 1}\n(B) {answer}\n(C) {answer - 1}"
            row = {"id": f"{kind}-{number}", "problem": text}
            row["answer"] = "B" if kind == "choice" else str(answer)
            file.write(json.dumps(row) + "\n")
    return planted


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    with tempfile.TemporaryDirectory() as folder:
        raw, out = Path(folder) / "raw.jsonl", Path(folder) / "out"
        planted = write(raw, count)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        stages: dict[str, dict[str, float]] = {}
        clock = {"wall": time.monotonic(), "cpu": time.process_time()}

        def show(stage: str, chunks: int) -> None:
            entry = stages.setdefault(stage, {"seconds": 0.0, "cpu_seconds": 0.0, "peak_mb": 0.0})
            entry["seconds"] += time.monotonic() - clock["wall"]
            entry["cpu_seconds"] += time.process_time() - clock["cpu"]
            entry["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            clock.update(wall=time.monotonic(), cpu=time.process_time())

        summary = curate(CurateConfig(inputs=(str(raw),), out=str(out)), progress=show).summary
        show("reports", 0)
        found: dict[str, Counter[str]] = {kind: Counter() for kind in planted}
        with (out / "decisions.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                found[row["id"].partition("-")[0]][row["reason"] or "kept"] += 1
        size = sum(f.stat().st_size for f in out.iterdir()) >> 20
    print(f"{count:,} rows; {before} MB before the start, {size} MB of results")
    print(f"{'stage':14} seconds      cpu   ms/row  peak MB")
    for name, s in stages.items():
        print(
            f"{name:14} {s['seconds']:7.1f} {s['cpu_seconds']:8.1f} "
            f"{1000 * s['cpu_seconds'] / count:8.3f} {s['peak_mb']:8.0f}"
        )
    for kind, counts in found.items():
        print(f"planted {kind:7} {planted[kind]:8,}: {dict(counts.most_common())}")
    report = {
        "rows": count,
        "before_mb": before,
        "stages": {k: {n: round(v, 1) for n, v in s.items()} for k, s in stages.items()},
        "planted": {kind: dict(counts.most_common()) for kind, counts in found.items()},
        "summary": {k: summary[k] for k in ("kept", "rewritten", "dropped")},
    }
    (HERE / "curation.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
