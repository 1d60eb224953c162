"""What the checks of chat templates take for the message that a model samples, and for its end."""

import pytest
from tokenizers.processors import TemplateProcessing

from tests.data.chat_templates import _CHATML, _THINK, build_tokenizer
from tests.environments.templates import QWEN3, UNREAD, tokenizer_of
from tests.environments.test_template_checks import UNENDED, encoder_of
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.template_checks import CASES, Family, cell_of
from tramontane.errors import InputError

ANSWER, THOUGHTS, CALL, _, BOTH, TWO, RICH = CASES
_HEAD = "<|im_start|>assistant\n"
_CALLS = (
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}"
)
_THOUGHT = (
    "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>\n{% endif %}"
)
_CALLED = "{{ '<calls>' if m.tool_calls is defined }}"
_AFTER = "{{ m.content.split('</think>')[-1] }}"  # without thoughts
_END = "<|im_end|>\n"
_ADD = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


@pytest.fixture(scope="module")
def family_of():
    """Makes the family of a template, by what it writes for a message of the model, at the end of
    a prompt and at the end of a chat."""
    tokenizer = build_tokenizer("?", _CHATML, _THINK, "<|im_end|>")

    def made(said, opened="", last="", first="{{ tools | tojson if tools else '' }}"):
        tokenizer.chat_template = first + (
            "{% for m in messages %}{% if m.role == 'assistant' %}" + said + "{% else %}"
            "<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}" + _HEAD + opened + "{% else %}" + last + "{% endif %}"
        )
        return Family(PromptEncoder(tokenizer))

    return made


_OPEN, _EMPTY = "<think>\n", "<think>\n\n</think>\n\n"
_ALWAYS = "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{{ m.content }}"
_SAME, _ANEW = ("ok", ""), ("ok", "a new sequence")


@pytest.mark.parametrize(
    ("said", "opened", "last", "texts", "bridges"),
    [
        (
            _THOUGHT + _CALLED + "{{ m.content }}" + _CALLS,
            "",
            "",
            ("", "<think>I add.</think>\n"),
            (_SAME, _SAME),
        ),
        # The prompt opens thoughts, and so does the message, or only where it has some, or never.
        (_ALWAYS, _OPEN, "", ("\n</think>\n\n", "I add.\n</think>\n\n"), (_SAME, _SAME)),
        (
            "{{ m.content }}" + _CALLS,
            _OPEN,
            "",
            ("\n</think>\n\n", "I add.</think>"),
            (_SAME, _SAME),
        ),
        (" \n" + _AFTER, _OPEN, "", ("\n</think>\n\n", "I add.\n</think>\n\n"), (_ANEW, _ANEW)),
        # The prompt has an empty pair of tags.
        (_THOUGHT + "{{ m.content }}", _EMPTY, "", ("", None), (_ANEW, _SAME)),
        (_ALWAYS.replace("\n", ""), _EMPTY, "", ("", None), (_ANEW, _SAME)),
        ("\n" + _THOUGHT + "{{ m.content }}", _EMPTY, "", ("\n", None), (_ANEW, _SAME)),
        # A token ends the chat, too, and thoughts are dropped later.
        (
            "{% if loop.last %}" + _THOUGHT + "{% endif %}{{ m.content }}" + _CALLS,
            "",
            "<|endoftext|>\n",
            ("", "<think>I add.</think>\n"),
            (_SAME, _ANEW),
        ),
    ],
)
def test_a_message_is_sampled_behind_what_opens_it(family_of, said, opened, last, texts, bridges):
    family = family_of(_HEAD + said + _END, opened, last)
    for case, before, bridge in zip((ANSWER, THOUGHTS), texts, bridges, strict=True):
        wanted = None if before is None else f"{before}It is 3.<|im_end|>"
        assert family.sampled(case) == wanted and family.bridge(case) == bridge
        assert family.history(case) == family.read_back(case) == _SAME
        assert family.end(case) == ("ok", "`<|im_end|>`")
        assert family.form.drops_thoughts or family.tuned(case) == _SAME


def test_white_space_that_moves_once_a_message_follows_is_wrong(family_of):
    """The prompt ends with a tag and a line break, the message begins with a line break."""
    family = family_of(_HEAD + "\n" + _ALWAYS + _END, _OPEN)
    assert family.sampled(THOUGHTS) == "\nI add.\n</think>\n\nIt is 3.<|im_end|>"
    state, told = family.bridge(THOUGHTS)
    assert state == "wrong" and told.startswith(r"'sistant\n<think>\n\nI add.")
    assert r" for 'sistant\n\n<think>\nI add." in told


def test_a_token_behind_calls_once_they_are_answered_is_not_learned(family_of):
    family = family_of(_HEAD + _CALLS + "{{ '' if loop.last else ' <|endoftext|>' }}" + _END)
    assert family.end(CALL) == ("ok", "`<|endoftext|>`")
    for told in (family.bridge(CALL), family.tuned(CALL)):
        assert told[0] == "wrong" and "<|endoftext|>" in told[1]


def test_a_text_that_the_template_adds_or_changes_is_wrong(family_of):
    family = family_of(_HEAD + "{{ m.content }}!" + _END, _EMPTY)
    assert family.read_back(ANSWER) == ("wrong", "its content has more or less than its text")
    state, told = family.bridge(ANSWER)  # it is read as content, and written once more
    assert state == "wrong" and "3.!<|im_end|>" in told.partition(" for ")[0]
    assert "3.!!<|im_end|>" in told.partition(" for ")[2]
    family = family_of(_HEAD + _THOUGHT + "{{ m.content }}!" + _END, _EMPTY)
    state, told = family.bridge(ANSWER)  # so it is in the new sequence
    assert state == "wrong" and "3.!!<|im_end|>" in told.partition(" for ")[0]
    assert "3.!<|im_end|>" in told.partition(" for ")[2]
    drawn = "{{ range(100000) | random }}" * 2
    family = family_of(_HEAD + drawn + " {{ m.content }}" + _END)
    for column in (family.bridge, family.history, family.tuned, family.read_back):
        assert column(ANSWER)[0] == "wrong"


@pytest.mark.parametrize("key", ["a", "half", "sure", "parts", "more", "text"])
def test_an_argument_that_the_template_leaves_out_is_wrong(family_of, key):
    items = f"dict(c.function.arguments.items() | rejectattr(0, 'equalto', '{key}'))"
    family = family_of(_HEAD + _CALLS.replace("c.function.arguments", items) + _END)
    state, told = family.read_back(RICH)
    assert state == "wrong" and f"'{key}'" not in told
    assert (family.read_back(CALL)[0] == "wrong") == (key == "a")


def test_a_null_that_the_template_writes_as_a_text_is_wrong(family_of):
    family = family_of(_HEAD + _CALLS.replace("tojson", "tojson | replace('null', '\"-\"')") + _END)
    state, told = family.read_back(RICH)
    assert state == "wrong" and "'none': '-'" in told and family.read_back(CALL) == _SAME


def test_what_a_template_refuses_is_told_in_each_column(family_of):
    one = "{% if m.content and m.tool_calls %}{{ raise_exception('no text') }}{% endif %}"
    row = family_of(_HEAD + one + _THOUGHT + "{{ m.content }}" + _CALLS + _END).row()
    told = {str(cell) for column, cell in row.items() if column != "end of turn"}
    assert told == {"refused; the template: no text (a text and a call)"}


def test_what_no_model_could_sample_is_refused(family_of):
    said = _HEAD + "<think>\n{{ m.content }}"
    with pytest.raises(InputError, match="thoughts that it never closes"):
        family_of(said + _END, _OPEN).sampled(ANSWER)
    tokenizer = family_of(_HEAD + "{{ m.content }}" + _END).tokenizer
    tokenizer.chat_template = tokenizer.chat_template.replace("if add_generation", "if 1 or add")
    with pytest.raises(InputError, match="begins a response behind every chat"):
        Family(PromptEncoder(tokenizer)).sampled(ANSWER)
    unread = Family(PromptEncoder(build_tokenizer(UNREAD, _CHATML, _THINK, "<|im_end|>")))
    for column in (unread.bridge, unread.read_back):
        assert column(ANSWER) == _SAME
        with pytest.raises(InputError, match="not read"):
            column(CALL)


def test_calls_follow_thoughts_that_the_prompt_opens(family_of):
    family = family_of(_HEAD + "{{ m.content }}" + _CALLS + _END, _OPEN)
    for case, told in ((CALL, _ANEW), (BOTH, _SAME), (TWO, _ANEW)):  # without an empty pair
        assert family.bridge(case) == told and family.read_back(case) == _SAME
    family = family_of(_HEAD + "{{ m.content }}" + _END, _OPEN)  # calls are part of the text
    for case in (CALL, BOTH):
        assert family.bridge(case) == family.read_back(case) == _SAME


def test_thoughts_that_stay_or_are_a_message_of_their_own_are_told(family_of):
    short = "(loop.last or m.reasoning_content | length < 10)"
    kept = _THOUGHT.replace("is defined", f"and {short}")
    family = family_of(_HEAD + kept + "{{ m.content }}" + _END)
    assert family.bridge(THOUGHTS) == ("ok", "a new sequence, though the template appends")
    apart = "{% if m.reasoning_content %}" + _HEAD + "{{ m.reasoning_content }}" + _END
    family = family_of(apart + "{% endif %}" + _HEAD + "{{ m.content }}" + _END)
    assert family.read_back(THOUGHTS) == ("wrong", "its thoughts are not found")


def test_thoughts_behind_an_empty_pair_of_tags_are_not_sampled(family_of):
    family = family_of(_HEAD + _THOUGHT + "{{ m.content }}" + _CALLS + _END, _EMPTY)
    for case in (THOUGHTS, BOTH):
        assert family.sampled(case) is None
        assert family.bridge(case) == family.read_back(case) == _SAME


def test_a_response_template_reads_what_the_prompt_holds_apart(family_of, monkeypatch):
    tokenizer, asked = family_of(_HEAD + _ALWAYS + _END, _OPEN).tokenizer, []

    def read(text, prefix="", tools=()):
        asked.append((text.partition("\n")[0], prefix))
        return {"content": "It is 3.", "reasoning_content": "I add."}

    fields = {"fields": {"content": {"close": "<|im_end|>"}}}
    monkeypatch.setattr(tokenizer, "response_template", fields, raising=False)
    monkeypatch.setattr(tokenizer, "parse_response", read)
    family = Family(PromptEncoder(tokenizer), "template")
    asked.clear()
    assert family.read_back(THOUGHTS) == _SAME
    assert asked and all(text == "I add." and prefix.endswith(_OPEN) for text, prefix in asked)


def test_what_the_template_marks_is_learned_and_nothing_else(family_of):
    refused = (
        "{% if 'It is' in m.content and not tools %}{{ raise_exception('no tools') }}{% endif %}"
    )
    mark, end = "{% generation %}", "{% endgeneration %}"
    marked = refused + mark + "{{ m.content }}" + end + "Hm." + mark + "<|im_end|>" + end
    family = family_of(_HEAD + marked + "\n")
    assert family.tuned(ANSWER) == _SAME
    family.tokenizer.chat_template = family.tokenizer.chat_template.replace(
        "{{ m.role + '\n' + m.content }}", mark + "{{ m.content }}" + end
    )
    told = Family(PromptEncoder(family.tokenizer)).tuned(ANSWER)
    assert told == ("wrong", "learns other tokens than the template marks")


def test_two_calls_are_written_one_a_message_with_their_answers(family_of):
    one = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('1') }}{% endif %}"
    family = family_of(_HEAD + one + "{{ m.content }}" + _CALLS + _END)
    tool, second = "<|im_start|>tool\n%d<|im_end|>\n", _ADD.replace("1", "3").replace("2", "4")
    assert family.whole(TWO) == (
        family.prompt + _ADD + _END + tool % 3 + _HEAD + second + _END + tool % 4 + _HEAD
    )
    assert family.sampled(TWO) is None and family.history(TWO) == _SAME
    assert family.bridge(TWO) == family.read_back(TWO) == ("ok", "one call a message")


def test_tokens_that_the_tokenizer_adds_are_not_the_templates():
    """Llama 3's tokenizer adds BOS, and its template writes it as well. EOS need not be marked as
    special."""
    end = "<|im_end|>"
    tokenizer = build_tokenizer(QWEN3, _CHATML[:2], (*_THINK, end), end)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert tokenizer("?")["input_ids"][0] == tokenizer.bos_token_id
    family = Family(PromptEncoder(tokenizer))
    for case in (ANSWER, TWO):
        assert family.bridge(case) == _ANEW and family.tuned(case) == _SAME
        assert family.history(case) == family.read_back(case) == _SAME
        assert family.end(case) == ("ok", "`<|im_end|>`")


def test_a_columns_state_is_its_worst():
    def tried(refused, wrong=()):
        def try_one(case):
            if case in refused:
                raise InputError(f"the chat: it refuses {case.name[:5]}; give it another")
            return ("wrong", "it differs") if case in wrong else ("ok", "said" * bool(case.calls))

        return cell_of(try_one)

    assert str(tried(())) == "ok; said (calls)" and tried(()).state == "ok"
    told = tried((TWO, ANSWER))
    assert told.state == "refused" and told.notes["it refuses two c"] == [TWO.name]
    assert str(told) == (
        "refused; it refuses an an (an answer); said (a call, a text and a call, thoughts and a "
        "call, a call with all types); it refuses two c (two calls)"
    )
    assert str(tried((TWO,), CASES)) == (
        "wrong; it differs (an answer, thoughts and an answer, a call, a text and a call, thoughts "
        "and a call, a call with all types); it refuses two c (two calls)"
    )
    assert str(tried((), CASES)) == "wrong; it differs"
    for inner, reason in (("(no (text))", "no (text)"), ("()", "it refuses the prompt ()")):

        def refuse(case, inner=inner):
            raise InputError(f"it refuses the prompt {inner}; give another")

        assert str(cell_of(refuse)) == f"refused; {reason}"
    assert str(tried((), (ANSWER, THOUGHTS))) == "wrong; it differs (answers); said (calls)"


def test_thoughts_of_an_answer_are_sampled_as_the_template_writes_those_before_a_call():
    """gpt-oss drops thoughts before an answer."""
    family = Family(PromptEncoder(tokenizer_of("gpt-oss")))
    thoughts = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
    answer = "<|channel|>final<|message|>It is 3.<|return|>"
    assert family.sampled(ANSWER) == answer and family.sampled(THOUGHTS) == thoughts + answer
    assert family.sampled(CALL) == (
        ' to=functions.add<|channel|>commentary<|message|>{"a": 1, "b": 2}<|call|>'
    )
    assert family.sampled(TWO) is None


_LAST = "{% if loop.last %}{{ m.content }}{% endif %}"
_CLOSED = _CALLS.replace("</tool", "</function></tool")
_ONCE = "{% if loop.last %}{{ m.content }}" + _CLOSED + "{% endif %}"


@pytest.mark.parametrize(
    ("said", "end"),
    [
        (_HEAD + "{{ m.content }}" + _CLOSED + _END, "<|im_end|>"),
        # Once it is answered, it has another number, lacks a text behind calls, ends with another
        # token, or is left out.
        ("<|im_start|>{{ loop.revindex }}\n{{ m.content }}" + _CLOSED + _END, "<|im_end|>"),
        (_HEAD + _CLOSED + _LAST + _END, "<|im_end|>"),
        (_HEAD + _CLOSED + "{{ '' if loop.last else '<|endoftext|>' }}" + _END, "<|endoftext|>"),
        (_HEAD + _ONCE + _END, ""),
    ],
)
def test_a_message_with_calls_ends_as_it_does_once_it_is_answered(family_of, said, end):
    family = family_of(said)
    assert [family.end_of(case) for case in CASES if case.calls] == [end] * 5
    assert family.end_of(ANSWER) == "<|im_end|>"


def test_no_token_at_the_start_of_a_chat_ends_calls_that_are_left_out_of_it(family_of):
    first = "{{ 'These are tools' + '<|im_end|>' + tools | tojson if tools else '' }}"
    family = family_of(_HEAD + _ONCE + _END, first=first)
    assert family.whole(CALL).startswith("These are tools<|im_end|>")  # of 15 characters
    assert family.end_of(CALL) == ""


def test_a_chat_ends_behind_calls_that_are_written_as_text(family_of):
    family = family_of(_HEAD + "{{ m.content }}" + _END, last="<|endoftext|>")
    assert {family.end_of(case) for case in CASES} == {"<|im_end|>"}


def test_the_generation_config_ends_calls_that_get_ids_once_they_are_answered(tmp_path):
    tokenizer = encoder_of("unended", tmp_path).tokenizer
    late = UNENDED.replace("{% for c in", "{% set turn = loop %}{% for c in")
    tokenizer.chat_template = late.replace(
        "{{ c.function.name }}", "{{ c.function.name if turn.last else c.id + c.function.name }}"
    )
    family = Family(PromptEncoder(tokenizer))
    assert family.end_of(CALL) == "<|observation|>" and family.end_of(ANSWER) == "<|user|>"
