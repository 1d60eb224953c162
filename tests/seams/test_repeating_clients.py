"""Clients that give up on a request, and send it again."""

import asyncio
from dataclasses import replace

import pytest

pytest.importorskip("fastapi", reason="not installed: pip install 'tramontane-rl[view]'")

from tests.environments import harnesses
from tests.environments.templates import tokenizer_of
from tests.environments.test_harness import play, played, problem, worker_of
from tramontane.environments import harness

UNREAD = 4 * harnesses.GIVES_UP  # after the repetition


READ = [UNREAD, "One.", UNREAD, "Read."]


def together(*plays):
    """Conversations side by side, which wait for most of their time."""

    async def run():
        return await asyncio.gather(*plays)

    return asyncio.run(run())


def test_what_a_harness_gave_up_leaves_no_turn_and_no_token():
    said = [0.6, "Unread.", "One.", 0.6, "Unread, too.", "Read."]
    forked, kept = (
        [play(worker_of("GivesUp", history=history), *each) for each in (said, READ)]
        for history in ("fork", "keep")
    )
    found = together(*forked, *kept)
    for (answer, whole, prompts), (plain, same, _) in (found[:2], found[2:]):
        assert answer.ending == "completed" and answer.turn.reward == 1.0
        assert [turn.text for turn in whole.turns] == ["One.", "Read."] and not whole.earlier
        assert [m["content"] for m in whole.turns[0].messages] == ["Two?"]
        assert prompts[0] == prompts[1]
        assert plain.ending == "completed"
        assert (same.prompt_ids, same.token_ids) == (whole.prompt_ids, whole.token_ids)
        assert (same.logprobs, same.versions) == (whole.logprobs, whole.versions)


def test_another_request_in_place_of_one_given_up_follows_what_was_read():
    given = replace(problem(**{"else": ["Uno?", "Due?"]}), effort="low")
    said = [0.6, "Unread.", "One.", 0.6, "Unread, too.", "Read."]
    thought = [0.6, "Unread.", "<think>So.</think>One.", *said[3:]]
    (answer, whole, prompts), (_, anew, _) = together(
        play(worker_of("GivesUp"), *said, given=given),
        play(worker_of("GivesUp", "qwen3"), *thought, given=given),
    )
    assert answer.ending == "completed" and answer.turn.reward == 1.0
    assert [turn.text for turn in whole.turns] == ["One.", "Read."] and not whole.earlier
    assert [m["content"] for m in whole.turns[0].messages] == ["Due?"]
    decode = tokenizer_of("qwen2.5").decode
    assert prompts[0] != prompts[1] == whole.prompt_ids and "Uno?" in decode(whole.prompt_ids)
    assert "Two?" not in decode(whole.token_ids)
    assert all("Be brief." in decode(prompt) for prompt in prompts)
    # Where the template writes the chat anew without thoughts, each message is there once.
    assert len(anew.earlier) == 1 and anew.turns[-1].text == "Read."
    prompt = tokenizer_of("qwen3").decode(anew.prompt_ids)
    assert [prompt.count(part) for part in ("Uno?", "One.", "Due?", "So.")] == [1, 1, 1, 0]


def test_the_same_request_under_way_gets_the_same_answer():
    (answer, once, _), (_, whole, _) = together(
        play(worker_of("Repeats"), 1.0, "Once."), play(worker_of("GivesUp"), *READ)
    )
    assert answer.ending == "completed" and answer.turn.reward == 1.0
    assert [turn.text for turn in once.turns] == ["Once."]
    assert [turn.text for turn in whole.turns] == ["One.", "Read."]


def test_a_harness_that_gives_up_everything_is_blamed(monkeypatch):
    monkeypatch.setattr(harness, "MAX_WITHDRAWN", 3)
    said = [harnesses.GIVES_UP / 2, "Unread."] * 9
    answer, *_ = played(worker_of("Impatient"), *said)
    assert answer.ending == "environment_failed" and "time limit of its client" in answer.reason
