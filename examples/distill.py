"""Distillation from a larger model: the tiny base teaches a model without its last layer.

    python examples/distill.py [key=value ...]

The student is the base with three of its four layers, after a short cold start on worked traces.
The teacher scores every token that the student samples, and the student's distribution is pulled
to its own (on-policy distillation). docs/distillation.md has more teachers and other uses.
"""

import sys
from pathlib import Path

import tramontane
from tramontane.models.loading import load_model, load_tokenizer

STUDENT = Path("runs/three_layers")


def three_layers() -> None:
    """Save the tiny base without its last layer."""
    model = load_model("tiny")
    model.model.layers = model.model.layers[:3]
    model.config.num_hidden_layers = 3
    model.save_pretrained(STUDENT)
    load_tokenizer("tiny").save_pretrained(STUDENT)


SIZES = ["cold_start.steps=60", "cold_start.batch_tokens=2048", "trainer.learning_rate=1e-3"]

if __name__ == "__main__":
    three_layers()
    settings = [
        "name=distilled",
        f"model={STUDENT}",
        "teacher.model=tiny",
        "trainer.objective.name=distill",
        "pipeline.diversity=none",  # no group is dropped for equal rewards: none are used
        "cold_start.learning_rate=1e-3",
        "cold_start.warmup_steps=5",
        "cold_start.data.playground=[{levels: [1, 3], languages: [en]}]",
    ]
    tramontane.train("examples/small.yaml", [*settings, *(sys.argv[1:] or SIZES)])
