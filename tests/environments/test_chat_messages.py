"""Messages of a conversation as chat templates write them: which are text, which are refused, and
what ends a turn."""

import pytest

from tests.data.chat_templates import build_tokenizer
from tests.environments.templates import tokenizer_of
from tests.environments.test_chat import (
    CALL,
    KEYED,
    TOOLS,
    chat_of,
    keyed,
    message,
    text_of,
    tool,
    user,
)
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.calls import Parsed
from tramontane.environments.chat import Chat, Following
from tramontane.environments.chat_format import ChatFormat
from tramontane.errors import InputError
from tramontane.types import ToolCall


def test_a_turn_ends_at_the_first_of_the_ends_before_the_new_messages():
    text = "x</s>y<eot>z</s>New<eom>"
    for in_call in (False, True):
        following = Following(text, text.index("New"), in_call, False, list)
        behind = {end: following.behind([end, "<eom>"]) for end in ("</s>", "<eot>", "<eos>")}
        assert behind["<eot>"] == ("<eot>" if in_call else "x</s>y<eot>", "z</s>New<eom>")
        assert behind["</s>"] == ("</s>" if in_call else "x</s>", "y<eot>z</s>New<eom>")
        assert following.behind(["<eot>", "</s>"]) == behind["</s>"]
        assert behind["<eos>"] == ("", text)
    late = Following("x<eot></s>", 10, False, False, list)
    assert late.behind(["</s>", "<eot>"]) == ("x<eot>", "</s>")


# Writes all that it is given.
WHOLE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if m.name or m.tool_call_id %}"
    "{{ ' ' + m.name + ' ' + m.tool_call_id }}{% endif %}{{ '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.id + ' ' + c.function.name + ' ' "
    "+ c.function.arguments | tojson + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_answers_have_the_names_and_ids_of_their_calls():
    form, chat, prompt = keyed(WHOLE)
    calls = [CALL, ToolCall("", {}, "", id="mine12345")]
    new, wanted = [tool("3"), tool("30"), tool("more"), user("Go on")], text_of(form, prompt)
    for turn in range(3):
        following = chat.follow(message("Hm.", calls), new)
        put = (
            f"\n<|im_start|>tool add call00{turn}00\n3<|im_end|>\n"
            "<|im_start|>tool invalid mine12345\n30<|im_end|>\n"
            f"<|im_start|>tool environment call00{turn}02\nmore<|im_end|>\n"
            "<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"
        )
        wanted += f'Hm.<tool_call>call00{turn}00 add {{"a": 1, "b": 2}}</tool_call><tool_call>'
        wanted += f"mine12345 invalid {{}}</tool_call><|im_end|>{put}"
        assert text_of(form, following.whole()) == wanted and not following.rewritten
        assert text_of(form, chat.tokens(following, form.encoder.tokenizer.eos_token_id)) == put


def test_special_tokens_in_arguments_are_text():
    form, chat, _ = keyed(WHOLE)
    arguments = {"a": "<|im_end|>", "b": [{"c": "<|im_end|>"}, 1, None]}
    whole = chat.follow(message("", [ToolCall("add", arguments, "")]), [tool("3")]).whole()
    held = '{"a": "<|im_end|>", "b": [{"c": "<|im_end|>"}, 1, null]}'
    assert held in text_of(form, whole)
    start, end = form.encoder.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert whole.count(end) == whole.count(start) - 1


def test_a_copy_goes_on_by_itself():
    _, chat, _ = chat_of("qwen2.5")
    other = chat.copy()
    one = chat.follow(message("3"), [user("More")])
    two = other.follow(message("4"), [user("Less")])
    for said, new, following in (("3", "More", one), ("4", "Less", two)):
        assert following.whole() == chat_of("qwen2.5")[1].follow(message(said), [user(new)]).whole()


def test_calls_are_messages_where_a_template_writes_one_a_message():
    calls = [ToolCall("add", {"a": n}, "") for n in range(3)]
    said = Parsed("Hm.", "So.", "Hm.", calls)
    new = [tool("0"), tool("1"), tool("2"), user("Go on")]
    one = chat_of("llama-3")[1].parts
    assert [*one(said, new)] == [
        (said._replace(calls=calls[:1]), new[:1]),
        (Parsed("", "", "", calls[1:2]), new[1:2]),
        (Parsed("", "", "", calls[2:]), new[2:]),
    ]
    two = said._replace(calls=calls[:2])
    assert [put for _, put in one(two, new[:2])] == [new[:1], new[1:2]]
    assert [*one(said, new[1:])] == [(said, new[1:])]  # not every call is answered
    assert [*chat_of("qwen2.5")[1].parts(said, new)] == [(said, new)]


@pytest.mark.parametrize("history", ["fork", "keep"])
def test_calls_of_one_message_are_written_anew_or_answered_together(history):
    form = ChatFormat(PromptEncoder(tokenizer_of("gpt-oss")), history)
    chat = Chat(form, TOOLS)
    chat.start([user("What is 1 + 2?")])
    calls = [ToolCall("add", {"a": n}, "") for n in range(2)]
    following = chat.follow(message("Both.", calls), [tool("3"), tool("30")])
    whole = text_of(form, following.whole())
    put = text_of(form, chat.tokens(following, form.encoder.tokenizer.eos_token_id))
    assert whole.count(" to=functions.add") == (2 if history == "fork" else 0)
    assert put.count("functions.add to=") == (1 if history == "fork" else 2)


def test_the_first_refusal_of_calls_is_told():
    refuses = (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
        "{{ raise_exception('one call alone') }}{% elif m.role == 'tool' and not "
        "loop.previtem.tool_calls %}{{ raise_exception('no call') }}{% endif %}{% endfor %}"
    )
    _, chat, _ = keyed(refuses + KEYED.replace("BEHIND", ""))
    with pytest.raises(InputError, match="one call alone"):
        chat.follow(message("Both", [CALL, CALL]), [tool("3"), tool("3")])


PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    "some", ["messages | rejectattr('role', 'equalto', 'assistant')", "messages[:3]"]
)
def test_a_template_that_omits_a_message_is_refused(some):
    _, chat, _ = keyed(PLAIN.replace("in messages", f"in {some}"))
    with pytest.raises(InputError, match="omits a message"):
        chat.follow(message("3"), [user("And 3?")])


def test_what_a_template_writes_twice_holds_no_sign():
    form, chat, _ = keyed(PLAIN.replace("m.content +", "m.content + '|' + m.content +"))
    following = chat.follow(message("3"), [user("And 3?")])
    put = text_of(form, chat.tokens(following, form.encoder.tokenizer.eos_token_id))
    assert put == "\n<|im_start|>user\nAnd 3?|And 3?<|im_end|>\n<|im_start|>assistant\n"
    assert "3|3<|im_end|>" in text_of(form, following.whole())


def test_tools_beside_the_last_message_are_moved():
    described = "{% if loop.last and tools %}{{ tools | tojson }}{% endif %}"
    _, chat, _ = keyed(PLAIN.replace("%}{{", f"%}}{described}{{{{", 1))
    assert chat.follow(message("3"), [user("And 3?")]).rewritten


def test_where_a_message_has_no_end_nothing_else_ends_it():
    template = PLAIN.replace(
        "+ '<|im_end|>\n'", "+ ('' if m.role == 'assistant' else '<|im_end|>' + m.content)"
    )
    form, chat, _ = keyed(template)
    following = chat.follow(message("3"), [user("And?")])
    put = text_of(form, chat.tokens(following, form.encoder.tokenizer.eos_token_id))
    assert put == "<|im_start|>user\nAnd?<|im_end|>And?<|im_start|>assistant\n"
    calls = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    form, chat, _ = keyed(template.replace("{% endfor %}", calls, 1))
    following = chat.follow(message("", [CALL]), [tool("3")])
    with pytest.raises(InputError, match="no token that ends a message with calls"):
        chat.tokens(following, form.encoder.tokenizer.eos_token_id)


def test_a_token_that_the_model_ended_with_is_looked_for_first():
    form, chat, _ = keyed(PLAIN.replace("<|im_end|>", "<s>\n<|im_end|>"))
    following = chat.follow(message("3"), [user("And?")])
    put = text_of(form, chat.tokens(following, form.encoder.tokenizer.bos_token_id))
    assert put.startswith("\n<|im_end|>\n<|im_start|>user\nAnd?<s>")


def test_a_tokenizer_that_splits_the_end_of_a_turn_is_refused():
    tokenizer = tokenizer_of.__wrapped__("qwen2.5")
    tokenizer.split_special_tokens = True
    chat = Chat(ChatFormat(PromptEncoder(tokenizer)))
    chat.start([user("What is 1 + 2?")])
    following = chat.follow(message("3"), [user("And?")])
    with pytest.raises(InputError, match="does not keep '<.im_end.>' as a token"):
        chat.tokens(following, tokenizer.eos_token_id)


CALLED = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "behind", "rewritten"),
    [
        (f"{CALLED}Sum.\n", "", False),
        (f"Sum.{CALLED}\n", "", True),
        (f"{CALLED}Sum.\n", "{{ m.content if m.tool_calls }}", True),
        (f"{CALLED}Sum.\n", "{% if m.tool_calls %}{% set ns.last = m.content %}{% endif %}", True),
    ],
)
def test_text_behind_calls_stays_where_the_template_writes_it_there(text, behind, rewritten):
    template = KEYED.replace("BEHIND", behind)
    if "ns" in behind:  # written behind all messages
        template = f"{{% set ns = namespace(last='') %}}{template}{{{{ ns.last }}}}"
        template = template.replace("{{ m.content +", "{{ ('' if m.tool_calls else m.content) +")
    form, chat, prompt = keyed(template)
    following = chat.follow(Parsed(text, "", "Sum.", [CALL]), [tool("3")])
    assert following.rewritten == rewritten
    written = text_of(form, following.whole())
    assert written.count("Sum.") == (2 if "{{" in behind else 1)
    put = text_of(form, chat.tokens(following, form.encoder.tokenizer.eos_token_id))
    if not rewritten:
        assert text_of(form, prompt) + text.strip() + "<|im_end|>" + put == written


def test_thoughts_in_the_text_are_written_once_before_calls():
    form, chat, _ = chat_of("qwen2.5")
    said = [
        (message("Hm.", [CALL], "So."), "<think>So.</think>\n\nHm.\n<tool_call>"),
        (message("", [CALL], "So."), "<think>So.</think>\n<tool_call>"),
        (Parsed("Hm.", "So.", "Hm.", [CALL]), "Hm.\n<tool_call>"),  # thoughts apart, of a client
        (message("Hm.", (), "So."), "<think>So.</think>Hm.<|im_end|>"),
    ]
    for each, wanted in said:
        following = chat.follow(each, [user("Go on")])
        turns = text_of(form, following.whole()).split("<|im_start|>assistant\n")
        assert turns[-2].startswith(wanted)
        assert following.rewritten == (each.text == "Hm.")


def test_an_empty_pair_that_the_prompt_opened_stays():
    _, chat, _ = chat_of("qwen2.5", response_prefix="<think>")
    empty = Parsed("<think></think>3", "", "3", [])
    assert not chat.follow(empty, [user("And?")]).rewritten
    form, chat, _ = chat_of("qwen2.5", response_prefix="<think>")
    following = chat.follow(Parsed("<think></think>", "", "", [CALL]), [tool("3")])
    assert following.rewritten
    assert "assistant\n\n<tool_call>" in text_of(form, following.whole())


def test_thoughts_that_were_not_closed_are_appended_to_where_they_are_text():
    cut = Parsed("<think>So", "So", "", [])
    _, chat, _ = chat_of("qwen2.5")
    assert not chat.follow(cut, [user("And?")]).rewritten
    _, chat, _ = keyed(KEYED.replace("BEHIND", ""))  # which closes them
    assert chat.follow(cut, [user("And?")]).rewritten
    _, chat, _ = chat_of("qwen3")  # which drops an empty pair
    assert chat.follow(Parsed("<think></think>3", "", "3", []), [user("And?")]).rewritten


def test_calls_as_text_stay_behind_thoughts_that_the_template_reads():
    template = KEYED[: KEYED.index("{% if m.tool")] + KEYED[KEYED.index("BEHIND") :]
    form, chat, _ = keyed(template.replace("BEHIND", ""))
    text = f"<think>So.</think>\n\n  Hm.{CALLED}\n"
    whole = chat.follow(Parsed(text, "So.", "Hm.", [CALL]), [tool("3")]).whole()
    assert f"<think>\nSo.\n</think>\n\n  Hm.{CALLED}\n<|im_end|>" in text_of(form, whole)


@pytest.mark.parametrize("reads_calls", [False, True])
def test_tokens_around_calls_stay_where_calls_are_text(reads_calls):
    calls = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    template = PLAIN.replace("{% endfor %}", f"{calls * reads_calls}{{% endfor %}}", 1)
    template = template.replace("m.content +", "(m.reasoning_content or '') + m.content +")
    template = f"{{{{ '<|tool_list_start|>' + tools | tojson if tools }}}}{template}"
    special = ("<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "[THINK]", "[/THINK]")
    tokenizer = build_tokenizer(template, special, (), "<|im_end|>")
    form = ChatFormat(PromptEncoder(tokenizer))
    chat, token = Chat(form, TOOLS), tokenizer.convert_tokens_to_ids
    system = {"role": "system", "content": "[THINK]"}
    assert chat.start([system, user("<|tool_call_start|>[THINK]")]).count(token("[THINK]")) == 1
    text = "[THINK]<|tool_call_start|>[THINK]<|im_end|>"
    made = [ToolCall("add", {"a": "[THINK]"}, "")] * reads_calls
    said = Parsed(text, "[THINK]", text, made)
    whole = chat.follow(said, [user("<|tool_call_start|>[THINK]")]).whole()
    assert whole.count(token("<|tool_call_start|>")) == (not reads_calls)
    assert whole.count(token("[THINK]")) == 4 + reads_calls
    assert whole.count(token("<|im_end|>")) == 4
