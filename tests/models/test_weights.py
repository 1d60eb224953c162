"""Weights arrive as the trainer has them, in the generators' dtype."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import Memory
from tests.runs import small_config, unheard
from tramontane.config import Config, GeneratorConfig, TrainerConfig
from tramontane.generator import Generator
from tramontane.models.host import HostMemory, pageable
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.models.weights import BUCKET_BYTES, Bucket, CopiedWeights, Part, Weights
from tramontane.placement import ConcurrentHandle, Handle
from tramontane.placement.place import check, place
from tramontane.trainer.trainer import Trainer

# Ray's object store is compared below, in the test that measures memory.
KINDS = [
    ("thread", 1, "float32"),
    ("process", 1, "bfloat16"),
    ("thread", 2, "bfloat16"),
    ("nixl", 1, "float32"),
]


def _config(request: Any, folder: Path, kind: str, ranks: int, dtype: str) -> Config:
    if kind not in ("thread", "process"):
        request.getfixturevalue("ray_cluster")
    if kind == "nixl":
        pytest.importorskip("nixl", reason="NIXL is not installed: pip install nixl")
    return small_config(
        folder,
        placement={"kind": "ray", "weights": "nixl"} if kind == "nixl" else {"kind": kind},
        trainer={"ranks": ranks, "learning_rate": 1e-2},
        generator={"dtype": dtype},
    )


class Sharded(Trainer):
    """A trainer whose `move` changes each weight by a different amount."""

    def move(self, update: int) -> None:
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                parameter.add_(1e-3 * update * (number + 1)).mul_(1 + 1e-3 * update)


@pytest.fixture
def workers() -> Iterator[Callable[[Config], tuple[Any, Handle, ConcurrentHandle]]]:
    """Makes a placement with a trainer and a generator, and closes them after the test."""
    opened: list[Any] = []

    def make(config: Config) -> tuple[Any, Handle, ConcurrentHandle]:
        placement = place(config, unheard)
        trainer = placement.trainer(partial(Sharded.load, "tiny", config.trainer, 5))
        generator = placement.generator(0, partial(Generator.load, "tiny", config.generator, 4, 64))
        opened.extend([trainer, generator, placement])
        for handle in (trainer, generator):
            handle.started.result()
        return placement, trainer, generator

    yield make
    for worker in opened:
        worker.close()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("kind", "ranks", "dtype"), KINDS)
def test_a_generator_has_what_the_trainer_has_bit_for_bit(
    request: Any, workers: Any, tmp_path: Path, kind: str, ranks: int, dtype: str
) -> None:
    """Holds for any number of ranks; the trainer's next changes are invisible until published."""
    config = _config(request, tmp_path, kind, ranks, dtype)
    placement, trainer, generator = workers(config)
    whole = Sharded.load("tiny", config.trainer.model_copy(update={"ranks": 1}), 5)
    start = {n: t.clone() for n, t in whole.model.state_dict().items()}
    for update in (1, 2):
        trainer.submit("move", update).result()
        whole.move(update)
        weights = trainer.submit("publish", placement.weights()).result()
        generator.submit_background("fetch", update, weights).result()
        del weights
        assert generator.submit("swap", update).result() > 0
        trainer.submit("move", 7).result()
        arrived = generator.submit("weights").result()
        for name, expected in whole.model.state_dict().items():
            assert not torch.equal(expected, start[name])
            assert torch.equal(arrived[name], expected.to(getattr(torch, dtype))), name
        whole.move(7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_stored_weights_keep_names_and_shapes(ray_cluster: Any, dtype: torch.dtype) -> None:
    from tramontane.placement.stored import StoredWeights

    tall = torch.randn(7, 2)
    ranks: list[list[Bucket]] = [
        [
            [
                Part.whole(["a"], torch.randn(6, 4).T),
                Part.whole(["scalar"], torch.tensor(2.5)),
                Part.whole(["none"], torch.empty(0, 3)),
            ],
            [
                Part.whole(["in", "out"], torch.randn(5, 7)),
                Part.whole(["bf16"], torch.randn(4).bfloat16()),
                Part(("tall",), tall.shape, 0, tall[:4]),
            ],
        ],
        [[Part(("tall",), tall.shape, 4, tall[4:])]],
    ]
    for kind, memory in (
        (CopiedWeights, None),
        (StoredWeights, None),
        (StoredWeights, HostMemory(pageable)),  # the way of a GPU's
    ):
        weights, other = kind(dtype), kind(dtype)
        for carrier, added in zip((weights, other), ranks, strict=True):
            for bucket in added:
                carrier.add(bucket, memory)
        weights.merge([other])
        expected = [part for added in ranks for bucket in added for part in bucket]
        found = [part._replace(values=part.values.clone()) for b in weights.buckets() for part in b]
        assert [part[:3] for part in found] == [part[:3] for part in expected]
        for got, part in zip(found, expected, strict=True):
            assert torch.equal(got.values, part.values.to(dtype))
        assert weights.shapes() == {name: part.shape for part in expected for name in part.names}


HEAVY = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10}


def _heavy() -> LlamaForCausalLM:
    """A model of 170 MB whose largest tensor has 4 MB; always the same."""
    config = LlamaConfig(
        vocab_size=load_model("tiny").config.vocab_size,
        num_attention_heads=8,
        tie_word_embeddings=True,
        **HEAVY,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="packed")
    generator = torch.Generator().manual_seed(0)  # two threads may be making a model each
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    return model


class Measured:
    """A worker, and the memory that its last measured call took."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.worker = make()

    def close(self, seconds: float) -> None:
        self.worker.close(seconds)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.worker, method)(*args)

    def publish(self, weights: Weights) -> Weights:
        with Memory() as self.memory:
            return self.worker.publish(weights)

    def update(self, version: int, weights: Weights) -> None:
        with Memory() as self.memory:
            self.worker.fetch(version, weights)
            self.worker.swap(version)

    def rise(self) -> int:
        return self.memory.rise


def _heavy_trainer(ranks: int) -> Measured:
    config = TrainerConfig(ranks=ranks)
    return Measured(lambda: Sharded(_heavy(), config, 5))


def _heavy_generator() -> Measured:
    return Measured(lambda: Generator(_heavy(), load_tokenizer("tiny"), GeneratorConfig(), 2, 16))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="measured in /proc")
@pytest.mark.parametrize(("kind", "ranks"), [("thread", 1), ("ray", 2)])
def test_a_generator_holds_one_more_version_and_a_trainer_one_bucket(
    request: Any, tmp_path: Path, kind: str, ranks: int
) -> None:
    config = _config(request, tmp_path, kind, ranks, "float32")
    placement = place(config, unheard)
    trainer = placement.trainer(partial(_heavy_trainer, ranks))
    generator = placement.generator(0, _heavy_generator)
    for handle in (trainer, generator):
        handle.started.result()
    total = sum(t.nbytes for t in _unique(generator.submit("call", "weights").result()))
    assert total > 2.5 * BUCKET_BYTES
    whole = Sharded(_heavy(), config.trainer.model_copy(update={"ranks": 1}), 5)
    for update in (1, 2):
        trainer.submit("call", "move", update).result()
        whole.move(update)
        weights = trainer.submit("publish", placement.weights()).result()
        assert trainer.submit("rise").result() < BUCKET_BYTES
        generator.submit("update", update, weights).result()
        # The first version takes new memory, the next ones the memory of the version before.
        rise = generator.submit("rise").result()
        assert rise < BUCKET_BYTES / 4 + (total if update == 1 else 0)
    del weights
    trainer.submit("call", "move", 7).result()
    arrived = generator.submit("call", "weights").result()
    assert all(torch.equal(arrived[n], t) for n, t in whole.model.state_dict().items())
    for worker in (trainer, generator, placement):
        worker.close()


def _unique(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return list({t.data_ptr(): t for t in tensors.values()}.values())


def test_a_transport_that_is_not_installed_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    from tramontane.errors import InputError

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "nixl" else 1)
    with pytest.raises(InputError, match="pip install nixl"):
        check(small_config(tmp_path, placement={"kind": "ray", "weights": "nixl"}))
    check(small_config(tmp_path, placement={"weights": "nixl"}))
