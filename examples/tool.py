"""A tool: the model learns to use a calculator that is a function of this file.

    python examples/tool.py [key=value ...]

The function's name, type hints and docstring are what the model is told. A `ValueError` is
answered with its text, and the conversation continues. `configs/tools.yaml` begins with a short
cold start, since the tiny base has never seen a call; its traces call this name with this argument.
"""

import re
import sys

import tramontane


def calculator(expression: str) -> str:
    """Compute a sum of whole numbers.

    Args:
        expression: Numbers, + - * and brackets, such as (12 + 3) * 4.
    """
    if not re.fullmatch(r"[\d\s()+*-]{1,60}", expression) or "**" in expression:
        raise ValueError("only whole numbers, + - * and brackets")
    try:
        return str(eval(expression, {"__builtins__": {}}))
    except SyntaxError:
        raise ValueError("brackets or operators do not match") from None


SHORTER = ["pipeline.updates=10", "pipeline.n_batch=128", "pipeline.n_async=192"]
SHORTER += ["pipeline.group_size=8", "pipeline.max_staleness=1", "trainer.learning_rate=2e-4"]
SHORTER += ["data.playground.languages=[en]", "evaluation.problems=64", "cold_start.steps=200"]
SHORTER += [
    "cold_start.data.mixture={work: 0.6, guess: 0.4}",
    """cold_start.data.playground=[
  {levels: [1, 2], kinds: [long_sums], languages: [en], share: 3},
  {levels: [1, 2], kinds: [sums], languages: [en], share: 1}]""",
]

if __name__ == "__main__":
    settings = ["name=tool", "evaluation.also={}", *(sys.argv[1:] or SHORTER)]
    tramontane.train("configs/tools.yaml", settings, tools=[calculator])
