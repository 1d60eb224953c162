"""The controller sends only numbers to the trainer, and no text."""

import pickle
from dataclasses import fields, replace

from tramontane.batches import Batch, BatchSettings, TrainSequence
from tramontane.tokens import INSERTED, EarlierSequence
from tramontane.types import Completion, Group, Problem, TrainedFigures, Verdict
from tramontane.verifier.math.normalize import vote

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
    sent = batch.train_batch(vote)
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
        "target", "replaced", "continues", "teacher", "experts", "allowed", "truncated", "images",
        "put_images",
    }  # fmt: skip


def test_a_message_holds_the_prompt_of_a_group_once_and_four_bytes_a_number():
    def size(prompt, tokens, count):
        numbers = [70_000] * tokens, [-1.0] * tokens, [1] * tokens
        completions = [Completion(0, i, [3] * prompt, *numbers, "stop") for i in range(count)]
        verdicts = [Verdict(1.0, {}, "right")] * count
        group = Group(0, Problem("p", "math", "?"), completions, verdicts)
        return len(pickle.dumps(Batch(0, [group], SETTINGS).train_batch(vote)))

    assert size(1000, 8, 16) - size(0, 8, 16) < 4 * 1000 + 100
    assert size(8, 1000, 16) - size(8, 0, 16) < 16 * (3 * 4 * 1000 + 100)


def test_answers_are_numbered_within_their_group():
    verdicts = [
        Verdict(1.0, {}, "right", answer="1/2"),
        Verdict(0.0, {}, "wrong", answer="2"),
        Verdict(0.0, {}, "malformed"),
        Verdict(1.0, {}, "right", answer="0.5"),
        Verdict(0.0, {}, "wrong", answer="4/2"),
        Verdict(0.0, {}, "wrong", answer="3"),
    ]
    group = graded(0, verdicts[0])
    group.completions, group.verdicts = group.completions[:1] * 6, verdicts
    sent = Batch(0, [group], SETTINGS).train_batch(vote)
    assert [s.answer for s in sent.sequences] == [0, 1, -1, 0, 1, 2]
    group.problem = replace(group.problem, tests={"type": "stdio", "cases": []})
    sent = Batch(0, [group], SETTINGS).train_batch(vote)
    assert [s.answer for s in sent.sequences] == [0, 1, -1, 0, 2, 3]  # programs, as written


def test_a_completion_without_a_verdict_is_not_scored():
    sequence = TrainSequence.of(graded(0, Verdict(0.0, {}, "right")).completions[0])
    assert not sequence.scored
    assert sequence.token_ids.tolist() == [7, 8, 9]


def test_a_forked_conversation_is_consecutive_sequences_with_one_reward():
    earlier = EarlierSequence([1, 2], [3, 4], [-0.5, -0.5], [0, 0])
    forked = Completion(0, 0, [1, 9], [5], [-1.0], [0], "stop", earlier=[earlier])
    inserted = [7, 8, 9], [-1.0, 0.0, -1.0], [0, INSERTED, 1]
    whole = Completion(0, 1, [1, 2], *inserted, "stop")
    verdicts = [Verdict(1.0, {}, "right", answer="4"), Verdict(0.0, {}, "wrong")]
    group = Group(0, Problem("p", "math", "?"), [forked, whole], verdicts)
    batch = Batch(1, [group], SETTINGS)
    sent = batch.train_batch(vote).groups[0]
    assert [s.prompt_ids.tolist() for s in sent] == [[1, 2], [1, 9], [1, 2]]
    assert [s.token_ids.tolist() for s in sent] == [[3, 4], [5], [7, 8, 9]]
    assert [s.continues for s in sent] == [False, True, False]
    assert [s.reward for s in sent] == [1.0, 1.0, 0.0]
    assert [s.answer for s in sent] == [0, 0, -1]
    # The trainer's figures, for each sequence, find their way back to the conversations.
    batch.learned = TrainedFigures()
    batch.learned.advantages.extend([0.5, 0.5, -0.5])
    batch.learned.logprobs.extend([-1, -2, -3, -4, -5, -6])
    batch.share_learned()
    assert group.learned is not None
    assert group.learned.advantages.tolist() == [0.5, -0.5]
    assert group.learned.logprobs.tolist() == [-1, -2, -3, -4, -5, -6]
