"""What a dry run says of a small batch on a CPU, against the most that the run then takes."""

import json
import subprocess
import sys

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import tramontane
from tests.runs import small_config
from tramontane.models.loading import load_tokenizer

SMALL_BATCH = {"n_batch": 4, "n_async": 4, "group_size": 2, "l_max": 64, "l_cache": 8}
RUN = r"""
import json, re, sys
import tramontane
from tramontane.config import Config
tramontane.train(Config.model_validate(json.loads(sys.argv[1])), report=False)
# Not ru_maxrss, which begins with that of the process that forked this one.
print(int(re.search(r"VmHWM:\s*(\d+) kB", open("/proc/self/status").read())[1]) << 10)
"""


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"threads": 1}, {"threads": 4}, {"microbatch_tokens": 32768}])
def test_a_small_batch_takes_what_is_said_of_it(tmp_path, keys):
    """30 million parameters. Four threads were said to take four times the activations."""
    tokenizer = load_tokenizer("tiny")
    llama = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=4096,
    )  # fmt: skip
    LlamaForCausalLM(llama).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = small_config(
        tmp_path / "run",
        model=str(tmp_path / "model"),
        pipeline=SMALL_BATCH | {"diversity": "none"},
        trainer=keys | {"dtype": "float32"},
        generator={"slots": 4, "dtype": "float32"},
        placement={"kind": "thread"},
        evaluation={"problems": 4},
    )
    (load,) = tramontane.dry_run(config).memory.loads
    arguments = [sys.executable, "-c", RUN, json.dumps(config.model_dump(mode="json"))]
    ran = subprocess.run(arguments, capture_output=True, text=True, timeout=900, check=True)
    taken = int(ran.stdout.splitlines()[-1])
    assert taken <= load.needed <= 1.5 * taken
