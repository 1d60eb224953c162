"""An environment: a wrong answer is sent back once, and a right one then counts half.

    python examples/environment.py [key=value ...]

Two methods make a class an environment: `start` gives the conversation's first messages (None: the
problem's own prompt), `step` answers each turn. Nothing is imported for it. With
`conversation.reward=last`, what the last `step` returns is the whole reward.
"""

import re
import sys

import tramontane


class SecondChance:
    """Says whether the number in the box is right; ends the conversation after two answers."""

    def start(self, problem):
        self.answer, self.tries = problem.answer, 0

    def step(self, message):
        """Messages for the model, a reward or None, and whether the conversation is done."""
        self.tries += 1
        found = re.findall(r"\\boxed\{(-?\d+)\}", message["content"])
        if found and found[-1] == self.answer:
            return [], 1.0 / self.tries, True
        if self.tries == 2:
            return [], 0.0, True
        return "That is not the answer. Work it out step by step.", None, False


SIZES = ["pipeline.n_batch=128", "pipeline.n_async=192", "evaluation.problems=64"]

if __name__ == "__main__":
    settings = ["name=second_chance", "conversation.reward=last", "conversation.turns=2"]
    settings += ["data.playground.kinds=[sums]", *(sys.argv[1:] or SIZES)]
    tramontane.train("examples/small.yaml", settings, environment=SecondChance)
