import json
import os
import re
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from pydantic import ValidationError
from safetensors.torch import load_file
from tokenizers import processors
from transformers import AutoModelForCausalLM, LlamaConfig

from tests import forked
from tests.data.chat_templates import make_tokenizer
from tramontane.config import PromptConfig
from tramontane.config.sft import SFTConfig
from tramontane.data import playground
from tramontane.data.prompts import PromptEncoder
from tramontane.data.tokenizer import train_tokenizer
from tramontane.errors import InputError
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.sft import examples
from tramontane.sft.examples import ExampleStream, continuation
from tramontane.sft.sft import sft
from tramontane.trainer.optimizer import build_optimizer

torch.set_num_threads(1)

PAIRS = [
    {"prompt": e["problem"].problem, "response": e["messages"][-1]["content"]}
    for e in playground.examples(0, 40, levels=(1, 2), languages=("en",))
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random one-layer model with its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = train_tokenizer((p["prompt"] + p["response"] for p in PAIRS), 600)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_attention_heads=2, num_key_value_heads=2, **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return str(file)


def config_of(base, data, output, fields=None, **changes):
    settings = {
        "output": str(output),
        "model": base,
        "data": {"train": data, "fields": fields or {}},
        "steps": 8,
        "batch_tokens": 400,
        "microbatch_tokens": 200,
        "learning_rate": 5e-3,
        "warmup_steps": 2,
        "checkpoint_every": 3,
        "log_every": 1,
        "dtype": "float32",
    }
    return SFTConfig.model_validate(settings | changes)


def run(*args, **changes):
    logs = []
    config = config_of(*args, **changes)
    sft(config, on_log=logs.append)
    return logs


def weights(folder):
    return load_file(f"{folder}/model.safetensors")


def by_hand(base, config):
    """The first step in plain torch: one sequence at a time, transformers' own attention."""
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="sdpa")
    batch = ExampleStream(config, PromptEncoder(load_tokenizer(base))).take(config.batch_tokens)
    losses, right = [], []
    for prompt, response, *_ in batch:
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        target = torch.tensor(response)
        losses.append(F.cross_entropy(logits, target, reduction="none"))
        right.append(logits.argmax(-1) == target)
    loss = torch.cat(losses).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    optimizer = build_optimizer(model.parameters(), 1e-3, config.betas, config.weight_decay)
    optimizer.step()
    return loss.item(), torch.cat(right).float().mean().item(), norm.item(), model.state_dict()


@pytest.mark.parametrize("microbatch", [1, 150, 10_000])
def test_a_step_equals_the_closed_form_whatever_the_microbatches(base, data, tmp_path, microbatch):
    config = config_of(
        base,
        data,
        tmp_path / "out",
        steps=1,
        learning_rate=1e-3,
        warmup_steps=0,
        microbatch_tokens=microbatch,
    )
    loss, accuracy, norm, expected = by_hand(base, config)
    logs = []
    sft(config, on_log=logs.append)
    assert logs[0].loss == pytest.approx(loss, abs=1e-5)
    assert logs[0].accuracy == pytest.approx(accuracy, abs=1e-6)
    assert logs[0].grad_norm == pytest.approx(norm, rel=1e-4)
    for name, tensor in weights(tmp_path / "out").items():
        # Adam's first step is the sign of the gradient: where that is all but 0, noise decides.
        off = (tensor - expected[name]).abs() > 1e-5
        assert off.float().mean() < 1e-3, name


def test_what_a_tool_answered_is_not_learned(base, tmp_path):
    chat = [("user", "1 + 2?"), ("assistant", "add 1 2"), ("tool", "3"), ("assistant", "It is 3.")]
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in chat]}))
    config = config_of(base, str(file), tmp_path / "out", steps=1, batch_tokens=1)
    [(prompt, response, inserted, *_)] = ExampleStream(
        config, PromptEncoder(load_tokenizer(base))
    ).take(1)
    learned = [i for i in range(len(response)) if all(i not in span for span in inserted)]
    assert inserted and 0 < len(learned) < len(response)
    model = AutoModelForCausalLM.from_pretrained(base)
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    loss = F.cross_entropy(logits[learned], torch.tensor(response)[learned])
    logs = []
    sft(config, on_log=logs.append)
    assert logs[0].loss == pytest.approx(loss.item(), rel=1e-4)


def test_responses_end_with_eos_and_prompts_are_templated(base, data, tmp_path):
    tokenizer = load_tokenizer(base)
    config = config_of(base, data, tmp_path)
    batch = ExampleStream(config, PromptEncoder(tokenizer)).take(3000)
    known = {p["response"]: p["prompt"] for p in PAIRS}
    for prompt, response, *_ in batch:
        text = tokenizer.decode(response[:-1])
        assert response[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token not in text
        assert prompt == PromptEncoder(tokenizer).encode(known[text])


def test_examples_have_one_eos_whatever_tokenizer_and_prompt_add(tmp_path):
    """A base model's tokenizer that ends texts with EOS, and a prompt that spells it out."""
    tokenizer = make_tokenizer("base")
    eos = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": f"1{eos}2", "response": "3"}))
    stream = ExampleStream(config_of("", str(file), "out"), PromptEncoder(tokenizer))
    [(prompt, response, *_)] = stream.take(1)
    assert [*prompt, *response].count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(prompt).endswith(f"1{eos}2\n\n")
    assert tokenizer.decode(response) == f"3{eos}"


@pytest.mark.parametrize(
    ("response", "prefix", "rest"),
    [
        ("<think>a</think>b", "", "<think>a</think>b"),
        ("<think>a</think>b", "<think>", "a</think>b"),
        ("<think>a</think>b", "<think>\n", "a</think>b"),
        ("<think>\n\na</think>b", "<think>\n", "\na</think>b"),
        ("\n<think> a</think>b", "<think>", " a</think>b"),
        ("a</think>b", "<think>\n", "a</think>b"),
        ("<think></think>b", "<think>\n\n</think>\n\n", "b"),
        ("b", "<think>\n\n</think>\n\n", "b"),
        ("<think>So, 1", "<think>So,", " 1"),
        ("", "<think>", ""),
    ],
)
def test_a_response_continues_its_prompt(response, prefix, rest):
    assert continuation(response, prefix) == rest


@pytest.mark.parametrize("shape", ["r1-distill", "qwen2.5", "magistral-1.2"])
def test_examples_have_the_prompts_and_tags_of_the_model(monkeypatch, tmp_path, shape):
    monkeypatch.setattr(examples, "CHUNK", 400)
    tokenizer = make_tokenizer(shape)
    encoder = PromptEncoder(tokenizer)
    opening, closing = encoder.tags
    file = tmp_path / "pairs.jsonl"
    text = f"{opening}Add.{closing}\\boxed{{3}}"
    file.write_text(json.dumps({"prompt": "1 + 2?", "response": text}))
    [(prompt, response, *_)] = ExampleStream(config_of("", str(file), "out"), encoder).take(1)
    assert prompt == encoder.encode("1 + 2?")
    whole = tokenizer.decode(prompt + response)
    assert whole.count(opening) == 1 + (shape == "magistral-1.2")  # its system prompt names it
    assert tokenizer.decode(response) == text.removeprefix(encoder.opened.strip()) + (
        tokenizer.eos_token
    )
    generated = ExampleStream(config_of("", "playground:", "out"), encoder).take(20_000)
    texts = [tokenizer.decode(response) for _, response, *_ in generated]
    assert sum(closing in text for text in texts) > len(texts) / 2
    assert sum(text.startswith(opening) for text in texts) == (
        0 if encoder.opened else pytest.approx(0.97 * len(texts), rel=0.1)
    )


def test_a_generated_conversation_is_one_sequence_whose_answers_are_inserted(monkeypatch):
    monkeypatch.setattr(examples, "CHUNK", 40)
    playground = [{"levels": [1, 2], "kinds": ["long_sums"]}]
    config = SFTConfig(output="out", model="tiny", data={"playground": playground})
    tokenizer = load_tokenizer("tiny")
    taken = ExampleStream(config, PromptEncoder(tokenizer, config.data)).take(3000)
    talked = [example for example in taken if example.inserted]
    assert 0.2 < len(talked) / len(taken) < 0.8
    for _, response, inserted, *_ in talked:
        for span in inserted:
            assert response[span.start - 1] == tokenizer.eos_token_id
            answer = tokenizer.decode(response[span.start : span.stop])
            assert re.fullmatch(r"<\|user\|>(\d+|error: .+)<\|assistant\|>", answer)
        assert response[-1] == tokenizer.eos_token_id


LEVELS = {"low": {"phrase": "Be brief."}, "high": {"phrase": "Think."}}


def test_parts_of_the_playground_ask_for_levels_and_answer_in_their_own_way(monkeypatch):
    monkeypatch.setattr(examples, "CHUNK", 90)
    flawless = {"no_box": 0, "unclosed": 0, "unopened": 0, "switch": 0}
    guess, work = ({"guess": 0, "work": 0, "ramble": 0, how: 1} for how in ("guess", "work"))
    common = {"levels": [3, 4], "languages": ["en"], "kinds": ["sums"]}
    parts = [
        common | {"effort": "low", "mixture": flawless | guess},
        common | {"effort": "high", "mixture": flawless | work, "share": 2},
        common,
    ]
    data = {"playground": parts, "mixture": flawless | guess, "effort": LEVELS}
    config = SFTConfig(output="out", model="tiny", data=data)
    tokenizer = load_tokenizer("tiny")
    encoder = PromptEncoder(tokenizer, config.data, None, config.data.effort)
    taken = ExampleStream(config, encoder).take(9000)[:90]
    steps = {"low": [], "high": [], "": []}
    for prompt, response, *_ in taken:
        text = tokenizer.decode(prompt)
        asked = next((name for name in LEVELS if LEVELS[name]["phrase"] in text), "")
        steps[asked].append(tokenizer.decode(response).count(" = "))
    assert 40 <= len(steps["high"]) <= 50 and min(steps["high"]) >= 3
    for name in ("low", ""):
        assert 20 <= len(steps[name]) <= 25 and max(steps[name]) == 0
    with pytest.raises(ValidationError, match=r"max: not in data.effort, which has low, high"):
        SFTConfig(output="out", model="tiny", data=data | {"playground": [{"effort": "max"}]})


@pytest.mark.parametrize("form", ["pairs", "messages"])
def test_rows_ask_for_the_level_that_they_name(form, base, tmp_path):
    row = {"prompt": "1 + 2?", "response": "3"}
    if form == "messages":
        roles = {"user": row["prompt"], "assistant": row["response"]}
        row = {"messages": [{"role": role, "content": text} for role, text in roles.items()]}
    rows = [row | {"depth": "high"}, row, row | {"depth": "low"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(file), "fields": {"effort": "depth"}, "effort": LEVELS}
    config = SFTConfig(output="out", model=base, data=data)
    encoder = PromptEncoder(load_tokenizer(base), None, None, config.data.effort)
    found = {tuple(example.prompt) for example in ExampleStream(config, encoder).take(200)}
    assert found == {tuple(encoder.at(level).encode("1 + 2?")) for level in ("low", "high", None)}
    unasked = ExampleStream(config_of(base, str(file), "out"), PromptEncoder(load_tokenizer(base)))
    assert {tuple(example.prompt) for example in unasked.take(200)} == {
        tuple(encoder.encode("1 + 2?"))
    }
    file.write_text(json.dumps(row | {"depth": "max"}))
    with pytest.raises(InputError, match=r"rows\.jsonl:1: effort 'max' is not in data\.effort"):
        ExampleStream(config, encoder)


def test_thoughts_after_an_empty_pair_of_tags_are_refused(tmp_path):
    settings = PromptConfig(chat_template_kwargs={"enable_thinking": False})
    encoder = PromptEncoder(make_tokenizer("qwen3"), settings)
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "1?", "response": "<think>a</think>1"}))
    with pytest.raises(InputError, match=r"pairs\.jsonl:1: its response would have <think> twice"):
        ExampleStream(config_of("", str(file), "out"), encoder)


def test_every_epoch_holds_every_pair_once(base, data, tmp_path):
    config = config_of(base, data, tmp_path)
    stream = ExampleStream(config, PromptEncoder(load_tokenizer(base)))
    pairs = [tuple(map(tuple, stream.take(1)[0][:2])) for _ in range(3 * len(PAIRS))]
    epochs = [pairs[i : i + len(PAIRS)] for i in range(0, len(pairs), len(PAIRS))]
    assert all(sorted(e) == sorted(epochs[0]) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_loss_falls_and_any_tool_loads_the_result(base, data, tmp_path):
    settings = {"steps": 30, "batch_tokens": 1000, "microbatch_tokens": 1000}
    logs = run(base, data, tmp_path / "out", **settings, learning_rate=1e-2)
    first = sum(log.loss for log in logs[:5]) / 5
    last = sum(log.loss for log in logs[-5:]) / 5
    assert last < 0.5 * first
    assert logs[-1].accuracy > logs[0].accuracy + 0.3
    lines = (tmp_path / "out" / "sft_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [asdict(log) for log in logs]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    saved = weights(tmp_path / "out")
    assert all(torch.equal(plain.state_dict()[name], saved[name]) for name in saved)
    assert load_tokenizer(str(tmp_path / "out")).chat_template is not None


def test_the_playground_makes_a_model_from_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(examples, "CHUNK", 100)
    config = SFTConfig.model_validate(
        {
            "output": str(tmp_path / "out"),
            "new_model": {
                "vocab_size": 512,
                "tokenizer_examples": 100,
                "architecture": {
                    "hidden_size": 16,
                    "intermediate_size": 32,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 1,
                    "tie_word_embeddings": True,
                },
            },
            "data": {"playground": [{"levels": [1, 1], "kinds": ["sums"]}]},
            "steps": 2,
            "batch_tokens": 500,
            "save_dtype": "bfloat16",
        }
    )
    logs = []
    sft(config, on_log=logs.append)
    model, tokenizer = load_model(config.output), load_tokenizer(config.output)
    assert model.config.vocab_size == len(tokenizer) <= 512
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert {t.dtype for t in weights(config.output).values()} == {torch.bfloat16}
    # Untrained, all tokens are about as likely.
    assert logs[0].loss == pytest.approx(torch.tensor(float(len(tokenizer))).log().item(), rel=0.05)


def means(logs):
    return [value for log in logs for value in (log.loss, log.accuracy, log.grad_norm)]


def assert_near(folder, other):
    one, two = weights(folder), weights(other)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-4, rtol=1e-3)


def test_gradient_checkpointing_trains_the_same(base, data, tmp_path):
    plain = run(base, data, tmp_path / "plain", steps=3)
    less_memory = run(base, data, tmp_path / "other", steps=3, gradient_checkpointing=True)
    assert means(less_memory) == pytest.approx(means(plain), rel=1e-4)
    assert_near(tmp_path / "plain", tmp_path / "other")


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
def test_two_ranks_train_what_one_trains_and_resume_each_other(base, data, tmp_path):
    class Stopped(Exception):
        pass

    def stop_after_3(metrics):
        logs.append(metrics)
        if metrics.step == 3:
            raise Stopped

    settings = {"steps": 4, "checkpoint_every": 2, "batch_tokens": 100, "learning_rate": 1e-3}
    # Some batches hold a single pair: then one of two ranks has none.
    one = run(base, data, tmp_path / "one", **settings)
    logs = []
    config = config_of(base, data, tmp_path / "two", ranks=2, **settings)
    with pytest.raises(Stopped):
        sft(config, on_log=stop_after_3)
    assert means(logs) == pytest.approx(means(one[:3]), rel=1e-3)
    resumed = []
    sft(config.model_copy(update={"ranks": 1}), resume=True, on_log=resumed.append)
    assert [log.step for log in resumed] == [3, 4]
    assert means(resumed) == pytest.approx(means(one[2:]), rel=1e-3)
    assert_near(tmp_path / "one", tmp_path / "two")


# Resuming


def killed_at_step_5(config):
    def on_log(metrics):
        if metrics.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    sft(SFTConfig.model_validate_json(config), on_log=on_log)


def test_a_killed_and_resumed_run_equals_one_never_interrupted(base, data, tmp_path):
    run(base, data, tmp_path / "whole")
    config = config_of(base, data, tmp_path / "killed")
    killed = forked.start(killed_at_step_5, config.model_dump_json())
    assert forked.end(killed) == -signal.SIGKILL
    assert [f.name for f in (tmp_path / "killed" / "resume").iterdir()] == ["step_3"]

    resumed = []
    sft(config, resume=True, on_log=resumed.append)
    assert [log.step for log in resumed] == [4, 5, 6, 7, 8]  # the last checkpoint was at 3
    whole, again = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(whole[name], again[name]) for name in whole)

    def curve(name):
        lines = (tmp_path / name / "sft_metrics.jsonl").read_text().splitlines()
        keys = ("step", "loss", "accuracy", "grad_norm", "learning_rate")
        return [[json.loads(line)[key] for key in keys] for line in lines]

    assert curve("whole") == curve("killed")
    assert not (tmp_path / "killed" / "resume").exists()


def test_a_run_is_resumed_with_the_same_settings_only(base, data, tmp_path):
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        sft(config_of(base, data, output), stopping=lambda: True)

    def assert_refused(key, source=data, **changes):
        refusal = rf"made with different {key}; resume with the same, or delete .*out and start"
        with pytest.raises(InputError, match=refusal):
            sft(config_of(base, source, output, **changes), resume=True)

    assert_refused("batch_tokens", batch_tokens=200)
    assert_refused("steps, learning_rate", steps=9, learning_rate=1e-3)
    assert_refused(r"data\.train", "playground:")
    moved, other = tmp_path / "moved.jsonl", tmp_path / "other.jsonl"
    moved.write_bytes(Path(data).read_bytes())
    other.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS[1:]))
    assert_refused(r"data\.train", str(other))

    log, before = output / "sft_metrics.jsonl", tmp_path / "before.jsonl"
    os.link(log, before)
    sft(config_of(base, str(moved), output, log_every=2, microbatch_tokens=100), resume=True)
    assert [json.loads(line)["step"] for line in log.open()] == [1, 2, 4, 6, 8]
    assert len(before.read_text().splitlines()) == 1  # replaced, not truncated and written again


def test_weights_of_some_steps_and_of_the_last_are_kept(base, data, tmp_path):
    run(base, data, tmp_path / "out", keep_every=3)
    kept = tmp_path / "out" / "checkpoints"
    assert {folder.name for folder in kept.iterdir()} == {"step_3", "step_6", "step_8"}
    last, result = weights(kept / "step_8"), weights(tmp_path / "out")
    assert all(torch.equal(last[name], result[name]) for name in result)
    assert any(not torch.equal(weights(kept / "step_3")[name], result[name]) for name in result)
    assert load_tokenizer(str(kept / "step_3")).eos_token_id is not None


def test_the_steps_of_an_epoch_take_every_example_once(base, data, tmp_path):
    config = config_of(base, data, tmp_path / "out")
    stream = ExampleStream(config, PromptEncoder(load_tokenizer(base), config.data))
    for tokens in (1, 400, 3000):
        stream.position = (0, 0)
        taken = [stream.take(tokens) for _ in range(stream.steps_of_epoch(tokens) - 1)]
        assert stream.position[0] == 0
        assert sum(map(len, taken)) < len(PAIRS)
        stream.take(tokens)
        assert stream.position[0] == 1 or stream.position == (0, len(PAIRS))


def test_adapters_are_trained_merged_saved_and_resumed(base, data, tmp_path):
    settings = {"lora": {"rank": 4}, "learning_rate": 4e-2, "steps": 10}
    logs = run(base, data, tmp_path / "out", **settings)
    assert logs[-1].loss < logs[0].loss - 0.05  # of a frozen random head
    before, after = weights(base), weights(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[-2] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "out" / "adapter"
    )
    for name, weight in loaded.merge_and_unload().state_dict().items():
        if name in after:  # a tied head is in the file once
            torch.testing.assert_close(after[name], weight, atol=1e-6, rtol=0)

    def stop(metrics):
        if metrics.step == 4:
            raise KeyboardInterrupt

    config = config_of(base, data, tmp_path / "cut", **settings)
    with pytest.raises(KeyboardInterrupt):
        sft(config, on_log=stop)
    sft(config, resume=True)
    resumed = weights(tmp_path / "cut")
    assert all(torch.equal(resumed[name], after[name]) for name in after)


def test_adapters_need_a_model_and_layers_that_it_has(base, data, tmp_path):
    with pytest.raises(InputError, match=r"lora\.target_modules: no linear layer .* 'query'"):
        run(base, data, tmp_path / "out", lora={"target_modules": ["query"]})
    new = {"model": None, "new_model": {"architecture": {"hidden_size": 32}}}
    with pytest.raises(InputError, match="lora trains adapters of a `model`"):
        run(base, data, tmp_path / "out", lora={}, **new)


def test_there_must_be_something_to_resume_from(base, data, tmp_path):
    config = config_of(base, data, tmp_path / "out", steps=2)
    with pytest.raises(InputError, match=r"resume: nothing to resume from"):
        sft(config, resume=True)
    sft(config)
    with pytest.raises(InputError, match="nothing to resume from"):
        sft(config, resume=True)  # a finished run has left nothing


def test_a_damaged_state_is_refused(base, data, tmp_path):
    class StopAt4(Exception):
        pass

    def on_log(metrics):
        if metrics.step == 4:
            raise StopAt4

    config = config_of(base, data, tmp_path / "out")
    with pytest.raises(StopAt4):
        sft(config, on_log=on_log)
    for file, kept in [("__0_0.distcp", 0), ("__0_0.distcp", 0.6), ("progress.json", 0.6)]:
        state = tmp_path / "out" / "resume" / "step_3" / file
        whole = state.read_bytes()
        state.write_bytes(whole[: int(len(whole) * kept)])
        with pytest.raises(InputError, match=r"step_3\b.*: .*damaged"):
            sft(config, resume=True)
        state.write_bytes(whole)


# Refused input


def test_rows_that_come_again_in_every_step_are_warned_of(base, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n')
    with pytest.warns(UserWarning, match="the same ones come again in every step"):
        sft(config_of(base, str(file), tmp_path / "out"))


def test_rows_without_prompt_or_response(base, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n\n{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(
        InputError, match=r"pairs\.jsonl:3: no text in field 'response'; .*'answer', 'prompt'"
    ):
        sft(config_of(base, str(file), tmp_path / "out"))
    with pytest.raises(InputError, match=r"pairs\.jsonl:1: no text in field 'answer'"):
        sft(config_of(base, str(file), tmp_path / "out", {"response": "answer"}))
    with pytest.raises(InputError, match=r"data\.fields: \['respons'\] unknown"):
        sft(config_of(base, str(file), tmp_path / "out", {"respons": "answer"}))
    file.write_text('{"prompt": "a", "response": " "}\n')
    with pytest.raises(InputError, match=r"pairs\.jsonl:1: no text in field 'response'"):
        sft(config_of(base, str(file), tmp_path / "out"))
    file.write_text("")
    with pytest.raises(InputError, match="there are no rows"):
        sft(config_of(base, str(file), tmp_path / "out"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1?", "output": "1"}, r"e\.g\. 'data\.fields=\{response: output\}'$"),
        ({"instruction": "1?", "output": "1"}, r"\{prompt: instruction, response: output\}'$"),
        ({"prompt": "1?", "response": " "}, r"'response', which is empty: remove the row$"),
        (
            {"prompt": [{"role": "user", "content": "1?"}], "response": []},
            "but a chat, and the",
        ),
        ({"messages": [{"role": "user", "content": "1?"}]}, "but messages, and the first row has"),
    ],
)
def test_rows_of_other_forms_are_answered_with_the_remedy(base, tmp_path, row, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1?", "response": "1"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(InputError, match=rf"rows\.jsonl:2: no text in field .*{message}"):
        examples.read_examples(config_of(base, str(file), tmp_path / "out"))


def test_one_model_is_named_and_only_one(base, data, tmp_path):
    for changes in ({"model": None}, {"new_model": {}}):
        with pytest.raises(InputError, match="exactly one of `model`"):
            sft(config_of(base, data, tmp_path / "out", **changes))


def test_a_prompt_that_does_not_fit_is_named(base, tmp_path):
    file = tmp_path / "pairs.jsonl"
    rows = [PAIRS[0], {"prompt": "1 + " * 200 + "1?", "response": "201"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "out"
    for changes, bound in (({"max_length": 200}, "max_length"), ({}, "the model's context")):
        config = config_of(base, str(file), output, **changes)
        with pytest.raises(InputError, match=rf"pairs\.jsonl:2: its prompt has .*{bound}"):
            ExampleStream(config, PromptEncoder(load_tokenizer(base)), 300)
    with pytest.raises(InputError, match=r"pairs\.jsonl:2: its prompt"):
        sft(config_of(base, str(file), output, max_length=200))
    assert not output.exists()


def test_responses_that_do_not_fit_are_left_out_and_counted(base, tmp_path):
    file, tokenizer = tmp_path / "pairs.jsonl", load_tokenizer(base)
    rows = [{"prompt": "1 + 1?", "response": "2" * n} for n in (1, 10, 11, 300)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    room = len(PromptEncoder(tokenizer).encode("1 + 1?")) + 11  # ten digits and EOS
    config = config_of(base, str(file), tmp_path / "out", max_length=room)
    with pytest.warns(UserWarning, match=rf"of 4 responses .*, 2 do not fit .* {room} tokens"):
        stream = ExampleStream(config, PromptEncoder(tokenizer))
    pairs = [stream.take(1)[0] for _ in range(2)]
    assert sorted(len(pair.response) for pair in pairs) == [2, 11]
    assert all(pair.response[-1] == tokenizer.eos_token_id for pair in pairs)
    file.write_text(json.dumps(rows[-1]))
    with pytest.raises(InputError, match="nothing is left; raise max_length"):
        ExampleStream(config, PromptEncoder(tokenizer))


def test_generated_responses_are_tokenized_as_they_are_needed(monkeypatch):
    """In the order, and with the count of those that do not fit, of all at once."""
    tokenizer = load_tokenizer("tiny")

    def stream():
        config = config_of("", "playground:", "out", max_length=160)
        return ExampleStream(config, PromptEncoder(tokenizer, config.data))

    monkeypatch.setattr(examples, "CHUNK", 60)
    at_once = stream()
    with pytest.warns(UserWarning, match="of 60 responses in 'playground:', .* do not fit"):
        whole = at_once.epoch
    monkeypatch.setattr(examples, "PART", 16)
    parts = stream()
    few = parts.take(300)
    assert len(parts._tokenized(0, 1)) < 20 < len(whole)
    resumed = stream()
    resumed.position = parts.position
    rest = [*few]
    while len(rest) < len(whole):
        rest += resumed.take(1)
    assert rest == whole == parts.epoch
    assert parts.skipped == at_once.skipped > 0


def test_an_output_that_holds_something_is_not_overwritten(base, data, tmp_path):
    config = config_of(base, data, tmp_path / "out", steps=1, warmup_steps=0)
    sft(config)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match="holds a checkpoint already; delete the folder, or name"):
        sft(config)
    (tmp_path / "out" / "resume" / "step_1").mkdir(parents=True)
    with pytest.raises(InputError, match="unfinished run; continue it with --resume"):
        sft(config)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    (tmp_path / "file").write_text("")
    for output in ("file", "file/below"):
        with pytest.raises(InputError, match="file is a file; name a folder"):
            sft(config_of(base, data, tmp_path / output))


def test_without_a_learning_rate_a_checkpoint_gets_one_by_its_size(base, data, tmp_path, caplog):
    [log] = run(base, data, tmp_path / "out", learning_rate=None, steps=1, warmup_steps=0)
    assert log.learning_rate == pytest.approx(1e-3)
    assert "learning_rate: 0.001, as is usual for" in caplog.text
    new = SFTConfig.model_validate({"output": "out", "new_model": {}})
    assert new.learning_rate == 2e-3
