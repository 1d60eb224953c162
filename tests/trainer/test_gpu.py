"""The trainer on a GPU by value. On a CPU the same tests run too, so that they cannot rot."""

from __future__ import annotations

import itertools
import shutil
from functools import cache, partial

import pytest
import torch

from tests.generator.slot_models import make_model as generator_model
from tests.generator.slot_models import make_requests, make_tokenizer
from tests.trainer.rollouts import batch, model
from tramontane.batches import TrainSequence
from tramontane.config import GeneratorConfig, TrainerConfig
from tramontane.generator import Generator
from tramontane.models.weights import CopiedWeights, LocalWeights
from tramontane.placement.ranks import ProcessRanks
from tramontane.placement.thread import ThreadHandle
from tramontane.trainer.parity import compare
from tramontane.trainer.trainer import Trainer

WAIT_SECONDS = 120.0
# In one process, which compiles each function once for all tests of trainers.
COMPILED = (pytest.mark.slow, pytest.mark.xdist_group("compiled trainer"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


def make_trainer(device: str, make=model, **settings) -> Trainer:
    settings = {"learning_rate": 1e-2, "microbatch_tokens": 64, "compile": False} | settings
    found = make().requires_grad_(True).to(device)
    found.set_attn_implementation("packed")
    return Trainer(found, TrainerConfig(device=device, **settings), 10)


def gradient(trainer: Trainer) -> torch.Tensor:
    """The gradient of all weights, found by a step of plain descent."""
    before = trainer.weights()
    trainer.optimizer = torch.optim.SGD([p for p in trainer.model.parameters() if p.requires_grad])
    trainer.step(batch(groups=2))
    after = trainer.weights()
    return torch.cat([(before[name] - after[name]).flatten() for name in before])


@cache
def expected_gradient(rank: int | None = None, **settings: bool) -> torch.Tensor:
    """In float32 on a CPU; `rank` is that of adapters."""
    lora = {"lora": {"rank": rank}} if rank else {}
    return gradient(make_trainer("cpu", dtype="float32", max_grad_norm=1e9, **settings, **lora))


SETTINGS = (
    {},
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "activation_offload": True},
    {"lora": {"rank": 4}},
)
# To compile takes seconds: each setting in one type, whose kernels do not depend on adapters.
COMPILES = (({"compile": True}, "bfloat16"), ({"compile": True, "lora": {"rank": 4}}, "float32"))


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        *itertools.product(SETTINGS, ("float32", "bfloat16")),
        *(pytest.param(*pair, marks=COMPILED) for pair in COMPILES),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "plain",
)
def test_the_gradient_is_that_of_float32_on_a_cpu(device, dtype, settings):
    if "compile" in settings and shutil.which("g++") is None:
        pytest.skip("needs g++")
    eager = {name: value for name, value in settings.items() if name != "compile"}
    expected = expected_gradient(**eager.pop("lora", {}), **eager)
    found = gradient(make_trainer(device, dtype=dtype, max_grad_norm=1e9, **settings))
    share = float((found - expected).norm() / expected.norm())
    assert expected.norm() > 0
    assert share < (1e-3 if dtype == "float32" else 0.05)


def test_training_goes_on_from_a_checkpoint_as_without_one(device, tmp_path):
    one, other = (make_trainer(device, dtype="bfloat16") for _ in range(2))
    one.step(batch(0))
    one.save_state(tmp_path / "state")
    one.step(batch(1))
    other.load_state(tmp_path / "state")
    other.step(batch(1))
    for name, values in one.weights().items():
        # A step moves a weight by 1e-2; a GPU sums in any order.
        torch.testing.assert_close(other.weights()[name], values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("staging", ["device", "host"])
def test_a_generator_decodes_while_the_trainer_steps_and_takes_its_weights(device, staging):
    """In threads with a stream each: what a generator sampled with the new weights has the
    trainer's log-probs, up to bfloat16."""
    config = GeneratorConfig(
        device=device, dtype="bfloat16", staging=staging, kv_cache="recompute", kv_cache_mib=64
    )
    of_generator = generator_model(dtype=torch.bfloat16).to(device)
    make_generator = partial(Generator, of_generator, make_tokenizer(), config, 8, 128)
    generator = ThreadHandle("generator", make_generator, device)
    make = partial(make_trainer, device, generator_model, dtype="bfloat16")
    trainer = ThreadHandle("trainer", make, device)
    try:
        requests = make_requests(3, 4, seed=3, lengths=(5, 20), tokens=(20, 30))
        generator.submit("submit", requests).result(WAIT_SECONDS)
        step = trainer.submit("step", batch())
        done = generator.submit("step", 10).result(WAIT_SECONDS)
        step.result(WAIT_SECONDS)
        weights = trainer.submit("publish", LocalWeights()).result(WAIT_SECONDS)
        fetched = generator.submit_background("fetch", 1, weights)
        done += generator.submit("step", 5).result(WAIT_SECONDS)
        fetched.result(WAIT_SECONDS)
        generator.submit("swap", 1).result(WAIT_SECONDS)
        done += generator.submit("step", 400).result(WAIT_SECONDS)
        assert {v for c in done for v in c.versions} == {0, 1}
        sequences = [TrainSequence.of(c) for c in done]
        exact = trainer.submit("logprobs", sequences, 1.0).result(WAIT_SECONDS)
    finally:
        generator.close()
        trainer.close()
    pairs = [
        zip(c.versions, c.logprobs, row, strict=True) for c, row in zip(done, exact, strict=True)
    ]
    new = [[(ours, theirs) for version, ours, theirs in row if version == 1] for row in pairs]
    assert compare(*([[x[i] for x in row] for row in new] for i in (0, 1))).mean < 0.05


@pytest.mark.slow
def test_a_trainer_in_a_process_of_its_own_gives_the_same_weights(device, monkeypatch):
    if device == "cpu":
        from tests import forked

        monkeypatch.setattr("tramontane.placement.ranks.START_METHOD", forked.START_METHOD)
    here = make_trainer(device, dtype="bfloat16")
    ranks = ProcessRanks("trainer", partial(make_trainer, device, dtype="bfloat16"), 1, device)
    try:
        ranks.started.result(WAIT_SECONDS)
        ranks.submit("step", batch()).result(WAIT_SECONDS)
        published = ranks.submit("publish", CopiedWeights(torch.float32)).result(WAIT_SECONDS)
        found = {name: part for b in published.buckets() for part in b for name in part.names}
    finally:
        ranks.close()
    here.step(batch())
    for name, values in here.weights().items():
        torch.testing.assert_close(found[name].values.cpu(), values, rtol=1e-3, atol=1e-4)
