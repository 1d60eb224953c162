"""`make hostile` finds what a program leaves, and lists its programs under their acts."""

import ast
import ctypes
import secrets
import subprocess
import sys

import pytest

from fuzz.hostile import SUBREAPER, World, faults_of
from fuzz.programs import COMPILER, CPP, GOOD, PYTHON, generate

LEAVES = """
import os, socket, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
s = socket.socket(socket.AF_UNIX)
s.bind("\\0" + sys.argv[1])
s.listen()
open(sys.argv[2], "w").close()
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_leftovers_are_found(tmp_path):
    mark = f"hostile-{secrets.token_hex(4)}"
    world = World(mark, tmp_path)
    try:
        assert world.leftovers("none") == []
        daemon = subprocess.Popen(
            [sys.executable, "-c", LEAVES, mark, str(tmp_path / "file")], stdout=subprocess.PIPE
        )
        assert daemon.stdout.readline() == b"up\n"
        daemon.wait()
        found = world.leftovers("none", patience=0.1)
        kinds = sorted(line.partition(":")[0] for line in found)
        assert kinds == [
            "descriptor",
            "file",
            "process",
            "socket",
        ]  # the descriptor is this end of the pipe
        daemon.stdout.close()
        assert world.leftovers("none") == []  # killed, or known by now
    finally:
        ctypes.CDLL(None).prctl(SUBREAPER, 0, 0, 0, 0)


def test_programs_are_drawn_by_the_seed():
    programs = generate(0, 500, "mark")
    assert programs == generate(0, 500, "mark") != generate(1, 500, "mark")
    assert {p.act for p in programs} == {*PYTHON, *CPP, *COMPILER}
    for program in programs:
        if program.tag == "python":
            assert program.echoes == program.source.endswith(GOOD[program.tests])
            if "is not Python" not in program.act and "\0" not in program.source:
                ast.parse(program.source)


def test_false_verdicts_are_faults():
    echo, other = (next(p for p in generate(0, 500, "m") if p.echoes is e) for e in (True, False))
    assert faults_of(echo, "right", "", 1.0) == faults_of(other, "wrong", "late", 1.0) == []
    assert faults_of(other, "right", "", 1.0)
    assert faults_of(echo, "unscorable", "", 1.0)
    assert faults_of(echo, "wrong", "", 1000.0)
