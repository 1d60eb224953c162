"""The parity gate at the length of a run: errors that only long sequences show."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from tests.runs import small_config, unheard
from tramontane.controller.generators import GeneratorPool
from tramontane.generator import Generator
from tramontane.models import int8
from tramontane.models.loading import load_tokenizer
from tramontane.placement.thread import ThreadHandle
from tramontane.run.parity_gate import check_long_parity, check_parity
from tramontane.run.prepare import PROBE_TOKENS, prepare
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.start import dry_run
from tramontane.trainer import Trainer
from tramontane.trainer.parity import ParityError

WINDOW = 250


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a sliding window, and the tokenizer of `tiny`."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), load_tokenizer("tiny")
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        sliding_window=WINDOW,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
    )
    MistralForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def no_window(model: PreTrainedModel) -> None:
    """Attention sees all positions."""
    model.config.sliding_window = None


def lost_scaling(model: PreTrainedModel) -> None:
    """Rotary positions end at the length that the model was pre-trained for."""
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, position_ids.clamp(max=WINDOW))


def late_cache_error(model: PreTrainedModel) -> None:
    """Prefill caches wrong values from some position on."""
    attention = model.model.layers[0].self_attn.v_proj

    def spoil(module: torch.nn.Module, args: object, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([values[:, :WINDOW], values[:, WINDOW:] * 1.5], 1)

    attention.register_forward_hook(spoil)


@pytest.mark.parametrize("defect", [None, no_window, lost_scaling, late_cache_error])
def test_the_gate_sees_what_only_long_sequences_show(
    checkpoint: Path, tmp_path: Path, defect: Callable[[PreTrainedModel], None] | None
) -> None:
    # Short prompts are not packed into one long row.
    generation = {"prefill_tokens": 64}
    config = small_config(tmp_path, model=str(checkpoint), generator=generation)
    prepared = prepare(config)
    longest = prepared.max_prompt + config.pipeline.l_max
    assert len(prepared.long_probe) + PROBE_TOKENS == longest > WINDOW + PROBE_TOKENS
    assert max(map(len, prepared.probes)) + PROBE_TOKENS < WINDOW

    def load(slots: int, max_len: int) -> Generator:
        generator = Generator.load(str(checkpoint), config.generator, slots, max_len)
        if defect:
            defect(generator.model)
        return generator

    pool = GeneratorPool(
        lambda number, *size: ThreadHandle(f"generator {number}", partial(load, *size)),
        config,
        print,
        unheard,
        prepared.max_prompt,
    )
    trainer = ThreadHandle("trainer", partial(Trainer.load, str(checkpoint), config.trainer, 1))

    async def check() -> None:
        await check_parity(prepared, pool, trainer)
        if defect is None:
            await check_long_parity(prepared, pool, trainer)
            return
        with pytest.raises(ParityError, match=rf"come after {longest - PROBE_TOKENS} others"):
            await check_long_parity(prepared, pool, trainer)

    try:
        asyncio.run(check())
    finally:
        pool.close()
        trainer.close()


@pytest.mark.skipif(not int8.is_exact(), reason="this processor has no instructions for int8")
def test_a_policy_in_eight_bits_is_measured_before_the_first_update(
    tmp_path: Path, one_layer: str
) -> None:
    sections: dict[str, Any] = {
        "model": one_layer,
        "pipeline": {"updates": 1},
        "generator": {"weights": "int8", "dtype": "float32"},
        "trainer": {"dtype": "float32"},
    }
    train(small_config(tmp_path / "near", **sections), QuietScreen())
    events = (tmp_path / "near/events.log").read_text(encoding="utf-8")
    assert re.search(
        r"generator.weights int8: KL\(μ‖π\) .* effective sample size (0\.9|1\.0)", events
    )
    sections["generator"]["weights"] = "full"
    lines = dry_run(small_config(tmp_path / "full", **sections)).lines
    assert re.fullmatch(r"off; the largest layers [\d.]+ times as fast .*", lines["int8"])
    sections["generator"]["weights"] = "int8"
    sections["trainer"]["parity_kl"] = 1e-9
    with pytest.raises(ParityError, match=r"parity_kl allows 1e-09"):
        train(small_config(tmp_path / "far", **sections), QuietScreen())
    assert not (tmp_path / "far/metrics.jsonl").exists()
