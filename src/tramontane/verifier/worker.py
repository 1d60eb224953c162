"""A worker process of the pool: `python -m tramontane.verifier.worker FD`.

Tasks (pickled tuples) arrive over the socket FD. Verdicts, rewards of whole groups, or outputs of
programs are sent back one at a time as soon as they are ready, so that the pool knows which item a
worker was grading when it is late or dies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tramontane.config import VerifierConfig
from tramontane.errors import InputError
from tramontane.placement.process import limit_memory, serve
from tramontane.verifier import code, correctness, functions, language, math
from tramontane.verifier.custom import GroupCall
from tramontane.verifier.group_rewards import run_group_call
from tramontane.verifier.reward import grade_apart


def warm_up() -> None:
    """What every worker needs, before the first is forked; see `placement.warm`."""
    math.warm_up()
    language.warm_up()


def prepare(config: VerifierConfig, folder: Path) -> Callable[[Any], Iterator[Any]]:
    """Check the user's functions under the memory limit; see `serve`."""
    functions.leave_trail(folder)
    limit_memory(config.memory_mb << 20)
    try:
        correctness.check(config)
    except InputError as error:  # an import may fail under the memory limit
        where = f"in a worker, with verifier.memory_mb {config.memory_mb}"
        raise InputError(f"{error} ({where})") from None

    def results(task: Any) -> Iterator[Any]:
        problem, items, l_max, l_cache = task
        for item in items:
            if isinstance(item, code.Trial):
                yield code.run_trial(item, config)
            elif isinstance(item, GroupCall):
                yield run_group_call(problem, item, config)
            elif isinstance(item, correctness.ReferenceCheck):
                yield correctness.can_judge(problem, config)
            else:
                yield grade_apart(problem, item, config, l_max, l_cache)

    return results


if __name__ == "__main__":
    serve(int(sys.argv[1]), prepare)
