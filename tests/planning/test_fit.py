"""The memory that generators get on a GPU, alone and beside a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tramontane import dry_run
from tramontane.config import Config
from tramontane.generator.vllm.process import engine_args
from tramontane.models.shape import load_shape
from tramontane.planning.fit import CUDA_CONTEXT, generator_limits, memory_gaps, run_memory
from tramontane.planning.gpus import GIB, GPUS
from tramontane.planning.memory import Lengths, generator_memory

SHAPE = "llama-3.1-8b"


def run_on(**sections: Any) -> Config:
    device = {"device": "cuda"}
    own = {name: device | sections.get(name, {}) for name in ("generator", "trainer")}
    return Config.model_validate(sections | own)


def limits(gpu: str = "h100", **sections: Any) -> dict[str, float]:
    return generator_limits([run_on(**sections)], load_shape(SHAPE), [Lengths(512, 7680)], gpu)


LORA = {"lora": {"rank": 16}, "gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("sections", "share"),
    [
        ({"trainer": {"device": "cpu"}}, 0.9),
        ({"trainer": {"device": "cuda:1"}, "generator": {"device": "cuda:0"}}, 0.9),
        ({"placement": {"kind": "ray", "generator": {"gpus": 0.5}}}, 0.45),
        ({"placement": {"kind": "ray"}, "generator": {"workers": 2}}, 0.9),
        ({"trainer": {"device": "cpu"}, "generator": {"workers": 2}}, 0.9),
    ],
)
def test_a_generator_away_from_the_trainer_has_its_share_of_a_gpu(sections, share) -> None:
    assert limits(**sections) == {"gpu_memory_utilization": share}
    assert limits(**sections | {"generator": {"gpu_memory_utilization": 0.7}}) == {}
    assert limits(generator={"device": "cpu"}) == {}


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_generator_beside_a_trainer_gets_what_its_arithmetic_leaves(device: str) -> None:
    """LoRA of 8 B on one H100: half of 0.9 would leave 5 GiB of cache."""
    found = limits(trainer=LORA, generator={"device": device})
    settings = run_on(trainer=LORA, generator=found | {"device": device})
    (load, _) = run_memory([settings], load_shape(SHAPE), [Lengths(512, 7680)], "h100").loads
    trainer, generator = (worker.memory for worker in load.workers)
    share = found["gpu_memory_utilization"] * load.capacity
    overhead = CUDA_CONTEXT + memory_gaps(trainer, on_gpu=True)
    assert share + trainer.total + overhead == pytest.approx(0.9 * load.capacity, rel=2e-3)
    assert generator.cache > 10 * GIB
    # A trainer that fills the GPU: the run is refused with the keys to change, not here.
    full = limits(trainer={"learning_rate": 1e-6})
    assert 0 < full["gpu_memory_utilization"] < 0.02


def test_a_generator_shares_its_gpu_with_the_teachers_that_are_on_it() -> None:
    on = {"trainer": {"device": "cuda:1", "objective": {"name": "distill"}}}
    on |= {"generator": {"device": "cuda:0"}, "pipeline": {"diversity": "none"}}
    teacher = {"model": SHAPE, "ranks": 2, "dtype": "bfloat16"}
    elsewhere = limits(**on, teacher=teacher | {"device": "cuda:2"})
    assert elsewhere == {"gpu_memory_utilization": 0.9}
    found = limits(**on, teacher=teacher | {"device": "cuda:0"})
    settings = run_on(**on, teacher=teacher | {"device": "cuda:0"})
    loads = run_memory([settings], load_shape(SHAPE), [Lengths(512, 7680)], "h100").loads
    [scoring] = [w.memory for w in loads[0].workers if w.name == "teacher"]
    overhead = CUDA_CONTEXT + memory_gaps(scoring, on_gpu=True)
    taken = (scoring.total + overhead) / GPUS["h100"].memory
    assert found["gpu_memory_utilization"] == pytest.approx(0.9 - taken, abs=2e-3)


def test_vllm_beside_a_trainer_gets_the_bytes_of_its_cache() -> None:
    """It would take what other processes allocate meanwhile for its own."""
    vllm = {"kind": "vllm", "slots": 64}
    found = limits(trainer=LORA, generator=vllm)
    settings = run_on(trainer=LORA, generator=vllm | found)
    memory = generator_memory(settings, load_shape(SHAPE), Lengths(512, 7680), 80e9)
    share = found["gpu_memory_utilization"] * GPUS["h100"].memory
    spent = memory.weights + memory.activations + memory.logits
    assert found["kv_cache_mib"] * 2**20 <= share - spent
    assert found["kv_cache_mib"] == pytest.approx((share - spent) / 2**20, abs=1)
    arguments = engine_args(settings.generator, "x", None, 64, 8192)
    assert arguments["kv_cache_memory_bytes"] == found["kv_cache_mib"] << 20
    assert "gpu_memory_utilization" not in arguments
    apart = limits(trainer={"device": "cuda:1"}, generator=vllm | {"device": "cuda:0"})
    assert "kv_cache_mib" not in apart


def test_assumed_gpus_have_the_workers_whose_device_the_file_does_not_name(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("generator: {device: cpu}")
    assumed = {"gpu": "h100", "model_shape": SHAPE}
    found = dry_run(file, **assumed)
    assert (found.config.generator.device, found.config.trainer.device) == ("cpu", "cuda")
    assert found.config.trainer.dtype == "bfloat16"
    assert found.memory.loads[0].device == "cuda:0 (h100)"
    assert dry_run(file, ["trainer.device=cpu"], **assumed).config.trainer.device == "cpu"
    assert dry_run(file, model_shape=SHAPE).config.trainer.device == "cpu"


def test_a_table_of_a_tiny_model_has_no_row_of_zeros() -> None:
    sizes = {"group_size": 4, "n_batch": 16, "n_async": 32, "l_max": 64, "l_cache": 16}
    on = {name: {"device": "cpu"} for name in ("trainer", "generator")}
    settings = run_on(**on, pipeline=sizes)
    found = run_memory([settings], load_shape("tiny"), [Lengths(32, 64)])
    for row in found.rows():
        assert "-0.00" not in row and any(cell not in ("", "0.00") for cell in row[1:])
