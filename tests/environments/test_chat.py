"""Tokens of conversations: what was sampled stays, under templates of every shape."""

from copy import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.environments.templates import SHAPES, tokenizer_of
from tests.environments.worlds import add
from tramontane.config import PromptConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.calls import Parsed
from tramontane.environments.chat import Chat
from tramontane.environments.chat_format import ChatFormat
from tramontane.environments.tools import schema_of
from tramontane.errors import InputError
from tramontane.types import ToolCall

TOOLS = [schema_of(add)]
CALL = ToolCall("add", {"a": 1, "b": 2}, "3")
# Whether a template rewrites history: (after a call, after the user's next message), for a message
# with thoughts.
REWRITES = {
    "qwen3": (False, True),
    "r1-distill": (True, True),
    "llama-3": (True, False),
    "mistral-v7": (True, False),
    "numbered": (True, True),
    "gpt-oss": (False, True),  # an answered message ends with another token
}


def chat_of(shape, tools=TOOLS, **config):
    form = ChatFormat(PromptEncoder(tokenizer_of(shape), PromptConfig(**config)))
    chat = Chat(form, tools)
    return form, chat, chat.start([{"role": "user", "content": "What is 1 + 2?"}])


def message(text, calls=(), thoughts=""):
    whole = f"<think>{thoughts}</think>{text}" if thoughts else text
    return Parsed(whole, thoughts, text, list(calls))


def user(text):
    return {"role": "user", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def ids(form, text):
    return form.encoder.tokenizer(text, add_special_tokens=False)["input_ids"]


def text_of(form, tokens):
    return form.encoder.tokenizer.decode(tokens)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_describes_the_tools_once(shape):
    form, _, prompt = chat_of(shape)
    assert text_of(form, prompt).count("Add two numbers.") == 1


def test_a_template_that_takes_tools_under_another_name_does_not_describe_them():
    template = (
        "{% if xml_tools %}<tools>{{ xml_tools }}</tools>{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>{% endfor %}"
    )
    tokenizer = tokenizer_of.__wrapped__("smollm2")
    tokenizer.chat_template = template
    form = ChatFormat(PromptEncoder(tokenizer))
    prompt = Chat(form, TOOLS).start([user("What is 1 + 2?")])
    assert text_of(form, prompt).count("Add two numbers.") == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a_turn_follows_as_the_template_writes_it(shape):
    """Where a template only appends, the tokens are those of the whole chat."""
    form, chat, prompt = chat_of(shape)
    end = form.encoder.tokenizer.eos_token
    answer = form.text_of(ids(form, f"It is 3.{end}"))
    assert answer == "It is 3."
    following = chat.follow(message("It is 3."), [user("And 3 + 4?")])
    if shape in ("numbered",):
        assert following.rewritten
        return
    sampled = ids(form, chat_prefix(chat, shape) + "It is 3.")
    eos = form.encoder.tokenizer.eos_token_id
    put = chat.tokens(following, eos)
    written = following.whole()
    if shape in ("r1-distill", "gpt-oss"):  # an opened turn; another token ends the last turn
        assert written[-len(put) :] == put
    else:
        assert not following.rewritten
        assert prompt + sampled + [eos] + put == written


def chat_prefix(chat, shape):
    return "<|channel|>final<|message|>" if shape == "gpt-oss" else ""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_template_that_rewrites_history_is_found_out(shape):
    expected = REWRITES.get(shape, (False, False))
    _, chat, _ = chat_of(shape)
    assert chat.follow(message("", [CALL], "Add them."), [tool("3")]).rewritten == expected[0]
    _, chat, _ = chat_of(shape)
    assert chat.follow(message("3", (), "Easy."), [user("And 3 + 4?")]).rewritten == expected[1]
    # Without thoughts there is nothing to drop, except the tag that the prompt opened.
    _, chat, _ = chat_of(shape)
    plain = chat.follow(message("3"), [user("And 3 + 4?")]).rewritten
    assert plain == (shape in ("numbered", "gpt-oss", "r1-distill"))


def test_what_is_rewritten_is_written_whole():
    form, chat, prompt = chat_of("qwen3")
    following = chat.follow(message("3", (), "Easy."), [user("And 3 + 4?")])
    assert following.rewritten
    text = text_of(form, following.whole())
    assert "Easy" not in text
    assert text.endswith(
        "<|im_start|>assistant\n3<|im_end|>\n<|im_start|>user\nAnd 3 + 4?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    # The new sequence is appended to like any other.
    again = chat.follow(message("", [CALL], "Now 7."), [tool("7")])
    assert not again.rewritten
    assert text_of(form, prompt).split("\n")[0] == text.split("\n")[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_two_answers_are_one_suffix(shape):
    """The suffix is what the template writes for both together, not for one after another; or the
    conversation is written anew, with one call a message."""
    form, chat, _ = chat_of(shape)
    eos = form.encoder.tokenizer.eos_token_id
    following = chat.follow(message("", [CALL, CALL]), [tool("3"), tool("30")])
    anew = shape == "gpt-oss"
    put = text_of(form, following.whole() if anew else chat.tokens(following, eos))
    assert following.rewritten or not anew
    assert put.count("3") >= 2 and put.index("3") < put.index("30")
    if shape == "smollm3":  # as messages of the user
        turns = "<|im_start|>user\n3<|im_end|>\n<|im_start|>user\n30<|im_end|>"
        assert put == f"\n{turns}\n<|im_start|>assistant\n"
    if shape in ("qwen2.5", "qwen3"):
        assert put == (
            "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n30\n"
            "</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
    if shape == "gemma-3":  # no tools: the user's message, since roles must alternate
        assert put.count("<start_of_turn>user") == 1
    if shape == "mistral-v7":
        first, second = "call00000", "call00001"
        assert put == (
            f"[TOOL_RESULTS]{first}[TOOL_CONTENT]3[/TOOL_RESULTS]"
            f"[TOOL_RESULTS]{second}[TOOL_CONTENT]30[/TOOL_RESULTS]"
        )


@pytest.mark.parametrize("shape", ["qwen2.5", "llama-3", "gemma-3", "base"])
def test_a_turn_without_its_end_gets_the_templates(shape):
    """A stop text ends a turn without an end token."""
    form, chat, prompt = chat_of(shape)
    following = chat.follow(message("3"), [user("More")])
    last = ids(form, "3")[-1]
    put = chat.tokens(following, last)
    assert put[0] == form.encoder.tokenizer.eos_token_id
    assert prompt + ids(form, "3") + put == following.whole()


def test_another_end_than_the_templates_stays():
    form, chat, _ = chat_of("llama-3")
    following = chat.follow(message("", [CALL]), [tool("3")])
    sampled = form.encoder.tokenizer.convert_tokens_to_ids("<|eom_id|>")
    put = text_of(form, chat.tokens(following, sampled))
    assert put.startswith("<|start_header_id|>ipython<|end_header_id|>\n\n")


def test_a_template_that_opens_the_thoughts_opens_each_turns():
    form, chat, _ = chat_of("qwen2.5", response_prefix="<think>")
    assert chat.prefix == "<think>"
    following = chat.follow(message("3", (), "Easy."), [user("More")])
    put = text_of(form, chat.tokens(following, form.encoder.tokenizer.eos_token_id))
    assert put.endswith("<|im_start|>assistant\n<think>")
    assert chat.prefix == "<think>"


PIECES = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            [
                "<|im_end|>", "<|im_start|>", "</s>", "<|eot_id|>", "</tool_response>",
                "<tool_call>", "<think>", "</think>", "[TOOL_RESULTS]", "[/INST]", "🙂", "👩‍🔬",
                "\ufdd0", "\ufdd1", " ", "\n", "<end_of_turn>", "<｜end▁of▁sentence｜>",
                "<|return|>", "é", "\x00",
            ]
        ),
    ),
    max_size=6,
).map("".join)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(
    shape=st.sampled_from([shape for shape in SHAPES if shape != "numbered"]),
    answers=st.lists(PIECES, min_size=1, max_size=3),
    said=PIECES,
)
def test_what_a_tool_answers_is_text(shape, answers, said):
    """Whatever a tool answers and the model writes, the tokens so far are followed by the
    template's own tokens and the text of the answer, which holds no control token."""
    form, chat, _ = chat_of(shape)
    tokenizer = form.encoder.tokenizer
    calls = [ToolCall("add", {"a": said}, answer) for answer in answers]
    plain = Chat(form, TOOLS)
    plain.start([user("What is 1 + 2?")])
    harmless = plain.follow(message("x", calls), [tool("") for _ in answers])
    following = chat.follow(message(said, calls), [tool(answer) for answer in answers])
    eos = tokenizer.eos_token_id
    put, frame = chat.tokens(following, eos), plain.tokens(harmless, eos)
    added = {*tokenizer.added_tokens_decoder}
    assert [t for t in put if t in added] == [t for t in frame if t in added]
    shown = tokenizer.decode(put)
    for answer in answers:
        clean = answer.replace("\ufdd0", "\ufffd").replace("\ufdd1", "\ufffd").strip()
        if shape not in ("llama-3", "gpt-oss"):  # these write JSON
            assert clean in shown


@settings(deadline=None, max_examples=40)
@given(shape=st.sampled_from(list(SHAPES)), token_ids=st.lists(st.integers(0, 499), max_size=12))
def test_the_text_of_any_tokens_can_be_followed(shape, token_ids):
    form, chat, prompt = chat_of(shape)
    eos = form.encoder.tokenizer.eos_token_id
    text = form.text_of([*token_ids, eos], prompt)
    following = chat.follow(message(text), [user("Go on")])
    assert "Go on" in text_of(form, chat.tokens(following, eos))


KEYED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}{{ '<tool_call>' + c.function | tojson + '</tool_call>' }}"
    "{% endfor %}{% endif %}BEHIND{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def keyed(template, shape="qwen3", **config):
    tokenizer = copy(tokenizer_of(shape))
    tokenizer.chat_template = template
    form = ChatFormat(PromptEncoder(tokenizer, PromptConfig(**config)))
    chat = Chat(form, TOOLS)
    return form, chat, chat.start([user("What is 1 + 2?")])


@pytest.mark.parametrize("calls", [[], [CALL]], ids=["answer", "call"])
def test_thoughts_are_put_into_the_key_that_the_template_reads(calls):
    form, chat, _ = keyed(KEYED.replace("BEHIND", ""))
    following = chat.follow(message("" if calls else "3", calls, "Add them."), [user("And 3?")])
    written = text_of(form, following.whole())
    assert written.count("<think>") == 1 and "<think>\nAdd them.\n</think>\n\n" in written
    assert not following.rewritten


def test_no_sign_is_put_in_where_a_template_moves_text_behind_the_calls():
    form, chat, _ = keyed(KEYED.replace("BEHIND", "{{ '|' }}"))
    following = chat.follow(message("Let me add.", [CALL], "Add them."), [tool("3")])
    put = text_of(form, chat.tokens(following, ids(form, "<|im_end|>")[0]))
    assert chat._nonce not in put and "3" in put
    assert following.rewritten and "Let me add." in text_of(form, following.whole())


@pytest.mark.parametrize("calls", [[], [CALL]], ids=["answer", "call"])
def test_thoughts_that_a_template_writes_behind_the_message_are_refused(calls):
    thoughts = "{% if m.reasoning_content %}{{ m.reasoning_content }}{% endif %}"
    template = KEYED.replace(KEYED[KEYED.index("{% if m.r") : KEYED.index("{% if m.t")], "")
    _, chat, _ = keyed(
        template.replace("BEHIND", "").replace("+ '<|im", f"}}}}{thoughts}{{{{ '<|im")
    )
    with pytest.raises(InputError, match="in two places"):
        chat.follow(message("3", calls, "Add them."), [user("And 3?")])


@pytest.mark.parametrize("calls", [[], [CALL]], ids=["answer", "call"])
def test_a_turn_that_a_template_refuses_is_refused_in_its_words(calls):
    refuses = "{% if messages | length > 2 %}{{ raise_exception('one turn alone') }}{% endif %}"
    _, chat, _ = keyed(refuses + KEYED.replace("BEHIND", ""))
    with pytest.raises(InputError, match="one turn alone"):
        chat.follow(message("3", calls), [user("And 3?")])


def test_an_emptied_pair_of_tags_is_not_appended():
    """The model wrote an empty pair, and the template leaves it out of earlier turns."""
    _, chat, _ = keyed(KEYED.replace("BEHIND", ""))
    empty = Parsed("<think>\n\n</think>\n\n3", "\n\n", "3", [])
    assert chat.follow(empty, [user("And 3?")]).rewritten


def test_one_clock_writes_all_prompts_of_a_conversation():
    template = "{{ strftime_now('%H:%M:%S.%f') }}" + KEYED.replace("BEHIND", "")
    form, chat, prompt = keyed(template)
    following = chat.follow(message("3"), [user("And 3?")])
    assert not following.rewritten
    assert following.whole()[: len(prompt)] == prompt
    dated = PromptEncoder(form.encoder.tokenizer, PromptConfig(date="2026-01-31"))
    assert dated.render("1?").startswith("00:00:00")
