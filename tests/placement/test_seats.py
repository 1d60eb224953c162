"""Which GPU each worker has, by table."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runs import small_config
from tramontane.config import Config, TeacherConfig
from tramontane.controller.generators import generator_maker
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.generator import load_generator
from tramontane.models.loading import load_tokenizer
from tramontane.placement.seats import seats
from tramontane.placement.thread import LocalPlacement
from tramontane.run.prepare import devices_line


def run_on(generator: str, trainer: str, workers: int = 1, ranks: int = 1, **more: Any) -> Config:
    return Config.model_validate(
        {
            "generator": {"device": generator, "workers": workers} | more,
            "trainer": {"device": trainer, "ranks": ranks},
        }
    )


CUDA = tuple(f"cuda:{number}" for number in range(8))


@pytest.mark.parametrize(
    ("generator", "trainer", "workers", "ranks", "gpus", "generators", "trainers", "shared"),
    [
        ("cpu", "cpu", 2, 2, 0, ("cpu", "cpu"), ("cpu", "cpu"), False),
        ("mps", "cpu", 1, 1, 0, ("mps",), ("cpu",), False),
        ("cuda", "cuda", 1, 1, 1, CUDA[:1], CUDA[:1], True),
        ("cuda:0", "cuda", 1, 1, 1, CUDA[:1], CUDA[:1], True),
        ("cuda", "cuda:0", 1, 1, 1, CUDA[:1], CUDA[:1], True),
        ("cuda", "cuda", 1, 1, 2, CUDA[1:2], CUDA[:1], False),
        ("cuda:0", "cuda", 1, 1, 2, CUDA[:1], CUDA[:1], True),
        ("cuda", "cpu", 2, 1, 2, CUDA[:2], ("cpu",), False),
        ("cuda", "cuda", 2, 1, 2, CUDA[:2], CUDA[:1], True),
        ("cuda:1", "cuda", 1, 2, 2, CUDA[1:2], CUDA[:2], True),  # beside rank 1
        ("cuda", "cuda", 6, 2, 8, CUDA[2:], CUDA[:2], False),
        ("cuda", "cuda:4", 4, 4, 8, CUDA[:4], CUDA[4:], False),
        ("cuda:2", "cuda:4", 3, 4, 8, CUDA[2:5], CUDA[4:], True),
        ("cuda", "cuda", 1, 8, 8, CUDA[:1], CUDA, True),
        ("cuda", "cuda", 2, 1, None, CUDA[:2], CUDA[:1], True),  # as few as are needed
    ],
)
def test_every_rank_and_every_generator_has_a_gpu_of_its_own(
    generator: str,
    trainer: str,
    workers: int,
    ranks: int,
    gpus: int | None,
    generators: tuple[str, ...],
    trainers: tuple[str, ...],
    shared: bool,
) -> None:
    found = seats(run_on(generator, trainer, workers, ranks), gpus)
    assert found == (trainers, generators, 1, ())
    assert found.beside_generator(trainers) == shared


def test_a_vllm_generator_has_as_many_gpus_as_its_model_is_split_over() -> None:
    vllm = {"kind": "vllm", "vllm": {"tensor_parallel": 2}}
    found = seats(run_on("cuda", "cuda", 3, 2, **vllm), 8)
    assert found.generators == ("cuda:2", "cuda:4", "cuda:6")
    assert not found.beside_generator(found.ranks)
    one = seats(run_on("cuda:3", "cuda:4", **vllm), 8)
    assert one.beside_generator(one.ranks)
    with pytest.raises(
        InputError, match=r"2 GPUs each .* from cuda:0 on, and torch sees 7\. Set it to 3"
    ):
        seats(run_on("cuda", "cuda", 4, 2, **vllm), 7)
    with pytest.raises(InputError, match=r"Not even one fits there: lower .*tensor_parallel"):
        seats(run_on("cuda", "cpu", **vllm), 1)


@pytest.mark.parametrize(
    ("generator", "workers", "gpus", "fitting"),
    [("cuda", 2, 1, 1), ("cuda:0", 3, 2, 2), ("cuda:1", 2, 2, 1)],
)
def test_more_generators_than_gpus_are_refused_with_the_number_that_fits(
    generator: str, workers: int, gpus: int, fitting: int
) -> None:
    with pytest.raises(
        InputError, match=rf"generator\.workers is {workers}.* Set it to {fitting}:"
    ):
        seats(run_on(generator, "cpu", workers), gpus)
    seats(run_on(generator, "cpu", fitting), gpus)


def test_on_ray_each_process_sees_its_own_gpus_alone() -> None:
    config = run_on("cuda", "cuda", 5, 3)
    placement = config.placement.model_copy(update={"kind": "ray"})
    found = seats(config.model_copy(update={"placement": placement}), 1)
    assert found == (("cuda",) * 3, ("cuda",) * 5, 1, ())


@given(st.integers(1, 4), st.integers(1, 8), st.integers(0, 3), st.integers(1, 16))
def test_no_gpu_is_shared_while_there_are_enough(
    workers: int, ranks: int, first: int, gpus: int
) -> None:
    config = run_on("cuda", f"cuda:{first}", workers, ranks)
    if workers > gpus:
        with pytest.raises(InputError):
            seats(config, gpus)
        return
    found = seats(config, gpus)
    assert len(set(found.generators)) == workers
    assert len(set(found.ranks)) == ranks
    if first + ranks + workers <= gpus:
        assert not found.beside_generator(found.ranks)


def test_each_generator_is_loaded_onto_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    started: list[tuple[int, partial[Any]]] = []
    config, encoder = run_on("cuda", "cuda", 6, 2), PromptEncoder(load_tokenizer("tiny"))
    placement = LocalPlacement(config, print)
    monkeypatch.setattr(placement, "generator", lambda *given: started.append(given) or given)
    make = generator_maker(config, "tiny", encoder, placement)
    for number in (0, 5, 3, 5):  # the last replaces a lost one
        assert make(number, 4, 64) == started[-1]
    devices = [(number, load.args[1].device) for number, load in started]
    assert devices == [(0, "cuda:2"), (5, "cuda:7"), (3, "cuda:5"), (5, "cuda:7")]
    told = "tiny", 4, 64, encoder.response, config.timeouts.heartbeat
    for _, load in started:
        assert load.func is load_generator and (load.args[0], *load.args[2:]) == told


@pytest.mark.parametrize(
    ("generator", "trainer", "teacher", "first"),
    [
        ("cuda:0", "cuda", None, True),
        ("cuda:1", "cuda", None, False),
        ("cuda:1", "cuda", "cuda:1", True),
        ("cuda:0", "cpu", "cuda", True),
        ("cpu", "cpu", "cpu", False),
    ],
)
def test_a_generator_that_shares_its_gpu_starts_first(
    monkeypatch: pytest.MonkeyPatch, generator: str, trainer: str, teacher: str | None, first: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = run_on(generator, trainer)
    if teacher:
        config = config.model_copy(update={"teacher": TeacherConfig(model="tiny", device=teacher)})
    assert LocalPlacement(config, print).generators_first == first


def test_each_rank_of_a_teacher_has_a_gpu_and_is_named(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        teacher={"model": "tiny", "device": "cuda:1", "ranks": 2},
        trainer={"objective": {"name": "distill"}},
        pipeline={"diversity": "none"},
    )
    assert seats(config, 3).teachers == ("cuda:1", "cuda:2")
    assert "teacher on cuda:1, cuda:2" in devices_line(config)
