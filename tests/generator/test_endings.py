"""Texts and tokens that end a completion, against a search in the whole text after every token."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from tests.data.chat_templates import make_tokenizer
from tests.generator.slot_models import finish, make_requests
from tramontane.config import GeneratorConfig
from tramontane.errors import InputError
from tramontane.generator import Generator
from tramontane.generator.endings import Detokenizer, StopTexts
from tramontane.generator.engine import SlotEngine
from tramontane.tokens import INSERTED, floats, ints
from tramontane.types import ResponseText

STOPS = ("\n\nT", "é!", "ab")


@cache
def tokenizer():
    return make_tokenizer("qwen2.5")


@cache
def stop_texts():
    return StopTexts(Detokenizer(tokenizer(), ResponseText()), STOPS, len(tokenizer()) + 3)


def relevant_tokens():
    """Tokens that build, split and interrupt the stop texts: single bytes, pieces, a special
    token."""
    ids = tokenizer().convert_tokens_to_ids
    single = tokenizer().backend_tokenizer.pre_tokenizer.pre_tokenize_str("\n\nTé!ab x")
    characters = {c for piece, _ in single for c in piece}
    pieces = tokenizer()("\n\nT ab about Two", add_special_tokens=False)["input_ids"]
    return sorted({ids(c) for c in characters} | {ids("<|im_end|>")} | set(pieces))


def first_stop(ids):
    """(number of tokens up to the first stop text, text before it), by brute force."""
    decode = Detokenizer(tokenizer(), ResponseText()).decode
    for n in range(1, len(ids) + 1):
        text = decode(ids[:n])
        if places := [text.find(stop) for stop in STOPS if stop in text]:
            return n, text[: min(places)]
    return None


@given(st.lists(st.sampled_from(range(40)), max_size=40))
@example(list(range(40)))
def test_a_stop_text_is_found_at_the_token_that_completes_it(places):
    tokens = relevant_tokens()
    ids = [tokens[place % len(tokens)] for place in places]
    stops = stop_texts()
    found = next(
        (
            n
            for n in range(1, len(ids) + 1)
            if stops.may_end[ids[n - 1]] and stops.found(ids[max(0, n - stops.tail) : n])
        ),
        None,
    )
    expected = first_stop(ids)
    assert found == (expected and expected[0])


def test_few_tokens_are_looked_at():
    """Most tokens cannot end a stop text, so that nothing is decoded after them."""
    tokens = len(tokenizer())
    assert 0 < int(stop_texts().may_end.sum()) < tokens / 2
    assert not stop_texts().may_end[tokens:].any()  # rows of the embedding without a token


def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer()) + 3,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.25,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def generated(stop=(), response=None, record=None):
    config = GeneratorConfig(stop=stop)
    generator = Generator(model(), tokenizer(), config, 16, 160, response or ResponseText())
    if record:
        made = generator._engine
        generator._engine = SlotEngine(
            generator.model, 16, 160, generator._endings.ids, record=record,
            stop_texts=generator._endings.texts,
        )  # fmt: skip
        assert type(made._decoder) is not type(generator._engine._decoder)
    generator.submit(make_requests(12, 2, seed=3, lengths=(2, 30), tokens=(40, 80)))
    return finish(generator)


@pytest.fixture(scope="module")
def unstopped():
    return generated()


def plain(step):
    step()
    return step


@pytest.mark.parametrize("record", [None, plain])
def test_completions_end_at_the_first_stop_text(unstopped, record):
    texts = [c.text for c in unstopped.values()]
    # Two characters that many texts have, so that many completions end early.
    pairs = {text[i : i + 2] for text in texts for i in range(len(text) - 1) if text.isascii()}
    common = sorted(pairs, key=lambda pair: -sum(pair in text for text in texts))[:2]
    stops = (*common, "e")
    decode = Detokenizer(tokenizer(), ResponseText()).decode
    ended = 0
    for key, c in generated(stops, record=record).items():
        free = unstopped[key]
        n = len(c.token_ids)
        assert c.token_ids == free.token_ids[:n]
        assert c.logprobs == pytest.approx(free.logprobs[:n], abs=1e-5)
        assert not any(stop in decode(c.token_ids[:-1]) for stop in stops)
        if any(stop in decode(c.token_ids) for stop in stops):
            ended += 1
            places = [p for s in stops if (p := free.text.find(s)) >= 0]
            assert (c.finish_reason, c.text) == ("stop", free.text[: min(places)])
        else:
            assert (c.finish_reason, c.text, n) == (
                free.finish_reason,
                free.text,
                len(free.token_ids),
            )
    assert ended > 10


@pytest.mark.parametrize("turn_start", [0, 7])  # of an interruption, of a conversation
def test_a_stop_text_in_what_was_put_in_does_not_end_what_follows(turn_start):
    put = tokenizer()("so ab\n\n", add_special_tokens=False)["input_ids"]
    ids, decode = [40, *put], Detokenizer(tokenizer(), ResponseText()).decode
    count = len(ids)
    stops = ("ab", "\n\n", " ab")

    def going_on(stop):
        generator = Generator(model(), tokenizer(), GeneratorConfig(stop=stop), 16, 160)
        requests = [
            replace(
                each,
                token_ids=ints(ids),
                logprobs=floats([0.0] * count),
                versions=ints([0] + [INSERTED] * len(put)),
                turn_start=min(turn_start, count),
                sampling=replace(each.sampling, max_tokens=count + 50),
            )
            for each in make_requests(8, 1, seed=3, lengths=(2, 30), tokens=(60, 61))
        ]
        generator.submit(requests)
        return finish(generator)

    stopped = going_on(stops)
    for key, free in going_on(()).items():
        sampled = free.token_ids[count:].tolist()
        first = (
            n for n in range(len(sampled)) if any(s in decode(sampled[: n + 1]) for s in stops)
        )
        n = next(first, len(sampled) - 1) + 1
        assert stopped[key].token_ids.tolist() == [*ids, *sampled[:n]]


def test_a_text_that_never_comes_changes_nothing(unstopped):
    rare = "\u07dc"  # no token but its own bytes may complete it
    assert not any(rare in c.text for c in unstopped.values())
    assert generated((rare,)) == unstopped


def test_tokens_end_a_completion_and_have_no_text(unstopped):
    ids = [i for c in unstopped.values() for i in c.token_ids]
    stop = max(set(ids), key=ids.count)
    special = tokenizer().convert_tokens_to_ids("<|im_start|>")
    done = generated((stop, "<|im_start|>"))
    ends = [c for c in done.values() if c.finish_reason == "stop"]
    assert len(ends) > 4
    for c in ends:
        assert c.token_ids[-1] in (stop, special, tokenizer().eos_token_id)
        assert not {stop, special} & set(c.token_ids[:-1])
        assert c.text == Detokenizer(tokenizer(), ResponseText()).decode(c.token_ids[:-1])


def test_the_prefix_is_not_searched_for_stop_texts(unstopped):
    done = generated(("zq",), ResponseText(prefix="zq: "))
    assert all(c.text.startswith("zq: ") for c in done.values())
    assert [c.token_ids for c in done.values() if c.finish_reason == "length"]


def test_a_stop_outside_the_vocabulary_is_refused():
    with pytest.raises(InputError, match=r"EOS or stop tokens \[99999\]"):
        Generator(model(), tokenizer(), GeneratorConfig(stop=(99999,)), 4, 40)
