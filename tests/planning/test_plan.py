"""The planner's formulas, its splits, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import Mistral4Config

import tramontane
from tramontane.config import parse, parse_settings
from tramontane.errors import InputError
from tramontane.planning.config import PlanConfig
from tramontane.planning.gpus import GPUS
from tramontane.planning.machine import Machine
from tramontane.planning.plan import (
    best_share,
    by_time,
    cheapest,
    plan,
    splits_of,
    step_seconds,
)

SHAPES = ["llama-3.1-8b", "mistral-small-24b", "llama-3.1-70b"]


def test_the_example_of_the_paper() -> None:
    """η_t m_t = 3, η_g m_g = 1: θ* = 0.75, T = 4 B / G (arXiv 2505.24034)."""
    assert best_share(3, 1) == 0.75
    assert step_seconds(100, 10, 3, 1) == pytest.approx(4 * 100 / 10)


@given(
    train=st.floats(0.01, 1e4),
    generate=st.floats(0.01, 1e4),
    share=st.floats(0.01, 0.99),
    train_more=st.floats(1, 4),
    generate_more=st.floats(1, 4),
)
def test_the_best_share_is_the_best_and_never_longer_than_taking_turns(
    train: float, generate: float, share: float, train_more: float, generate_more: float
) -> None:
    """In turn, both works run on GPUs that hold more, so neither costs less."""
    best = step_seconds(256, 64, train, generate)
    apart = max(256 * train / (share * 64), 256 * generate / ((1 - share) * 64))
    assert best <= apart * (1 + 1e-9)
    share = best_share(train, generate)
    assert best == pytest.approx(256 * train / (share * 64))
    assert best == pytest.approx(256 * generate / ((1 - share) * 64))
    together = step_seconds(256, 64, train * train_more, generate * generate_more)
    assert best <= together * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from(SHAPES),
    gpus=st.sampled_from([8, 16, 64, 256, 512]),
    gpu=st.sampled_from(sorted(GPUS)),
    engine=st.sampled_from(["auto", "slots", "vllm"]),
    n_batch=st.sampled_from([256, 2048, 8192]),
    mean=st.integers(500, 12_000),
)
def test_every_split_holds_whole_groups_within_its_gpus_and_costs_what_the_formulas_say(
    model: str, gpus: int, gpu: str, engine: str, n_batch: int, mean: int
) -> None:
    sizes = {"model": model, "gpus": gpus, "gpu": gpu, "n_batch": n_batch, "engine": engine}
    config = PlanConfig.model_validate(sizes | {"length_mean": mean})
    machine = Machine(config)
    train = machine.train_cost
    if apart := cheapest(machine, 2 * n_batch, 0.0):
        shared = cheapest(machine, n_batch, machine.shared)
        assume(shared is not None)
        assert shared is not None
        assert step_seconds(n_batch, gpus, train, apart[1]) <= step_seconds(
            n_batch, gpus, train, shared[1]
        ) * (1 + 1e-9)
    for split in splits_of(machine):
        assert split.gpus <= gpus
        assert split.generator_gpus in ([1] if engine == "slots" else [1, 2, 4, 8])
        kind = machine.engines[split.generator_gpus].kind
        assert kind == engine or (
            engine == "auto" and (kind == "slots") == (split.generator_gpus == 1)
        )
        assert split.n_async <= split.generators * split.slots
        assert config.group_size * split.generators <= split.n_async <= 2 * n_batch
        assert split.seconds >= n_batch * train / split.trainer_gpus * (1 - 1e-9)


def test_a_plan_is_made_of_whole_gpus_and_beats_taking_turns() -> None:
    found = plan(PlanConfig(model="llama-3.1-8b", gpus=16, n_batch=512))
    apart, together = found.apart, found.together
    assert apart.split.gpus <= 16 and together is not None
    assert apart.simulated.seconds_per_update < together.simulated.seconds_per_update
    seconds = step_seconds(512, 16, found.machine.train_cost, apart.generate)
    assert apart.simulated.seconds_per_update >= seconds * 0.9
    assert apart.simulated.staleness_max <= apart.split.max_staleness
    assert together.simulated.staleness_max == 0
    assert {"gpu", "train_mfu", "sigma", "slots"} <= set(found.assumptions)


@pytest.mark.parametrize(
    ("model", "gpus", "gpu", "keys"),
    [
        ("llama-3.1-8b", 8, "h200", ["engine=slots"]),
        ("llama-3.1-8b", 64, "h100", []),
        ("mistral-small-24b", 64, "a100", []),
        ("llama-3.1-70b", 128, "h100", []),
        ("mistral-large-123b", 256, "b200", []),
        ("llama-3.1-405b", 512, "h200", []),
    ],
)
def test_the_config_of_a_plan_passes_the_dry_run_on_its_gpus(
    tmp_path: Path, model: str, gpus: int, gpu: str, keys: list[str]
) -> None:
    settings = {"model": model, "gpus": gpus, "gpu": gpu, "n_batch": 128}
    found = plan(parse_settings(PlanConfig, settings, keys, "plan"))
    (tmp_path / "run.yaml").write_text(found.config_file)
    checked = tramontane.dry_run(tmp_path / "run.yaml", gpu=gpu, model_shape=model)
    assert checked.memory.refusals == ()
    config = checked.config
    assert config.generator.kind == ("slots" if keys == ["engine=slots"] else "vllm")
    reserved = config.placement.generator.gpus or 1
    assert config.generator.vllm.tensor_parallel == reserved
    assert (
        config.trainer.ranks + config.generator.workers * reserved == found.apart.split.gpus <= gpus
    )
    # The sequences that a generator is planned to decode at once fit its cache at their mean.
    machine = found.machine
    assert found.apart.split.slots * machine.cached <= machine.engines[int(reserved)].tokens


def test_each_gpu_of_a_generator_keeps_a_token_s_latents_whole(tmp_path: Path) -> None:
    """Tensor parallelism divides heads, and latents have none (Mistral Small 4's sizes)."""
    config = Mistral4Config()
    config.save_pretrained(tmp_path)
    found = plan(PlanConfig(model=str(tmp_path), gpus=64, gpu="h200", n_batch=128))
    machine = found.machine
    assert machine.kv_bytes == 2 * config.num_hidden_layers * (
        config.kv_lora_rank + config.qk_rope_head_dim
    )
    groups = {size: engine for size, engine in machine.engines.items() if size > 1}
    for size, engine in groups.items():
        room = GPUS["h200"].memory - machine.weight_bytes / size
        assert room - (18 << 30) < engine.tokens * machine.kv_bytes < room
    (tmp_path / "run.yaml").write_text(found.config_file)
    checked = tramontane.dry_run(tmp_path / "run.yaml", gpu="h200", model_shape=str(tmp_path))
    assert groups and checked.memory.refusals == ()


def test_data_sheets_are_found_in_either_case() -> None:
    assert PlanConfig(model="tiny", gpus=2, gpu="H100").gpu == "h100"
    assert GPUS["h200"].memory / 2**30 == pytest.approx(139.8)
    assert GPUS["h200"].flops == GPUS["h100"].flops == 989e12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"gpu": "tpu"},
            "no data sheet for the GPU 'tpu'; choose from a100, b200, h100, h200, l40s",
        ),
        ({"gpus": 1}, "plan: gpus: "),
        ({"n_batch": 100}, "group_size 16 does not divide n_batch 100"),
        ({"length_mean": 90, "length_max": 50}, "length_mean 90 is not below length_max 50"),
        ({"trian_mfu": 0.3}, "unknown key; did you mean 'train_mfu'"),
    ],
)
def test_bad_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        parse(PlanConfig, {"model": "tiny", "gpus": 64} | settings, "plan")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model": "mistral-large-123b", "gpus": 8},
            "mistral-large-123b does not fit 8 h100 GPUs: the trainer takes 64 of them",
        ),
        ({"model": "llama-3.1-405b", "gpu": "l40s"}, "no number of them holds a trainer"),
        (
            {"model": "mistral-small-24b", "gpu": "l40s", "length_max": 8000, "node": 1},
            "no generator of 16 sequences fits a node of 1",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(PlanConfig.model_validate({"gpus": 512} | settings))


def test_times_are_bytes_over_bandwidth_and_operations_over_flops() -> None:
    """A decode step of one short sequence reads the weights; a trained token takes 6 P; gradients
    and gathered weights cross the slowest link; a rank computes the longest sequence alone."""
    sizes = {"model": "llama-3.1-8b", "gpus": 8, "train_flops": 6.0, "train_mfu": 0.5}
    sizes |= {"decode_bandwidth": 1.0, "step_seconds": 0, "prompt_mean": 1, "length_max": 9999}
    found = Machine(PlanConfig.model_validate(sizes))
    parameters = 8_030_261_248
    step = float(found.decode(1, np.array(1.0), np.array(0.0)))
    assert step == pytest.approx(2 * parameters / 3.35e12)
    token = 6 * parameters / (0.5 * 989e12)
    assert found.train_seconds(80_000, 4) == pytest.approx(20_000 * token)
    assert found.train_seconds(80_000, 64) == pytest.approx(10_000 * token)
    slow = Machine(found.config.model_copy(update={"train_mfu": 1.0, "length_max": 7000}))
    assert slow.train_seconds(16 * 7000, 16) == pytest.approx(3 * 2 * parameters / 50e9)
    shared = Machine(found.config.model_copy(update={"context_parallel": 4}))
    assert found.train_seconds(20_000, 8) == pytest.approx(10_000 * token)
    # Queries and outputs of 32 heads, keys and values of 8, of 128 numbers, in 32 layers: 3 of 4
    # parts of a rank's 2,500 tokens cross its link in each of three passes.
    sent = 3 * 2_500 * 0.75 * 2 * (32 + 8) * 128 * 32 * 2
    expected = 2_500 * token + sent / shared.gpu.link
    assert shared.train_seconds(20_000, 8) == pytest.approx(expected)
    keys = shared.trainer_keys(shared.train_group or 0)
    assert keys is not None
    assert keys["context_parallel"] == 4
    assert keys["ranks"] % 4 == 0


def test_gpus_that_share_sequences_may_be_more_than_completions() -> None:
    sizes = {"model": "llama-3.1-8b", "gpus": 64, "context_parallel": 8, "n_batch": 8}
    machine = Machine(PlanConfig.model_validate(sizes | {"group_size": 8}))
    assert max(split.trainer_gpus for split in splits_of(machine)) > 8


def test_gpus_that_share_sequences_are_of_one_node_and_share_the_heads() -> None:
    with pytest.raises(ValueError, match="3 GPUs of a node of 8 share a sequence"):
        PlanConfig.model_validate({"model": "llama-3.1-8b", "gpus": 8, "context_parallel": 3})
    sizes = {"model": "llama-3.1-8b", "gpus": 60, "node": 6, "context_parallel": 3}
    with pytest.raises(InputError, match="3 ranks cannot share the 32 query heads"):
        plan(PlanConfig.model_validate(sizes))


def report(tmp_path: Path, **machine: Any) -> str:
    """A report in the form of `benchmarks.bounds`."""
    rows = [
        {"worker": f"{worker}, {n}", "share": {"median": share}}
        for worker, n, share in [
            ("generator", "96 slots", 0.5),
            ("generator", "192 slots", 0.6),
            ("trainer", "microbatches of 1024", 0.7),
        ]
    ]
    found = {"rows": rows, "gemm": 2e11, "copy": 2e10, "cpu": "a CPU", "cores": 2}
    (tmp_path / "bounds.json").write_text(json.dumps(found | {"dtype": "bfloat16"} | machine))
    return str(tmp_path / "bounds.json")


def test_a_plan_for_a_measured_cpu_is_a_config_for_its_cores(tmp_path: Path) -> None:
    settings = {"model": "tiny", "gpus": 4, "gpu": report(tmp_path, cores=4), "n_batch": 64}
    lengths = {"prompt_mean": 40, "prompt_max": 200, "length_mean": 60, "length_max": 224}
    found = plan(PlanConfig.model_validate(settings | lengths | {"decode_bandwidth": 0.4}))
    config = found.machine.config
    assert (config.train_mfu, config.train_flops, config.prefill_mfu) == (0.7, 6.0, 0.6)
    assert config.decode_bandwidth == 0.4  # a given key comes before a measured one
    (tmp_path / "run.yaml").write_text(found.config_file)
    run = tramontane.dry_run(tmp_path / "run.yaml", ["data.train=playground:"], model="tiny")
    assert run.memory.refusals == ()
    assert run.config.generator.device == run.config.trainer.device == "cpu"
    assert run.config.trainer.threads + run.config.generator.workers <= 4


def test_a_measured_gpu_has_the_memory_of_its_data_sheet(tmp_path: Path) -> None:
    path = report(tmp_path, gpu="NVIDIA H200", gemm=7e14, copy=4e12)
    gpu = Machine(PlanConfig(model="tiny", gpus=8, gpu=path)).gpu
    assert (gpu.flops, gpu.bandwidth, gpu.device) == (7e14, 4e12, "cuda")
    assert (gpu.memory, gpu.link) == (GPUS["h200"].memory, GPUS["h200"].link)
    for other in ("NVIDIA V100", "NVIDIA GH200 480GB"):
        with pytest.raises(InputError, match=f"no data sheet for {other}"):
            _ = Machine(PlanConfig(model="tiny", gpus=8, gpu=report(tmp_path, gpu=other))).gpu


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        PlanConfig(model="tiny", gpus=8, gpu=str(tmp_path / "bounds.json"))
    (tmp_path / "bounds.json").write_text("{cut")
    with pytest.raises(InputError, match=r"bounds\.json: not JSON"):
        PlanConfig(model="tiny", gpus=8, gpu=str(tmp_path / "bounds.json"))
    with pytest.raises(InputError, match=r"has no rows of the generator and the trainer"):
        PlanConfig(model="tiny", gpus=8, gpu=report(tmp_path, rows=[]))
    (tmp_path / "bounds.json").write_text('{"rows": []}')
    with pytest.raises(
        InputError, match=r"not a report of benchmarks.bounds \(without copy, cores"
    ):
        PlanConfig(model="tiny", gpus=8, gpu=str(tmp_path / "bounds.json"))


@settings(max_examples=20, deadline=None)
@given(gpus=st.integers(8, 600), model=st.sampled_from(["tiny", *SHAPES]))
def test_more_gpus_never_make_an_update_longer(gpus: int, model: str) -> None:
    """Twice the GPUs hold every split of half of them."""
    few, more = (
        min(splits_of(Machine(PlanConfig(model=model, gpus=n))), key=by_time, default=None)
        for n in (gpus, 2 * gpus)
    )
    if few is not None:
        assert more is not None and more.seconds <= few.seconds * (1 + 1e-9)
