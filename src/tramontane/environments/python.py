"""The tool `python`: a session in the sandbox that judges programs (`verifier.code.sandbox`)."""

from __future__ import annotations

import contextlib
import threading

from tramontane.config import Config, VerifierConfig
from tramontane.errors import InputError
from tramontane.verifier.code import sandbox

CODE_BYTES = 32_768  # longest code of a call
ANSWER_CHARACTERS = 4_000  # a longer output keeps its beginning and its end
CLOCK_FACTOR = 5.0  # time by the clock of a call on a busy host, as a multiple of its limit


class Python:
    """A toolbox with a Python interpreter that lives as long as its conversation.

    It has the standard library, no network, a private directory of 64 MB, and for each call the
    limits of a program's test: `verifier.code_timeout_s` of processor time and
    `verifier.code_memory_mb`. A call that breaks a limit ends the session; the next one begins with
    a new one. No process or file is left at the end.
    """

    def __init__(self, config: VerifierConfig | None = None) -> None:
        self._config = config or VerifierConfig()
        self._lock = threading.Lock()  # two calls of a turn run one after the other
        self._session: sandbox.Sandbox | None = None
        self._open = contextlib.ExitStack()

    def start(self, config: Config) -> None:
        self._config = config.verifier

    def python(self, code: str) -> str:
        """Run Python code. Variables, functions and imports are kept for later calls.

        Args:
            code: The code. The value of its last expression is printed.

        Returns:
            What the code prints, and the traceback if it fails.
        """
        source = code.encode(errors="replace")
        if len(source) > CODE_BYTES:
            raise ValueError(f"the code is longer than {CODE_BYTES:,} bytes")
        with self._lock:
            if self._session is None:
                self._session = self._begin()
            result = self._session.run(source + b"\n")  # nothing at all would end the session
            if result.failure:
                self._end()
        if result.is_unjudged:
            raise RuntimeError(result.failure)  # the machine's fault
        if result.failure:
            raise ValueError(f"{result.failure}; the session was restarted, and its names are gone")
        return _shortened(result.output.decode(errors="replace").rstrip())

    def close(self) -> None:
        with self._lock:
            self._end()

    def _begin(self) -> sandbox.Sandbox:
        config, rung = self._config, sandbox.probe()
        if rung == "rlimits" and not config.allow_unsandboxed:
            raise InputError(
                "data.tools: python needs a sandbox, and none works here (`tramontane doctor` says "
                "how to fix it); to do without one, set verifier.allow_unsandboxed"
            )
        limits = sandbox.Limits(
            config.code_timeout_s, config.code_memory_mb, clock_factor=CLOCK_FACTOR
        )
        job = sandbox.Job([], limits, is_session=True)
        return self._open.enter_context(sandbox.Sandbox(job, rung))

    def _end(self) -> None:
        self._session = None
        self._open.close()


def _shortened(text: str) -> str:
    if len(text) <= ANSWER_CHARACTERS:
        return text
    half = ANSWER_CHARACTERS // 2
    return f"{text[:half]}\n… ({len(text) - 2 * half:,} characters omitted) …\n{text[-half:]}"
