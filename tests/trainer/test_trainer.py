import copy
import json
import math
import os
import pickle
import random
import shutil
import threading
import time
from array import array
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    LlamaForCausalLM,
    OPTConfig,
    Starcoder2Config,
)

from benchmarks.architectures.sizes import tiny_model
from tests.trainer.rollouts import (
    TEMPERATURE,
    batch,
    equal,
    group,
    model,
    train_batch,
    trainer,
    with_own_logprobs,
)
from tramontane.config import TrainerConfig
from tramontane.errors import InputError
from tramontane.models import compiling
from tramontane.placement.thread import TrainerThread
from tramontane.trainer import forwards, state
from tramontane.trainer.collate import collate_shared
from tramontane.trainer.trainer import Trainer


def few(version=0):
    """Eight completions, where it does not matter how many there are."""
    return batch(version, groups=2)


def loss_by_hand(t, b):
    """The paper's J from plain padded forwards, group after group, negated."""
    rewards = [[s.reward for s in g] for g in b.groups]
    centered = [r - sum(rs) / len(rs) for rs in rewards for r in rs]
    std = torch.tensor(centered, dtype=torch.float64).std(correction=0)
    advantages = iter([a / std for a in centered])
    plain = copy.deepcopy(t.model)
    plain.set_attn_implementation("eager")
    loss = 0.0
    for g in b.groups:
        summed, tokens = 0.0, 0
        for s in g:
            logits = plain(torch.tensor([[*s.prompt_ids, *s.token_ids]])).logits[0]
            logp = torch.log_softmax(logits / TEMPERATURE, -1)[len(s.prompt_ids) - 1 : -1]
            logp = logp.gather(1, torch.tensor(s.token_ids)[:, None])[:, 0]
            ratio = (logp - torch.tensor(s.logprobs)).exp()
            a = next(advantages)
            summed += torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a).sum()
            tokens += len(s.token_ids)
        loss -= summed / tokens / len(b.groups)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in plain.named_parameters()}


def sgd(t, rate=1.0):
    """Plain gradient descent, so that the weights' change is the gradient."""
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=rate)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("budget", [1, 64, 10_000])
def test_loss_and_gradient_are_the_formula_whatever_the_microbatches(budget, checkpointing):
    t = trainer(
        microbatch_tokens=budget,
        gradient_checkpointing=checkpointing,
        max_grad_norm=1e9,
        learning_rate=1.0,
    )
    b = few()
    for s in with_own_logprobs(t, b).sequences:
        shift = random.Random(len(s.token_ids)).uniform(-0.4, 0.4)
        s.logprobs = array("f", [x + shift for x in s.logprobs])
    loss, gradient = loss_by_hand(t, b)
    before = t.weights()
    sgd(t)
    metrics = t.step(b)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    after = t.weights()
    for name, g in gradient.items():
        torch.testing.assert_close(before[name] - after[name], g, atol=2e-6, rtol=1e-4)
    norm = sum(g.square().sum() for g in gradient.values()).sqrt()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_a_gradient_above_the_limit_is_scaled_down_to_it():
    plain, clipped = trainer(max_grad_norm=1e9), trainer(max_grad_norm=1e9)
    before = plain.weights()
    for t in (plain, clipped):
        sgd(t)
    norm = plain.step(few())["grad_norm"]
    clipped.config = clipped.config.model_copy(update={"max_grad_norm": norm / 4})
    assert clipped.step(few())["grad_norm"] == pytest.approx(norm)  # reported unclipped
    after, after_clipped = plain.weights(), clipped.weights()
    for name, w in before.items():
        torch.testing.assert_close(
            w - after_clipped[name], (w - after[name]) / 4, atol=1e-6, rtol=1e-3
        )


@pytest.mark.slow
@pytest.mark.xdist_group("compiled trainer")  # that of test_gpu, which compiles the same functions
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_compiled_blocks_compute_the_same():
    plain, compiled = trainer(), trainer(compile=True)
    for version in range(2):  # lengths differ in each
        one, two = plain.step(batch(version)), compiled.step(batch(version))
        assert two == pytest.approx(one, rel=1e-4, abs=1e-6)
    blocks = compiled.model.model.layers
    assert all(block._compiled_call_impl is not None for block in blocks)


@pytest.mark.parametrize(("device", "variable"), [("cpu", "CXX"), ("cuda", "CC")])
def test_compiling_without_a_compiler_is_refused_before_any_work(device, variable, monkeypatch):
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: name)  # Triton is there
    monkeypatch.setenv(variable, "no-such-compiler")
    with pytest.raises(InputError, match="compile is true.*no-such-compiler"):
        forwards.compilation(TrainerConfig(device=device, compile=True))
    found = forwards.compilation(TrainerConfig(device=device))  # auto
    assert not found.enabled
    expected = "off, not a CUDA device" if device == "cpu" else "off, no compiler"
    assert found.reason.startswith(expected)


def test_compiling_is_the_default_on_a_gpu_where_it_can_be(monkeypatch):
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("CC", "true")
    includes = compiling.sysconfig.get_path("include")
    enabled = Path(includes, "Python.h").is_file()
    assert forwards.compilation(TrainerConfig(device="cuda:1")).enabled == enabled
    assert not forwards.compilation(TrainerConfig(device="cuda", compile=False)).enabled
    assert not forwards.compilation(TrainerConfig(device="cpu")).enabled
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda name: "/nowhere")
    found = forwards.compilation(TrainerConfig(device="cuda"))
    assert not found.enabled and "Python.h" in found.reason


def test_the_same_inputs_give_the_same_bits():
    one, two = trainer(dtype="bfloat16"), trainer(dtype="bfloat16")
    for version in range(3):
        assert one.step(few(version)) == two.step(few(version))
    assert equal(one.weights(), two.weights())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_train_what_one_thread_does(dtype):
    one, two, again = (
        trainer(dtype=dtype, threads=threads, microbatch_tokens=64) for threads in (1, 3, 3)
    )
    for version in range(2):
        b = batch(version, groups=3)
        expected, metrics = one.step(b), two.step(b)
        assert metrics == pytest.approx(
            expected, rel=1e-2 if dtype == "bfloat16" else 1e-4, abs=1e-6
        )
        assert again.step(b) == metrics
    assert equal(two.weights(), again.weights())
    for name, weight in one.weights().items():
        # AdamW's first steps have the learning rate's size, whatever the gradient's.
        torch.testing.assert_close(weight, two.weights()[name], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("repeatable", [True, False])
def test_the_gradient_of_several_threads_is_that_of_one(repeatable):
    one, two = (
        trainer(threads=threads, max_grad_norm=1e9, microbatch_tokens=64) for threads in (1, 3)
    )
    for t in (one, two):
        sgd(t)
        b = batch()
        t.step(replace(b, settings=replace(b.settings, repeatable=repeatable)))
    for name, weight in one.weights().items():
        torch.testing.assert_close(weight, two.weights()[name], atol=1e-6, rtol=1e-5)


def test_minibatches_take_whole_groups_in_order():
    t, by_hand = trainer(), trainer()
    b = batch(n_minibatch=8)
    metrics = t.step(b)
    first = by_hand.step(train_batch(0, b.groups[:2]))
    second = by_hand.step(train_batch(0, b.groups[2:]))
    assert equal(t.weights(), by_hand.weights())
    assert t.version == 1
    assert metrics["loss"] == pytest.approx((first["loss"] + second["loss"]) / 2)
    # The mismatch is that of the first minibatch, before any step.
    assert metrics["mismatch_age_0"] == first["mismatch_age_0"]


def test_metrics_say_what_was_trained_on():
    t = trainer(updates=10, warmup_updates=4)
    b = with_own_logprobs(t, batch(version=3))
    versions = iter([3, 2, 1, 0] * 4)
    for s in b.sequences:
        age = 3 - (version := next(versions))
        s.versions = array("i", [version] * len(s.token_ids))
        s.logprobs = array("f", [x + age * 0.01 for x in s.logprobs])
    metrics = t.step(b)
    assert all(type(value) is float for value in metrics.values())
    assert metrics["mismatch_age_0"] == metrics["mismatch_age_0_max"] == 0
    assert metrics["mismatch_age_1"] == pytest.approx(0.01, rel=1e-3)
    assert metrics["mismatch_age_1_max"] == pytest.approx(0.01, rel=1e-3)
    old = [s for s in b.sequences if s.versions[0] < 2]
    drift = sum((3 - s.versions[0]) * 0.01 * len(s.token_ids) for s in old)
    tokens = sum(len(s.token_ids) for s in old)
    assert metrics["mismatch_age_2plus"] == pytest.approx(drift / tokens, rel=1e-3)
    assert metrics["mismatch_age_2plus_max"] == pytest.approx(0.03, rel=1e-3)
    ages = [3 - v for s in b.sequences for v in s.versions]
    assert metrics["staleness_mean"] == pytest.approx(sum(ages) / len(ages))
    assert metrics["staleness_max"] == 3
    assert metrics["completion_tokens"] == len(ages)
    # A budget of 64 tokens holds a prompt with all its completions or several times.
    layout, tokens = collate_shared(b.sequences, 64)
    assert len(layout) > 1
    assert metrics["computed_tokens"] == sum(tokens)
    assert metrics["learning_rate"] == pytest.approx(0.25e-3)
    assert t.stats()["computed_tokens"] == metrics["computed_tokens"]
    assert "mismatch_age_1" not in t.step(batch(version=1))


def test_a_right_completion_becomes_more_likely():
    t = trainer(learning_rate=3e-3)
    b = batch()
    for g in b.groups:
        for i, s in enumerate(g):
            s.reward = float(i == 0)
    with_own_logprobs(t, b)
    before = [sum(s.logprobs) for s in b.sequences]
    for version in range(5):
        t.step(train_batch(version, b.groups))
    after = [sum(s.logprobs) for s in with_own_logprobs(t, b).sequences]
    gained = [new - old for new, old in zip(after, before, strict=True)]
    assert all(g > 0 for g in gained[::4])
    assert sum(gained[1::4] + gained[2::4] + gained[3::4]) < 0


def test_unscorable_completions_are_not_learned_from():
    b = batch()
    for number, g in enumerate(b.groups):
        g[number].scored, g[number].reward = False, 0.0
    t, other = trainer(), trainer()
    metrics = t.step(b)
    # Whatever they say, the update is the same.
    for number, g in enumerate(b.groups):
        g[number].token_ids = array("i", [7] * len(g[number].token_ids))
    assert other.step(b)["loss"] == metrics["loss"]
    assert equal(t.weights(), other.weights())


def test_with_kl_and_correction_the_first_step_is_the_plain_gradient():
    """At π_θ = π_old = π_ref = μ every correction is 1 and the KL term is at its minimum."""
    plain, other = (
        trainer(),
        trainer(objective={"magistral": {"kl_coef": 1.0, "importance_correction": "clipped"}}),
    )
    b = with_own_logprobs(plain, few())
    a, c = plain.step(b), other.step(b)
    assert c["kl_reference"] == pytest.approx(0, abs=1e-7)
    assert c["importance_weight"] == pytest.approx(1)
    assert a["loss"] == pytest.approx(c["loss"], abs=1e-7)
    for one, two in zip(plain.weights().values(), other.weights().values(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)
    # Afterwards the reference keeps the initial weights.
    assert other.step(b)["kl_reference"] > 1e-6


def test_the_proximal_policy_is_that_of_the_start_of_the_update():
    t = trainer(learning_rate=1e-2, objective={"magistral": {"importance_correction": "truncated"}})
    metrics = t.step(with_own_logprobs(t, batch(n_minibatch=8)))
    # In the second minibatch the weights have moved away from π_old, which is still μ.
    assert metrics["importance_weight"] == pytest.approx(1, abs=1e-6)
    assert abs(metrics["ratio"] - 1) > 1e-4


def test_an_entropy_bonus_raises_entropy():
    bonus, plain = trainer(objective={"magistral": {"entropy_coef": 1.0}}), trainer()
    b = with_own_logprobs(plain, few())
    for _ in range(4):
        with_bonus, without = bonus.step(b), plain.step(b)
    assert with_bonus["entropy"] > without["entropy"] + 0.01


def test_bfloat16_stays_near_float32_and_keeps_float32_weights():
    exact, rough = trainer(), trainer(dtype="bfloat16")
    b = with_own_logprobs(exact, few())
    a, c = exact.step(b), rough.step(b)
    assert 0 < c["mismatch_age_0"] < 0.05
    assert c["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.05)
    assert {w.dtype for w in rough.weights().values()} == {torch.float32}


def spoilt(b, group=0):
    """The same batch with a behavior log-prob that makes the gradient of its minibatch NaN."""
    b = copy.deepcopy(b)
    b.groups[group][0].logprobs[0] = float("nan")
    return b


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_whose_gradient_is_not_finite_changes_nothing_but_the_version(dtype):
    skipping, plain = trainer(dtype=dtype), trainer(dtype=dtype)
    before = skipping.weights()
    metrics = skipping.step(spoilt(few()))
    assert (metrics["skipped_steps"], skipping.version) == (1, 1)
    assert not {"loss", "grad_norm"} & metrics.keys()  # JSON has no NaN
    assert all(math.isfinite(value) for value in metrics.values())
    assert equal(before, skipping.weights())
    # Moments, and the gradient of the next step, are as if the step had never been.
    plain.version = 1
    assert skipping.step(few(1)) == plain.step(few(1))
    assert equal(skipping.weights(), plain.weights())


def test_a_minibatch_is_skipped_alone_and_left_out_of_the_means():
    skipping, by_hand = trainer(), trainer()
    b = batch(n_minibatch=8)
    metrics = skipping.step(spoilt(b, group=3))  # in the second minibatch
    first = by_hand.step(train_batch(0, b.groups[:2]))
    assert equal(skipping.weights(), by_hand.weights())
    assert metrics["skipped_steps"] == 1
    for key in ("loss", "grad_norm", "clip_fraction_high"):
        assert metrics[key] == first[key]


def test_consecutive_steps_without_a_finite_gradient_end_the_run():
    t = trainer(max_nonfinite_steps=3)
    start = t.weights()
    for version in range(2):
        t.step(spoilt(few(version)))
    moved = t.step(few(2))["grad_norm"]
    assert moved > 0  # a finite step: the count begins again
    after = t.weights()
    for version in range(3, 5):
        t.step(spoilt(few(version)))
    with pytest.raises(InputError, match="3 consecutive optimizer steps are not finite"):
        t.step(spoilt(few(5)))
    assert equal(after, t.weights()) and not equal(start, after)


def test_an_infinite_weight_is_found_and_the_state_before_it_trains_on(tmp_path):
    t = trainer(max_nonfinite_steps=2)
    t.step(few())
    t.save_state(tmp_path)
    with torch.no_grad():
        t.model.lm_head.weight[0, 0] = torch.inf
    assert t.step(few(1))["skipped_steps"] == 1
    with pytest.raises(InputError, match="not finite"):
        t.step(few(2))
    again = trainer()
    again.load_state(tmp_path)
    assert again.step(few(1))["skipped_steps"] == 0


def test_weights_are_copies_under_the_names_of_the_state_dict(tmp_path):
    t = trainer()
    weights = t.weights()
    assert weights.keys() == t.model.state_dict().keys()
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    before = {n: w.clone() for n, w in weights.items()}
    t.step(few())
    assert equal(weights, before)
    assert not equal(t.weights(), before)


def test_saved_weights_load_anywhere(tmp_path):
    t = trainer()
    t.step(few())
    t.save_weights(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert equal(dict(loaded.state_dict()), t.weights())
    again = Trainer.load(str(tmp_path), t.config, 10)
    sequences = few().sequences
    assert again.logprobs(sequences, 0.8) == t.logprobs(sequences, 0.8)


@pytest.mark.parametrize("done", [0, 2])
def test_a_resumed_trainer_goes_on_bit_for_bit(tmp_path, done):
    settings = {
        "schedule": "cosine",
        "objective": {"magistral": {"kl_coef": 0.1, "importance_correction": "truncated"}},
    }
    t = trainer(**settings)
    for version in range(done):
        t.step(few(version))
    t.save_state(tmp_path)
    resumed = trainer(**settings)
    resumed.load_state(tmp_path)
    assert resumed.version == t.version == done
    for version in range(done, done + 2):
        assert resumed.step(few(version)) == t.step(few(version))
    assert equal(t.weights(), resumed.weights())


def test_a_step_waits_for_a_state_that_is_being_written(tmp_path, monkeypatch):
    t = trainer()
    t.step(few())
    before = t.weights()
    computed, order = threading.Event(), []
    save, clip, step = dcp.save, torch.nn.utils.clip_grad_norm_, t.optimizer.step

    def slow_save(*args, **options):
        computed.wait(60)
        time.sleep(0.2)
        save(*args, **options)
        order.append("saved")

    def clip_and_tell(*args):
        computed.set()
        return clip(*args)

    def recorded_step():
        order.append("step")
        step()

    monkeypatch.setattr(state.dcp, "save", slow_save)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_tell)
    monkeypatch.setattr(t.optimizer, "step", recorded_step)
    t.save_state(tmp_path, wait=False)
    t.step(few(1))
    t._state_files.finish()
    assert order == ["saved", "step"]
    again = trainer()
    again.load_state(tmp_path)
    assert equal(again.weights(), before) and not equal(t.weights(), before)


def test_a_trainer_that_is_closed_has_written_its_state(tmp_path, monkeypatch):
    """A run that fails may be resumed in the same process, which writes into the same folder."""
    save = dcp.save

    def slow_save(*args, **options):
        time.sleep(0.2)
        save(*args, **options)

    monkeypatch.setattr(state.dcp, "save", slow_save)
    handle = TrainerThread("trainer", trainer)
    handle.submit("save_state", tmp_path, False).result(60)
    handle.close()
    trainer().load_state(tmp_path)


def test_a_damaged_state_is_a_clear_error(tmp_path):
    t = trainer()
    with pytest.raises(InputError, match="no trainer state"):
        t.load_state(tmp_path / "missing")
    t.save_state(tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="damaged"):
        t.load_state(tmp_path)
    flipped = bytearray(whole)
    flipped[len(whole) // 2 : len(whole) // 2 + 3] = b"\x00\xff\x00"
    data.write_bytes(flipped)
    with pytest.raises(InputError, match="damaged"):
        t.load_state(tmp_path)
    data.unlink()
    with pytest.raises(InputError, match="damaged"):
        t.load_state(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"not a pickle")
    with pytest.raises(InputError, match="damaged"):
        t.load_state(tmp_path)


class Payload:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_state_from_elsewhere_runs_no_code(tmp_path):
    t, mark = trainer(), tmp_path / "ran"

    def hostile_metadata(folder: Path) -> None:
        (folder / ".metadata").write_bytes(pickle.dumps(Payload(f"touch {mark}")))

    def hidden_in_metadata(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.planner_data = Payload(f"touch {mark}")
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    def object_for_tensor(folder: Path) -> None:  # torch unpickles it whole
        dcp.save({"version": Payload(f"touch {mark}")}, checkpoint_id=folder, no_dist=True)

    def other_file(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        for item in metadata.storage_data.values():
            item.relative_path = "../__0_0.distcp"
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    def no_metadata(folder: Path) -> None:
        (folder / ".metadata").write_bytes(pickle.dumps([1, 2]))

    for number, harm in enumerate(
        (hostile_metadata, hidden_in_metadata, object_for_tensor, other_file, no_metadata)
    ):
        folder = tmp_path / str(number)
        t.save_state(folder)
        harm(folder)
        (folder / "checksums_0").write_bytes(state._checksums(folder, 0))
        with pytest.raises(InputError, match="was not loaded"):
            trainer().load_state(folder)
        assert not mark.exists(), harm


class ByName(pickle.Pickler):
    """Writes a member of an enum as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_a_state_of_another_python_is_loaded_and_nothing_else_of_a_class(tmp_path):
    t = trainer()
    t.save_state(tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    other = trainer()
    for planned, is_read in ((None, True), (Part(), False)):
        metadata.planner_data = planned
        with (tmp_path / ".metadata").open("wb") as file:
            ByName(file).dump(metadata)
        (tmp_path / "checksums_0").write_bytes(state._checksums(tmp_path, 0))
        if is_read:
            other.load_state(tmp_path)
            assert equal(other.weights(), t.weights())
        else:
            with pytest.raises(InputError, match="asks .*Size.* for count"):
                other.load_state(tmp_path)


class Part:
    """Read back as an attribute of a class that a state may name."""

    def __reduce__(self) -> Any:
        return getattr, (torch.Size, "count")


def test_the_state_of_another_model_is_a_clear_error(tmp_path):
    trainer(tied=True).save_state(tmp_path)
    other = trainer(tied=False)
    with pytest.raises(InputError, match="another model"):
        other.load_state(tmp_path)


def test_hidden_states_are_those_of_every_layer():
    t = trainer()
    states = t.hidden_states([3, 1, 4, 1, 5])
    assert [tuple(h.shape) for h in states] == [(5, 32)] * 3
    torch.testing.assert_close(states[0], t.weights()["model.embed_tokens.weight"][[3, 1, 4, 1, 5]])
    logits = states[-1] @ t.weights()["lm_head.weight"].T
    plain = model()
    plain.set_attn_implementation("eager")
    torch.testing.assert_close(logits, plain(torch.tensor([[3, 1, 4, 1, 5]])).logits[0].detach())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ranks": 2}, "ranks is 2, but the process group has 1"),
    ],
)
def test_sizes_that_cannot_work_are_refused_at_construction(sizes, message):
    with pytest.raises(InputError, match=message):
        trainer(**sizes)


def test_dropout_is_off_since_the_generator_has_none():
    with_dropout = model()
    with_dropout.config.attention_dropout = 0.5
    for layer in with_dropout.model.layers:
        layer.self_attn.attention_dropout = 0.5
    t = trainer()
    t = Trainer(with_dropout, t.config, 10)
    b = with_own_logprobs(t, few())
    assert t.step(b)["mismatch_age_0_max"] == 0


@pytest.mark.parametrize(
    ("config", "rates"),
    [
        (Starcoder2Config, {"residual_dropout": 0.3, "embedding_dropout": 0.3}),
        (OPTConfig, {"dropout": 0.3, "layerdrop": 0.5, "attention_dropout": 0.3}),
        (FalconConfig, {"hidden_dropout": 0.3, "attention_dropout": 0.3}),
        (GPT2Config, {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}),
    ],
)
def test_dropout_under_any_name_is_off(config, rates, tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "ffn_dim": 48, "word_embed_proj_dim": 32}
    eager = AutoModelForCausalLM.from_config(config(**sizes, **rates), attn_implementation="eager")
    t = Trainer(eager, TrainerConfig(microbatch_tokens=64), 10)
    t.save_weights(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved.items() >= rates.items()  # the checkpoint's config is exported as it was
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(t.model(ids).logits, t.model(ids).logits)


class Noisy(LlamaForCausalLM):
    """Random under a name that nobody knows."""

    always = False

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        random = self.training or self.always
        output.logits = torch.nn.functional.dropout(output.logits, 0.1, random)
        return output


def test_a_model_that_is_random_in_training_is_trained_without():
    t = Trainer(Noisy(model().config), TrainerConfig(dtype="float32"), 10)
    b = with_own_logprobs(t, few())
    assert t.step(b)["mismatch_age_0_max"] == 0


def test_a_model_that_stays_random_is_refused():
    noisy = Noisy(model().config)
    noisy.always = True
    with pytest.raises(InputError, match=r"Noisy computes different logits .* config\.json"):
        Trainer(noisy, TrainerConfig(), 10)


def test_a_lone_group_trains():
    t = trainer()
    metrics = t.step(train_batch(0, [group(random.Random(0), rewards=[1.0, 0.0, 0.0, 0.1])]))
    assert metrics["grad_norm"] > 0


def test_weights_that_transformers_reads_otherwise_are_refused_when_first_saved(tmp_path):
    # On loading, transformers 5.23 resets Youtu's embedding of the padding token.
    t = Trainer(tiny_model("youtu"), TrainerConfig(), 1)
    t.model.get_input_embeddings().weight.data += 1
    with pytest.raises(InputError, match=r"embed_tokens.weight is read back with other values"):
        t.save_weights(tmp_path)
