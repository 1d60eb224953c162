"""Thinking tokens are counted from token ids, however the tags are spelt."""

import pytest
from transformers import PreTrainedTokenizerBase

from tramontane.data.tokenizer import train_tokenizer
from tramontane.evaluation.thinking import ThinkingCounter
from tramontane.types import PAPER_TAGS, Completion, ResponseText, ThinkingTags

TEXTS = ["What is 1 + 1? so it is > a and < b [a]", "</answer> [/b] ◁c▷"] * 20
# A pair of single tokens, and pairs that the vocabulary spells by several.
PAIRS = [PAPER_TAGS, ThinkingTags("[THINK]", "[/THINK]"), ThinkingTags("◁think▷", "◁/think▷")]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(TEXTS, 420)


def count(
    tokenizer: PreTrainedTokenizerBase, parts: list[str], tags: ThinkingTags, prefix: str = ""
) -> int:
    """The count for parts that are tokenized one by one, as sampled tokens may be."""
    ids = [i for part in parts for i in tokenizer(part, add_special_tokens=False)["input_ids"]]
    zeros = [0] * len(ids)
    completion = Completion(0, 0, [1], ids, zeros, zeros, "stop")
    return ThinkingCounter(tokenizer, ResponseText(tags, prefix)).count(completion)


@pytest.mark.parametrize("tags", PAIRS)
@pytest.mark.parametrize(
    ("parts", "thoughts"),
    [
        ("O;so it is > a;C; 1;</s>", "so it is > a"),
        ("so it is < b;C; 1;</s>", "so it is < b"),  # the prompt ended with the opening tag
        ("O;so it is;</s>", "so it is"),
        ("O;so it is", "so it is"),  # cut off
        (" 1;O;a;C; and; 2;C; 3", "a"),
        ("so it is [a];</s>", None),
        ("O;C; 1", ""),
        ("O", ""),
        ("", None),
    ],
)
def test_tokens_between_the_tags(
    tokenizer: PreTrainedTokenizerBase, tags: ThinkingTags, parts: str, thoughts: str | None
) -> None:
    named = {"O": tags.opening, "C": tags.closing}
    found = count(tokenizer, [named.get(part, part) for part in parts.split(";")], tags)
    assert found == len(tokenizer(thoughts or "", add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("spelling", [["</", "think", ">"], ["<", "/", "t", "h", "ink", ">"]])
def test_a_tag_may_be_spelt_although_it_is_a_token(
    tokenizer: PreTrainedTokenizerBase, spelling: list[str]
) -> None:
    assert count(tokenizer, ["<think>", "so", *spelling, " 1"], PAPER_TAGS) == len(
        tokenizer("so", add_special_tokens=False)["input_ids"]
    )


def test_a_token_that_joins_a_tag_with_its_neighbor_is_no_thought(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tags = ThinkingTags("{", "}")
    pieces = ["{", "so", "}.", " 1"]
    assert count(tokenizer, pieces, tags) == len(tokenizer("so")["input_ids"])


def test_a_model_may_have_more_tokens_than_its_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    opening, closing = (tokenizer(tag)["input_ids"] for tag in PAPER_TAGS)
    ids = [5_000, *opening, 7, 5_000, *closing, 99_326]
    completion = Completion(0, 0, [1], ids, [0] * len(ids), [0] * len(ids), "length")
    assert ThinkingCounter(tokenizer, ResponseText(PAPER_TAGS, "")).count(completion) == 2


@pytest.mark.parametrize(
    ("prefix", "parts", "thoughts"),
    [
        ("<think>\n", ["so it is"], "so it is"),  # opened by the prompt, and cut off
        ("<think>\n", ["so it is", "</think>", " 1"], "so it is"),
        ("<think>\n\n</think>\n\n", ["so it is"], ""),  # thinking is switched off
        ("Well. ", ["so it is"], ""),
    ],
)
def test_the_beginning_of_the_response_opens_or_ends_the_thoughts(
    tokenizer: PreTrainedTokenizerBase, prefix: str, parts: list[str], thoughts: str
) -> None:
    expected = len(tokenizer(thoughts, add_special_tokens=False)["input_ids"])
    assert count(tokenizer, parts, PAPER_TAGS, prefix) == expected
