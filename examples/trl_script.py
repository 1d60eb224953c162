"""A script of TRL, for `trl_counterpart.py` beside it.

    pip install trl
    python examples/trl_script.py

It trains the tiny base with `GRPOTrainer` on sums, by a reward that reads the last number.
"""

import re

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tramontane.models.names import resolve

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


if __name__ == "__main__":
    config = GRPOConfig(
        output_dir="runs/trl_script",
        max_steps=8,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=96,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to="none",
        use_cpu=True,
    )
    tiny = str(resolve("tiny"))
    GRPOTrainer(
        model=tiny, args=config, train_dataset=Dataset.from_list(ROWS), reward_funcs=[correct]
    ).train()
