"""Judge hostile programs in a row, and search for what they leave behind: `make hostile`.

`python -m fuzz.hostile --rung bubblewrap --programs 1000 --seed 0` judges programs that
`fuzz.programs` combines from hostile acts. A program must not be right if it does not do what the
tests ask, must not be unscorable, and must not take longer than its limits. After each program
there must be no process, mount, file, socket, queue, segment or descriptor that was not there
before, and the host must not lose more memory and disk meanwhile than the limits allow. The exit
code is 1 if any of this fails.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.programs import KEY, Program, generate
from tramontane.config import VerifierConfig
from tramontane.types import Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.grade import judge

CONFIG = VerifierConfig(code_timeout_s=1.0)
CASES = [{"input": f"{n}\n", "output": f"{n}\n"} for n in (7, 8)]
# Each of these would pass by a name that the program supplies, or by a loop that it ends.
ASSERTS = """
for got, want in zip(map(echo, [7]), [7]): assert got == want
assert all(map(lambda x: echo(x) == x, "ab"))
assert isclose(echo(1.5), 1.5)
assert Counter(sorted(echo("ab"))) == Counter("ba")
"""
PROBLEMS = {
    "stdio": Problem("stdio", "code", "Print it.", tests={"type": "stdio", "cases": CASES}),
    "python_assert": Problem(
        "asserts", "code", "Write echo(x).", tests={"type": "python_assert", "code": ASSERTS}
    ),
}
_CLOCK_SECONDS = sandbox.CLOCK_FACTOR * CONFIG.code_timeout_s  # on a host that is too busy
LIMIT_SECONDS = sandbox.COMPILE_SECONDS + 3 * (_CLOCK_SECONDS + sandbox.GRACE_SECONDS)
GONE_SECONDS = 3.0  # limit for killed processes to be gone
MEMORY_MB = 64  # growth of this process over all programs
# What one program may cost the host: its own limit, that of its tests' process, and what is touched
# between two measurements; a compiler has 2 GB.
HOST_MB, HOST_COMPILER_MB = 2 * CONFIG.code_memory_mb + 700, 2048 + 700
LOOK_SECONDS = 0.02  # between two looks at the host
FOLDERS = ["/tmp", "/var/tmp", "/dev/shm", "/run", "/", "/root", "/home", "/dev", "/var/cache"]
SUBREAPER = 36


@dataclass
class Row:
    """The results of one act: a line of the table."""

    verdicts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    host_mb: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class World:
    """The processes, files and kernel objects outside the sandbox that a program could leave.

    Args:
        mark: a part of every name that the programs use.
        folder: the folder for temporary files of the judge.
    """

    def __init__(self, mark: str, folder: Path) -> None:
        caches = (Path("/var/cache"), Path.home() / ".cache")
        # Only the present ones: other processes on the machine may make more.
        headers = [path for cache in caches for path in cache.glob("tramontane/headers-*")]
        self.mark, self.folders = mark, [folder, *headers]
        # Orphans become children of this process, so that none is overlooked.
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
        self.before = self.look()

    def look(self) -> dict[str, set[str]]:
        """The names of everything that exists now, by kind."""
        marked = [p for f in FOLDERS for p in _entries(f) if self.mark in p]
        sockets = "".join(Path(f"/proc/net/{n}").read_text() for n in ("tcp", "tcp6", "udp"))
        unix = [
            line for line in Path("/proc/net/unix").read_text().split("\n") if self.mark in line
        ]
        return {
            "process": set(descendants()),
            "mount": set(Path("/proc/self/mountinfo").read_text().splitlines()),
            "file": {str(p) for f in self.folders for p in f.rglob("*")} | set(marked),
            "segment": {
                line for kind in ("shm", "sem", "msg")
                for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()
                if line.split()[0] == str(KEY)
            },
            "socket": {"47000"} if f":{47000:04X} " in sockets else set(unix),
            "key": {
                line.split(":")[0] for line in Path("/proc/key-users").read_text().splitlines()
                if line.split(":")[0].strip() == str(0x70000000 + os.getpid())
            },
            "descriptor": {
                f"{n} {target}" for n in os.listdir("/proc/self/fd") if (target := _target(n))
            },
        }  # fmt: skip

    def leftovers(self, name: str = "", patience: float = GONE_SECONDS) -> list[str]:
        """Everything that is new since the last call, and still exists after `patience` seconds.

        New processes are killed, and everything else counts as known from then on, so that each
        program answers only for its own leftovers.
        """
        end = time.monotonic() + patience
        while True:
            reap()
            now = self.look()
            found = {kind: names - self.before[kind] for kind, names in now.items()}
            if not any(found.values()) or time.monotonic() > end:
                break
            time.sleep(0.02)
        for pid in found["process"]:
            os.kill(int(pid.split()[0]), signal.SIGKILL)
        self.before = {kind: self.before[kind] | names for kind, names in now.items()}
        others = [f"a mount is gone: {m}" for m in self.before["mount"] - now["mount"]]
        if ctypes.CDLL("librt.so.1").mq_unlink(f"/{name}".encode()) == 0:
            others.append("queue")
        return [f"{kind}: {name}" for kind, names in found.items() for name in names] + others


class Host:
    """What the whole machine has lost, in MB of memory and disk, at its worst within the block.

    Args:
        folder: on the disk that counts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.lost = folder, 0

    def __enter__(self) -> Host:
        self.lost, self._before = 0, self._free()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.lost = max(self.lost, self._before - self._free())

    def _free(self) -> int:
        lines = Path("/proc/meminfo").read_text().splitlines()
        memory = next(int(x.split()[1]) >> 10 for x in lines if x.startswith("MemAvailable"))
        disk = os.statvfs(self.folder)
        return memory + (disk.f_bavail * disk.f_frsize >> 20)


def _target(descriptor: str) -> str:
    """What a descriptor of this process leads to; nothing once it is closed, as that of the folder
    which lists them is."""
    with contextlib.suppress(FileNotFoundError):
        return re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{descriptor}"))
    return ""


def descendants() -> list[str]:
    """All processes below this one, as `pid name`."""
    found, parents = [], [str(os.getpid())]
    while parents:
        for task in _entries(f"/proc/{parents.pop()}/task"):
            try:
                children = Path(task, "children").read_text().split()
                parents += children
                found += [f"{c} {Path('/proc', c, 'comm').read_text().strip()}" for c in children]
            except (FileNotFoundError, ProcessLookupError):  # ended meanwhile
                continue
    return found


def reap() -> None:
    """Wait for ended orphans, as init would."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _entries(folder: str) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(folder)]
    except OSError:  # absent, or not readable
        return []


def memory_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20


def faults_of(program: Program, outcome: str, reason: str, seconds: float) -> list[str]:
    """The faults of a verdict."""
    found = []
    if outcome not in ("right", "wrong"):
        found.append(f"{outcome}: {reason}")
    if outcome == "right" and not program.echoes:
        found.append("right, though it does not do what the tests ask")
    if seconds > LIMIT_SECONDS:
        found.append(f"took {seconds:.1f} s")
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz.hostile")
    parser.add_argument("--rung", choices=sandbox.RUNGS[:-1], help="by default the best one here")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="only acts with this text in their names")
    parser.add_argument("--out", type=Path, help="file for programs with faults, as JSON lines")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    rung = args.rung or sandbox.probe()
    if rung == "rlimits" or (why := sandbox.why_not(rung)):
        sys.exit(f"{rung} does not work here: {why}" if rung != "rlimits" else "no sandbox here")
    sandbox.probe = lambda: rung  # type: ignore[assignment]
    mark = f"hostile-{secrets.token_hex(4)}"
    programs = generate(args.seed, args.programs, mark)
    programs = [p for p in programs if not args.only or args.only in p.act]
    rows: defaultdict[str, Row] = defaultdict(Row)
    with tempfile.TemporaryDirectory(prefix="tramontane-hostile-") as name:
        os.chmod(name, 0o711)  # programs may run as a separate user
        tempfile.tempdir = name
        header = "```cpp\n#include <bits/stdc++.h>\n```\n"
        judge(header, PROBLEMS["stdio"], CONFIG)  # compiles it once, outside the measurements
        world = World(mark, Path(name))
        started, memory = time.monotonic(), memory_mb()
        for number, program in enumerate(programs, 1):
            block = f"```{program.tag}\n{program.source}\n```\n"
            most = HOST_MB if program.tag == "python" else HOST_COMPILER_MB
            host, lost = Host(Path(name)), []
            # Once more if the host lost too much: other work on it may be the cause.
            while not lost or (lost[-1] > most and len(lost) < 3):
                begun = time.monotonic()
                with host:
                    outcome, reason, *_ = judge(block, PROBLEMS[program.tests], CONFIG)
                seconds = time.monotonic() - begun
                lost.append(host.lost)
            faults = faults_of(program, outcome, reason, seconds) + world.leftovers(program.name)
            if lost[-1] > most:
                faults.append(f"the host lost {lost[-1]} MB")
            row = rows[program.act]
            row.verdicts[outcome] += 1
            row.seconds.append(seconds)
            row.host_mb.append(lost[-1])
            row.faults += faults
            if faults and args.out:
                with args.out.open("a") as out:
                    out.write(json.dumps([*program, outcome, reason, faults]) + "\n")
            if sys.stderr.isatty() or number % 100 == 0:
                print(f"{number} of {len(programs)}", file=sys.stderr)
        grown = memory_mb() - memory
    if grown > MEMORY_MB:
        rows["(the judge)"].faults.append(f"grew by {grown} MB")
    show(rows)
    total = sum(len(row.faults) for row in rows.values())
    took = time.monotonic() - started
    print(f"{rung}, seed {args.seed}: {len(programs)} programs in {took:.0f} s; "
          f"the judge grew by {grown} MB; {total} faults")  # fmt: skip
    return 1 if total else 0


def show(rows: dict[str, Row]) -> None:
    print(f"{'act':32}{'programs':>9}{'right':>7}{'wrong':>7}{'other':>7}{'mean s':>8}{'max s':>8}"
          f"{'host MB':>9}  faults")  # fmt: skip
    for act, row in sorted(rows.items()):
        n = len(row.seconds)
        right, wrong = row.verdicts["right"], row.verdicts["wrong"]
        mean, longest = sum(row.seconds) / max(n, 1), max(row.seconds, default=0.0)
        print(f"{act:32}{n:9}{right:7}{wrong:7}{n - right - wrong:7}{mean:8.2f}{longest:8.2f}"
              f"{max(row.host_mb, default=0):9}  "
              f"{len(row.faults) or ''}")  # fmt: skip
        for fault, times in Counter(row.faults).most_common(3):
            print(f"    {times} × {fault[:160]}")


if __name__ == "__main__":
    sys.exit(main())
