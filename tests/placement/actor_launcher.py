"""What the cluster of the tests runs in place of Ray's `setup_worker.py`: has the server of
`tests.placement.warm_actors` fork the process, and ends as that ends. It imports next to nothing,
so that it starts in milliseconds. An actor with a runtime environment starts as Ray starts it.
"""

import marshal
import os
import signal
import socket
import struct
import sys

SOCKET = "TRAMONTANE_TEST_ACTORS"  # the variable with the path of the server's socket
SIZE, STATUS = struct.Struct("q"), struct.Struct("i")
CONTEXT = "--serialized-runtime-env-context="
SETUP = (CONTEXT, "--language=")  # options that are for `setup_worker.py`


def launch(arguments: list[str]) -> int:
    """The exit code of `default_worker.py`, negative for a signal."""
    request = marshal.dumps((arguments, dict(os.environ), os.getcwd()))
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(os.environ[SOCKET])
        socket.send_fds(link, [SIZE.pack(len(request))], [0, 1, 2])
        link.sendall(request)
        status = link.recv(STATUS.size)
    return STATUS.unpack(status)[0] if status else -signal.SIGKILL


def main() -> None:
    worker = sys.argv[1]
    if any(word.startswith(CONTEXT) and word != f"{CONTEXT}{{}}" for word in sys.argv):
        setup = os.path.join(os.path.dirname(worker), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, setup, *sys.argv[1:]])
    code = launch(sys.argv[1:])
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


if __name__ == "__main__":
    main()
