"""TRL's side of `vs_trl.py` and `vs_trl_images.py`, run by TRL's interpreter: GRPOTrainer, a few
updates at a time.

    python trl_side.py SETTINGS

SETTINGS is a JSON file. After `warm_up` updates that are not counted the script writes `ready`. For
each line that it then reads, it does `updates` updates and writes a line of JSON with their seconds
and the lengths of their completions. Prompts are texts, one a line, or rows of `problem` and maybe
`image` (a data URI), for a model with a vision tower, which is frozen.
"""

from __future__ import annotations

import base64
import io
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from vs_trl_reward import plain_reward, reward

# The parent process reads stdout, so only the lines of `say` may go there.
OUT, sys.stdout = sys.stdout, sys.stderr


def say(line: str) -> None:
    print(line, file=OUT, flush=True)


class Turns(TrainerCallback):
    """Waits for its turn before an update, and reports the time of its updates."""

    def __init__(self, warm_up: int, updates: int, taught: bool) -> None:
        self.updates, self.done = updates, -warm_up
        self.score = reward if taught else plain_reward
        self.lengths: list[int] = []
        self.began = 0.0

    def reward(self, completions: list[Any], completion_ids: Any, **_: Any) -> list[float]:
        self.lengths += [len(ids) for ids in completion_ids]
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [self.score(text) for text in texts]

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.done >= 0 and self.done % self.updates == 0:
            if self.done == 0:
                say("ready")
            if not sys.stdin.readline():
                sys.exit()
            self.lengths.clear()
            self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.done += 1
        if self.done > 0 and self.done % self.updates == 0:
            seconds = time.perf_counter() - self.began
            say(json.dumps({"seconds": seconds, "lengths": self.lengths}))


def row_of(line: Any) -> dict[str, Any]:
    """A row of the data set: of a text as it stands, or of a problem, which may have an image."""
    if isinstance(line, str):
        return {"prompt": line}
    row: dict[str, Any] = {"prompt": [{"role": "user", "content": line["problem"]}]}
    if "image" in line:
        content = base64.b64decode(line["image"].partition(",")[2])
        row["image"] = Image.open(io.BytesIO(content)).convert("RGB")
    return row


def main() -> None:
    s = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(s["threads"])
    transformers.utils.logging.disable_progress_bar()
    turns = Turns(s["warm_up"], s["updates"], s["taught"])
    on_cpu = s["device"] == "cpu"
    config = GRPOConfig(
        output_dir=s["folder"],
        seed=s["seed"],
        use_cpu=on_cpu,
        model_init_kwargs={"dtype": s["dtype"]} | s["model"],
        bf16=s["autocast"],
        torch_compile=s["compile"],
        per_device_train_batch_size=s["microbatch"],
        gradient_accumulation_steps=s["completions"] // s["microbatch"],
        num_generations=s["group_size"],
        max_completion_length=s["max_tokens"],
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        use_transformers_continuous_batching=s["continuous"],
        learning_rate=s["learning_rate"],
        lr_scheduler_type="constant",
        beta=0.0,
        num_iterations=1,
        max_steps=10**6,
        activation_checkpointing=False,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    prompts = Path(s["prompts"]).read_text(encoding="utf-8").splitlines()
    rows = [row_of(json.loads(line)) for line in prompts]
    reader = AutoTokenizer if isinstance(rows[0]["prompt"], str) else AutoProcessor
    trainer = GRPOTrainer(
        model=s["checkpoint"],
        processing_class=reader.from_pretrained(s["checkpoint"], padding_side="left"),
        reward_funcs=turns.reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[turns],
    )
    for name, parameter in trainer.model.named_parameters():
        parameter.requires_grad_(not re.search("vision_tower|projector", name))
    trainer.train()


if __name__ == "__main__":
    main()
