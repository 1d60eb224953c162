"""vLLM as a generator, in its own environment and process."""

from tramontane.generator.vllm.generator import HEARTBEAT, VllmGenerator

__all__ = ["HEARTBEAT", "VllmGenerator"]
