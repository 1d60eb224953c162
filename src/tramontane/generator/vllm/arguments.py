"""Arguments of vLLM's engine, from the configuration of a generator."""

from __future__ import annotations

import os
from typing import Any

from tramontane.config import GeneratorConfig
from tramontane.models.kv_memory import kv_bytes_per_token

BLOCK = 128  # positions in a block of vLLM's cache on a CPU


def engine_args(
    config: GeneratorConfig, path: str, model: Any, slots: int, max_len: int
) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`.

    Args:
        config: its `vllm.engine_args` replace any argument.
        path: checkpoint folder or Hugging Face name; vLLM reads only its config.
        model: that config.
        slots: completions decoded at once.
        max_len: maximum length of a prompt plus its `max_tokens`, in tokens.
    """
    arguments: dict[str, Any] = {
        "model": path,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": config.dtype,
        "max_model_len": max_len,
        "max_num_seqs": slots,
        "max_num_batched_tokens": max(config.prefill_tokens, slots),
        "tensor_parallel_size": config.vllm.tensor_parallel,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: temperature
        "generation_config": "vllm",  # not the checkpoint's, which may change the distribution
        "disable_log_stats": True,
        "seed": 0,
    }
    if config.kv_cache_mib is not None:
        arguments["kv_cache_memory_bytes"] = (config.kv_cache_mib << 20) // config.workers
    elif config.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    if config.device == "cpu":
        arguments |= {
            "kv_cache_memory_bytes": _cpu_cache_bytes(config, model, slots, max_len),
            "enforce_eager": True,  # no compilation at each start
            # A step that reads only part of a prompt must undo the request's random draw, which
            # vLLM cannot do on a CPU, so every prompt is read in one step.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(config.prefill_tokens, slots, max_len),
            # vLLM's CPU build keeps the old output head after an update if it is tied to the
            # embeddings, so the head is sent as a separate weight.
            "hf_overrides": {"tie_word_embeddings": False},
        }
    return arguments | config.vllm.engine_args


def variables(config: GeneratorConfig) -> dict[str, str]:
    """Environment variables that select the generator's device for vLLM."""
    _, _, number = config.device.partition(":")
    if not number:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[int(number)] if visible else number}


def _cpu_cache_bytes(config: GeneratorConfig, model: Any, slots: int, max_len: int) -> int:
    """Bytes for the cache: the limit if there is one, else enough for all slots."""
    if config.kv_cache_mib is not None:
        return (config.kv_cache_mib << 20) // config.workers
    blocks = slots * -(-max_len // BLOCK) + 1
    return blocks * BLOCK * kv_bytes_per_token(model, config.dtype)
