"""A worker process of the pool: `python -m tramontane.verifier.worker FD`.

Tasks (pickled tuples) arrive over the socket FD. Verdicts, rewards of whole groups, or outputs of
programs are sent back one at a time as soon as they are ready, so that the pool knows which item a
worker was grading when it is late or dies.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from tramontane.config import VerifierConfig
from tramontane.errors import InputError
from tramontane.temporary import die_with_parent
from tramontane.verifier import code, correctness, functions, language, math
from tramontane.verifier.custom import GroupCall
from tramontane.verifier.reward import grade_apart, run_group_call

READY = ""  # the first message of a worker that can grade; any other text is the error


def main(descriptor: int) -> None:
    """Serve until the pool closes its end of the socket, or dies."""
    die_with_parent()
    # Job systems signal every process; only the controller reacts. A handler, since programs under
    # test would inherit SIG_IGN.
    signal.signal(signal.SIGTERM, lambda *_: None)
    connection = Connection(descriptor)
    config: VerifierConfig
    config, folder = connection.recv()
    tempfile.tempdir = folder
    functions.leave_trail(Path(folder))
    limit = config.memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    math.warm_up()
    language.warm_up()
    try:
        correctness.check(config)
    except InputError as error:  # an import may fail under the memory limit
        connection.send(f"{error} (in a worker, with verifier.memory_mb {config.memory_mb})")
        return
    connection.send(READY)
    while True:
        problem, items, l_max, l_cache = connection.recv()
        for item in items:
            if isinstance(item, code.Trial):
                connection.send(code.run_trial(item, config))
            elif isinstance(item, GroupCall):
                connection.send(run_group_call(problem, item, config))
            else:
                connection.send(grade_apart(problem, item, config, l_max, l_cache))


if __name__ == "__main__":
    # Output of libraries must not reach the run's display; errors still go to stderr.
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the pool is gone
        main(int(sys.argv[1]))
