"""Given answers: where they are put, and a run that no verifier judges."""

from pathlib import Path

import pytest

from tests.runs import small_config
from tramontane.batches import Batch, BatchSettings, TrainBatch
from tramontane.config.objectives import JEPOOptions
from tramontane.data.prompts import PromptEncoder
from tramontane.models.loading import load_tokenizer
from tramontane.run.folder import RunFolder
from tramontane.run.screen import QuietScreen
from tramontane.run.targets import Targets
from tramontane.run.train import train
from tramontane.tokens import ELSEWHERE, AllowedTokens, ints
from tramontane.trainer.allowed import allowed_of
from tramontane.types import Completion, Group, Outcome, Problem, Verdict
from tramontane.verifier.math.normalize import vote

SETTINGS = BatchSettings(stage="", temperature=1.0, l_max=64, n_minibatch=2)


def batch(texts: list[str], outcomes: list[Outcome], answer: str | None = "42") -> Batch:
    tokenizer = load_tokenizer("tiny")
    completions = []
    for index, text in enumerate(texts):
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        n = len(ids)
        completions.append(
            Completion(0, index, [1, 2], ids, [-1.0] * n, [3] * n, "stop", text=text)
        )
    verdicts = [Verdict(float(o == "right"), {}, o) for o in outcomes]
    group = Group(0, Problem("p", "math", "?", answer), completions, verdicts)
    return Batch(0, [group], SETTINGS)


def targets(context: int | None = None, **options: str) -> Targets:
    encoder = PromptEncoder(load_tokenizer("tiny"))
    return Targets(
        JEPOOptions(targets=options.pop("targets", "unsolved"), **options), encoder, context
    )


def completed(targets: Targets, given: Batch) -> TrainBatch:
    made = given.train_batch(vote)
    targets(given, made)
    return made


def texts(made: Targets, given: Batch) -> list[tuple[str, str]]:
    """(sampled, given) of each sequence, decoded."""
    tokenizer, found = load_tokenizer("tiny"), []
    for s in completed(made, given).sequences:
        assert len(s.token_ids) == len(s.logprobs) == len(s.versions)
        cut = len(s.token_ids) - s.target
        assert {*s.versions[cut:]} <= {ELSEWHERE}
        assert {*s.versions[:cut]} == {3}
        assert s.logprobs[:cut].tolist() == [-1.0] * cut
        found.append((tokenizer.decode(s.token_ids[:cut]), tokenizer.decode(s.token_ids[cut:])))
    return found


WRONG = ["<think>1 + 1</think> \\boxed{3}", "<think>open"]


def test_sampling_masks_end_where_the_answer_begins() -> None:
    given = batch(["<think>1 + 1</think> \\boxed{3} and a long tail after it"], ["wrong"])
    [completion] = given.groups[0].completions
    n = len(completion.token_ids)
    completion.allowed = AllowedTokens(ints([2] * n), ints([5, 6] * n))
    [sequence] = completed(targets(), given).sequences
    cut = len(sequence.token_ids) - sequence.target
    assert 0 < cut < n and sequence.allowed is not None and len(sequence.allowed) == cut
    sets = allowed_of([sequence])
    assert sets is not None and len(sets) == len(sequence.token_ids)
    assert (sets[:cut, :2] == [5, 6]).all() and (sets[cut:] == -1).all()
    assert len(completion.allowed) == n  # the completion keeps its own


def test_the_answer_follows_the_thoughts_of_an_unsolved_group() -> None:
    eos = load_tokenizer("tiny").eos_token
    assert texts(targets(), batch(WRONG, ["wrong", "malformed"])) == [
        ("<think>1 + 1</think>", f"\n\\boxed{{42}}{eos}"),
        (f"<think>open{eos}", ""),
    ]
    long = targets(target_text=" So: {answer}", target_after="1 + 1")
    assert texts(long, batch(WRONG, ["wrong", "malformed"]))[0] == (
        "<think>1 + 1",
        f" So: 42{eos}",
    )


@pytest.mark.parametrize(
    ("outcomes", "answer", "which", "context"),
    [
        (["right", "wrong"], "42", "unsolved", None),
        (["wrong", "wrong"], None, "always", None),
        (["wrong", "wrong"], "42", "unsolved", 8),
    ],
)
def test_other_groups_stay_as_they_were_sampled(
    outcomes: list[Outcome], answer: str | None, which: str, context: int | None
) -> None:
    given = batch(WRONG, outcomes, answer)
    made = completed(targets(context, targets=which), given)
    assert made == given.train_batch(vote)
    assert made.sequences[0].target == 0


def test_always_means_solved_groups_too() -> None:
    found = texts(targets(targets="always"), batch(WRONG, ["right", "wrong"]))
    assert found[0][1].startswith("\n\\boxed{42}")


@pytest.mark.slow
def test_a_run_learns_where_no_verifier_checks(tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "run",
        data={"domain": "essay"},
        pipeline={"diversity": "none", "n_minibatch": 16},
        verifier={"domains": {"essay": {"format": "none", "needs": ["answer"]}}},
        trainer={"objective": {"name": "jepo", "jepo": {"supervised_coef": 1.0}}},
    )
    # The playground's problems have a domain of their own; a file's get that of the config.
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "1 + 2 = ?", "answer": "3, of course"}\n' * 8)
    data = config.data.model_copy(update={"train": str(file)})
    train(config.model_copy(update={"data": data}), QuietScreen())
    for metrics in RunFolder(tmp_path / "run").metrics():
        assert metrics["pass_rate"] == 0
        assert metrics["given_tokens"] > 0
        assert metrics["grad_norm"] > 0
