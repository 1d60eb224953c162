"""Examines the machine: what tramontane can use, and how to fix the rest."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from tramontane.errors import InputError, install, other_project

if TYPE_CHECKING:
    from tramontane.models.gpu import Build

State = Literal["ok", "missing", "optional"]


TOOL_SECONDS = 60.0  # limit for `TOOL --version`
ATTENTION_ERROR = 0.02  # of bfloat16 against float32; about 0.004 is expected


class Finding(NamedTuple):
    """One line of the report; `optional` is a missing part that nothing else needs."""

    name: str
    state: State
    found: str
    remedy: str = ""


def doctor(chat: str | None = None) -> list[Finding]:
    """Examine everything without changing anything; the sandbox runs one small program.

    Args:
        chat: a model, whose chat template is examined instead.

    Raises:
        InputError: no such model.
    """
    import platform

    if chat is not None:
        from tramontane.environments.report import examine

        return [Finding(*trait) for trait in examine(chat)]
    return [
        Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}"),
        _name(),
        *_devices(),
        *_sandbox(),
        _tool("g++", "C++ programs are unscorable: install g++ (apt-get install g++)"),
        _package("ray", f"workers on several machines: {install('ray')}"),
        _package("peft", f"adapters in place of all weights: {install('lora')}"),
        *(
            _package(name, f"faster layers that carry state, on a GPU: {install('state')}")
            for name in ("flash-linear-attention", "causal-conv1d", "mamba-ssm")
        ),
        _vllm(),
        _package("reasoning-gym", f"more training problems: {install('reasoning-gym')}"),
        _package("pyarrow", f"Parquet files, such as the rollouts of runs: {install('parquet')}"),
        _package("scipy", f"studies: {install('studies')}"),
        _package("matplotlib", f"the plots of studies: {install('studies')}"),
        _plugins(),
    ]


def _name() -> Finding:
    if remedy := other_project():
        return Finding("tramontane", "missing", "mixed with another project's files", remedy)
    return Finding("tramontane", "ok", "tramontane-rl")


@dataclass(frozen=True)
class GpuFacts:
    """A GPU that torch sees, with its memory in bytes, and what `_attention_error` gives on it, or
    the error that it raised."""

    name: str
    capability: tuple[int, int]
    free: int
    total: int
    attention: float | str


def _devices() -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        remedy = f"to run models, install: {install('train')}"
        return [Finding("torch", "optional", "not installed", remedy)]
    import torch

    from tramontane.config.device import number_type
    from tramontane.models.gpu import Build

    chosen = number_type("cpu")
    build = Build.installed()
    about = f"{build.torch}, built for {f'CUDA {build.cuda}' if build.cuda else 'CPUs'}"
    return [
        Finding("torch", "ok", f"{about}, {torch.get_num_threads()} threads"),
        Finding("dtype: auto", "ok", f"{chosen.dtype} on the CPU: {chosen.reason}"),
        *gpu_findings(build, [_examine_gpu(i) for i in range(torch.cuda.device_count())]),
    ]


def _examine_gpu(number: int) -> GpuFacts:
    import torch

    about = torch.cuda.get_device_properties(number)
    try:
        attention: float | str = _attention_error(f"cuda:{number}")
    except RuntimeError as error:  # such as a build without kernels for this GPU
        attention = str(error).partition("\n")[0]
    free, total = torch.cuda.mem_get_info(number)
    return GpuFacts(about.name, (about.major, about.minor), free, total, attention)


def _attention_error(device: str) -> float:
    """Largest error of packed attention in bfloat16, relative to the largest output."""
    import torch

    from tramontane.models.attention import packed_attention
    from tramontane.models.packing import Packing

    lengths = (300, 20, 150)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(lengths), 64) for heads in (8, 2, 2)]
    exact = [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]
    outs = []
    for q, k, v in (exact, [x.to(device, torch.bfloat16) for x in exact]):
        row = Packing(lengths, [None] * len(lengths), q.device)
        out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, packing=row)
        outs.append(out.float().cpu())
    return float((outs[1] - outs[0]).abs().max() / outs[0].abs().max())


def gpu_findings(build: Build, gpus: Sequence[GpuFacts]) -> list[Finding]:
    """Findings on the NVIDIA GPUs, as torch sees them, and their driver."""
    if not gpus:
        return [Finding("cuda", "optional", "no device", build.why_no_gpu())]
    findings = [Finding("driver", "ok", build.driver or "unknown")]
    findings.append(Finding("kernels", "ok", " ".join(build.kernels)))
    for number, gpu in enumerate(gpus):
        name, lacks = f"cuda:{number}", build.lacks(gpu.capability)
        memory = f"{gpu.free / 2**30:.1f} of {gpu.total / 2**30:.1f} GiB free"
        capability = ".".join(map(str, gpu.capability))
        facts = f"{gpu.name}, capability {capability}, {memory}"
        findings.append(Finding(name, "missing" if lacks else "ok", facts, lacks))
        findings.append(_attention_finding(f"{name} attention", gpu))
    return findings


def _attention_finding(name: str, gpu: GpuFacts) -> Finding:
    if isinstance(gpu.attention, str):
        return Finding(name, "missing", "fails", gpu.attention)
    error = f"differs from float32 by {gpu.attention:.1e}"
    if not gpu.attention <= ATTENTION_ERROR:  # or it is not a number
        remedy = "its results cannot be used: try another release of torch, or another driver"
        return Finding(name, "missing", error, remedy)
    if gpu.capability < (8, 0):
        return Finding(name, "ok", f"{error}; without flash attention, which needs capability 8.0")
    return Finding(name, "ok", error)


_MEND = {
    "namespaces": "the fastest: needs root with the right to mount, or user namespaces (sysctl "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0); in a "
    "container, --security-opt seccomp=unconfined, or --privileged",
    "bubblewrap": "install it (apt-get install bubblewrap), where only it may make namespaces",
    "landlock": "needs Linux 6.2 with Landlock among its security modules (lsm=landlock,...)",
}


def _sandbox() -> list[Finding]:
    from tramontane.verifier.code import sandbox

    with warnings.catch_warnings():  # the finding below says the same at length
        warnings.simplefilter("ignore", RuntimeWarning)
        used = sandbox.probe()
    findings = [Finding("sandbox", "ok", used)]
    if used == "rlimits":
        remedy = "no code is graded unless verifier.allow_unsandboxed=true: fix one below"
        findings = [Finding("sandbox", "missing", "none: rlimits alone", remedy)]
    for rung in sandbox.RUNGS[:-1]:
        remedy, why = _MEND[rung], sandbox.why_not(rung)
        findings.append(
            Finding(rung, "optional", why, remedy) if why else Finding(rung, "ok", "works")
        )
    return findings


def _tool(name: str, remedy: str) -> Finding:
    import shutil
    import subprocess

    if shutil.which(name) is None:
        return Finding(name, "missing", "not found", remedy)
    answer = subprocess.run(
        [name, "--version"], capture_output=True, text=True, timeout=TOOL_SECONDS
    ).stdout
    return Finding(name, "ok", answer.splitlines()[0] if answer else "works")


def _vllm() -> Finding:
    """vLLM in its environment; `missing` if it is expected but broken."""
    if importlib.util.find_spec("torch") is None:
        remedy = f"vLLM is for runs, which need: {install('train')}"
        return Finding("vllm", "optional", "not looked for", remedy)
    from tramontane.generator.vllm import environment

    try:
        return Finding("vllm", "ok", str(environment.find(None)))
    except InputError as error:
        if environment.expected():
            return Finding("vllm", "missing", "does not work", str(error))
        remedy = f"generators that run vLLM (generator.kind: vllm): {environment.SETUP}"
        return Finding("vllm", "optional", f"no {environment.interpreter(None)}", remedy)


def _plugins() -> Finding:
    from tramontane import plugins

    groups = (plugins.COMMANDS, plugins.STUDIES, plugins.CONFIGS)
    entries = [entry for group in groups for entry in plugins.offered(group).values()]
    packages = sorted(
        {f"{entry.dist.name} {entry.dist.version}" for entry in entries if entry.dist}
    )
    if packages:
        return Finding("plugins", "ok", ", ".join(packages))
    return Finding("plugins", "optional", "none", "commands and studies of further packages")


def _package(name: str, remedy: str) -> Finding:
    import importlib.metadata

    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "optional", "not installed", remedy)
