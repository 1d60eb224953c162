"""vLLM's process: its arguments, start, calls, and detection of its death."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from tramontane.config import GeneratorConfig
from tramontane.generator.vllm.environment import Environment
from tramontane.models.shape import shape_of
from tramontane.placement import WorkerDied
from tramontane.temporary import die_with_parent, exit_of

BLOCK = 128  # positions in a block of vLLM's cache on a CPU
SCRIPT = Path(__file__).parent / "inside" / "vllm_worker.py"
_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in our process, step by step
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all processes are bound to the same first cores
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


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
    """Environment variables that select the generator's devices for vLLM."""
    _, _, first = config.device.partition(":")
    if not first:
        return {}
    numbers = [int(first) + n for n in range(config.devices)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else None
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[n] if names else str(n) for n in numbers)}


def _cpu_cache_bytes(config: GeneratorConfig, model: Any, slots: int, max_len: int) -> int:
    """Bytes for the cache: the limit if there is one, else enough for all slots."""
    if config.kv_cache_mib is not None:
        return (config.kv_cache_mib << 20) // config.workers
    blocks = slots * -(-max_len // BLOCK) + 1
    return blocks * BLOCK * shape_of(model, "").kv_bytes_per_token(config.dtype)


class VllmError(RuntimeError):
    """vLLM refused a call; the message is the traceback of its process."""


class VllmProcess:
    """A process of `inside/vllm_worker.py`, called by method name.

    It ends with this object, or with its parent process.

    Args:
        environment: where vLLM is installed.
        variables: environment variables that name its devices.
        threads: CPU threads of its computations.
        heartbeat: longest silence before the process counts as hung, in seconds.
    """

    def __init__(
        self,
        environment: Environment,
        variables: Mapping[str, str],
        threads: int,
        heartbeat: float,
    ) -> None:
        self._heartbeat = heartbeat
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with us)
        ours, theirs = socket.socketpair()
        # Our interpreter's paths and packages are not vLLM's.
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        env |= {
            **_VARIABLES,
            **variables,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": str(SCRIPT.parent),
        }
        with theirs:
            self._process = subprocess.Popen(
                [environment.python, SCRIPT, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=env,
                pass_fds=[theirs.fileno()],
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )
        self._connection = Connection(ours.detach())
        self.close = weakref.finalize(self, _end, self._process, self._connection)

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the process's `Worker` and return its result.

        Raises:
            WorkerDied: the process ended, or gave no sign of life for `heartbeat` seconds.
            VllmError: the call failed in the process.
        """
        try:
            self._connection.send((method, *args))
            while True:
                if not self._connection.poll(self._heartbeat):
                    self.close()
                    raise WorkerDied(
                        f"vLLM's process {self.pid} gave no sign of life for {self._heartbeat:g} s "
                        f"(timeouts.heartbeat) in {method}"
                    )
                if (answer := self._connection.recv()) is not None:  # None: a sign of life
                    break
        except (EOFError, ConnectionError):
            raise WorkerDied(self._death(method)) from None
        state, result = answer
        if state == "error":
            raise VllmError(f"vLLM's process, in {method}:\n{result}")
        return result

    def _death(self, method: str) -> str:
        code = self._process.wait()
        died = f"vLLM's process {self.pid} died in {method}"
        if code < 0:
            return f"{died} ({exit_of(code)})"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        return f"{died} ({exit_of(code)}): {last}"


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()
