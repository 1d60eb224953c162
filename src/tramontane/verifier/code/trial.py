"""Trials: run a program on inputs in the sandbox, without expected outputs. Used by curation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from tramontane.config import VerifierConfig
from tramontane.temporary import temporary_folder
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.grade import (
    MAX_OUTPUT,
    MAX_TIMEOUTS,
    NO_COMPILER,
    NO_SANDBOX,
    Language,
    seconds_for,
    stdio_job,
)


class Trial(NamedTuple):
    """A program, its inputs, and the number of timeouts after which the rest are not run."""

    language: Language
    program: str
    inputs: list[str]
    max_timeouts: int = MAX_TIMEOUTS

    def time_limit(self, config: VerifierConfig) -> float:
        """Longest time of the whole trial in seconds, including the compiler."""
        return seconds_for(len(self.inputs), compilers=1, config=config)


class TrialOutput(NamedTuple):
    """The output of one execution, or in `failure` why it is not used."""

    output: str
    failure: str = ""


def run_trial(trial: Trial, config: VerifierConfig) -> list[TrialOutput]:
    """Run a program on each input, in the sandbox.

    After `max_timeouts`, or if the program kills the sandbox, the remaining inputs are not run:
    each gets the last failure.
    """
    if trial.language != "python" and shutil.which("g++") is None:
        return [TrialOutput("", NO_COMPILER)] * len(trial.inputs)
    if sandbox.probe() == "rlimits" and not config.allow_unsandboxed:
        return [TrialOutput("", NO_SANDBOX)] * len(trial.inputs)
    timeouts, outputs = 0, []
    with temporary_folder("code") as folder:
        job = stdio_job(trial.program, trial.language, trial.inputs, config, Path(folder))
        job.keep_going = True
        with sandbox.Sandbox(job, sandbox.probe()) as running:
            if job.compiler and (failure := next(running.results).failure):
                return [TrialOutput("", f"does not compile: {failure}")] * len(trial.inputs)
            for result in running.results:
                outputs.append(_as_output(result))
                timeouts += result.failure.startswith("timed out")
                if timeouts == trial.max_timeouts:
                    break
    return outputs + [outputs[-1]] * (len(trial.inputs) - len(outputs))


def _as_output(result: sandbox.Result) -> TrialOutput:
    if result.failure:
        return TrialOutput("", result.failure)
    if len(result.output) > MAX_OUTPUT:
        return TrialOutput("", f"printed more than {MAX_OUTPUT >> 20} MB")
    try:
        return TrialOutput(result.output.decode())
    except UnicodeDecodeError:
        return TrialOutput("", "printed what is not UTF-8")
