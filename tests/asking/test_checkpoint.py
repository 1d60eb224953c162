"""A checkpoint's answers: seeds, prompts that do not fit, and the same bits after a restart."""

import json
from itertools import islice

import pytest
import torch

from tramontane import InputError
from tramontane.asking import Prompt
from tramontane.asking.checkpoint import Checkpoint
from tramontane.asking.model import check_model
from tramontane.config.asking import CheckpointModel, ModelConfig

torch.set_num_threads(1)  # the model is small: a second thread costs more than it brings

PROMPTS = [Prompt(f"p{n}", f"What is ${n} + {n * n}$?") for n in range(7)]


def checkpoint(path, **settings):
    model = CheckpointModel(path=path, slots=4, max_prompt_tokens=64)
    return Checkpoint(ModelConfig(checkpoint=model, max_tokens=40, **settings))


def test_answers_depend_on_their_seeds_alone(tmp_path, one_layer):
    found = dict(checkpoint(one_layer).answers(PROMPTS[:2], 4, tmp_path / "a.jsonl"))
    assert [len(found[i]) for i in range(2)] == [4, 4]
    assert all(len({a.text for a in answers}) > 1 for answers in found.values())
    assert all(0 < a.tokens <= 40 and not a.fault for group in found.values() for a in group)
    # Another key, and another seed, give the same question other answers.
    renamed = [Prompt("other", PROMPTS[0].text)]
    [(_, other)] = checkpoint(one_layer).answers(renamed, 4, tmp_path / "b.jsonl")
    assert other != found[0]
    [(_, other)] = checkpoint(one_layer, seed=1).answers(PROMPTS[:1], 4, tmp_path / "c.jsonl")
    assert other != found[0]


def test_a_prompt_that_is_too_long_gets_no_answer_and_others_do(tmp_path, one_layer):
    prompts = [PROMPTS[0], Prompt("long", "1 + " * 200), PROMPTS[1]]
    found = dict(checkpoint(one_layer).answers(prompts, 2, tmp_path / "a.jsonl"))
    assert [a.fault for a in found[1]] == ["its prompt is longer than 64 tokens"] * 2
    assert all(a.text for i in (0, 2) for a in found[i])


def test_checkpoints_that_cannot_run_are_refused_at_once():
    def config(max_tokens=10, **settings):
        model = CheckpointModel(**{"path": "tiny", **settings})
        return ModelConfig(checkpoint=model, max_tokens=max_tokens)

    with pytest.raises(InputError, match=r"max_tokens 1024 leave no room .* context of 1024"):
        check_model(config(max_tokens=1024))
    with pytest.raises(InputError, match="no such folder"):
        check_model(config(path="./nowhere"))
    with pytest.raises(InputError, match="torch sees no GPU"):
        check_model(config(device="cuda:99"))
    assert [p.rpartition("/")[2] for p in check_model(config())] == ["model.safetensors"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, one_layer):
    """(answers, record) of a call that nothing stops."""
    record = tmp_path_factory.mktemp("whole") / "whole.jsonl"
    return dict(checkpoint(one_layer).answers(PROMPTS, 3, record)), record.read_bytes()


@pytest.mark.parametrize("stop_after", [1, 3, 5])
def test_a_stopped_checkpoint_continues_to_the_same_answers(
    stop_after, undisturbed, tmp_path, one_layer
):
    """Exactly the same, although the last digits of an answer's logits depend on the sequences that
    are computed with it, and a token sometimes depends on those digits."""
    whole, whole_record = undisturbed
    record, prompts = tmp_path / "stopped.jsonl", PROMPTS
    taken = list(islice(checkpoint(one_layer).answers(prompts, 3, record), stop_after))
    kept = record.read_bytes()
    state = json.loads(record.with_suffix(".flight.json").read_text())
    with record.open("ab") as file:  # after the valid part
        file.write(b'[0, 0, "hal')
    assert state["end"] == len(kept) and any(tokens for _, _, tokens in state["flight"])
    again = dict(checkpoint(one_layer).answers(prompts, 3, record))
    assert again == whole
    assert all(again[i] == answers for i, answers in taken)
    # The record keeps its content, and continues as that of the undisturbed call.
    assert record.read_bytes().startswith(kept)
    assert record.read_bytes() == whole_record
