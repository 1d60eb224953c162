"""The killer of workers finds their processes, and no other process."""

import json
import subprocess
import sys
import time
from argparse import Namespace

from chaos.__main__ import config, killed
from chaos.processes import workers
from chaos.proof import _tokens
from tramontane.models.loading import load_tokenizer


def test_another_process_with_a_dead_workers_number_is_no_worker(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:

        def found(seconds):
            row = {"time": time.time() + seconds, "worker": "trainer", "process": process.pid}
            (tmp_path / "workers.jsonl").write_text(json.dumps(row) + "\n")
            return workers(tmp_path)

        assert found(0) == {"trainer": process.pid}
        assert found(-10) == {}  # it began after the row was written
        process.kill()
        process.wait()
        assert found(0) == {}


def test_conversations_are_replayed_for_some_seeds_and_environments_must_be_killed(tmp_path):
    args = {"generator": "slots", "updates": None, "conversations": True}
    configs = [config(Namespace(**args, seed=seed)) for seed in range(9)]
    assert {c["conversation"]["replay"] for c in configs} == {False, True}
    kills = [{"worker": "verifier 0", "signal": "SIGKILL"}] * 3
    killer, run = Namespace(kills=kills), Namespace(folder=tmp_path)
    assert killed(killer, 3, run, False).kept and not killed(killer, 3, run, True).kept
    kills.append({"worker": "environment 1", "signal": "SIGKILL"})
    assert killed(killer, 3, run, True).kept


def test_turns_of_earlier_sequences_are_whole():
    tokenizer = load_tokenizer("tiny")
    eos = tokenizer.eos_token_id
    texts = ["one", "two"]
    ids = [[*tokenizer.encode(text, add_special_tokens=False), eos] for text in texts]
    turns = [{"sequence": n, "start": 0, "end": len(each)} for n, each in enumerate(ids)]
    size = len(ids[1])
    row = {"update": 1, "filtered": None, "text": "\n\n".join(texts), "turns": turns}
    row |= {"token_ids": ids[1], "versions": [0] * size, "logprobs": [0.0] * size}
    row["earlier"] = [{"token_ids": ids[0]}]
    promises = _tokens([row], {"l_max": 100, "max_staleness": 2})
    assert [promise.kept for promise in promises] == [True] * 3
