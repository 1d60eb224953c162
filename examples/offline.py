"""Offline rows: learn from recorded answers with rewards; nothing is sampled for training.

    python examples/offline.py [key=value ...]

The answers here are the tiny base's own, graded by `evaluate`. Any file does that has `prompt`,
`response` and `reward` in each row: other models' answers, or thumbs of people. `agro` can learn
from completions of any policy; groups are the answers to one prompt.
"""

import json
import sys
from pathlib import Path

import tramontane
from tramontane.data import playground

ROWS = Path("runs/offline_rows.jsonl")


def record(problems: int = 64, samples: int = 8) -> None:
    """Write a row for each of the tiny base's answers to problems of the playground."""
    drawn = playground.problems("train", seed=7, levels=(1, 3), languages=("en",), count=problems)
    tasks = [{"problem": problem.problem, "answer": problem.answer} for problem in drawn]
    answers = ROWS.with_name("offline_answers.jsonl")
    tramontane.evaluate(
        "tiny", tasks, problems=problems, samples=samples, temperature=1.0, write_to=answers
    )
    with answers.open() as lines, ROWS.open("w") as file:
        for row in map(json.loads, lines):
            kept = {"prompt": row["problem"], "response": row["text"], "reward": row["reward"]}
            file.write(json.dumps(kept) + "\n")


if __name__ == "__main__":
    ROWS.parent.mkdir(exist_ok=True)
    record()
    settings = [
        "name=offline",
        f"data.trajectories.sources=[{ROWS}]",
        "trainer.objective.name=agro",
    ]
    tramontane.train("examples/small.yaml", [*settings, *sys.argv[1:]])
