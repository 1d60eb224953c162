"""Conversations in Mistral's own tokens, compared with what its library makes of whole requests."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mistral_common = pytest.importorskip("mistral_common", reason="mistral-common is not installed")

from mistral_common.protocol.instruct.request import ChatCompletionRequest
from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

from benchmarks.chat_templates import MISTRAL, MISTRAL_VERSIONS, mistral_tokenizer
from tests.environments.test_worker import problem, talk
from tests.environments.worlds import add
from tramontane.config import Config, PromptConfig, SFTConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.calls import Parsed, Parser
from tramontane.environments.mistral import (
    MistralChat,
    MistralExamples,
    files_of,
    load_mistral,
    plain_tool,
)
from tramontane.environments.mistral_family import MistralFamily
from tramontane.environments.recorded import Conversation
from tramontane.environments.report import by_mistral, examine
from tramontane.environments.tools import schema_of
from tramontane.environments.wire import ChatRequest
from tramontane.environments.worker import EnvironmentWorker
from tramontane.errors import InputError
from tramontane.sft.examples import ExampleStream
from tramontane.tokens import floats, ints
from tramontane.types import Completion, SamplingParams, ThinkingTags, ToolCall

DATA = Path(mistral_common.__file__).parent / "data"
TAGS = ThinkingTags("[THINK]", "[/THINK]")
CONTROL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a `tekken.json` of version 13: a thousand tokens of a real one."""
    raw = json.loads((DATA / "tekken_240911.json").read_text())
    raw["config"] |= {
        "version": "v13",
        "default_vocab_size": 1000 + len(CONTROL),
        "default_num_special_tokens": len(CONTROL),
        "num_vocab_tokens": 1000,
    }
    raw["vocab"] = raw["vocab"][:1000]
    raw.pop("image", None)
    raw["special_tokens"] = [
        {"rank": n, "token_str": token, "is_control": True} for n, token in enumerate(CONTROL)
    ]
    made = tmp_path_factory.mktemp("mistral")
    (made / "tekken.json").write_text(json.dumps(raw))
    return made


@pytest.fixture(scope="module")
def encoder(folder):
    tokenizer = convert_tekken_tokenizer(str(folder / "tekken.json"), "{{ messages[0].content }}")
    tokenizer.name_or_path = str(folder)
    return PromptEncoder(tokenizer, PromptConfig())


def user(text):
    return {"role": "user", "content": text}


def of_request(mistral, messages):
    tool = schema_of(add)["function"]
    known = {key: tool[key] for key in ("name", "description", "parameters")}
    request = ChatCompletionRequest.model_validate(
        {"messages": messages, "tools": [{"type": "function", "function": known}]}
    )
    return list(mistral.encode_chat_completion(request).tokens)


TEXTS = st.lists(st.one_of(st.text(max_size=8), st.sampled_from([*CONTROL, "🙂", "é"])), max_size=4)


@settings(deadline=None, max_examples=40)
@given(thoughts=TEXTS.map("".join), answers=st.lists(TEXTS.map("".join), min_size=1, max_size=3))
def test_a_conversation_has_the_tokens_of_mistrals_library(encoder, thoughts, answers):
    mistral = load_mistral(encoder)
    instruct = mistral.instruct_tokenizer
    chat = MistralChat(mistral, encoder, [schema_of(add)])
    prompt = chat.start([user("What is 1 + 2?")])
    assert prompt == of_request(mistral, [user("What is 1 + 2?")])
    for tag in TAGS:
        thoughts = thoughts.replace(tag, "")
    call = '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'
    text = f"[THINK]{thoughts}x[/THINK]" + call * len(answers)
    parser = Parser(encoder.tokenizer, "mistral", TAGS)
    message = parser.parse(text, [schema_of(add)])
    assert [made.arguments for made in message.calls] == [{"a": 1, "b": 2}] * len(answers)
    following = chat.follow(message, [{"role": "tool", "content": answer} for answer in answers])
    assert not following.rewritten
    put = chat.tokens(following, instruct.tokenizer.eos_id)
    said = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": f"{thoughts}x"}],
        "tool_calls": [
            {"id": f"call000{n:02d}", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
            for n in range(len(answers))
        ],
    }
    replies = [
        {"role": "tool", "content": answer, "tool_call_id": f"call000{n:02d}"}
        for n, answer in enumerate(answers)
    ]
    whole = of_request(mistral, [user("What is 1 + 2?"), said, *replies])
    assert following.whole() == whole
    own = encoder.tokenizer(text, add_special_tokens=False)["input_ids"] if not thoughts else None
    if own is not None:  # the sampled tokens, where the text has one way to be sampled
        assert [*prompt, *own, instruct.tokenizer.eos_id, *put] == whole
    assert whole[-len(put) :] == put and chat.tokens(following, 999)[0] == instruct.tokenizer.eos_id
    control = [token for token in put if token < len(CONTROL)]
    opening, closing = (CONTROL.index(f"[{slash}TOOL_RESULTS]") for slash in ("", "/"))
    assert control == [opening, closing] * len(answers)


def test_a_message_of_the_user_follows(encoder):
    mistral = load_mistral(encoder)
    chat = MistralChat(mistral, encoder, [schema_of(add)])
    prompt = chat.start([user("Hi")])
    message = Parser(encoder.tokenizer, "mistral", TAGS).parse("It is 3.", [schema_of(add)])
    nothing = chat.copy().follow(Parsed("", "", "", []), [user("More")])
    following = chat.follow(message, [user("More")])
    assert not following.rewritten and following.put == nothing.put
    said = encoder.tokenizer("It is 3.</s>", add_special_tokens=False)["input_ids"]
    assert prompt + said + following.put == following.whole()


def test_a_system_message_of_the_chat_is_taken_in_place_of_the_configured_one(encoder):
    configured = PromptEncoder(encoder.tokenizer, PromptConfig(system_prompt="Be brief."))
    mistral, system = load_mistral(configured), {"role": "system", "content": "Be long."}
    start = lambda *said: MistralChat(mistral, configured, [schema_of(add)]).start(said)  # noqa: E731
    assert start(system, user("Hi")) == of_request(mistral, [system, user("Hi")])
    assert start(user("Hi")) == start(system | {"content": "Be brief."}, user("Hi"))
    rows = [user("Hi"), {"role": "assistant", "content": "Hello."}]
    (learned,) = MistralExamples(configured).examples(Conversation.of(rows, [], "row 1"), "row 1")
    assert "Be brief." in encoder.decode(learned.prompt)


def test_the_report_tries_mistrals_own_tokens(encoder):
    traits = by_mistral(encoder)
    assert [trait.name.removesuffix(", by mistral-common") for trait in traits[:4]] == [
        "bridge", "history", "calls read back", "end of turn",
    ]  # fmt: skip
    assert {trait.state for trait in traits} == {"ok"}
    assert {trait.found for trait in traits[4:]} == {"appended"} and len(traits) == 7
    assert files_of(encoder)
    (refused,) = by_mistral(PromptEncoder(encoder.tokenizer, PromptConfig(response_prefix="So: ")))
    assert refused.state == "optional" and "response_prefix" in refused.found
    assert refused.name == "by mistral-common"


def test_the_report_of_a_checkpoint_tries_both_its_template_and_mistrals_own_tokens(tmp_path):
    mistral_tokenizer("v7", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    traits = {trait.name: trait for trait in examine(str(tmp_path))}
    assert traits["chat template"].found == "none"
    # v7 writes the tools before the user's last message.
    for place, found in (("", "appended"), (", by mistral-common", "rewritten")):
        assert traits[f"thoughts, then a message{place}"].found == found


def test_a_tool_is_described_by_what_the_library_knows():
    described = {"name": "f", "return": {"type": "string"}}
    assert plain_tool({"type": "function", "function": described})["function"] == {"name": "f"}


def test_thoughts_of_a_system_prompt_are_thoughts(encoder):
    config = PromptConfig(system_prompt="First think. [THINK]Your\nthoughts.[/THINK]Your answer.")
    thinking = PromptEncoder(encoder.tokenizer, config, tuple(TAGS))
    prompt = MistralChat(load_mistral(thinking), thinking).start([user("Hi [THINK]")])
    control = [CONTROL[token] for token in prompt if token < len(CONTROL)]
    assert encoder.decode(prompt).endswith("[INST]Hi [THINK][/INST]")  # a text
    assert control == [
        "<s>", "[SYSTEM_PROMPT]", "[THINK]", "[/THINK]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]",
    ]  # fmt: skip


def test_v7_moves_its_tools_to_the_last_message_of_the_user(encoder):
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    pytest.importorskip("sentencepiece", reason="mistral-common is not installed")
    mistral = MistralTokenizer.from_file(str(DATA / "mistral_instruct_tokenizer_241114.model.v7"))
    assert mistral.instruct_tokenizer.tokenizer.version.value == "v7"

    parser = Parser(_Bare(), "mistral", encoder.tags)
    calls = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]'
    chat = MistralChat(mistral, encoder, [schema_of(add)])
    prompt = chat.start([user("Hi")])
    following = chat.follow(
        parser.parse(calls, [schema_of(add)]), [{"role": "tool", "content": "3"}]
    )
    assert not following.rewritten and following.whole()[: len(prompt)] == prompt
    text = mistral.instruct_tokenizer.decode(following.put, special_token_policy="keep")
    assert text.replace("▁", "") == "[TOOL_RESULTS]call00000[TOOL_CONTENT]3[/TOOL_RESULTS]"
    thought = parser.parse("<think>Easy.</think>It is 3.", [schema_of(add)])  # text before v13
    assert chat.follow(thought, [user("More")]).rewritten
    empty = chat.follow(parser.parse("<think></think>Yes."), [user("More")]).whole()
    assert "<think></think>Yes." in mistral.instruct_tokenizer.decode(empty)


def test_ids_that_the_model_wrote_are_kept(encoder):
    """v7 writes them into calls and answers."""
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    pytest.importorskip("sentencepiece", reason="mistral-common is not installed")
    mistral = MistralTokenizer.from_file(str(DATA / "mistral_instruct_tokenizer_241114.model.v7"))
    parser = Parser(_Bare(), "mistral", encoder.tags)
    call = '{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "XyZ123456"}'
    chat = MistralChat(mistral, encoder, [schema_of(add)])
    chat.start([user("Hi")])
    message = parser.parse(f"[TOOL_CALLS][{call}]", [schema_of(add)])
    following = chat.follow(message, [{"role": "tool", "content": "3"}])
    text = mistral.instruct_tokenizer.decode(following.whole(), special_token_policy="keep")
    assert text.count("XyZ123456") == 2 and "call000" not in text


class _Bare:
    chat_template = None


@pytest.fixture(scope="module", params=MISTRAL_VERSIONS)
def version(request, tmp_path_factory):
    """(version, encoder) of each of Mistral's tokenizers."""
    settings = {"reasoning_effort": {"type": "enum", "default": "none", "values": EFFORTS}}
    more = {"model_settings_builder": settings} if request.param == "v15" else {}
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, PromptEncoder(mistral_tokenizer(request.param, folder, **more))


EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def test_every_version_writes_and_reads_what_its_library_does(version):
    name, encoder = version
    row = MistralFamily(load_mistral(encoder), encoder).row()
    assert {column: cell.state for column, cell in row.items()} == {
        "bridge": "ok",
        "history": "ok",
        "SFT text": "refused" if name == "v3" else "ok",  # a text or calls
        "calls read back": "ok",
        "end of turn": "ok",
    }, row
    anew = {
        "v3": "an answer, thoughts and an answer, a text and a call, thoughts and a call",
        "v7": "answers",
        "v11": "answers",
    }
    assert str(row["bridge"]) == (f"ok; a new sequence ({anew[name]})" if name in anew else "ok")
    assert str(row["end of turn"]) == "ok; `</s>`"


def test_every_version_keeps_ids_and_answers_unknown_names(version):
    name, encoder = version
    mistral = load_mistral(encoder)
    listed = '[TOOL_CALLS][{"name": "%s", "arguments": {"a": 1}, "id": "XyZ123456"}]'
    form = {"v3": listed, "v7": listed, "v11": '[TOOL_CALLS]%s[CALL_ID]XyZ123456[ARGS]{"a": 1}'}
    parser = Parser(encoder.tokenizer, "mistral", encoder.tags)
    for called in ("add", "my.tool", "add numbers", "ünïcode", "a" * 70):
        chat = MistralChat(mistral, encoder, [schema_of(add)])
        chat.start([user("Hi")])
        text = form.get(name, '[TOOL_CALLS]%s[ARGS]{"a": 1}') % called
        message = parser.parse(text, [schema_of(add)])
        assert [call.name for call in message.calls] == [called]
        following = chat.follow(message, [{"role": "tool", "content": "no such tool"}])
        kept = encoder.decode(following.whole()).count("XyZ123456")
        assert kept == (2 if name in form else 0)


def test_a_conversation_of_a_run_has_the_tokens_of_its_request(version):
    """Two turns with calls and one without, after which the model is told of its answers by id."""
    name, encoder = version
    data = {"train": "playground:", "tools": ["tests.environments.worlds:add"]}
    config = Config(model="tiny", data=data, conversation={"tokens": "mistral"})
    thinking = PromptEncoder(encoder.tokenizer, PromptConfig(system_prompt="Bé short."))
    listed = '[TOOL_CALLS][{"name": "add", "arguments": {"a": %d, "b": 2}, "id": "%s"}]'
    form = {"v3": listed, "v7": listed, "v11": '[TOOL_CALLS]add[CALL_ID]%s[ARGS]{"a": %d, "b": 2}'}
    messages = [{"role": "system", "content": "Bé short."}, user("1 + 2 + 2?")]
    said = []
    for a, id_ in ((1, "call00000"), (3, "call00100")):
        given = (id_, a) if name == "v11" else (a, id_) if name in form else a
        said.append(form.get(name, '[TOOL_CALLS]add[ARGS]{"a": %d, "b": 2}') % given)
        function = {"name": "add", "arguments": f'{{"a": {a}, "b": 2}}'}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"id": id_, "function": function}]},
            {"role": "tool", "content": str(a + 2), "tool_call_id": id_},
        ]
    messages.append({"role": "assistant", "content": "It is 5."})
    answered, spoken = talk(
        EnvironmentWorker(config, thinking), *said, "It is 5.", given=problem("1 + 2 + 2?")
    )
    assert answered.ending == "completed", answered.reason
    tuning = load_mistral(thinking, mode="finetuning")
    tools = [{"type": "function", "function": plain_tool(schema_of(add))["function"]}]
    request = ChatCompletionRequest.model_validate({"messages": messages, "tools": tools})
    wanted = list(tuning.encode_chat_completion(request).tokens)
    assert [*spoken.prompt, *spoken.ids] == wanted


def test_answers_without_ids_have_those_of_the_calls_in_their_places(version):
    """In a run and in fine-tuning; the second has no call at first, which some versions refuse."""
    name, encoder = version
    mistral, tuning = load_mistral(encoder), load_mistral(encoder, mode="finetuning")
    answers, arguments = [{"role": "tool", "content": text} for text in "45"], {"a": "é"}
    made = ToolCall("add", arguments, "")
    function = {"function": {"name": "add", "arguments": arguments}}
    ran, learned = (MistralChat(mistral, encoder, [schema_of(add)]) for _ in range(2))
    assert ran.start([user("Hi")]) == learned.start([user("Hi")])
    for turn in range(3):
        said = {"role": "assistant", "content": None, "tool_calls": [function] * 2}
        learned.learned(said, tuning)
        following = ran.follow(Parsed("", "", "", [made] * 2), answers)
        assert following.whole() == learned.answered(answers) and not following.rewritten
        text = encoder.decode(following.whole())
        assert text.count("é") == 2 * (turn + 1)
        if name in ("v3", "v7"):
            assert [text.count(f"call00{turn}0{n}") for n in (0, 1)] == [2, 2]
    learned.learned({"role": "assistant", "content": "", "tool_calls": [function]}, tuning)
    if name in ("v3", "v7"):
        whole = ran.follow(Parsed("", "", "", [made]), answers).whole()
        assert whole == learned.answered(answers)
        assert [encoder.decode(whole).count(f"call0030{n}") for n in (0, 1)] == [2, 1]
        return
    with pytest.raises(InputError, match="Unexpected tool call id call00301"):
        ran.follow(Parsed("", "", "", [made]), answers)
    with pytest.raises(InputError, match="Unexpected tool call id call00301"):
        learned.answered(answers)


def test_a_call_without_a_name_is_written_as_invalid(version):
    _name, encoder = version
    chat = MistralChat(load_mistral(encoder), encoder, [schema_of(add)])
    chat.start([user("Hi")])
    message = Parsed("x", "", "", [ToolCall("", {}, "error: no name", error=True)])
    whole = chat.follow(message, [{"role": "tool", "content": "error: no name"}]).whole()
    assert encoder.decode(whole).count("invalid") == 1


def test_an_endpoint_writes_and_reads_mistrals_tokens(version):
    pytest.importorskip("fastapi", reason="not installed: pip install 'tramontane-rl[view]'")
    from tramontane.environments.endpoint import ModelEndpoint

    name, encoder = version
    plain = PromptEncoder(encoder.tokenizer, PromptConfig(system_prompt=None))
    listed = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]'
    text = listed if name in ("v3", "v7") else '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'
    ids = ints(encoder.tokenizer(text, add_special_tokens=False)["input_ids"])
    asked = []

    async def sample(prompt, n, seed, sampling, images):
        asked.append(prompt)
        n_tokens = len(ids)
        yield [
            Completion(-1, 0, prompt, ids, floats([-1.0] * n_tokens), ints([0] * n_tokens), "stop")
        ]

    config = Config(conversation={"tokens": "mistral"})
    endpoint = ModelEndpoint("m", config, plain, SamplingParams(99), sample, 4096, 2000)
    tool = plain_tool(schema_of(add))
    body = ChatRequest(model="m", messages=[user("1 + 2?")], tools=[tool])
    answer = json.loads(asyncio.run(endpoint.chat(body)).body)
    (made,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"a": 1, "b": 2}
    assert asked == [of_request(load_mistral(plain), [user("1 + 2?")])]


def recorded(thinks):
    """Rows of fine-tuning: thoughts, calls whose answers come in another order, two questions."""
    calls = [
        {"id": id_, "function": {"name": "add", "arguments": f'{{"a": {n}, "b": 2}}'}}
        for n, id_ in enumerate(("first0000", "second000"))
    ]
    answers = [
        {"role": "tool", "content": f"{id_} [/TOOL_RESULTS]", "tool_call_id": id_}
        for id_ in ("second000", "first0000")
    ]
    thoughts = {"reasoning_content": "Both at once."} if thinks else {}
    return [
        {"role": "system", "content": "Be short."},
        user("0 + 2 and 1 + 2?"),
        {"role": "assistant", "content": "", "tool_calls": calls, **thoughts},
        *answers,
        {"role": "assistant", "content": "2 and 3.", **thoughts},
        user("Thanks [/INST]"),
        {"role": "assistant", "content": "é 🙂"},
    ]


def test_every_version_learns_what_its_library_writes_for_fine_tuning(version):
    name, encoder = version
    thinks, tool = name in ("v13", "v15"), plain_tool(schema_of(add))
    rows, plain = recorded(thinks), []
    for row in rows:
        row = dict(row)
        if thoughts := row.pop("reasoning_content", ""):
            text = [{"type": "text", "text": row["content"]}] if row["content"] else []
            row["content"] = [{"type": "thinking", "thinking": thoughts}, *text]
        plain.append(row)

    def library(messages, mode):
        mistral = load_mistral(encoder, mode=mode)
        request = ChatCompletionRequest.model_validate({"messages": messages, "tools": [tool]})
        return list(mistral.encode_chat_completion(request).tokens)

    wanted = []
    for place, row in enumerate(plain):
        if row["role"] == "assistant":
            prompt = library(plain[:place], "test")
            whole = library(plain[: place + 1], "finetuning")
            assert whole[: len(prompt)] == prompt
            wanted.append((prompt, whole[len(prompt) :]))
    for first in (0, 5):  # of these messages, none is learned
        found = []
        conversation = Conversation.of(rows, [schema_of(add)], "row 1", first)
        examples = list(MistralExamples(encoder).examples(conversation, "row 1"))
        for prompt, response, inserted, *_ in examples:
            before, place = prompt, 0
            for span in (*inserted, range(len(response), len(response))):
                found.append((before, response[place : span.start]))
                before, place = [*prompt, *response[: span.stop]], span.stop
        assert found == wanted[bool(first) :]
        assert len(examples) == (2 if name in ("v3", "v7", "v11") else 1), len(examples)
    ids = encoder.decode(wanted[1][0]).count("first0000")  # in the answer itself, and as an id
    assert (ids > 1) == (name in ("v3", "v7", "v11"))


def test_fine_tuning_refuses_what_a_version_does_not_write(version):
    name, encoder = version
    both = recorded(False)[:5]
    both[2]["content"] = "Let me see."
    conversation = Conversation.of([*both, {"role": "assistant", "content": "?"}], [], "row 7")
    examples = MistralExamples(encoder).examples(conversation, "row 7")
    if name == "v3":
        with pytest.raises(InputError, match="row 7: mistral-common refuses .* content or tool_c"):
            list(examples)
    else:
        learned = "".join(encoder.decode(example.response) for example in examples)
        assert "Let me see." in learned


def test_sft_learns_mistrals_tokens_of_rows_and_pairs(encoder, tmp_path):
    rows = [
        {"messages": recorded(True), "tools": [schema_of(add)]},
        {"messages": [user("Hi"), {"role": "assistant", "content": "[THINK]Hm.[/THINK]Hello."}]},
    ]
    chats, pairs = tmp_path / "chats.jsonl", tmp_path / "pairs.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs.write_text(json.dumps({"prompt": "Hi", "response": "[THINK]Hm.[/THINK]Hello."}) + "\n")
    thinking = PromptEncoder(encoder.tokenizer, PromptConfig(), tuple(TAGS))

    def stream(file):
        data = {"train": str(file), "tokens": "mistral"}
        raw = {"output": str(tmp_path / "out"), "model": "tiny", "data": data, "max_length": 4096}
        return ExampleStream(SFTConfig.model_validate(raw), thinking)

    with pytest.warns(UserWarning, match="come again"):
        own = stream(pairs)
    with pytest.warns(UserWarning, match="come again"):
        both = stream(chats)
    (pair,), found = own._tokenized(0), both._tokenized(0)
    assert pair in found and len(found) >= 2
    control = [CONTROL[token] for token in pair.response if token < len(CONTROL)]
    assert control == ["[THINK]", "[/THINK]", "</s>"]


def test_efforts_reach_the_settings_of_v15_alone(version):
    name, encoder = version
    for effort in EFFORTS:
        config = PromptConfig(chat_template_kwargs={"reasoning_effort": effort})
        tokenizer = encoder.tokenizer
        asking = PromptEncoder(tokenizer, config)
        chat = MistralChat(load_mistral(asking), asking)
        if name != "v15" and effort != "none":
            with pytest.raises(InputError, match="reasoning_effort"):
                chat.start([user("Hi")])
        elif name == "v15":
            settings = f'[MODEL_SETTINGS]{{"reasoning_effort": "{effort}"}}[/MODEL_SETTINGS]'
            assert settings in encoder.decode(chat.start([user("Hi")]))


def test_thoughts_of_a_system_prompt_are_control_tokens_where_a_version_takes_them(version):
    name, encoder = version
    config = PromptConfig(system_prompt="First [THINK]your thoughts[/THINK], then the answer.")
    thinking = PromptEncoder(encoder.tokenizer, config)
    prompt = MistralChat(load_mistral(thinking), thinking).start([user("Hi")])
    control = {MISTRAL[token] for token in prompt if token < len(MISTRAL)}
    assert ("[THINK]" in control) == (name == "v13") and "[INST]" in control, control


def test_what_cannot_be_written_is_refused(encoder, tmp_path):
    prefixed = PromptEncoder(encoder.tokenizer, PromptConfig(response_prefix="So: "))
    templated = PromptEncoder(encoder.tokenizer, PromptConfig(chat_template="{{ messages }}"))
    for other in (prefixed, templated):
        with pytest.raises(InputError, match=r"conversation.tokens: mistral: .*response_prefix"):
            load_mistral(other)
    with pytest.raises(InputError, match=r"data.tokens: mistral: .*response_prefix"):
        MistralExamples(prefixed)
    thinking = PromptEncoder(encoder.tokenizer, PromptConfig(), tuple(TAGS))
    chat = MistralChat(load_mistral(thinking), thinking)
    chat.start([user("Hi")])
    message = Parser(encoder.tokenizer, "mistral", TAGS).parse("3", [])
    for put in (
        {"role": "tool", "content": "4"},
        {"role": "system", "content": "[THINK]a[/THINK]"},
    ):
        with pytest.raises(InputError, match="mistral-common refuses it: Unexpected "):
            chat.copy().follow(message, [put])
    pair = chat.copy().follow(Parsed("[THINK][/THINK]3", "", "3", []), [user("More")])
    assert "[THINK]" not in encoder.decode(pair.whole())  # without thoughts, it is none
    apart = {"content": [{"type": "text", "text": "3"}], "reasoning_content": "Hm."}
    with pytest.raises(InputError, match="put them into a chunk"):
        chat.copy().learned({"role": "assistant"} | apart, load_mistral(encoder, mode="finetuning"))
    different = r"tekken.json has different tokens than tokenizer.json"
    tokenizer = encoder.tokenizer
    kept, own = tokenizer.name_or_path, tokenizer.eos_token
    try:
        tokenizer.eos_token = "[INST]"
        with pytest.raises(InputError, match=different):
            load_mistral(encoder)
        tokenizer.eos_token, tokenizer.name_or_path = own, str(tmp_path)
        with pytest.raises(InputError, match=r"has no file tekken.json"):
            load_mistral(encoder)
        (tmp_path / "tokenizer.model.v7").touch()
        assert files_of(encoder) == [tmp_path / "tokenizer.model.v7"]
        raw = json.loads((Path(kept) / "tekken.json").read_text())
        rank = max(tokenizer("Hello", add_special_tokens=False)["input_ids"]) - len(CONTROL)
        raw["vocab"][rank]["token_bytes"] = raw["vocab"].pop()["token_bytes"]
        raw["config"] |= {"default_vocab_size": 999 + len(CONTROL), "num_vocab_tokens": 999}
        (tmp_path / "tekken.json").write_text(json.dumps(raw))
        with pytest.raises(InputError, match=different):
            load_mistral(encoder)
    finally:
        tokenizer.name_or_path, tokenizer.eos_token = kept, own
