"""The study `byol-language`: do auxiliary losses help a causal LM to know which steps are good?

An arm fine-tunes the LM on worked solutions with slips, with one of the auxiliary losses or none.
Linear probes of the frozen hidden states then fit value, Q and advantage of partial solutions.
The number of remaining steps explains much of V, and any model can count them, so probes fit the
functions' and hidden states' residuals given the number of steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field

from tramontane.config import ObjectiveConfig, Section, TrainerConfig, parse
from tramontane.data.prompts import PromptEncoder
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.trainer import Trainer
from tramontane_representation.language import (
    SelfPredictiveSFT,
    Solution,
    action_vectors,
    solutions,
    state_latents,
    take_tokens,
)
from tramontane_representation.losses import SelfPredictionConfig
from tramontane_representation.probes import TRAINING_SHARE, held_out_r2s, products, residual

LOG_EVERY = 10


class LanguageSettings(Section):
    """Keys of an arm of `byol-language`."""

    model: str = "tiny"
    """Causal LM that is fine-tuned: `tiny`, a folder or a Hugging Face name."""
    auxiliary: SelfPredictionConfig = SelfPredictionConfig()
    """The auxiliary loss; `target_rate` is not used, since a target is the hidden state itself."""
    steps: int = Field(200, ge=1)
    """Optimizer steps."""
    batch_tokens: int = Field(4096, ge=1)
    """Tokens of an optimizer step."""
    learning_rate: float = Field(5e-4, gt=0)
    """Learning rate of AdamW, constant after 20 steps."""
    levels: tuple[int, int] = (2, 4)
    """Easiest and hardest level of the problems."""
    step_right: float = Field(0.75, gt=0, lt=1)
    """Probability that the behavior policy writes a step right."""
    probe_solutions: int = Field(600, ge=10)
    """Solutions of unseen problems whose states are probed."""


def run_arm(keys: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """Fine-tune, probe, and write losses to `metrics.jsonl`.

    Returns:
        `value`, `q`, `advantage`: R² of `probe_solutions` on prompts that neither training nor the
        probe's fit has seen. `value_before` and so on: the same before training. `loss`: mean
        negative log-likelihood of a training token, over the last tenth of the steps.

    Raises:
        InputError: invalid keys.
    """
    settings = parse(LanguageSettings, keys, "study byol-language")
    torch.manual_seed(seed)
    encoder = PromptEncoder(load_tokenizer(settings.model))
    model = load_model(settings.model)
    stream = solutions(encoder, "test", seed, levels=settings.levels, p=settings.step_right)
    unseen = [next(stream) for _ in range(settings.probe_solutions)]
    before = probe_latents(model, unseen, settings.step_right, seed)
    losses = _fine_tune(model, encoder, settings, seed, folder)
    measures = probe_latents(model, unseen, settings.step_right, seed)
    measures |= {f"{name}_before": value for name, value in before.items()}
    return measures | {"loss": float(np.mean(losses[-max(1, len(losses) // 10) :]))}


def _fine_tune(
    model: Any, encoder: PromptEncoder, settings: LanguageSettings, seed: int, folder: Path
) -> list[float]:
    """Train the model in place; return the loss of every step."""
    config = TrainerConfig(
        objective=ObjectiveConfig(name="sft"),
        learning_rate=settings.learning_rate,
        warmup_updates=min(20, settings.steps),
        dtype="float32",
    )
    trainer = Trainer(model, config, settings.steps)
    objective = SelfPredictiveSFT(trainer.model, settings.auxiliary)
    trainer.objective = objective
    optimizer = None
    if settings.auxiliary.method != "none":
        rate = settings.learning_rate * settings.auxiliary.predictor_speed
        optimizer = torch.optim.Adam(objective.predictions.parameters(), lr=rate)
    stream = solutions(encoder, "train", seed, levels=settings.levels, p=settings.step_right)
    losses = []
    with (folder / "metrics.jsonl").open("w") as log:
        for step in range(1, settings.steps + 1):
            metrics = trainer.step(objective.begin(take_tokens(stream, settings.batch_tokens)))
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(metrics["nll"])
            if step % LOG_EVERY == 0 or step == settings.steps:
                log.write(json.dumps({"step": step, **metrics}) + "\n")
    return losses


def probe_latents(model: Any, unseen: list[Solution], p: float, seed: int) -> dict[str, float]:
    """R² of linear probes of V, Q and advantage, beyond what the number of steps explains.

    V is fitted from the latent of a state. Q and the advantage are fitted from the latent of a
    state, the vector of the action and products of both, without the state after the action, since
    judging a step means comparing it with what the state requires. Solutions of a prompt are fitted
    or held out together.

    Returns:
        Shares of the variance of each function among states with as many steps behind and ahead.
    """
    latents = [z.double().numpy() for z in state_latents(model, unseen)]
    embeddings = model.get_input_embeddings()
    actions = np.concatenate([action_vectors(embeddings, s).double().numpy() for s in unseen])
    values = [solution.values(p) for solution in unseen]
    before = np.concatenate([z[:-1] for z in latents])
    value, q = (np.concatenate([v[part] for v in values]) for part in (np.s_[:-1], np.s_[1:]))
    chosen = split_by_prompt(unseen, seed)
    steps = np.array([s.steps for s in unseen])
    states, pairs = (np.repeat(np.arange(len(unseen)), steps + more) for more in (1, 0))
    place = np.concatenate([np.arange(n + 1) for n in steps])
    pair_place = np.concatenate([np.arange(n) for n in steps])

    def beyond_counts(
        features: np.ndarray, functions: list[np.ndarray], of: np.ndarray, t: np.ndarray
    ) -> list[float]:
        fitted, cells = chosen[of], np.stack([t, steps[of]], axis=1)
        x, *rest = (
            residual(a, cells, fitted) for a in (features, *(y[:, None] for y in functions))
        )
        return held_out_r2s(x, rest, fitted)

    joint = np.concatenate([before, actions, products(before, actions, chosen[pairs])], axis=1)
    of_state = beyond_counts(np.concatenate(latents), [np.concatenate(values)], states, place)
    of_pairs = beyond_counts(joint, [q, q - value], pairs, pair_place)
    return dict(zip(("value", "q", "advantage"), of_state + of_pairs, strict=True))


def split_by_prompt(unseen: list[Solution], seed: int) -> np.ndarray:
    """True for solutions that the probe fits: [N]. Those of one prompt go together."""
    numbers: dict[tuple[int, ...], int] = {}
    prompt = [numbers.setdefault(tuple(s.prompt_ids), len(numbers)) for s in unseen]
    return np.asarray(np.random.default_rng(seed).random(len(numbers))[prompt] < TRAINING_SHARE)
