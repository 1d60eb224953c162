"""The parity gate: do the workers of a run agree on the log-probs of the same tokens?"""

from __future__ import annotations

from tramontane.batches import TrainSequence
from tramontane.controller.generators import GeneratorPool
from tramontane.controller.pooled_generator import PooledGenerator
from tramontane.placement import Handle, Limit, call
from tramontane.run.prepare import PROBE_TOKENS, Prepared
from tramontane.trainer import parity
from tramontane.types import Completion

# Completions of each probe prompt, and the longest of them, that measure a quantized policy.
DISTANCE_SAMPLES, DISTANCE_TOKENS = 8, 60


async def check_parity(prepared: Prepared, generators: GeneratorPool, trainer: Handle) -> None:
    """Have every generator complete the probe prompts, and compare with the trainer's log-probs.

    Raises:
        ParityError: the mean difference is above the tolerance of the dtypes; the error names the
            first part of the model that differs.
    """
    config = prepared.config
    limit = Limit.of(config.timeouts, "control")
    tokens = min(PROBE_TOKENS, config.pipeline.l_max)
    for generator in generators:
        completions = await _probe(prepared, generator, prepared.probes, tokens)
        mismatch = await _compare(prepared, trainer, completions)
        tolerance = parity.tolerance(config.trainer, config.generator)
        if mismatch.mean <= tolerance:
            continue
        ids = [*completions[0].prompt_ids, *completions[0].token_ids]
        weights = await generator.ask("control", "weights")
        trained = await call(trainer, "weights", limit=limit)
        # vLLM exposes no hidden states, and only some of its weights.
        hidden = await generator.ask("control", "hidden_states", ids)
        computed = await call(trainer, "hidden_states", ids, limit=limit) if hidden else []
        has_experts = any(".experts." in name for name in trained)
        trained = {name: tensor for name, tensor in trained.items() if name in weights}
        parity.check(
            mismatch,
            tolerance,
            (parity.fingerprint(weights), parity.fingerprint(trained)) if weights else None,
            (hidden, computed) if hidden else None,
            {"dtype": (config.generator.dtype, config.trainer.dtype)},
            replayed=config.trainer.router_replay or not has_experts,
        )


async def check_quantized(prepared: Prepared, generators: GeneratorPool, trainer: Handle) -> str:
    """Measure how far the policy of a generator with quantized weights is from the trainer's; one
    generator is enough, since all quantize the same weights. Returns the figures, in words.

    Raises:
        ParityError: the KL divergence is above `trainer.parity_kl`, or the effective sample size
            below `trainer.parity_sample_size`.
    """
    config = prepared.config
    tokens = min(DISTANCE_TOKENS, config.pipeline.l_max)
    prompts = prepared.probes * DISTANCE_SAMPLES
    completions = await _probe(prepared, next(iter(generators)), prompts, tokens)
    logprobs = await _logprobs(prepared, trainer, completions)
    distance = parity.distance([c.logprobs for c in completions], logprobs)
    limits = config.trainer.parity_kl, config.trainer.parity_sample_size
    parity.check_distance(config.generator.quantized, distance, *limits)
    return f"{config.generator.quantized}: {distance}"


async def check_long_parity(prepared: Prepared, generators: GeneratorPool, trainer: Handle) -> None:
    """Compare the log-probs of the last tokens of a sequence of the run's maximum length.

    The sequence is prefilled except for these tokens, which are decoded, so it costs one forward
    and a few decode steps. It tests everything that depends on length, since every layer's keys at
    all positions affect the last tokens. One generator is enough: `check_parity` compares the
    weights of all, and the length-dependent code is the same. Without generators nothing is
    compared.

    Raises:
        ParityError: the mean difference is above the tolerance of the dtypes.
    """
    config = prepared.config
    generator = next(iter(generators), None)
    if generator is None:
        return
    completions = await _probe(prepared, generator, [prepared.long_probe], PROBE_TOKENS)
    mismatch = await _compare(prepared, trainer, completions)
    parity.check_long(
        mismatch, parity.tolerance(config.trainer, config.generator), len(prepared.long_probe)
    )


async def _probe(
    prepared: Prepared, generator: PooledGenerator, prompts: list[list[int]], tokens: int
) -> list[Completion]:
    config = prepared.config
    completions: list[Completion] = await generator.ask(
        "control", "probe", prompts, tokens, config.seed, config.generator.temperature
    )
    return completions


async def _compare(
    prepared: Prepared, trainer: Handle, completions: list[Completion]
) -> parity.Mismatch:
    logprobs = await _logprobs(prepared, trainer, completions)
    return parity.compare([c.logprobs for c in completions], logprobs)


async def _logprobs(
    prepared: Prepared, trainer: Handle, completions: list[Completion]
) -> list[list[float]]:
    config = prepared.config
    logprobs: list[list[float]] = await call(
        trainer,
        "logprobs",
        [TrainSequence.of(c) for c in completions],
        config.generator.temperature,
        limit=Limit.of(config.timeouts, "control"),
    )
    return logprobs
