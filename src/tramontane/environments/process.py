"""A process that runs environments: `python -m tramontane.environments.process FD`.

Requests arrive over the socket FD as pickled (number, method of `EnvironmentWorker`, arguments),
and are answered in any order with (number, result). A result may be an exception: `InputError`, or
`Broken`, which fails that conversation alone. Late steps are answered by the worker itself; if it
does not answer, the pool kills the process, with its group, and starts another.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from tramontane.environments.protocol import Broken
from tramontane.environments.running import THREADS
from tramontane.errors import InputError
from tramontane.interrupt import leave_to_controller
from tramontane.placement.printed import flush, print_by_line
from tramontane.placement.process import READY, limit_memory

if TYPE_CHECKING:
    from tramontane.config import Config
    from tramontane.data.prompts import PromptEncoder
    from tramontane.environments.worker import EnvironmentWorker

STACK = 2 << 20  # bytes of a thread's stack, which counts as allocated
MAX_STUCK = 16  # threads with steps that do not end, beyond which the process ends


def warm_up() -> None:
    """What every process of environments imports; see `placement.warm`."""
    from transformers import PreTrainedTokenizerFast  # noqa: F401 - of the encoder that it is sent

    from tramontane.environments import loading, worker  # noqa: F401


def main(descriptor: int) -> None:
    """Serve until the pool closes its end of the socket, or dies."""
    leave_to_controller(signal.SIGTERM)
    threading.stack_size(STACK)
    connection = Connection(descriptor)
    os.register_at_fork(after_in_child=connection.close)  # answers come from this process alone
    # Read before the imports, which take longer than the pool may wait to send a large vocabulary.
    settings = connection.recv_bytes()
    from tramontane.environments import loading
    from tramontane.environments.worker import EnvironmentWorker

    config: Config
    encoder: PromptEncoder
    config, encoder, folder = pickle.loads(settings)
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    try:
        loading.check(config.data)
        worker = EnvironmentWorker(config, encoder)
    except InputError as error:
        connection.send(str(error))
        return
    limit_memory(memory_of_conversations(config))
    connection.send(READY)
    asyncio.run(serve(connection, worker))


def memory_of_conversations(config: Config) -> int:
    """Bytes that conversations may use. Each has a thread, and another in a function of
    `data.tools`; only the stacks of a large number of them are added."""
    threads = max(0, config.pipeline.n_async - THREADS) * (2 if config.data.tools else 1)
    return (config.conversation.memory_mb << 20) + threads * STACK


async def serve(connection: Connection, worker: EnvironmentWorker) -> None:
    """Answer requests concurrently, until the socket is closed.

    Requests are read while answers wait for room in the socket: the pool sends a burst of requests
    before it reads, so the two could otherwise wait for each other.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    tasks: set[asyncio.Task[None]] = set()
    writer = ThreadPoolExecutor(1, "writer")

    async def answer(number: int, method: str, arguments: tuple) -> None:
        try:
            found = pickle.dumps((number, await getattr(worker, method)(*arguments)))
        except InputError as error:
            found = pickle.dumps((number, error))
        except Exception:  # this process has many other conversations
            found = pickle.dumps((number, Broken(traceback.format_exc())))
        flush()
        await loop.run_in_executor(writer, connection.send_bytes, found)

    def read() -> None:
        """Begin to answer a request, which is there or on its way."""
        try:
            task = loop.create_task(answer(*connection.recv()))
        except Exception as error:
            over.set_exception(error)
        else:
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if worker.stuck > MAX_STUCK:
                over.set_result(None)
        if over.done():
            loop.remove_reader(connection.fileno())

    loop.add_reader(connection.fileno(), read)
    await over


if __name__ == "__main__":
    print_by_line(os.dup(1))  # an environment may close 1 for all others
    status = 1
    try:
        main(int(sys.argv[1]))
        status = 0
    except (EOFError, ConnectionError):  # the pool is gone
        status = 0
    except BaseException:  # from an environment that broke the event loop
        traceback.print_exc()
    os._exit(status)  # a thread with a step that does not end must not keep the process
