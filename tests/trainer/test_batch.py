"""The controller sends only numbers to the trainer, and no text."""

import pickle
from dataclasses import fields

from tramontane.batches import Batch, BatchSettings, TrainSequence
from tramontane.types import Completion, Group, Problem, Verdict

SETTINGS = BatchSettings("long", temperature=0.7, l_max=9, n_minibatch=2)


def graded(number, verdict):
    completion = Completion(number, 0, [5, 6], [7, 8, 9], [-0.5, -1.5, -2.5], [3, 3, 4], "stop")
    completion.text = "a SECRET completion"
    problem = Problem("p", "math", "a SECRET problem", answer="a SECRET answer")
    return Group(number, problem, [completion, completion], [verdict] * 2)


def test_a_train_batch_holds_tokens_rewards_and_versions_and_no_text():
    right = Verdict(1.1, {"format": 0.1}, "right", "a SECRET reason", answer="a SECRET answer")
    # An unscorable completion is here only by `pipeline.unscorable: wrong`: it counts as wrong.
    batch = Batch(4, [graded(0, right), graded(1, Verdict(0.0, {}, "unscorable"))], SETTINGS)
    sent = batch.train_batch()
    assert (sent.version, sent.settings) == (4, SETTINGS)
    assert [s.reward for s in sent.sequences] == [1.1, 1.1, 0.0, 0.0]
    assert [s.scored for s in sent.sequences] == [True] * 4
    message = pickle.dumps(sent)
    for sequence in pickle.loads(message).sequences:
        assert sequence.prompt_ids.tolist() == [5, 6]
        assert sequence.token_ids.tolist() == [7, 8, 9]
        assert sequence.logprobs.tolist() == [-0.5, -1.5, -2.5]
        assert sequence.versions.tolist() == [3, 3, 4]
    assert b"SECRET" not in message
    assert {f.name for f in fields(TrainSequence)} == {
        "prompt_ids", "token_ids", "logprobs", "versions", "reward", "scored", "answer",
        "target", "replaced",
    }  # fmt: skip


def test_a_message_holds_the_prompt_of_a_group_once_and_four_bytes_a_number():
    def size(prompt, tokens, count):
        numbers = [70_000] * tokens, [-1.0] * tokens, [1] * tokens
        completions = [Completion(0, i, [i] * prompt, *numbers, "stop") for i in range(count)]
        verdicts = [Verdict(1.0, {}, "right")] * count
        group = Group(0, Problem("p", "math", "?"), completions, verdicts)
        return len(pickle.dumps(Batch(0, [group], SETTINGS).train_batch()))

    assert size(1000, 8, 16) - size(0, 8, 16) < 4 * 1000 + 100
    assert size(8, 1000, 16) - size(8, 0, 16) < 16 * (3 * 4 * 1000 + 100)


def test_answers_are_numbered_within_their_group():
    verdicts = [
        Verdict(1.0, {}, "right", answer="1/2"),
        Verdict(0.0, {}, "wrong", answer="2"),
        Verdict(0.0, {}, "malformed"),
        Verdict(1.0, {}, "right", answer="0.5"),
        Verdict(0.0, {}, "wrong", answer=" 2"),
        Verdict(0.0, {}, "wrong", answer="3"),
    ]
    group = graded(0, verdicts[0])
    group.completions, group.verdicts = group.completions[:1] * 6, verdicts
    sent = Batch(0, [group], SETTINGS).train_batch()
    assert [s.answer for s in sent.sequences] == [0, 1, -1, 0, 1, 2]


def test_a_completion_without_a_verdict_is_not_scored():
    sequence = TrainSequence.of(graded(0, Verdict(0.0, {}, "right")).completions[0])
    assert not sequence.scored
    assert sequence.token_ids.tolist() == [7, 8, 9]
