"""The process of a Ray actor: one worker, and a thread that answers heartbeats.

Ray imports this file in each actor's process. It imports no torch, so that a verifier's process
starts quickly and stays small.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray

from tramontane.placement.files import Copies
from tramontane.placement.printed import Kept
from tramontane.temporary import die_with_parent

if TYPE_CHECKING:
    from tramontane.placement.ranks import Membership

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface, in bytes 20 to 24 of the answer


class Actor:
    """One worker; its calls run in order, concurrently with heartbeats and file transfers."""

    def __init__(self) -> None:
        self._copies, self._printed = Copies(), Kept()

    def make(self, make: Callable[[], Any], membership: Membership | None) -> None:
        """Make the worker; if it is one of several ranks, it joins the others first."""
        die_with_parent()  # a stopped process would not notice that its machine's Ray has ended
        if membership is not None:
            _use_interface_of(ray.util.get_node_ip_address())
            membership.join()
        self._worker = self._copies.located(make)()

    def call(self, method: str, *args: Any) -> Any:
        result = getattr(self._worker, method)(*map(self._copies.located, args))
        return self._printed.told(result)

    @ray.method(concurrency_group="files")
    def files(self, method: str, *args: Any) -> Any:
        """Call a method of this machine's `Copies`."""
        return getattr(self._copies, method)(*args)

    @ray.method(concurrency_group="background")
    def call_in_background(self, method: str, *args: Any) -> Any:
        """Like `call`; runs concurrently with `call` and after earlier background calls."""
        return getattr(self._worker, method)(*args)

    @ray.method(concurrency_group="pulse")
    def beat(self) -> tuple[str, int]:
        """Node and process id; answered by a separate thread, even while the worker is busy."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    @ray.method(concurrency_group="pulse")
    def printed(self) -> Any:
        """What the worker's processes have printed since the last answer."""
        return self._printed.told(None)

    @ray.method(concurrency_group="pulse")
    def free_address(self) -> str:
        """An address on this actor's machine at which ranks can meet."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"


def _use_interface_of(address: str) -> None:
    """Have gloo use the network interface with this machine's address in the cluster.

    By default gloo uses the address that the host's name resolves to, often the loopback interface,
    which ranks on other machines cannot reach.
    """
    if sys.platform != "linux" or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # it has no address
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    os.environ["GLOO_SOCKET_IFNAME"] = name
