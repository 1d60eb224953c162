"""Distillation from a stronger model: the tiny base after reinforcement learning teaches the base.

    python examples/distill.py [key=value ...]

The teacher scores every token that the student samples, and the student's distribution is pulled
to its own (on-policy distillation): no reward is used. docs/distillation.md has more teachers and
other uses.
"""

import sys

import tramontane

if __name__ == "__main__":
    sizes = sys.argv[1:] or ["pipeline.updates=10"]
    teacher = tramontane.train("examples/small.yaml", ["name=teacher", *sizes])
    settings = [
        "name=distilled",
        f"teacher.model={teacher.weights}",
        "trainer.objective.name=distill",
        "trainer.objective.distill.top_k=16",
        "pipeline.diversity=none",  # no group is dropped for equal rewards: none are used
        "pipeline.n_minibatch=16",
    ]
    tramontane.train("examples/small.yaml", [*settings, *sys.argv[1:]])
