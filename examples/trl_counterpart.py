"""What `trl_script.py` does, here: the same rows, the same reward function, the same sizes.

    python examples/trl_counterpart.py [key=value ...]

docs/coming-from.md has the other keys. A reward function of TRL's kind alone decides: nothing is
added for format or length, and the prompt is the template's own.
"""

import re
import sys

import tramontane

ROWS = [
    {"prompt": f"Compute {a} + {b} - {c}.", "answer": str(a + b - c)}
    for a in range(8, 16)
    for b in range(2, 10)
    for c in range(2, 10)
]


def correct(completions, answer, **kwargs):
    """1 where the last number of the completion is the answer."""
    numbers = [re.findall(r"-?\d+", text) for text in completions]
    return [float(found[-1:] == [right]) for found, right in zip(numbers, answer, strict=True)]


SIZES = [
    "pipeline.updates=8",  # max_steps
    "pipeline.n_batch=64",  # per_device_train_batch_size × processes
    "pipeline.n_async=96",  # completions under way; TRL waits for each batch
    "pipeline.group_size=8",  # num_generations
    "pipeline.l_max=96",  # max_completion_length
    "trainer.learning_rate=5e-4",
]

if __name__ == "__main__":
    settings = ["name=trl_counterpart", *(sys.argv[1:] or SIZES)]
    tramontane.train(model="tiny", data=ROWS, rewards=[correct], overrides=settings)
