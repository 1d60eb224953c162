"""How a template takes conversations: ends of turns, tools' answers, and texts of tokens."""

import pytest

from tests.data.chat_templates import build_tokenizer
from tests.environments.templates import _CHATML, _HARMONY, GPT_OSS, QWEN25, SHAPES, tokenizer_of
from tramontane.config import EffortConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.calls import Parsed
from tramontane.environments.chat import Chat
from tramontane.environments.chat_format import ChatFormat

LAST = "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
USER = {"role": "user", "content": "Go on."}
ANSWER = {"role": "tool", "content": "3"}
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<turn|>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>",
    "<|END_OF_TURN_TOKEN|>",
)  # fmt: skip


def form_of(shape):
    return ChatFormat(PromptEncoder(tokenizer_of(shape)))


def ids(form, text):
    return form.encoder.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_turn_ends_once_also_with_another_token_than_the_templates():
    """With EOS, where a template of any family writes the end of turns that it trained."""
    tokenizer = build_tokenizer(None, (*_CHATML, *ENDS[1:], "<eos>"))
    for end in ENDS:
        tokenizer.chat_template = QWEN25.replace("<|im_end|>", end)
        form = ChatFormat(PromptEncoder(tokenizer))
        chat = Chat(form)
        chat.start([USER])
        following = chat.follow(Parsed("3", "", "3", []), [USER])
        put = chat.tokens(following, tokenizer.eos_token_id)
        turn = f"\n<|im_start|>user\nGo on.{end}\n<|im_start|>assistant\n"
        assert form.turn_end == end and put == ids(form, turn)


def test_the_text_of_a_turn_has_all_tokens_but_one_that_ends_it():
    form = form_of("mistral-v13")  # its tags are special tokens
    for text in ("[THINK]I add.[/THINK]", "3", ""):
        assert form.text_of(ids(form, text)) == form.text_of(ids(form, f"{text}</s>")) == text
    cut = "<tool_call>{}</tool_call>"
    assert form_of("qwen2.5").text_of(ids(form_of("qwen2.5"), cut)) == cut
    form = ChatFormat(PromptEncoder(build_tokenizer(None, (), ("<|end|>",), "<|end|>")))
    assert form.text_of(ids(form, "3<|end|>")) == "3"  # EOS is none of the special tokens


def test_the_text_of_a_turn_keeps_its_spaces():
    tokenizer = build_tokenizer(None, (), (" .",), "</s>")
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    form = ChatFormat(PromptEncoder(tokenizer))
    assert tokenizer.decode(ids(form, "Hm , so")) == "Hm, so"
    assert form.text_of(ids(form, "Hm , so")) == "Hm , so"
    assert form.text_of(ids(form, "Hm"), ids(form, "So .")) == "Hm"


def test_levels_of_effort_keep_what_was_sampled_where_the_model_does():
    levels = {"low": EffortConfig(phrase="Be brief.")}
    form = ChatFormat(PromptEncoder(tokenizer_of("qwen2.5"), efforts=levels), "keep")
    assert form.at(None) is form and form.at("low").history == "keep"
    assert "Be brief." in form.at("low").encoder.render([USER])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_message_is_closed_as_the_template_ends_it(shape):
    """Whether a prompt follows or not, and whatever follows calls."""
    form = form_of(shape)
    form.check_ends()
    chat = [USER, {"role": "assistant", "content": "It is 3."}]
    text = form.encoder.complete(chat).rpartition("It is 3.")[2]
    assert form.closed(f"3{text}") == f"3{form.turn_end}"
    assert form.turn_end in form.ends and form.closed("3 \n") == f"3{form.turn_end}"
    if form.reads_calls:
        called = form.encoder.complete([USER, form.calling("", [("add", {"a": 1})], ["call00000"])])
        assert form.closed(called, called=True) == called.rstrip()


def test_what_a_template_writes_behind_the_last_message_alone_is_no_end():
    tokenizer = build_tokenizer(QWEN25 + LAST, (*_CHATML, "<|endoftext|>"), (), "<|im_end|>")
    form = ChatFormat(PromptEncoder(tokenizer))
    assert form.turn_end == "<|im_end|>" and not form.ends_anew
    assert form.closed("3<|im_end|>\n<|endoftext|>") == "3<|im_end|>"


def test_a_template_with_channels_has_no_place_for_thoughts_but_a_key():
    tokenizer = build_tokenizer(GPT_OSS, (*_HARMONY, "<|endoftext|>"))
    form = ChatFormat(PromptEncoder(tokenizer))
    assert form.reads_thoughts and form.turn_end == "<|return|>" and form.ends_anew
    tokenizer.chat_template = GPT_OSS.replace("m.thinking or m.content", "m.content")
    form = ChatFormat(PromptEncoder(tokenizer))
    assert form.drops_thoughts and not form.reads_thoughts


@pytest.mark.parametrize("shape", ["base", "gemma-3", "smollm2"])
def test_tools_answer_as_the_user_where_a_template_does_not_take_their_role(shape):
    form, told = form_of(shape), "<tool_response>\n3\n</tool_response>"
    assert form.tool_role == (shape == "smollm2")
    taken = form.as_taken([ANSWER, USER])
    if form.tool_role:
        assert taken == [ANSWER, USER]
    else:
        assert taken == [{"role": "user", "content": f"{told}\nGo on."}]
    others = [{"role": "system", "content": "Be brief."}, USER]
    assert form.as_taken(others) == others


def test_a_template_may_look_for_the_call_of_an_answer():
    own = "messages[loop.index0 - 1].tool_calls[0].id"
    found = f"(m.content if m.tool_call_id == {own} else '') + '\n</tool_response>'"
    tokenizer = tokenizer_of.__wrapped__("qwen2.5")
    tokenizer.chat_template = QWEN25.replace("m.content + '\n</tool_response>'", found)
    assert found in tokenizer.chat_template and ChatFormat(PromptEncoder(tokenizer)).tool_role
