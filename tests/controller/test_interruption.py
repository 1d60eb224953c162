"""Interruption of long thoughts: when, by what, and that the inserted tokens teach nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.controller.driven import DrivenLedger, config
from tests.runs import small_config
from tramontane.config import Config, InterruptionConfig, parse_settings
from tramontane.controller.interruption import Interruption
from tramontane.controller.ledger import Ledger
from tramontane.data.curriculum import Curriculum
from tramontane.errors import InputError
from tramontane.run.folder import RunFolder
from tramontane.run.rollouts import read_run
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.status import Status
from tramontane.tokens import INSERTED, floats, ints
from tramontane.types import Completion, FinishReason, SamplingParams

CLOSING = "</think>"
SENTENCE = [7, 8, 9]


def interruption(low: int, high: int, answer: int) -> Interruption:
    settings = InterruptionConfig(after=(low, high), answer_tokens=answer)
    return Interruption(settings, SENTENCE, CLOSING)


def stopped(request: Completion, tokens: int, finish: FinishReason, text: str = "") -> Completion:
    """The request after `tokens` more tokens of version 5."""
    n = len(request.token_ids)
    return replace(
        request,
        token_ids=request.token_ids + ints([1] * tokens),
        logprobs=request.logprobs + floats([-0.5] * tokens),
        versions=request.versions + ints([5] * tokens),
        finish_reason=finish,
        text=text or f"{n} tokens and {tokens}",
    )


@given(st.integers(0, 2**40), st.integers(1, 50), st.integers(0, 50), st.integers(1, 30))
def test_open_thoughts_are_closed_and_an_answer_follows(
    seed: int, low: int, spread: int, answer: int
) -> None:
    rule, l_max = interruption(low, low + spread, answer), low + spread + len(SENTENCE) + answer
    limit = rule.limit(seed)
    assert low <= limit <= low + spread
    sampling = SamplingParams(limit, 0.7)
    request = Completion.requested(0, 1, [3], seed, sampling, keep_kv=True)
    following = stopped(request, limit, "length")
    assert rule.continues(following, l_max)
    assert following.token_ids.tolist() == [1] * limit + SENTENCE
    assert following.versions.tolist() == [5] * limit + [INSERTED] * 3
    assert following.logprobs.tolist() == [-0.5] * limit + [0] * 3
    assert following.sampling == SamplingParams(limit + 3 + answer, 0.7)
    assert (following.seed, following.group, following.index) == (seed, 0, 1)
    # It is interrupted once, so its keys and values need not be kept after its answer.
    assert following.keep_kv is False
    assert not rule.continues(stopped(following, answer, "length"), l_max)


def test_closed_thoughts_continue_and_completions_that_ended_do_not() -> None:
    rule = interruption(4, 4, 6)
    request = Completion.requested(0, 0, [3], 1, SamplingParams(4, 1.0))
    closed = stopped(request, 4, "length", f"a{CLOSING}b")
    assert rule.continues(closed, 32)
    assert closed.token_ids.tolist() == [1] * 4
    assert closed.sampling.max_tokens == 10
    assert not rule.continues(stopped(request, 4, "stop"), 32)


def test_at_least_one_token_of_answer_is_sampled_below_l_max() -> None:
    request = Completion.requested(0, 0, [3], 1, SamplingParams(4, 1.0))
    following = stopped(request, 4, "length")
    assert interruption(4, 4, 6).continues(following, 6)
    assert following.token_ids.tolist() == [1] * 4 + SENTENCE[:1]
    assert following.sampling.max_tokens == 6


def test_a_group_is_whole_once_its_interrupted_completions_have_ended(forty: Path) -> None:
    class Interrupting(DrivenLedger):
        def _new_ledger(self) -> Ledger:
            problems = Curriculum(self.config.by_stage())
            rule = interruption(2, 3, 2)
            return Ledger(self.config, problems, lambda problem: [1], interruption=rule)

    run = Interrupting(config(forty))
    run.hand_out()
    first, second = run.ledger.outstanding[0].requests
    assert first.sampling.max_tokens in (2, 3) and first.keep_kv
    second.take_turn(stopped(second, 2, "stop"))
    run.ledger.turn_ended(second)
    assert second.status is Status.ENDED and run.ledger.take(second) is None
    first.take_turn(stopped(first, first.sampling.max_tokens, "length"))
    run.ledger.turn_ended(first)
    assert first.status is Status.SAMPLED
    run.resume()  # from a snapshot, in the middle of its answer
    (restored,) = run.ledger.outstanding[0].requests
    assert restored == first
    restored.take_turn(stopped(restored, 1, "stop"))
    run.ledger.turn_ended(restored)
    group = run.ledger.take(restored)
    assert group is not None
    assert INSERTED in group.completions[0].versions


def test_thoughts_that_would_outlast_l_max_are_refused() -> None:
    raw = {"generator": {"interruption": {"after": [200, 256]}}, "pipeline": {"l_max": 256}}
    with pytest.raises(InputError, match="after up to 256 tokens, and completions end at l_max"):
        parse_settings(Config, raw, [], "run.yaml")
    raw["generator"]["interruption"]["after"] = [30, 20]
    with pytest.raises(InputError, match="give the lower number first"):
        parse_settings(Config, raw, [], "run.yaml")


def test_conversations_are_not_interrupted() -> None:
    raw = {
        "generator": {"interruption": {"after": [20, 30]}},
        "data": {"train": "playground:", "tools": ["calculator"]},
    }
    with pytest.raises(InputError, match="interrupts the thoughts of a single turn"):
        parse_settings(Config, raw, [], "run.yaml")


@pytest.mark.slow
def test_a_run_with_interrupted_thoughts(tmp_path: Path) -> None:
    settings = {"interruption": {"after": [12, 20], "answer_tokens": 24, "text": " Stop."}}
    run = small_config(tmp_path / "run", generator=settings, pipeline={"diversity": "none"})
    train(run, QuietScreen())
    rows = list(read_run(tmp_path / "run"))
    interrupted = [row for row in rows if INSERTED in row["versions"]]
    assert interrupted
    for row in interrupted:
        place = row["versions"].index(INSERTED)
        n = row["versions"].count(INSERTED)
        assert 12 <= place <= 20
        assert set(row["versions"][place : place + n]) == {INSERTED}
        assert 0 < len(row["versions"]) - place - n <= 24
        assert f" Stop.{CLOSING}" in row["text"]
    whole = [row for row in rows if INSERTED not in row["versions"]]
    assert all(CLOSING in row["text"] or row["finish_reason"] == "stop" for row in whole)
    for metrics in RunFolder(tmp_path / "run").metrics():
        assert metrics["interrupted_rate"] > 0
        assert "-2" not in metrics["staleness_histogram"]
