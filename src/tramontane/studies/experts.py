"""Reinforcement learning of a small mixture of experts, made from the tiny base by upcycling (arXiv
2212.05055), with and without router replay (arXiv 2510.11370).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from tramontane.evaluation.measure import evaluate
from tramontane.models.loading import load_tokenizer
from tramontane.models.names import resolve
from tramontane.studies.measures import FinishedRun
from tramontane.studies.procedures import SHARED_SECONDS, supervised, trained
from tramontane.studies.study import base_config
from tramontane.workplace import owned_folder

_KEPT = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
}


def replayed(keys: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """Reinforcement learning of a mixture of experts in bfloat16.

    All arms and seeds share the base: `upcycled`, then fine-tuned.

    Args:
        keys: `experts`, how many, and `chosen`, how many a token visits; `redrawn`, as in
            `upcycled`; `sft`, settings of the fine-tuning; `updates` of the reinforcement learning,
            `config`, config keys of all arms, and `changes`, those of one; `problems` of the
            evaluation.
        seed: of the reinforcement learning.
        folder: of the arm.

    Returns:
        pass@1 on held-out problems; means over all updates: `log_kl`, log₁₀ of KL(μ ‖ π) (nats),
        and the reward; and `largest`, the mean over updates of an update's largest |log π − log μ|
        (nats).
    """
    shared = folder.parents[1] / "base"
    with owned_folder(shared, "trained", wait=SHARED_SECONDS):
        start = shared / "upcycled"
        if not (start / "config.json").is_file():
            upcycled(start, keys["experts"], keys["chosen"], keys["redrawn"])
        base = supervised(shared / "sft", {"model": str(start), **keys["sft"]})
    changes = {"model": str(base), "pipeline.updates": keys["updates"], "seed": seed}
    model = trained(folder / "run", keys["config"] | changes | keys["changes"])
    run = FinishedRun(folder / "run")
    result = evaluate(model, None, base_config(), problems=keys["problems"], seed=0)
    return {
        "pass_at_1": result.pass_at_1.value,
        "log_kl": float(np.log10(run.curve("kl_behavior")).mean()),
        "largest": float(run.curve("mismatch_age_0_max").mean()),
        "reward": float(run.curve("reward").mean()),
    }


def upcycled(folder: Path, experts: int, chosen: int, redrawn: float) -> None:
    """Write the tiny base as a Mixtral whose experts are copies of its MLPs, with its tokenizer.

    Args:
        folder: of the checkpoint.
        experts: number of experts in each layer.
        chosen: how many of them a token visits.
        redrawn: share of each expert's inner units that get random weights of the same size, so
            that experts differ (arXiv 2502.19261); with 0, the model computes what the tiny base
            computes.
    """
    dense = AutoModelForCausalLM.from_pretrained(resolve("tiny"), dtype=torch.float32)
    values = {k: v for k, v in dense.config.to_dict().items() if k in _KEPT}
    config = MixtralConfig(**values, num_local_experts=experts, num_experts_per_tok=chosen)
    generator = torch.Generator().manual_seed(0)
    model = MixtralForCausalLM(config)
    model.load_state_dict(dense.state_dict(), strict=False)
    with torch.no_grad():
        for layer, source in zip(model.model.layers, dense.model.layers, strict=True):
            gate = layer.mlp.gate.weight
            gate.copy_(torch.randn(gate.shape, generator=generator) * gate.shape[1] ** -0.5)
            for expert in range(experts):
                drawn = torch.rand(config.intermediate_size, generator=generator) < redrawn
                parts = [
                    torch.where(drawn, _alike(weight, generator), weight)
                    for weight in (
                        source.mlp.gate_proj.weight.T,
                        source.mlp.up_proj.weight.T,
                        source.mlp.down_proj.weight,
                    )
                ]
                layer.mlp.experts.gate_up_proj[expert] = torch.cat(parts[:2], 1).T
                layer.mlp.experts.down_proj[expert] = parts[2]
    model.save_pretrained(folder)
    load_tokenizer("tiny").save_pretrained(folder)


def _alike(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(weight.shape, generator=generator) * weight.std()
