"""Locks that a process puts on itself: seccomp for system calls, Landlock for files (Linux).

Child processes inherit both locks, and no process can remove them. On every rung the filter blocks
system calls that bypass a sandbox and that no tested program needs: other processes' memory,
namespaces, mounts, sockets, and memory, queues and file attributes that outlive a process or escape
its limits. Landlock is for the rung without namespaces: it hides files there, and the filter also
blocks signals and changes of file attributes.
"""

from __future__ import annotations

import ctypes
import os
import struct

NO_NEW_PRIVS = 38
_SECCOMP, _FILTER_MODE = 22, 2
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000  # the other calling convention of x86-64
# System calls by name, with their numbers on x86-64 and on ARM.
_ALWAYS = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "kcmp": (312, 272), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "socket": (41, 198), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463),
}  # fmt: skip
_WITHOUT_NAMESPACES = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None),
    "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "setpriority": (141, 140),
    # Descriptors in transit through a socket are in no process's list.
    "sendmsg": (46, 211), "sendmmsg": (307, 269), "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274),
}  # fmt: skip
_SIGNALS = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
}  # fmt: skip
_DROP_BOUND, _CAPABILITIES_3 = 24, 0x20080522
_CLONE, _CLONE3, _PRLIMIT = (56, 220), 435, (302, 261)
_CLONE_NEW = 0x7E020000  # every kind of namespace
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR, _EXECUTE, _WRITE_FILE, _TRUNCATE = 1 << 2, 1 << 3, 1 << 0, 1 << 1, 1 << 14
_FILE_BITS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
LANDLOCK_NEEDED = 3  # the first version that can forbid truncating a file (Linux 6.2)
_SCOPES = 6  # the first version that confines signals (Linux 6.12)


def landlock_version() -> int:
    """Landlock's version in the running kernel; below 1 if it has none."""
    return _syscall(_LANDLOCK_CREATE, None, 0, 1)


def supported() -> bool:
    """True if the system calls' numbers on this machine are known."""
    return os.uname().machine in _AUDIT_ARCH


def filter_calls(namespaces: bool) -> None:
    """Block system calls for this process and its children: the calls fail with EPERM.

    A process with `namespaces` of its own may make more calls. Raises `OSError` if the kernel
    rejects the filter.
    """
    machine = os.uname().machine
    column = list(_AUDIT_ARCH).index(machine)
    names: dict[str, tuple[int, int | None]] = {**_ALWAYS}
    if not namespaces:
        names |= _WITHOUT_NAMESPACES
        if landlock_version() < _SCOPES:
            names |= _SIGNALS
    denied = sorted({n for row in names.values() if (n := row[column]) is not None})
    program = _filter(_AUDIT_ARCH[machine], denied, column)
    code = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    buffer = ctypes.create_string_buffer(header)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(_SECCOMP, _FILTER_MODE, buffer, 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp filter could be set")


def _filter(architecture: int, denied: list[int], column: int) -> bytes:
    """A classic BPF program over `struct seccomp_data` (number, architecture, …, arguments)."""
    load, jump_if, jump_ge, jump_set, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000

    def instruction(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    lines = [
        instruction(load, 0, 0, 4),
        instruction(jump_if, 1, 0, architecture),
        instruction(answer, 0, 0, kill),
        instruction(load, 0, 0, 0),
    ]
    if column == 0:
        lines += [instruction(jump_ge, 0, 1, _X32), instruction(answer, 0, 0, unknown)]
    for number in denied:
        lines += [instruction(jump_if, 0, 1, number), instruction(answer, 0, 0, refuse)]
    # The filter cannot follow clone3's pointer: callers fall back to clone.
    lines += [instruction(jump_if, 0, 1, _CLONE3), instruction(answer, 0, 0, unknown)]
    lines += [
        instruction(jump_if, 0, 3, _CLONE[column]),
        instruction(load, 0, 0, 16),
        instruction(jump_set, 0, 1, _CLONE_NEW),
        instruction(answer, 0, 0, refuse),
        instruction(load, 0, 0, 0),
        instruction(jump_if, 0, 3, _PRLIMIT[column]),  # allowed only on this process
        instruction(load, 0, 0, 16),
        instruction(jump_if, 1, 0, 0),
        instruction(answer, 0, 0, refuse),
        instruction(answer, 0, 0, allow),
    ]
    return b"".join(lines)


def drop_bounding_set() -> None:
    """Remove every capability from those that this process and its children can ever gain."""
    prctl = ctypes.CDLL(None).prctl
    capability = 0
    while prctl(_DROP_BOUND, capability, 0, 0, 0) == 0:  # until a number that the kernel lacks
        capability += 1


def drop_capabilities() -> None:
    """Give up every capability. Raises `OSError` if the kernel refuses."""
    header = struct.pack("Ii", _CAPABILITIES_3, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), "the capabilities could not be dropped")


def hide_files(readable: list[str], devices: list[str], writable: str) -> None:
    """Hide every file from this process and its children, except `readable` paths, `devices`, which
    can also be written, and the folder `writable`, where everything is allowed.

    Raises `OSError` if the kernel has no Landlock, or a path does not exist.
    """
    version = landlock_version()
    everything = (1 << (16 if version >= 5 else 15)) - 1
    size = 8 if version < 4 else 16 if version < _SCOPES else 24  # files, ports, signals
    attributes = struct.pack("QQQ", everything, 3, 3)[:size]
    ruleset = _check(_syscall(_LANDLOCK_CREATE, attributes, size, 0))
    rules = [(path, _READ_FILE | _READ_DIR | _EXECUTE) for path in readable]
    rules += [(path, _READ_FILE | _WRITE_FILE) for path in devices]
    for path, access in [*rules, (writable, everything)]:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            access &= _FILE_BITS
        rule = struct.pack("=Qi", access & everything, beneath)
        _check(_syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0))
        os.close(beneath)
    ctypes.CDLL(None).prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    _check(_syscall(_LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


def _syscall(number: int, *arguments: object) -> int:
    answer: int = ctypes.CDLL(None, use_errno=True).syscall(
        number, *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    )
    return answer


def _check(answer: int) -> int:
    if answer < 0:
        raise OSError(ctypes.get_errno(), "Landlock failed")
    return answer
