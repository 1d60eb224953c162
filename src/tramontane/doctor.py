"""Examines the machine: what tramontane can use, and how to fix the rest."""

from __future__ import annotations

import warnings
from typing import Literal, NamedTuple

from tramontane.errors import InputError, install

State = Literal["ok", "missing", "optional"]


TOOL_SECONDS = 60.0  # limit for `TOOL --version`


class Finding(NamedTuple):
    """One line of the report; `optional` is a missing part that nothing else needs."""

    name: str
    state: State
    found: str
    mend: str = ""


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
        *_devices(),
        *_sandbox(),
        _tool("g++", "C++ programs are unscorable: install g++ (apt-get install g++)"),
        _package("ray", f"workers on several machines: {install('ray')}"),
        _package("peft", f"adapters in place of all weights: {install('lora')}"),
        _vllm(),
        _package("reasoning-gym", f"more training problems: {install('reasoning-gym')}"),
        _package("matplotlib", f"the plots of studies: {install('studies')}"),
        _plugins(),
    ]


def _devices() -> list[Finding]:
    import torch

    from tramontane.config.device import number_type

    found = [Finding("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")]
    chosen = number_type("cpu")
    found.append(Finding("dtype: auto", "ok", f"{chosen.dtype} on the CPU: {chosen.reason}"))
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        found.append(
            Finding(f"cuda:{number}", "ok", f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
        )
    if not torch.cuda.is_available():
        mend = "training runs on the CPU; with a GPU, install its driver and torch's CUDA build"
        found.append(Finding("cuda", "optional", "no device", mend))
    return found


_MEND = {
    "bubblewrap": "the fastest: install it (apt-get install bubblewrap); in a container it needs "
    "--security-opt seccomp=unconfined, or --privileged",
    "namespaces": "needs util-linux (unshare, mount, chroot, setpriv), and root with the right to "
    "mount, or user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0)",
    "landlock": "needs Linux 6.2 with Landlock among its security modules (lsm=landlock,...)",
}


def _sandbox() -> list[Finding]:
    from tramontane.verifier.code import sandbox

    with warnings.catch_warnings():  # the finding below says the same at length
        warnings.simplefilter("ignore", RuntimeWarning)
        used = sandbox.probe()
    found = [Finding("sandbox", "ok", used)]
    if used == "rlimits":
        mend = "code problems are unscorable unless verifier.allow_unsandboxed=true: fix one below"
        found = [Finding("sandbox", "missing", "none: rlimits alone", mend)]
    for rung in sandbox.RUNGS[:-1]:
        remedy, why = _MEND[rung], sandbox.why_not(rung)
        found.append(
            Finding(rung, "optional", why, remedy) if why else Finding(rung, "ok", "works")
        )
    return found


def _tool(name: str, mend: str) -> Finding:
    import shutil
    import subprocess

    if shutil.which(name) is None:
        return Finding(name, "missing", "not found", mend)
    answer = subprocess.run(
        [name, "--version"], capture_output=True, text=True, timeout=TOOL_SECONDS
    ).stdout
    return Finding(name, "ok", answer.splitlines()[0] if answer else "works")


def _vllm() -> Finding:
    """vLLM in its environment; `missing` if it is expected but broken."""
    from tramontane.generator.vllm import environment

    try:
        return Finding("vllm", "ok", str(environment.find(None)))
    except InputError as error:
        if environment.expected():
            return Finding("vllm", "missing", "does not work", str(error))
        mend = f"generators that run vLLM (generator.kind: vllm): {environment.SETUP}"
        return Finding("vllm", "optional", f"no {environment.interpreter(None)}", mend)


def _plugins() -> Finding:
    """Packages that add commands, studies or configs."""
    from tramontane import plugins

    groups = (plugins.COMMANDS, plugins.STUDIES, plugins.CONFIGS)
    entries = [entry for group in groups for entry in plugins.offered(group).values()]
    found = sorted({f"{entry.dist.name} {entry.dist.version}" for entry in entries if entry.dist})
    if found:
        return Finding("plugins", "ok", ", ".join(found))
    return Finding("plugins", "optional", "none", "commands and studies of further packages")


def _package(name: str, mend: str) -> Finding:
    import importlib.metadata

    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "optional", "not installed", mend)
