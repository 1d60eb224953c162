"""Function tests: hostile programs on every rung that works here, and what travels between."""

import gzip
import json
import math
import shutil
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tramontane.config import VerifierConfig
from tramontane.types import Problem
from tramontane.verifier import cpp, sandbox
from tramontane.verifier.code import judge
from tramontane.verifier.inside import remote, wire

DATA = Path(__file__).parents[2].parent / "shared/data"
CONFIG = VerifierConfig(code_timeout_s=1.5, allow_unsandboxed=True)
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
needs_gpp = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SECRET = "xyzzy" + "-41-" + "plugh"


@pytest.fixture(params=["bubblewrap", "namespaces", "rlimits"])
def rung(request, monkeypatch):
    if request.param != "rlimits" and (reason := sandbox.why_not(request.param)):
        pytest.skip(f"{request.param} does not work here: {reason}")
    monkeypatch.setattr(sandbox, "probe", lambda: request.param)
    return request.param


def run(program, code, statement="", entry_point="f", tag="python", config=CONFIG):
    tests = {"type": f"{tag}_assert", "code": code, "entry_point": entry_point}
    problem = Problem("p", "code", statement, tests=tests)
    return judge(f"```{tag}\n{program}\n```", problem, config)[:2]


# ------------------------------------------------------------------------------ what travels

Point = namedtuple("Point", "x y")
Color = IntEnum("Color", "RED GREEN")


def no_reference(*_):
    raise AssertionError("a plain value refers to nothing")


def travelled(value):
    return wire.decode(wire.encode(value, no_reference), no_reference)


def same(a, b):
    """Equal, of one type throughout, in one order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, float):
        return repr(a) == repr(b)
    return repr(a) == repr(b) if isinstance(a, (complex, Decimal)) else a == b


text = st.text(st.characters(), max_size=20)  # lone surrogates too
hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    text,
    st.binary(max_size=20),
    st.complex_numbers(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.builds(range, st.integers(), st.integers(), st.integers(1)),
)
plain = st.recursive(
    st.one_of(hashable, st.builds(bytearray, st.binary(max_size=9)), st.just(int)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.lists(st.integers(), min_size=4, max_size=9),
        st.lists(st.floats(), min_size=4, max_size=9).map(tuple),
        st.tuples(inner, inner),
        st.builds(deque, st.lists(inner, max_size=3)),
        st.dictionaries(hashable.filter(lambda x: x == x), inner, max_size=4),
        st.frozensets(st.integers(), max_size=4),
        st.sets(text, max_size=4),
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_arrive_as_they_were(value):
    assert same(travelled(value), value)


@given(st.binary(max_size=200))
def test_other_bytes_are_garbage_or_plain(data):
    try:
        value = wire.decode(data, lambda *_: None)
    except wire.Garbage:
        return
    wire.encode(value, no_reference)  # only what could have been sent


@given(plain, st.data())
def test_damaged_values_are_garbage_or_plain(value, draw):
    data = bytearray(wire.encode(value, no_reference))
    for _ in range(3):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    test_other_bytes_are_garbage_or_plain.hypothesis.inner_test(bytes(data))


def test_subclasses_travel_as_what_they_extend():
    class Liar(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    assert same(travelled(Point(1, "a")), (1, "a"))
    assert same(travelled([Counter("aab"), OrderedDict(a=1)]), [{"a": 2, "b": 1}, {"a": 1}])
    assert same(travelled(defaultdict(list, {1: [2]})), {1: [2]})
    assert same(travelled([Liar(5), Color.GREEN, True]), [5, 2, True])


def test_depth_and_cycles_are_refused():
    cycle = []
    cycle.append(cycle)
    for value in (cycle, eval("[" * 90 + "]" * 90)):
        if value is cycle:
            with pytest.raises(wire.Garbage, match="nested"):
                wire.encode(value, no_reference)
        else:
            assert travelled(value) == value
    with pytest.raises(wire.Garbage, match="nested"):
        wire.decode(b"l\x01\0\0\0" * 10**6, no_reference)
    with pytest.raises(wire.Garbage, match="short"):
        wire.decode(b"l\xff\xff\xff\xff", no_reference)


def test_arguments_change_in_place():
    row = [1, 2]
    grid = [row, {"a": [3]}, "x"]
    remote.update(grid, [[9, 2, 4], {"b": 1, "a": [3, 5]}])
    assert grid == [[9, 2, 4], {"b": 1, "a": [3, 5]}]
    assert grid[0] is row


# ------------------------------------------------------------------------- honest programs

HONEST = {
    "plain": ("def f(x): return [x, {'a': (x, 1.5)}, {x}]", "assert f(1) == [1, {'a': (1, 1.5)}, {1}]"),
    "in place": ("def f(a): a.sort(); a[0] = [7]", "a = [3, 1]\nassert f(a) is None\nassert a == [[7], 3]"),
    "named": ("def f(a, *, b=2): b.append(a)", "b = []\nf(1, b=b)\nf(a=2, b=b)\nassert b == [1, 2]"),
    "generator": ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]\nassert sum(f(4)) == 6"),
    "iterator in": ("def f(it): return [next(it), *it]", "assert f(iter([1, 2, 3])) == [1, 2, 3]"),
    "callback": ("def f(g, n): return g(n) + g(n + 1)", "assert f(lambda x: 10 * x, 2) == 50"),
    "callback back": ("def f(g): return g", "g = lambda: 1\nassert f(g) is g"),
    "nested callback": ("def f(g, n): return 0 if n == 0 else g(n)", "assert f(lambda n: 1 + f(h, n - 1), 1) == 1\ndef h(n): pass"),
    "class": (
        "class f:\n    def __init__(self, n): self.n = n\n    def add(self, k): self.n += k; return self\n"
        "    def __len__(self): return self.n\n    def __str__(self): return f'<{self.n}>'",
        "x = f(2)\nassert x.add(3) is x and x.n == 5 and len(x) == 5 and str(x) == '<5>' and x != f(5)\n"
        "x.n = 0\nassert not x and isinstance(x, f) and not isinstance(3, f)",
    ),
    "raises": (
        "class Bad(ValueError): pass\ndef f(x): raise Bad('no ' + x)",
        "try: f('x')\nexcept ValueError as e: assert str(e) == 'no x'\nelse: assert False\n"
        "try: f('y')\nexcept Bad: pass",
    ),
    "key error": ("def f(): return {}['k']", "try: f()\nexcept KeyError as e: assert e.args == ('k',)"),
    "constant": ("LIMIT = 7\ndef f(): return LIMIT", "assert f() == LIMIT"),
    "program's import": ("import math\ndef f(): return math.pi", "assert math.isclose(f(), 3.14159265, rel_tol=1e-6)"),
    "a main block": ("def f(): return 1\nif __name__ == '__main__': print(f(int(input())))", "assert f() == 1"),
    "prints": ("print('loading')\ndef f(): print('x' * 999); return 1", "assert f() == 1"),
    "dataclass": ("from dataclasses import dataclass\n@dataclass\nclass f:\n    x: int", "assert f(3).x == 3"),
    "types": ("def f(x): return type(x)", "assert f(2) is int and f('') == str"),
    "tests' names": ("def helper(): return 1\ndef f(): return 2", "def helper(): return 3\nassert helper() == 3 and f() == 2"),
    "exit in the tests": ("def f(): return 1", "import sys\nassert f() == 1\nsys.exit(0)"),
    "large": ("def f(n): return list(range(n))", "assert f(10**6)[-1] == 10**6 - 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_honest(name):
    assert run(*HONEST[name]) == ("right", "")


def test_a_function_named_like_a_builtin(rung):
    assert (
        run("def sum(a, b): return a * b", "assert sum(2, 3) == 6", entry_point="sum")[0] == "right"
    )
    # The program decides over a built-in only where the problem asks for it.
    cheat = "def f(): return 5\ndef abs(x): return 0\ndef isclose(*a): return True\nmath = 1"
    assert run(cheat, "assert abs(f()) < 1")[0] == "wrong"
    code = "assert math.isclose(f(), 3)"
    liar = "class math:\n    isclose = lambda *a: True\ndef f(): return 5"
    assert run(liar, code) == ("wrong", "AssertionError (line 1 of the tests)")
    assert run("def math(): return 4", "assert math() == 4", entry_point="math")[0] == "right"


def test_helpers_come_from_the_statement():
    statement = (
        "Complete it; don't use loops.\n\nimport math\n\n\ndef poly(xs, x):\n    '''At x.'''\n"
        "    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\n\ndef f(xs):\n    '''A zero.'''\n"
    )
    code = "assert abs(poly([2, 1], f([2, 1]))) < 1e-9"
    assert run("def f(xs): return -xs[0] / xs[1]", code, statement) == ("right", "")
    cheat = "def poly(xs, x): return 0\ndef f(xs): return 0"
    assert run(cheat, code, statement) == ("wrong", "AssertionError (line 1 of the tests)")


def test_verdicts_say_why(rung):
    code = "\nassert f(1) == 2\nassert f(2) == 3"
    assert run("def f(x): return 2", code) == ("wrong", "AssertionError (line 3 of the tests)")
    assert run("def f(x): return y", code) == (
        "wrong",
        "NameError: name 'y' is not defined (line 2 of the tests)",
    )
    assert "name 'f' is not defined" in run("def g(x): pass", code)[1]
    assert run("def f(:", code)[1].startswith("exit code 1: SyntaxError")
    assert run("import sys; sys.exit(3)", code) == ("wrong", "exit code 3")
    assert run("def f(x):\n    while True: pass", code) == ("wrong", "timed out after 1.5 s")
    assert run("def f(x): return bytearray(10**9)", code) == ("wrong", "needed more than 300 MB")
    assert run("def f(x): return 2", "assert f(1) ==") == (
        "unscorable",
        "the tests do not compile: invalid syntax (<tests>, line 1)",
    )
    assert run("def f(x): return 2", "class A: pass\nf(A())") == (
        "unscorable",
        "the tests pass a A, which is no plain value",
    )


# ------------------------------------------------------------------------ hostile programs

_ALIKE = "def __eq__(self, o): return True\n    def __ne__(self, o): return False\n    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__\n    def __hash__(self): return 3"
_ORDER = f"class A({{}}):\n    {_ALIKE}\ndef f(x): return A({{}})"
HOSTILE = {
    "equal object": _ORDER.format("", ""),
    "equal int": _ORDER.format("int", "5"),
    "equal float": _ORDER.format("float", "5"),
    "equal str": _ORDER.format("str", "'5'"),
    "equal list": _ORDER.format("list", "[5]"),
    "equal dict": _ORDER.format("dict", "{5: 5}"),
    "equal class": "class M(type):\n    " + _ALIKE + "\nclass A(metaclass=M): pass\ndef f(x): return A",
    "builtins": "import builtins\nfor n in 'abs all any len sorted isinstance print type'.split(): setattr(builtins, n, lambda *a: True)\ndef f(x): return 5",
    "standard library": "import math, sys\nmath.isclose = lambda *a, **k: True\nsys.modules['math'] = sys.modules['wire'] = None\ndef f(x): return 5",
    "own judge": "import sys\nfor n, m in list(sys.modules.items()):\n    if n.startswith('inside'):\n        for k in list(vars(m)):\n            if not k.startswith('__'): setattr(m, k, lambda *a: 0)\ndef f(x): return 5",
    "exits in the call": "import sys\ndef f(x): sys.exit(0)",
    "exits hard in the call": "import os\ndef f(x): os._exit(0)",
    "exits while loading": "raise SystemExit(0)",
    "exits hard while loading": "import os\nos._exit(0)",
    "at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise KeyboardInterrupt",
    "kills itself": "import os\ndef f(x): os.kill(os.getpid(), 9)",
    "kills the rest": "import os\ndef f(x):\n    try: os.kill(-1, 9)\n    except OSError: pass\n    try: os.kill(os.getppid(), 9)\n    except OSError: pass\n    return 5",
    "closes the channel": "import os\nos.close(3)\nimport time; time.sleep(9)",
    "forged frames": "import os\nos.write(3, b'\\x01\\0\\0\\0N' * 9)\ndef f(x): return 5",
    "noise": "import os\nos.write(3, os.urandom(99999))\nimport time; time.sleep(9)",
    "endless noise": "import os\nwhile True: os.write(3, bytes(99999))",
    "huge frame": "import os\nos.write(3, b'\\xff' * 9)\ndef f(x): return 5",
    "huge reply": "def f(x): return 'x' * (17 * 2**20)",
    "deep reply": "def f(x):\n    y = x\n    for _ in range(10**5): y = [y]\n    return y",
    "own reply": "def f(x):\n    y = [x]\n    y.append(y)\n    return y",
    "endless reply": "def f(x):\n    while True: yield x",
    "calls back": "import os\nfrom inside import wire\ndef f(x):\n    d = wire.encode(('call', 0, [], {}), None)\n    os.write(3, len(d).to_bytes(4, 'little') + d)\n    return 5",
    "says garbage": "import os\nfrom inside import wire\ndef f(x):\n    for m in (('value',), ('error', [[]], [[]]), ('error', ['SystemExit', 'GeneratorExit'], [0])):\n        d = wire.encode(m, None)\n        os.write(3, len(d).to_bytes(4, 'little') + d)\n    return 5",
    "a child holds the channel": "import os, time\nif os.fork(): os._exit(0)\ntime.sleep(9)",
    "assertion": "def f(x): raise AssertionError('right')",
    "system exit by name": "class SystemExit(Exception): pass\ndef f(x): raise SystemExit(0)",
    "exits as the tests would": "import os\ndef f(x): os._exit(97)",
    "says that the tests are broken": "import os\ndef f(x): os._exit(98)",
    "replaces itself": "import os\ndef f(x): os.execv('/bin/true', ['true'])",
    "frames": "import sys\ndef f(x):\n    g = sys._getframe()\n    while g:\n        for v in list(g.f_locals.values()) + list(g.f_globals.values()):\n            if isinstance(v, str) and 'assert' in v: os._exit(0)\n        g = g.f_back\n    return 5",
    "deletes itself": "def f(x):\n    global f\n    del f\n    return 5",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name, rung):
    code = (
        "import math\nx = f(3)\nassert x == 4 or math.isclose(x, 4)\n"
        "assert x in (4,) and len(sorted([x, 5])) == 2\n"
    )
    if name == "endless reply":
        code = "assert list(f(3)) == [4]"
    if rung == "rlimits" and name == "kills the rest":
        pytest.skip("would take the machine's processes along")
    outcome, reason = run(HOSTILE[name], code)
    assert outcome == "wrong", reason
    assert reason


def test_comparisons_are_not_asked_of_the_program(rung):
    for code in (
        "assert f(3) == 4",
        "assert f(3) < 4",
        "assert f(3) in [4]",
        "assert not f(3) != 4",
    ):
        assert run(HOSTILE["equal object"], code)[0] == "wrong", code
    assert run(HOSTILE["equal list"], "assert f(3) == [5]") == ("right", "")  # what it extends


def test_the_tests_are_nowhere_to_be_found(rung):
    """The program reads all of its memory, of its files, and of other processes where it can."""
    if rung == "rlimits":
        pytest.skip("rlimits alone do not promise this")
    search = """
import gc, os, sys
def f(x):
    needle = ("-41-" "plugh").encode()[::-1]
    def has(data): return needle[::-1] in data
    found = []
    for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
        try:
            maps = open(f"/proc/{pid}/maps").read().splitlines()
            memory = open(f"/proc/{pid}/mem", "rb", 0)
        except OSError:
            continue
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            try:
                memory.seek(start)
                data = memory.read(end - start)
            except (OSError, ValueError, OverflowError):
                continue
            # Its own source says the two halves as one constant, once.
            if b"xyzzy" + needle[::-1] in data: found.append(line)
    for top in ("/program", "/tmp", "/inside", "/dev/shm", "/proc/self/fd", "/proc/1"):
        for folder, _, names in os.walk(top):
            for name in names:
                path = os.path.join(folder, name)
                if os.path.isfile(path) and has(open(path, "rb").read()) and name != "main.py":
                    found.append(path)
    if any(isinstance(o, str) and o.startswith("xyz") and len(o) > 9 for o in gc.get_objects()):
        found.append("gc")
    return found or len(maps)
""".replace("open(path, \"rb\").read())", "read(path))").replace("import gc", "def read(path):\n    try: return open(path, 'rb').read(1 << 24)\n    except OSError: return b''\nimport gc", 1)  # fmt: skip
    code = f"expected = {SECRET!r}\nx = f(3)\nassert type(x) is int and x > 5, x\nassert expected"
    assert run(search, code) == ("right", "")
    # The search finds what there is to find.
    assert run(f"SEEN = {SECRET!r}\n" + search, code) == (
        "wrong",
        "AssertionError (line 3 of the tests)",
    )


# ------------------------------------------------------------------------------------- C++

CPP_CODE = "#undef NDEBUG\n#include <assert.h>\nint main() {\n    assert(f(3) == 4);\n}\n"
HOSTILE_CPP = {
    "operator": "struct A {}; bool operator==(A, int) { return true; }\nA f(int) { return {}; }",
    "conversion": "struct A { template <class T> operator T() const { return T(4); } };\nA f(int) { return {}; }",
    "own assert": 'extern "C" void __assert_fail(const char*, const char*, unsigned, const char*) noexcept { _exit(0); }\n#define assert(x)\nint f(int) { return 5; }',
    "macros": "#define return return 0 *\n#define if while\n#define tests\n#define throw\nint f(int) { return 5; }",
    "swallows main": "#undef main\n#define main other\nint main() { return 0; }\nint f(int) { return 5; }",
    "exits before main": "struct A { A() { exit(0); } } a;\nint f(int) { return 5; }",
    "exits in the call": "int f(int) { _exit(0); }",
    "at exit": "void g() { _exit(0); }\nint f(int) { atexit(g); abort(); }",
    "signals": "#include <signal.h>\nvoid g(int) { _exit(0); }\nint f(int) { signal(SIGABRT, g); abort(); }",
    "forges": "int f(int) { char x[99] = {}; ::send(3, x, 99, 0); return 5; }",
    "specialises": "namespace tramontane { template <> void put<int>(bytes& out, const int&) { out += std::string(1 << 20, 'x'); } }\nint f(int) { return 5; }",
    "closes": "int f(int) { close(3); while (true); }",
    "throws": "int f(int) { throw 4; }",
    "forges a signature": 'void g() asm("_ZN10tramontane8exportedILi0E4evilJiEEEbPFT0_DpT1_E");\nvoid g() {}\nint f(int) { g(); return 5; }',
}  # fmt: skip


@needs_gpp
@pytest.mark.parametrize("name", HOSTILE_CPP)
def test_hostile_cpp(name):
    outcome, reason = run(HOSTILE_CPP[name], CPP_CODE, tag="cpp")
    assert outcome == "wrong", reason
    assert reason


@needs_gpp
def test_cpp(rung):
    program = (
        "#include <vector>\nusing namespace std;\nstatic int calls = 0;\n"
        "/* f(x) { */ int f(int x) { ++calls; return x + 1; }\n"
        "int main() { return f(2); }\n"
    )
    assert run(program, CPP_CODE, tag="cpp") == ("right", "")
    wrong = run("int f(int x) { return x; }", CPP_CODE, tag="cpp")
    assert wrong == ("wrong", "assertion failed (line 4 of the tests)")
    loop = run("int f(int x) { while (true); }", CPP_CODE, tag="cpp")
    assert loop == ("wrong", "timed out after 1.5 s")


@needs_gpp
def test_cpp_values():
    program = """
#include <bits/stdc++.h>
using namespace std;
map<string, vector<bool>> many(const vector<pair<int, double>>& a, string_view b, const char* c) {
    map<string, vector<bool>> out;
    for (auto [x, y] : a) out[string(b) + c + to_string(x)].push_back(y > 0);
    return out;
}
void change(vector<vector<int>>& grid, string& s, long long& n) { grid[0].push_back(7); s += "!"; ++n; }
template <class T> T twice(T x) { return x + x; }
int over(int x) { return 1; }
int over(double x) { return 2; }
tuple<int, array<char, 2>, optional<unordered_set<int>>> some() { return {1, {'a', 'b'}, {{3}}}; }
const string& named() { static string s = "name"; return s; }
deque<set<int, greater<int>>> sets(list<complex<double>> l) { return {{1, 2}, {(int)l.back().imag()}}; }
int fails(int x) { vector<int> v; return v.at(x); }
"""
    statement = "double twice(double x);\n\nint over(double x) {\n"
    code = """#include <assert.h>
int main() {
    auto m = many({{1, 0.5}, {1, -1}, {2, 3}}, "a", "b");
    assert((m == map<string, vector<bool>>{{"ab1", {true, false}}, {"ab2", {true}}}));
    vector<vector<int>> g = {{1}, {}};
    string s = "x";
    long long n = 5;
    change(g, s, n);
    assert(g[0].size() == 2 && g[0][1] == 7 && s == "x!" && n == 6);
    assert(over(1) == 2);
    assert(get<1>(some())[1] == 'b' && get<2>(some())->count(3));
    assert(named().size() == 4);
    assert(*sets({{1, 2}, {3, 9}})[0].begin() == 2 && sets({{3, 9}}).back().count(9));
    try { fails(3); assert(false); } catch (const out_of_range&) {}
}
"""
    assert run(program, code, statement, tag="cpp") == ("right", "")


@needs_gpp
def test_cpp_reasons():
    pointer = "int f(int* a) { return 4; }"
    asked, not_asked = "Write it.\n\nint f(int* a) {\n", "Write it.\n\nint f(int a) {\n"
    reason = "f: takes or gives a int*, which is no plain value"
    code = CPP_CODE.replace("f(3)", "f(0)")
    assert run(pointer, code, asked, tag="cpp") == ("unscorable", reason)
    assert run(pointer, code, not_asked, tag="cpp") == ("wrong", reason)
    assert run("int g(int x) { return 4; }", CPP_CODE, tag="cpp") == (
        "wrong",
        "defines none of the functions that the tests call",
    )
    assert run("int f(int x) { return 4 }", CPP_CODE, tag="cpp")[1].startswith("does not compile: ")
    assert run("int f(string x) { return 4; }", CPP_CODE, tag="cpp")[0] == "wrong"
    assert run("int f(int x) { return 4; }", "void test() {}", tag="cpp")[0] == "unscorable"


@needs_gpp
def test_cpp_helpers_come_from_the_statement():
    statement = (
        "Don't loop.\n\n#include <vector>\nusing namespace std;\n"
        "int twice(int x) {\n    // gives {2x}\n    return 2 * x;\n}\n\nint f(int x) {\n"
    )
    assert list(cpp.helpers(statement)) == ["twice"]
    code = CPP_CODE.replace("f(3) == 4", "twice(f(3)) == 8")
    cheat = "int twice(int x) { return 8; }\nint f(int x) { return 0; }"
    assert run(cheat, code, statement, tag="cpp")[0] == "wrong"
    honest = "int twice(int x) { return 2 * x; }\nint f(int x) { return x + 1; }"
    assert run(honest, code, statement, tag="cpp") == ("right", "")


def test_only_types_of_the_standard_library_reach_the_tests():
    def told(arguments):
        line = f"0000 W bool tramontane::exported<0, {arguments}>(int (*)())"
        return cpp.signatures(line, ["f"])["f"]

    string = "std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >"
    assert told(f"{string} const&, char const*, int&") == (string, ["char const*", "int&"])
    for bad in ("evil", "int); int main(", "int*", "std::function<int ()>", 'int"', "char const*"):
        assert isinstance(told(f"{bad}, int"), str), bad


# ---------------------------------------------------------------------------- real problems


def rows(name, step):
    with gzip.open(DATA / name, "rt") as lines:
        return [json.loads(line) for line in lines][::step]


@needs_data
def test_programs_that_return_nothing_or_the_same_are_wrong():
    for row in rows("humaneval_python.jsonl.gz", 8):
        name = row["tests"]["entry_point"]
        for value in ("None", "0", "''", "[]"):
            outcome, _ = run(
                f"def {name}(*args): return {value}", row["tests"]["code"], row["problem"], name
            )
            assert outcome == "wrong", (row["id"], value)


def test_floats_keep_their_bits():
    assert run("def f(x): return x", "import math\nassert math.copysign(1, f(-0.0)) == -1") == (
        "right",
        "",
    )
    assert math.isnan(travelled(math.nan))
    assert isinstance(travelled([Fraction(1, 3), Decimal("0.10")])[0], Fraction)
