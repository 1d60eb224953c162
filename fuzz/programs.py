"""Hostile acts and their combination into programs, for `fuzz.hostile`.

An act is the body of a function; it may return, raise, or never end. The words with a `$` are drawn
anew for each program. Everything that an act could leave has `$mark` in its name.
"""

from __future__ import annotations

import random
import textwrap
from string import Template
from typing import NamedTuple

# The right behavior, by the type of the tests.
GOOD = {"stdio": "print(input())", "python_assert": "def echo(n): return n"}
PYTHON = {
    # -- processes
    "fork bomb": "while True: os.fork()",
    "quiet fork bomb": """
        while True:
            try: os.fork()
            except OSError: pass
    """,
    "fork bomb of daemons": """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            try:
                if os.fork() == 0:
                    os.setsid()
                    if os.fork(): os._exit(0)
            except OSError: time.sleep(0.001)
    """,
    "fork storm that hops sessions": """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            try:
                if os.fork() == 0: os.setsid()
                elif os.getpid() % $few == 0: os._exit(0)
            except OSError: pass
    """,
    "chain of forks": """
        for _ in range(100 * $few):  # each parent ends: the process id is never the same for long
            try:
                if os.fork(): os._exit(0)
            except OSError: break
    """,
    "daemon": """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for n in range(1, 65):
                    try: signal.signal(n, signal.SIG_IGN)
                    except (OSError, ValueError): pass
                while True: time.sleep(1)
            os._exit(0)
    """,
    "children of another program": """
        import subprocess, sys
        for _ in range($few):
            subprocess.Popen(["sleep", "$many"], start_new_session=True)
    """,
    "zombies": """
        for _ in range($many):
            try: pid = os.fork()
            except OSError: break
            if pid == 0: os._exit(0)
    """,
    "threads": """
        import threading
        for _ in range($many):
            try: threading.Thread(target=time.sleep, args=($many,), daemon=True).start()
            except RuntimeError: break
    """,
    "threads that stay": """
        import threading
        for _ in range($few): threading.Thread(target=time.sleep, args=($many,)).start()
    """,
    "vfork and exec": """
        for _ in range($few): os.posix_spawn("/bin/sh", ["sh", "-c", "sleep $many &"], {})
    """,
    "child at exit": """
        import atexit
        atexit.register(lambda: os.fork() or (os.setsid(), time.sleep($many)))
    """,
    "exit without end": """
        import atexit
        atexit.register(lambda: time.sleep($many))
    """,
    # -- time
    "spin": "while True: pass",
    "sleep": "time.sleep($many)",
    "slow in C": "pow(3, 10 ** 9)",
    "never reads": "signal.pause()",
    "deaf to signals": """
        for n in range(1, 65):
            try: signal.signal(n, lambda *_: None)
            except (OSError, ValueError): pass
        while True: time.sleep(1)
    """,
    "recursion": "f = lambda: f()\nf()",
    "recursion in C": "import sys\nsys.setrecursionlimit(10 ** 9)\nf = lambda x: repr(x)\n"
    "x = []\nfor _ in range(10 ** 6): x = [x]\nf(x)",
    "regular expression": "import re\nre.match('(a+)+$$', 'a' * 40 + 'b')",
    # -- memory
    "heap": "x = [bytearray(1 << 20) for _ in range(1000 * $few)]",
    "mmap": "import mmap\nx = mmap.mmap(-1, $few << 28)\nfor i in range(0, len(x), 4096): x[i] = 1",
    "shared mmap, many processes": """
        import mmap
        x = mmap.mmap(-1, 100 << 20)
        for _ in range($few):
            if os.fork() == 0:
                y = bytearray(100 << 20)
                time.sleep($many)
    """,
    "shared maps": """
        import mmap
        for _ in range($few + 3):
            if os.fork() == 0:
                x = mmap.mmap(-1, 250 << 20)
                for i in range(0, len(x), 4096): x[i] = 1
                time.sleep($many)
    """,
    "socket buffers": """
        import socket
        for _ in range(5 * $few):
            if os.fork() == 0:
                for a, b in [socket.socketpair() for _ in range(25)]:
                    a.setblocking(False)
                    try:
                        while True: a.send(bytes(1 << 16))
                    except OSError: pass
                time.sleep($many)
        time.sleep($many)
    """,
    "memory file": """
        for _ in range($few):
            f = os.memfd_create("$mark")
            for _ in range(15): os.write(f, bytes(1 << 20))
    """,
    "pipes": """
        held = []
        while True:
            r, w = os.pipe()
            os.set_blocking(w, False)
            while os.write(w, bytes(1 << 16)): held.append((r, w))
    """,
    "allocates and forks": """
        x = bytearray(200 << 20)
        for _ in range($few):
            if os.fork() == 0:
                for i in range(0, len(x), 4096): x[i] = 1
                time.sleep($many)
    """,
    # -- files
    "fills the disk": """
        for i in range(1000):
            with open(f"$mark-{i}", "wb") as f: f.write(bytes(10 << 20))
    """,
    "many files": "for i in range(100_000): open(f'$mark-{i}', 'w').close()",
    "attributes": """
        for i in range(1000 * $few):
            open(f"$mark-{i}", "w").close()
            try: os.setxattr(f"$mark-{i}", "user.x", bytes(60_000))
            except OSError: pass
    """,
    "files without names": """
        held = []
        for i in range(50):
            f = open(f"$mark-{i}", "wb+")
            os.unlink(f"$mark-{i}")
            held.append(f)
            if os.fork() == 0:
                for _ in range(15): f.write(bytes(1 << 20))
                f.flush()
                time.sleep($many)
        time.sleep($many)
    """,
    "files that never had names": """
        held = [os.open(".", os.O_TMPFILE | os.O_RDWR) for _ in range(50)]
        for f in held: os.write(f, bytes(15 << 20))
        time.sleep($many)
    """,
    "files in a socket's queue": """
        import socket
        a, b = socket.socketpair()
        for i in range(50):
            f = os.open(".", os.O_TMPFILE | os.O_RDWR)
            os.write(f, bytes(15 << 20))
            socket.send_fds(a, [b"x"], [f])
            os.close(f)
        time.sleep($many)
    """,
    "many folders": "for i in range(100_000): os.mkdir(f'$mark-{i}')",
    "hides what it holds": """
        with open("/bin/sleep", "rb") as f: code = f.read()
        f = os.open("$mark", os.O_CREAT | os.O_WRONLY, 0o111)
        os.write(f, code)
        os.close(f)
        for i in range($few):
            if os.fork() == 0: os.execv("./$mark", ["sleep", "$many"])
        time.sleep($many)
    """,
    "deep folders": """
        for _ in range(20 * $many):
            os.mkdir("$mark")
            os.chdir("$mark")
    """,
    "closed folders": """
        os.makedirs("$mark/a/b/c")
        open("$mark/a/b/c/file", "w").close()
        for name in ("$mark/a/b/c", "$mark/a/b", "$mark/a", "$mark"): os.chmod(name, 0)
        os.chmod(".", 0)
    """,
    "odd names": """
        for name in ("\\n$mark", "-rf", "* $mark", "\\udcff$mark", "a" * 255, "..."):
            open(name.encode("utf-8", "surrogateescape"), "w").close()
    """,
    "links": """
        for n, target in enumerate(("/etc/passwd", "/proc/1/mem", "/", "..", "/dev/zero")):
            os.symlink(target, f"$mark-{n}")
        os.symlink("$mark-loop", "$mark-loop")
        os.link("/program/main.py", "$mark-hard")
    """,
    "special files": """
        os.mkfifo("$mark-fifo")
        import socket
        socket.socket(socket.AF_UNIX).bind("$mark-socket")
        os.mknod("$mark-device", 0o60600, os.makedev(254, 0))
    """,
    "removes what it can": """
        import shutil
        for path in ("/program", "/inside", "/tmp", "/dev", "/proc", os.path.expanduser("~"), "/"):
            shutil.rmtree(path, ignore_errors=True)
    """,
    "sparse and locked": """
        import fcntl
        f = open("$mark", "wb")
        os.ftruncate(f.fileno(), 15 << 20)
        fcntl.flock(f, fcntl.LOCK_EX)
        os.unlink("$mark")
        time.sleep($many)
    """,
    "writes everywhere": """
        for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/root", "/home", "/", "/dev",
                       "/program", "/inside", "/headers", "/var/cache", "/etc", "/usr/lib"):
            try: open(f"{folder}/$mark", "w").write("x")
            except OSError: pass
    """,
    # -- output
    "floods stdout": "while True: os.write(1, b'7' * 65536)",
    "floods stderr": "while True: os.write(2, b'error: ' * 9362)",
    "prints and prints": "while True: print('7' * $many)",
    "odd output": "os.write(1, bytes(range(256)) * $many)",
    "closes all": "os.closerange(0, 1 << 16)",
    "writes to all descriptors": """
        for n in range(64):
            try: os.write(n, b"\\0" * 12 + b"7\\n")
            except OSError: pass
    """,
    "the runner's descriptors": """
        for pid in (1, os.getppid()):
            for n in range(10): open(f"/proc/{pid}/fd/{n}", "wb").write(b"\\0" * 12)
    """,
    "swaps its input": "os.ftruncate(0, 0)\nos.lseek(0, 0, 0)",
    # -- signals and other processes
    "kills itself": "os.kill(os.getpid(), $signal)",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "kills its parent": "os.kill(os.getppid(), $signal)",
    "kills everyone": "os.kill(-1, $signal)",
    "kills its group": "os.killpg(0, $signal)",
    "stops its parent": "os.kill(os.getppid(), signal.SIGSTOP)",
    "traces its parent": """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        for request in (16, 0x4206, 0, 17): libc.ptrace(request, os.getppid(), 0, 0)
        if libc.ptrace(16, os.getppid(), 0, 0): raise OSError(ctypes.get_errno(), "ptrace")
    """,
    "reads processes": """
        for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
            for name in ("environ", "cmdline", "maps", "mem", "stack", "cwd/x", "root/etc/shadow"):
                try: open(f"/proc/{pid}/{name}", "rb").read(4096)
                except (OSError, ValueError): pass
    """,
    "its own name": """
        import ctypes
        ctypes.CDLL(None).prctl(15, b"kworker/0:0", 0, 0, 0)
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans come to it, not to the runner
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # nor does it die with its parent
        if os.fork() == 0:
            os.setsid()
            time.sleep($many)
    """,
    "exec": 'os.execv("/bin/sh", ["sh", "-c", "sleep $many & exec sleep $many"])',
    "exec, setuid": 'os.execv("/bin/su", ["su", "-c", "id"])',
    # -- the kernel's other objects
    "network": """
        import socket
        for host in ("127.0.0.1", "::1", "169.254.169.254", "8.8.8.8"):
            try: socket.create_connection((host, $port), 0.1)
            except OSError: pass
        s = socket.create_server(("", $port))
        if os.fork() == 0: time.sleep($many)
    """,
    "abstract socket": """
        import socket
        s = socket.socket(socket.AF_UNIX)
        s.bind("\\0$mark")
        s.listen()
        if os.fork() == 0: os.setsid(); time.sleep($many)
    """,
    "System V": """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        made = [libc.shmget($key, 1 << 20, 0o1666), libc.semget($key, 4, 0o1666),
                libc.msgget($key, 0o1666)]
        assert min(made) >= 0, os.strerror(ctypes.get_errno())
    """,
    "POSIX queue": """
        import ctypes
        libc = ctypes.CDLL("librt.so.1", use_errno=True)
        assert libc.mq_open(b"/$mark", 0o102, 0o666, None) >= 0, os.strerror(ctypes.get_errno())
    """,
    "shared memory": """
        from multiprocessing import shared_memory
        shared_memory.SharedMemory("$mark", True, 1 << 20)
    """,
    "new namespaces": """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        for flags in (0x10000000, 0x20000, 0x10020000, 0x40000000, 0x7E020000):
            if libc.unshare(flags) == 0: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)
        raise OSError(ctypes.get_errno(), "unshare")
    """,
    "mounts": """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        libc.umount2(b"/tmp", 2)
        if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None): raise OSError(ctypes.get_errno(), "no")
    """,
    "watches and rings": """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        for _ in range(1000): libc.inotify_init1(0), libc.epoll_create1(0), libc.eventfd(1, 0)
        for number in (425, 321, 323, 298, 248, 250, 304): libc.syscall(number, 0, 0, 0, 0, 0)
    """,
    "priorities": "os.nice(-20)",
    "terminal": """
        import pty
        os.setsid()
        for _ in range($few): pty.openpty()
    """,
    "timers": """
        signal.signal(signal.SIGALRM, lambda *_: os.fork())
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        time.sleep($many)
    """,
    # -- the judge
    "prints what the runner would": """
        import struct
        os.write(1, struct.pack("!iII", 0, 2, 0) + b"7\\n")
        os.write(2, struct.pack("!iII", 0, 2, 0) + b"7\\n")
    """,
    "looks for the tests": """
        import gc, sys
        frame = sys._getframe()
        while frame: frame, kept = frame.f_back, frame.f_locals
        found = [o for o in gc.get_objects() if isinstance(o, dict) and "output" in o]
        for name in ("expected", "tests.json", "output", "../output"): open(name)
    """,
    "supplies the tests' names": """
        always = lambda *args, **named: True
        globals().update(dict.fromkeys("all any sorted isclose zip map".split(), always))
        globals().update(Counter=lambda x: 1, echo=always)
    """,
    "ends the tests' loops": """
        class Stop(StopIteration): pass
        def stops(x): raise Stop(x)
        globals().update(echo=stops)
    """,
    "repairs the runner": """
        import sys
        for module in list(sys.modules.values()):
            for name in ("exit_code", "shut_down", "send_record", "run_python"):
                if hasattr(module, name): setattr(module, name, lambda *_: 0)
        sys.stdout.write = lambda text: None
        os._exit = lambda code: None
    """,
    "is not Python": "\0 <<<<<<< ) \u2028 if",
}
CPP = {
    "C++ fork bomb": "while (true) fork();",
    "C++ daemon": "if (!fork()) { setsid(); if (!fork()) for (;;) pause(); _exit(0); }",
    "C++ clone": "char* s = new char[65536]; for (int i = 0; i < $many; i++)\n"
    "clone([](void*) -> int { for (;;) pause(); }, s + 65536, CLONE_VM | CLONE_FS | $few, 0);",
    "C++ threads": "std::vector<std::thread> t; for (int i = 0; i < $many; i++)\n"
    "t.emplace_back([] { for (;;) pause(); });",
    "C++ heap": "std::vector<std::vector<char>> v; while (true) v.emplace_back(1 << 24, 'x');",
    "C++ stack": "std::function<int(int)> f = [&](int n) -> int { volatile char c[4096];\n"
    "c[0] = n; return f(n + 1) + c[0]; }; return f(0);",
    "C++ flood": "while (true) puts(std::string(65536, '7').c_str());",
    "C++ trap": 'signal(SIGSEGV, [](int) { fork(); }); *(volatile int*)0 = $few;',
    "C++ closes all": "for (int i = 0; i < 1024; i++) close(i); for (;;) pause();",
    "C++ kills": "kill(getppid(), $signal); kill(-1, $signal);",
    "C++ before main": "", "C++ at exit": "atexit([] { if (!fork()) for (;;) pause(); });",
    "C++ rewrites itself": 'std::ofstream("mine") << "#!/bin/sh\\ncat\\n";\n'
    'for (auto p : {"/proc/self/exe", "/tmp/main", "../main"}) {\n'
    'rename("mine", p); unlink(p); std::ofstream(p) << "#!/bin/sh\\ncat\\n"; chmod(p, 0777); }',
    "C++ exec": 'execl("/bin/sh", "sh", "-c", "sleep $many & sleep $many & wait", nullptr);',
}  # fmt: skip
_CPP_BEFORE_MAIN = "struct S { S() { fork(); setsid(); _exit(0); } } s;"
COMPILER = {
    "template bomb": "template <int N, class T> struct B { B<N - 1, B<N, T>> l;\n"
    "B<N - 1, T*> r; };\ntemplate <class T> struct B<0, T> {};\nint main() { B<25, int> b; }",
    "macro bomb": "#define A(x) x x x x x x x x x x\n#define B(x) A(A(A(A(A(A(A(A(x))))))))\n"
    "int main() { return B(1 +) 1; }",
    "includes a device": '#include "/dev/zero"\nint main() {}',
    "includes a process": '#include "/proc/self/environ"\n#include "/proc/1/maps"\nint main() {}',
    "includes itself": "#include __FILE__\nint main() {}",
    "includes a folder": '#include "/etc/shadow"\n#include "/"\nint main() {}',
    "huge array": "int big[1 << 28] = {1}; int main() { return big[$many]; }",
    "embeds a device": 'asm(".incbin \\"/dev/urandom\\""); int main() {}',
    "assembler": 'asm(".rept 100000000\\n.quad 1\\n.endr"); int main() {}',
    "constant evaluation": "constexpr unsigned long f(unsigned long n) { unsigned long s = 0;\n"
    "for (unsigned long i = 0; i < n; i++) s += i * i; return s; }\n"
    "int main() { constexpr auto x = f(100000000); return x; }",
    "error flood": "int main() { " + "x" * 10 + "; " + "undefined_$few(); " * 3000 + "}",
    "brackets": "int main() { return " + "(" * 20000 + "1" + ")" * 20000 + "; }",
}
_HEAD = "import os, signal, time\n"
_CPP_HEAD = "".join(
    f"#include <{header}>\n"
    for header in ("bits/stdc++.h", "sched.h", "signal.h", "sys/stat.h", "unistd.h")
)


class Program(NamedTuple):
    """A program, listed under one of its acts.

    `tests` is the type of its tests; `name` is in the names of everything that it may leave;
    `echoes` is true if it does, after the act, what the tests ask.
    """

    tests: str
    name: str
    act: str
    tag: str
    source: str
    echoes: bool


def generate(seed: int, count: int, mark: str) -> list[Program]:
    """`count` programs: every act in turn, in combinations drawn by the seed."""
    draw = random.Random(seed)
    acts = [*PYTHON] * 4 + [*CPP] * 2 + [*COMPILER]
    found = []
    while len(found) < count:
        draw.shuffle(acts)
        for act in acts[: count - len(found)]:
            words: dict[str, object] = {
                "few": draw.randint(1, 9), "many": draw.randint(10, 200), "port": 47_000,
                "signal": draw.choice([1, 2, 6, 9, 11, 14, 15, 19]), "key": KEY,
                "mark": f"{mark}-{len(found)}",
            }  # fmt: skip
            make = _python if act in PYTHON else _cpp
            tests = draw.choice(["stdio", "stdio", "python_assert"] if act in PYTHON else ["stdio"])
            tag, source, good = make(act, draw, GOOD[tests])
            source = Template(source).substitute(words)
            found.append(Program(tests, str(words["mark"]), act, tag, source, good))
    return found


KEY = 0x7A3F0001  # of System V objects


def _python(act: str, draw: random.Random, good: str) -> tuple[str, str, bool]:
    """The act alone, shielded from its own errors, in a child, or together with another act."""
    lines = [_HEAD]
    shape = draw.choice(["plain", "plain", "shielded", "child", "together"])
    lines.append(_function("act", PYTHON[act]))
    if shape == "plain":
        lines.append("act()")
    elif shape == "shielded":
        lines.append("try: act()\nexcept BaseException: pass")
    elif shape == "child":
        lines.append("if os.fork() == 0: act(); os._exit(0)")
    else:
        lines.append(_function("other", PYTHON[draw.choice([*PYTHON])]))
        lines.append("if os.fork() == 0:\n    os.setsid()\n    other()\n    os._exit(0)\nact()")
    echoes = draw.random() < 0.6
    return "python", "\n".join([*lines, good * echoes]), echoes


def _function(name: str, body: str) -> str:
    return f"def {name}():\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n"


def _cpp(act: str, draw: random.Random, good: str) -> tuple[str, str, bool]:
    if act in COMPILER:
        return "cpp", COMPILER[act], False
    echoes = draw.random() < 0.6 and act != "C++ before main"
    before = _CPP_BEFORE_MAIN if act == "C++ before main" else ""
    echo = "int n; std::cin >> n; std::cout << n << std::endl;" if echoes else ""
    return "cpp", f"{_CPP_HEAD}{before}\nint main() {{\n{CPP[act]}\n{echo}\n}}", echoes
