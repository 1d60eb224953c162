"""A judge: a reward model, trained on ratings of answers, gives the reward; no verifier is asked.

    python examples/judge.py [key=value ...]

The ratings here stand for those of people: a reader likes an answer that shows its calculation, and
shows no step twice. The tiny base learns them as a classifier, some are kept back to calibrate it,
and then it judges. Worthless answers (canaries) are shown to it after each update: if it likes one
of them, the run ends. docs/judges.md has judges that read a rubric, behind an endpoint.
"""

import json
import random
import re
import sys
from pathlib import Path

import tramontane
from tramontane.data import playground
from tramontane.studies.judged import train_judge

JUDGE = Path("runs/judge_model")
RATED, KEPT_BACK = 1024, 200  # answers


def likes(text: str) -> bool:
    equations = re.findall(r"\d+ [-+*/] \d+ = \d+", text)
    return bool(equations) and len(equations) == len(set(equations))


def rate() -> list[dict]:
    """The tiny base's answers to problems of the playground, with labels. Some are worthless, and
    short or strange: a judge that never saw such answers took them for good, and was refused."""
    drawn = playground.problems("train", 7, levels=(1, 3), languages=("en",), count=RATED // 4)
    tasks = [{"problem": problem.problem, "answer": problem.answer} for problem in drawn]
    file = JUDGE.with_name("judge_answers.jsonl")
    sizes = {"problems": len(tasks), "samples": 4, "temperature": 1.0}
    tramontane.evaluate("tiny", tasks, write_to=file, **sizes)
    rows = []
    for row in map(json.loads, file.open()):
        whole, problem = row["text"], row["problem"]
        worthless = ["", problem, whole[: random.randrange(len(whole))], shuffled(whole)]
        text = random.choice([whole] * 8 + worthless)
        rows.append({"problem": problem, "response": text, "label": likes(text)})
    return rows


def shuffled(text: str) -> str:
    words = text.split()
    return " ".join(random.sample(words, len(words)))


if __name__ == "__main__":
    JUDGE.mkdir(parents=True, exist_ok=True)
    random.seed(0)
    rows = rate()
    train_judge(rows[KEPT_BACK:] * 2, JUDGE, seed=0)
    with (JUDGE / "labeled.jsonl").open("w") as labeled:
        labeled.writelines(json.dumps(row) + "\n" for row in rows[:KEPT_BACK])
    settings = [
        "name=judged",
        "verifier.domains={math: {verifier: judge, format: none}}",
        "verifier.reward={correctness: 1, format: 0, language: 0}",
        "verifier.thinking_tags=[<hidden>, </hidden>]",  # not the model's: its thoughts are judged
        f"verifier.judge.reward_model={JUDGE}",
        f"verifier.judge.calibration.file={JUDGE}/labeled.jsonl",
        "verifier.judge.workers=1",
    ]
    tramontane.train("examples/small.yaml", [*settings, *sys.argv[1:]])
