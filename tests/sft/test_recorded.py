"""What of a recorded conversation is learned, to the token, and what is put in as text."""

import json
from copy import copy
from functools import partial

import pytest
from tokenizers.processors import TemplateProcessing

from tests.environments.templates import tokenizer_of
from tests.environments.test_chat import KEYED
from tests.environments.test_chat_messages import PLAIN, WHOLE
from tests.environments.test_template_checks import MARKED
from tests.environments.test_template_checks import encoder_of as own_encoder
from tests.environments.worlds import add
from tramontane.config import PromptConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.recorded import Conversation, ConversationEncoder
from tramontane.environments.tools import schema_of
from tramontane.errors import InputError
from tramontane.sft.examples import continuation

TOOLS = [schema_of(add)]
ASKED, SAID = {"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "3."}
ADD = {"name": "add", "arguments": {"a": 1, "b": 2}}


def encoder_of(template, shape="qwen3", **config):
    tokenizer = copy(tokenizer_of(shape))
    if template is not None:
        tokenizer.chat_template = template
    return PromptEncoder(tokenizer, PromptConfig(**config))


def examples_of(encoder, *messages, tools=(), given=0):
    prefix = encoder.config.response_prefix
    rest = {"row 1": partial(continuation, prefix=prefix)}
    made = ConversationEncoder(encoder, lambda where, text: rest[where](text))
    conversation = Conversation.of([*messages], tools, "row 1", given)
    return [*made.examples(conversation, "row 1")]


def parts_of(encoder, example):
    """The texts of the prompt and of the parts of the response, whether each is learned."""
    parts, decode = [(encoder.decode(example.prompt), False)], encoder.decode
    start = 0
    for span in [*example.inserted, range(len(example.response), 0)]:
        parts += [(decode(example.response[start : span.start]), True)]
        parts += [(decode(example.response[span.start : span.stop]), False)]
        start = span.stop
    return [part for part in parts if part[0]]


def said(content="", *calls, **thoughts):
    return {"role": "assistant", "content": content, "tool_calls": [*calls], **thoughts}


def told(content):
    return {"role": "tool", "content": content}


def test_answers_have_the_names_and_ids_of_the_calls_before_them():
    encoder = encoder_of(WHOLE)
    calls = [{"id": "mine12345", "function": ADD}, {"id": "call_1", "function": {"name": "f"}}]
    calls[1]["function"]["arguments"] = '{"x": ["y"]}'
    messages = [
        ASKED, said("Hm.", *calls), told("3"), told("30"), told(None), ASKED,
        said("", {"name": "g"}), told("4"), SAID, told("late"), SAID, ASKED,
    ]  # fmt: skip
    [example] = examples_of(encoder, *messages)
    start = "<|im_start|>"
    first, *parts = parts_of(encoder, example)
    assert first[0].endswith(f"{start}user\n1 + 2?<|im_end|>\n{start}assistant\n")
    assert parts == [
        (
            'Hm.<tool_call>mine12345 add {"a": 1, "b": 2}</tool_call><tool_call>call00001 f '
            '{"x": ["y"]}</tool_call><|im_end|>',
            True,
        ),
        (
            f"\n{start}tool add mine12345\n3<|im_end|>\n{start}tool f call00001\n30<|im_end|>\n"
            f"{start}tool environment call00000\n<|im_end|>\n"
            f"{start}user\n1 + 2?<|im_end|>\n{start}assistant\n",
            False,
        ),
        ("<tool_call>call00000 g {}</tool_call><|im_end|>", True),
        (f"\n{start}tool g call00000\n4<|im_end|>\n{start}assistant\n", False),
        ("3.<|im_end|>", True),
        (f"\n{start}tool environment call00000\nlate<|im_end|>\n{start}assistant\n", False),
        ("3.<|im_end|>", True),
    ]


def test_special_tokens_of_messages_that_are_not_the_models_are_text():
    encoder = encoder_of(PLAIN)
    held = "<|im_end|><tool_call>"
    messages = [{"role": "user", "content": held}, SAID, told(held), SAID]
    [example] = examples_of(encoder, *messages)
    ids = [*example.prompt, *example.response]
    count = {
        token: ids.count(encoder.tokenizer.convert_tokens_to_ids(token))
        for token in ("<|im_start|>", "<|im_end|>", "<tool_call>")
    }
    assert encoder.decode(ids).count(held) == 2
    assert count["<|im_end|>"] == count["<|im_start|>"] and count["<tool_call>"] == 1


def test_thoughts_are_written_where_the_template_reads_them():
    plain, keyed = encoder_of(PLAIN), encoder_of(KEYED.replace("BEHIND", ""))
    channels = encoder_of(None, "gpt-oss")
    for key in ("reasoning_content", "thinking", "reasoning"):
        message = said("3.", **({"reasoning": "", "thinking": None} | {key: "So."}))
        [example] = examples_of(plain, ASKED, message)
        assert plain.decode(example.response) == "<think>So.</think>3.<|im_end|>"
        [example] = examples_of(keyed, ASKED, message)
        assert keyed.decode(example.response) == "<think>\nSo.\n</think>\n\n3.<|im_end|>"
        for dropping in (channels, encoder_of(None, "r1-distill")):
            with pytest.raises(InputError, match="row 1: .* does not write a message's thoughts;"):
                examples_of(dropping, ASKED, message)
            assert len(examples_of(dropping, ASKED, SAID)) == 1


def test_calls_are_text_where_the_template_writes_none():
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    encoder = encoder_of(PLAIN)
    for content, text in (("", call), ("Hm.", f"Hm.\n{call}")):
        [example] = examples_of(encoder, ASKED, said(content, ADD), tools=TOOLS)
        assert encoder.decode(example.response) == f"{text}<|im_end|>"
    listed = f"{{{{ '<|tool_list_start|>' + tools | tojson if tools }}}}{PLAIN}"
    [example] = examples_of(encoder_of(listed), ASKED, said("", ADD), tools=TOOLS)
    [bare] = examples_of(encoder_of(listed), ASKED, SAID, tools=TOOLS)
    assert encoder.decode(bare.response) == "3.<|im_end|>"
    written = "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|><|im_end|>"
    assert encoder.decode(example.response) == written
    shown = f"{{{{ 'Write <tool_call>' + tools | tojson if tools }}}}{PLAIN}"
    [example] = examples_of(encoder_of(shown), ASKED, said("", ADD), tools=TOOLS)
    assert encoder.decode(example.response) == f"{call}<|im_end|>"
    shown = f"{{{{ '<tool_call><function=' + tools | tojson if tools }}}}{PLAIN}"
    with pytest.raises(InputError, match="does not write a message's call of add;"):
        examples_of(encoder_of(shown), ASKED, said("", ADD), tools=TOOLS)
    own = f"{{{{ tools | tojson if tools }}}}{PLAIN}"  # which does not say how calls are written
    with pytest.raises(InputError, match="does not write a message's call of add;"):
        examples_of(encoder_of(own), ASKED, said("", ADD), tools=TOOLS)


def test_without_a_template_the_rest_of_each_text_is_learned():
    encoder = encoder_of(None, "base", response_prefix="3")
    [example] = examples_of(encoder, ASKED, SAID, ASKED, SAID, tools=TOOLS)
    end = encoder.tokenizer.eos_token
    (prompt, _), *parts = parts_of(encoder, example)
    assert "Add two numbers." in prompt and prompt.endswith("1 + 2?\n\n3")
    assert parts == [(f".{end}", True), ("\n\n1 + 2?\n\n3", False), (f".{end}", True)]
    [spaced] = examples_of(encoder, ASKED, said(" 3."))
    assert encoder.decode(spaced.response) == f".{end}"


def test_a_message_may_begin_as_its_prompt_ends():
    opened = PLAIN.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    for template, prefix, text in (
        (PLAIN, "3", "3."),
        (PLAIN, "<think>\nSo: ", "<think>\nSo: 3.</think>3."),
        (opened, "So: ", "<think>\nSo: 3.</think>3."),
    ):
        encoder = encoder_of(template, response_prefix=prefix)
        [example] = examples_of(encoder, ASKED, said(text))
        assert encoder.decode(example.prompt + example.response).endswith(f"\n{text}<|im_end|>")
        assert prefix not in encoder.decode(example.response)


def test_a_prompt_that_changes_once_it_is_answered_is_refused():
    with pytest.raises(InputError, match="row 1: the chat template writes a prompt differently"):
        examples_of(encoder_of(None, "numbered"), ASKED, SAID)


@pytest.mark.parametrize("tools", ["", " \n", None, "[]", ()])
def test_no_tools_are_none(tools):
    assert Conversation.of([ASKED, SAID], tools, "row 1").tools == []


def test_a_conversation_is_checked_and_cut_behind_its_last_reply():
    system = {"role": "system", "content": "Add."}
    chat = [system, ASKED, SAID, told("x"), SAID]
    assert Conversation.of([*chat, told("x"), ASKED], TOOLS, "row 1", 2) == (chat, TOOLS, 2)
    assert Conversation.of(chat, None, "row 1") == Conversation(chat, []) == (chat, [], 0)
    assert Conversation.of([SAID, ASKED, SAID], "[]", "row 1").messages == [SAID, ASKED, SAID]
    for messages, given in (
        ([SAID, ASKED], 0),
        (["Hi", SAID], 0),
        ([ASKED, {"content": "3"}, SAID], 0),
        ([ASKED, SAID, ASKED], 2),
    ):
        with pytest.raises(InputError, match="row 1: field.* must be a chat with roles system, "):
            Conversation.of(messages, [], "row 1", given)


def test_of_the_given_messages_none_is_learned():
    encoder = encoder_of(PLAIN)
    messages = [ASKED, SAID, ASKED, SAID, ASKED, SAID]
    for given, learned in ((0, 3), (1, 3), (2, 2), (3, 2), (5, 1)):
        [example] = examples_of(encoder, *messages, given=given)
        parts = parts_of(encoder, example)
        assert [text for text, is_learned in parts if is_learned] == ["3.<|im_end|>"] * learned
        assert parts[0][0].count("3.") == 3 - learned


def test_arguments_in_a_form_that_is_not_json_are_an_error():
    with pytest.raises(json.JSONDecodeError):
        examples_of(encoder_of(WHOLE), ASKED, said("", {"name": "f", "arguments": "{"}))


def test_only_the_prompt_begins_with_the_tokenizers_first_token():
    tokenizer = tokenizer_of.__wrapped__("base")
    first = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{first[0]} $A", None, [first])
    [example] = examples_of(PromptEncoder(tokenizer), ASKED, SAID, ASKED, SAID)
    assert example.prompt[0] == first[1] and first[1] not in example.prompt[1:] + example.response


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("last", ["1 + 2?", "3."])
def test_a_row_that_the_template_refuses_is_named(template, last):
    condition = f"messages[-1].content == '{last}'"
    refuses = f"{{% if {condition} %}}{{{{ raise_exception('no sums') }}}}{{% endif %}}"
    with pytest.raises(InputError, match="row 1: .*no sums"):
        examples_of(encoder_of(refuses + template), ASKED, SAID)


def test_calls_end_as_the_generation_config_says(tmp_path):
    encoder = own_encoder("unended", tmp_path)
    [example] = examples_of(encoder, ASKED, said("", ADD), told("3"), SAID, tools=TOOLS)
    learned = [text for text, is_learned in parts_of(encoder, example) if is_learned]
    assert learned[0].endswith("</tool_call><|observation|>") and learned[1] == "3.<|user|>"


def test_what_a_template_leaves_out_is_named():
    silent = encoder_of(PLAIN.replace("m.content", "(m.content if m.role != 'assistant' else '')"))
    with pytest.raises(InputError, match="row 1: .* does not write a message's content;"):
        examples_of(silent, ASKED, SAID)
    alone = WHOLE.replace("m.tool_calls or []", "m.tool_calls if not m.content")
    encoder = encoder_of(alone)  # which does not describe tools, so that calls are text
    [example] = examples_of(encoder, ASKED, said("I add.", ADD))
    assert encoder.decode(example.response).startswith('I add.\n<tool_call>{"name": "add"')
    alone = alone.replace("tool_call>", "call>")
    encoder = encoder_of(f"{{{{ tools | tojson if tools }}}}{alone}")
    with pytest.raises(InputError, match="row 1: .* does not write a message's call of add;"):
        examples_of(encoder, ASKED, said("I add.", ADD), tools=TOOLS)
    assert len(examples_of(encoder, ASKED, said("", ADD), tools=TOOLS)) == 1
    first = WHOLE.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    with pytest.raises(InputError, match="row 1: .* does not write a message's call of add;"):
        examples_of(encoder_of(first), ASKED, said("I add.", ADD, ADD))
    [example] = examples_of(encoder_of(WHOLE), ASKED, said("add", ADD))
    assert encoder.decode(example.response).startswith("add<tool_call>call00000 add")


def test_a_template_that_begins_a_response_behind_every_chat_is_refused():
    always = PLAIN.replace("{% if add_generation_prompt %}", "{% if True %}")
    with pytest.raises(InputError, match="begins a response behind every chat"):
        examples_of(encoder_of(always), ASKED, SAID)


def test_calls_may_need_that_there_is_no_content():
    """Transformers leaves out what is null."""
    bare = "(m.tool_calls if m.content is not defined)"
    template = WHOLE.replace("m.tool_calls or []", bare).replace(
        "m.content }}", "(m.content or '') }}"
    )
    encoder = encoder_of(template)
    [example] = examples_of(encoder, ASKED, said("", ADD), told("3"), said("add"))
    called, answered = (text for text, learned in parts_of(encoder, example) if learned)
    assert called == '<tool_call>call00000 add {"a": 1, "b": 2}</tool_call><|im_end|>'
    assert answered == "add<|im_end|>"


def test_parts_that_follow_at_once_are_one():
    encoder = encoder_of(
        MARKED.replace(
            "m.content }}<|im_e", "m.content }}{% endgeneration %}{% generation %}<|im_e"
        )
    )
    [example] = examples_of(encoder, ASKED, SAID)
    assert encoder.decode(example.response).endswith("3.<|im_end|>")
    assert all(example.inserted)
