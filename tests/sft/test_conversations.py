"""Recorded conversations as examples for supervised fine-tuning."""

import json

import pytest

from tests.environments.templates import tokenizer_of
from tests.environments.worlds import add
from tramontane.config.sft import ExamplesConfig, SFTConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.tools import schema_of
from tramontane.errors import InputError
from tramontane.models.loading import load_tokenizer
from tramontane.sft.examples import ExampleStream, rows_of

TOOLS = [schema_of(add)]
ASKED = {"role": "user", "content": "What is 1 + 2?"}
ADD = {"name": "add", "arguments": {"a": 1, "b": 2}}
OPENAI = {"type": "function", "function": ADD | {"arguments": json.dumps(ADD["arguments"])}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [OPENAI]}
ANSWERED = {"role": "tool", "content": "3"}
SAID = {"role": "assistant", "content": "It is 3."}


def examples_of(tokenizer, file, *rows, count=1):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(file)}
    config = SFTConfig.model_validate(
        {"output": "out", "model": "tiny", "data": data, "max_length": 4096}
    )
    stream = ExampleStream(config, PromptEncoder(tokenizer))
    return [stream.take(1)[0] for _ in range(count)]


def learned(tokenizer, example):
    """The texts that are learned, one for each message."""
    texts, start = [], 0
    for span in [*example.inserted, range(len(example.response), 0)]:
        texts.append(tokenizer.decode(example.response[start : span.start]))
        start = span.stop
    return texts


@pytest.mark.parametrize("shape", ["qwen2.5", "tiny"])
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_a_conversation_is_one_sequence_of_which_the_model_s_turns_are_learned(
    shape, tools, tmp_path
):
    tokenizer = load_tokenizer("tiny") if shape == "tiny" else tokenizer_of(shape)
    encoder = PromptEncoder(tokenizer)
    row = {"messages": [ASKED, CALLED, ANSWERED, SAID, ASKED], "tools": tools}
    [example] = examples_of(tokenizer, tmp_path / "chats.jsonl", row)
    call, said = learned(tokenizer, example)
    assert call.endswith(tokenizer.eos_token) and '"name": "add"' in call and "<tool_call>" in call
    assert said == f"It is 3.{tokenizer.eos_token}"
    put = tokenizer.decode([example.response[i] for i in example.inserted[0]])
    assert "3" in put and "It is" not in put
    assert example.prompt == encoder.encode_all([[ASKED]])[0] or "add" in tokenizer.decode(
        example.prompt
    )
    text = tokenizer.decode(example.prompt + example.response)
    if shape == "qwen2.5":  # the tokens are those of the whole chat
        chat = [ASKED, {**CALLED, "content": "", "tool_calls": [{"function": ADD}]}, ANSWERED, SAID]
        assert encoder.render(chat, tools=TOOLS).startswith(text)


def test_a_template_that_drops_thoughts_begins_another_sequence(tmp_path):
    tokenizer = tokenizer_of("qwen3")
    thought = {"role": "assistant", "content": "3", "reasoning_content": "\none and two\n"}
    row = {"messages": [ASKED, thought, ASKED, SAID]}
    found = examples_of(tokenizer, tmp_path / "chats.jsonl", row, count=2)
    first, second = sorted(found, key=lambda example: len(example.prompt))
    assert learned(tokenizer, first) == [
        f"<think>\none and two\n</think>\n\n3{tokenizer.eos_token}"
    ]
    emptied = f"<think>\n\n</think>\n\nIt is 3.{tokenizer.eos_token}"  # as the template writes it
    assert learned(tokenizer, second) == [emptied]
    assert "one and two" not in tokenizer.decode(second.prompt)


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([ASKED], r"chats\.jsonl:1: field 'messages' must be a chat"),
        ([SAID, ASKED], "must be a chat"),
        ([ASKED, {"role": "robot", "content": "x"}, SAID], "must be a chat with roles"),
        ([ASKED, SAID, SAID], "two messages of the assistant in a row"),
    ],
)
def test_rows_that_are_no_conversations_are_named(messages, fault, tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    with pytest.raises(InputError, match=fault):
        rows_of(ExamplesConfig(train=str(file)))


@pytest.mark.parametrize("tools", ["[{", '[{"name": "a", "name": "b"}]'])
def test_tools_that_cannot_be_read_are_named(tools, tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [ASKED, SAID], "tools": tools}))
    with pytest.raises(InputError, match=r"chats\.jsonl:1: the tools are text, but not JSON \("):
        rows_of(ExamplesConfig(train=str(file)))


GIVEN = [ASKED, {"role": "assistant", "content": "Is it 4?"}, ASKED]


@pytest.mark.parametrize("shape", ["qwen2.5", "tiny"])
@pytest.mark.parametrize("name", ["response", "completion"])
def test_of_the_chat_in_a_prompt_nothing_is_learned(shape, name, tmp_path):
    """TRL's conversational prompts and completions, with the loss on the completion alone."""
    tokenizer = load_tokenizer("tiny") if shape == "tiny" else tokenizer_of(shape)
    row = {"prompt": GIVEN, name: [CALLED, ANSWERED, SAID], "tools": TOOLS}
    [example] = examples_of(tokenizer, tmp_path / "chats.jsonl", row)
    prompt = tokenizer.decode(example.prompt)
    assert "Is it 4?" in prompt and "It is 3." not in prompt
    call, said = learned(tokenizer, example)
    assert '"name": "add"' in call and "It is 3." in said and "Is it 4?" not in call + said
    whole = {"messages": [*GIVEN, CALLED, ANSWERED, SAID], "tools": TOOLS}
    every = examples_of(tokenizer, tmp_path / "whole.jsonl", whole)[0]
    assert every.prompt + every.response == example.prompt + example.response


def test_a_completion_is_a_response(tmp_path):
    tokenizer = load_tokenizer("tiny")
    texts = {"prompt": "1 + 2?", "completion": "It is 3."}
    chats = {"prompt": [{"role": "user", "content": "1 + 2?"}], "completion": [SAID]}
    [by_text] = examples_of(tokenizer, tmp_path / "texts.jsonl", texts)
    [by_chat] = examples_of(tokenizer, tmp_path / "chats.jsonl", chats)
    assert by_text == by_chat
    named = examples_of(tokenizer, tmp_path / "both.jsonl", texts | {"response": "No."})[0]
    assert "No." in tokenizer.decode(named.response)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": GIVEN, "completion": "It is 3."}, "no chat in field 'completion'"),
        ({"prompt": "1 + 2?", "completion": [SAID]}, "no chat in field 'prompt', and none in"),
        ({"prompt": GIVEN, "completion": [ASKED]}, "prompt and response must be a chat"),
        ({"prompt": [*GIVEN, SAID], "completion": [SAID]}, "two messages of the assistant"),
    ],
)
def test_prompts_and_responses_of_other_forms_are_named(row, fault, tmp_path):
    file = tmp_path / "chats.jsonl"
    rows = [{"prompt": GIVEN, "completion": [SAID]}, row]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=rf"chats\.jsonl:2: .*{fault}"):
        rows_of(ExamplesConfig(train=str(file)))
