r"""Graders of mathematical answers side by side, on telling answers: docs/graders.md.

    python -m benchmarks.graders            # writes the page

Each answer of graders.jsonl is given in a box. Graders whose package is not installed are left out:
pip install 'lm_eval[math]' inspect-ai verl pylatexenc adds them; verl wants many more packages than
its graders do (--no-deps, with tensordict, pyvers, hydra-core and codetiming, suffices).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/graders.md"
Grade = Callable[[str, str], bool]  # of (reference, answer)

INTRODUCTION = r"""# Graders side by side

Each answer is given in a `\boxed{}`, and each row says what it should be; `x` marks a wrong
verdict. The rows follow our [policies](math-answers.md#policies) and were chosen for being
telling, with our rules known: they show where graders differ, not how often, and ours has no
errors here by construction. Each row is a test. Written by `python -m benchmarks.graders`.
"""


def rows() -> list[dict[str, Any]]:
    lines = (HERE / "graders.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def tramontane(reference: str, answer: str) -> bool:
    from tramontane.verifier import math

    return math.judge_answer(answer, reference).outcome == "right"


def math_verify(reference: str, answer: str) -> bool:
    from math_verify import parse, verify

    sides = [parse(rf"\boxed{{{side}}}", parsing_timeout=None) for side in (reference, answer)]
    return bool(verify(*sides, timeout_seconds=None))


def hendrycks(reference: str, answer: str) -> bool:
    from lm_eval.tasks.hendrycks_math.utils import is_equiv

    return bool(is_equiv(reference, answer))


def minerva(reference: str, answer: str) -> bool:
    from lm_eval.tasks.minerva_math.utils import is_equiv, normalize_final_answer

    return bool(is_equiv(normalize_final_answer(reference), normalize_final_answer(answer)))


def prime_math(reference: str, answer: str) -> bool:
    from verl.utils.reward_score.prime_math import grade_answer

    return bool(grade_answer(answer, reference))


def dapo(reference: str, answer: str) -> bool:
    from verl.utils.reward_score.math_dapo import compute_score

    return bool(compute_score(rf"Answer: {answer}", reference)["acc"])


def inspect_math(reference: str, answer: str) -> bool:
    from inspect_ai.model import ModelOutput
    from inspect_ai.scorer import Target, math
    from inspect_ai.solver import TaskState

    output = ModelOutput.from_content("none", rf"\boxed{{{answer}}}")
    target = Target([rf"\boxed{{{reference}}}"])
    state = TaskState("none", 1, 1, "", [], target, output=output)
    score: Any = asyncio.run(math()(state, target))  # type: ignore[arg-type]
    return bool(score.value == "C")


GRADERS: dict[str, tuple[str, str, Grade]] = {
    "tramontane": ("tramontane", "", tramontane),
    "math-verify": ("math_verify", "math-verify", math_verify),
    "MATH (lm_eval)": ("lm_eval", "lm_eval", hendrycks),
    "Minerva (lm_eval)": ("lm_eval", "lm_eval", minerva),
    "prime_math (verl)": ("verl", "verl", prime_math),
    "DAPO (verl)": ("verl", "verl", dapo),
    "inspect_ai math": ("inspect_ai", "inspect-ai", inspect_math),
}


def graded(grade: Grade, reference: str, answer: str) -> bool:
    """False for a grader that raises."""
    try:
        return grade(reference, answer)
    except Exception:  # of the other grader
        return False


def page() -> str:
    found = {name: each for name, each in GRADERS.items() if find_spec(each[0])}
    for _, _, grade in found.values():
        grade("5", "5")  # raises if a package that it needs is missing
    told = rows()
    wrong = {
        name: [graded(grade, row["reference"], row["answer"]) != row["right"] for row in told]
        for name, (_, _, grade) in found.items()
    }
    lines = [
        INTRODUCTION,
        "| grader | version | wrong accepted | right refused |",
        "|---|---|---|---|",
    ]
    for name, (_, package, _) in found.items():
        version = importlib.metadata.version(package) if package else "this one"
        counts = []
        for right in (False, True):
            kept = [
                bad for bad, row in zip(wrong[name], told, strict=True) if row["right"] == right
            ]
            counts.append(f"{sum(kept)} of {len(kept)}")
        lines.append(f"| {name} | {version} | {counts[0]} | {counts[1]} |")
    lines += ["", f"| about | reference | answer | it is | {' | '.join(found)} |"]
    lines.append("|---|---|---|---|" + "---|" * len(found))
    for i, row in enumerate(told):
        cells = [row["about"], f"`{row['reference']}`", f"`{row['answer']}`"]
        cells += ["right" if row["right"] else "wrong"]
        cells += ["x" if wrong[name][i] else "" for name in found]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8").partition("| about")[0])
