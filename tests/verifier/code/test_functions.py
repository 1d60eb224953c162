"""Function tests: honest and hostile programs, and the values that travel between processes."""

import gzip
import json
import math
import os
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.paths import DATA
from tests.rungs import why_not
from tramontane.config import VerifierConfig
from tramontane.types import Problem
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.functions import names_of
from tramontane.verifier.code.grade import judge
from tramontane.verifier.code.idle import plainly_decide, why_idle
from tramontane.verifier.code.inside import tests_side, wire

# Long enough on a loaded machine; hostile programs, which may be late, have little time.
CONFIG = VerifierConfig(code_timeout_s=20.0, allow_unsandboxed=True)
SHORT = VerifierConfig(code_timeout_s=0.8, allow_unsandboxed=True)
ENDLESS = VerifierConfig(code_timeout_s=0.3, allow_unsandboxed=True)
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
SECRET = "xyzzy" + "-41-" + "plugh"


@pytest.fixture(
    params=["bubblewrap", "namespaces", pytest.param("landlock", marks=pytest.mark.slow)]
)
def rung(request, monkeypatch):
    if reason := why_not(request.param):
        pytest.skip(f"{request.param} does not work here: {reason}")
    monkeypatch.setattr(sandbox, "probe", lambda: request.param)
    return request.param


def run(program, code, statement="", entry_point="f", config=CONFIG):
    tests = {"type": "python_assert", "code": code, "entry_point": entry_point}
    problem = Problem("p", "code", statement, tests=tests)
    return judge(f"```python\n{program}\n```", problem, config)[:2]


def programs(file):
    """The programs of a file, by the name above each."""
    sections = (Path(__file__).parent / file).read_text().split("=== ")[1:]
    return dict(section.split("\n", 1) for section in sections)


# ------------------------------------------------------------------------------ what travels

Point = namedtuple("Point", "x y")
Color = IntEnum("Color", "RED GREEN")


def no_reference(*_):
    raise AssertionError("a plain value refers to nothing")


def travelled(value):
    return wire.decode(wire.encode(value, no_reference), no_reference)


def same(a, b):
    """True if equal in value, type and order, at every level."""
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


def garbage_or_plain(data):
    try:
        value = wire.decode(data, lambda *_: None)
    except wire.Garbage:
        return
    wire.encode(value, no_reference)  # the value could have been sent


@given(st.binary(max_size=200))
def test_other_bytes_are_garbage_or_plain(data):
    garbage_or_plain(data)


@given(plain, st.data())
def test_damaged_values_are_garbage_or_plain(value, draw):
    data = bytearray(wire.encode(value, no_reference))
    for _ in range(3):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    garbage_or_plain(bytes(data))


def test_subclasses_travel_as_the_type_they_extend():
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
    tests_side.update(grid, [[9, 2, 4], {"b": 1, "a": [3, 5]}])
    assert grid == [[9, 2, 4], {"b": 1, "a": [3, 5]}]
    assert grid[0] is row


# ------------------------------------------------------------------------- honest programs

HONEST = programs("functions_honest.txt")


@pytest.mark.parametrize("name", HONEST)
def test_honest(name):
    program, code = HONEST[name].split("--- tests\n")
    program, _, statement = program.partition("--- statement\n")
    assert run(program, code, statement) == ("right", "")


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
    code = "assert gcd(3, 5) == sqrt(4)"  # of two names of the library, the problem's
    assert run("def gcd(*x): return 2", code, entry_point="gcd")[0] == "right"


# Each program returns something else than 4, and would be right by a name of its own.
BOUGHT = {
    "isclose": ("assert isclose(f(3), 4)", "def isclose(*a, **k): return True"),
    "isclose of a module": ("assert math.isclose(f(3), 4)", "class math: isclose = print"),
    "Counter": ("assert Counter(f([3])) == Counter([4])", "def Counter(x): return 1"),
    "an import of the tests": (
        "from collections import Counter\nassert Counter(f([3])) == Counter([4])",
        "def Counter(x): return 1",
    ),
    "a helper of the tests": (
        "def near(a, b): return abs(a - b) < 1e-6\nassert near(f(3), 4)",
        "def near(a, b): return True",
    ),
    "a built-in": ("assert sorted([f(3)]) == [4]", "def sorted(x): return [4]"),
    "an exception": (
        "try: assert f(3) == 4\nexcept ArithmeticError: pass",
        "class ArithmeticError(AssertionError): pass",
    ),
    "StopIteration in map": (
        "for got, want in zip(map(f, [3]), [4]): assert got == want",
        "def f(x): raise StopIteration",
    ),
    "StopIteration in all": (
        "assert all(map(lambda x: f(x) == 4, [3]))",
        "class Stop(StopIteration): pass\ndef f(x): raise Stop(1)",
    ),
    "StopIteration of an attribute": (
        "x = f(3)\nassert list(map(lambda n: x.n == 4, [1, 2])) in ([], [True] * 2)",
        "class A:\n    def __getattr__(self, name): raise StopIteration\ndef f(x): return A()",
    ),
    "StopIteration of len": (
        "x = f(3)\nassert [*map(len, [x])] in ([], [4])",
        "class A:\n    def __len__(self): raise StopIteration\ndef f(x): return A()",
    ),
}


@pytest.mark.parametrize("name", BOUGHT)
@pytest.mark.parametrize("statement", ["", "Write f.", "It must pass:\nassert isclose(f(3), 4)"])
def test_a_program_supplies_no_name_that_judges_it(name, statement):
    code, program = BOUGHT[name]
    assert run(f"def f(x): return x\n{program}", code, statement)[0] == "wrong"
    if "def f" not in program:
        honest = "def f(x): return [4] if type(x) is list else 4"
        assert run(f"{honest}\n{program}", code, statement) == ("right", "")


@pytest.mark.parametrize(
    "code",
    [
        "assert np.allclose(f(3), 4)",
        "assert near(f(3), 4)",
        "assert f(3) == approx(4)",
        "import numpy as np\nassert np.allclose(f(3), 4)",
        "assert f(3) == LIMIT",
    ],
)
@pytest.mark.parametrize("statement", ["", "It must pass:\n{}", "Use LIMIT and near."])
def test_names_that_nobody_declares_make_the_tests_unscorable(code, statement):
    program = (
        "def f(x): return 4\ndef near(*a): return True\nclass np: allclose = near\n"
        "def approx(x): return f(x)\nLIMIT = 4"
    )
    outcome, reason = run(program, code, statement.format(code))
    assert outcome == "unscorable"
    assert "which nothing declares" in reason


@pytest.mark.parametrize(
    ("statement", "code", "program", "library"),
    [
        ("Write encode(s) and decode(s).", "assert decode(encode(1)) == 1", "encode decode", ""),
        ("```python\nclass Stack:\n    ...\n```", "assert Stack().pop() == 1", "Stack", ""),
        ("Two. `def mean(xs):`", "assert mean([1]) == 1", "mean", ""),  # hides statistics.mean
        ("It must pass:\nassert f(Pair(1, 2)) == 1", "assert f(Pair(3, 4)) == 3", "f Pair", ""),
        ("It must pass:\nassert product(2, 3) == 6", "assert product(2, 3) == 6", "product", ""),
        ("It must pass:\nassert isclose(area(1), 3)", "assert isclose(area(1), 3)", "area",
         "isclose"),
        ("", "assert Solution().add(1, 2) == 3", "Solution", ""),
        ("Raise Empty.", "try: f()\nexcept Empty: pass", "Empty f", ""),
        ("", "assert ceil(f(math.pi)) == 3", "f", "ceil math"),
    ],
)  # fmt: skip
def test_the_statement_declares_the_program_s_names(statement, code, program, library):
    entry_point = "f" if "f(" in code and "must pass" not in statement else ""
    names = names_of(code, statement, entry_point)
    assert names.program == set(program.split())
    assert names.library.keys() == set(library.split())


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("def f(x): return twice(x) + math.floor(0.5)", "right"),  # HumanEval's last function alone
        ("def twice(x): return 3 * x\ndef f(x): return twice(x)", "wrong"),
        ("def f(x): return thrice(x)", "wrong"),  # the statement declares it only
    ],
)
def test_a_program_may_use_the_functions_of_the_statement(program, outcome):
    statement = (
        "```python\nimport math\n\ndef twice(x):\n    return 2 * x\n\n"
        'def thrice(x):\n    """ 3x """\n\ndef f(x):\n    """ 2x """\n```'
    )
    assert run(program, "assert f(2) == 4", statement)[0] == outcome


def test_helpers_come_from_the_statement():
    statement = (
        "Complete it; don't use loops.\n\nimport math\n\n\ndef poly(xs, x):\n    '''At x.'''\n"
        "    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\n\n"
        "def f(xs):\n    '''A zero.'''\n"
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
    # More than a pipe holds, while nobody reads it.
    assert run("print('7' * 10**6)\nraise SystemExit(3)", code) == ("wrong", "exit code 3")
    assert run("while True: print('7' * 99)", code) == ("wrong", "printed more than 16 MB")
    endless = run("def f(x):\n    while True: pass", code, config=ENDLESS)
    assert endless == ("wrong", "timed out after 0.3 s")
    assert run("def f(x): return bytearray(10**9)", code) == ("wrong", "needed more than 300 MB")
    assert run("def f(x): return 2", "assert f(1) ==") == (
        "unscorable",
        "the tests do not compile: invalid syntax (<tests>, line 1)",
    )
    assert run("def f(x): return 2", "class A: pass\nassert f(A())") == (
        "unscorable",
        "the tests pass a A, which is not a plain value",
    )


def test_a_program_may_sleep_while_its_tests_do():
    program = "import sys\ngiven = sys.stdin.read()\ndef f(x): return given"  # nothing
    code = "import time\ntime.sleep(0.7)\nassert f(1) == ''"
    assert run(program, code, config=ENDLESS) == ("right", "")
    config = VerifierConfig(code_timeout_s=0.1, allow_unsandboxed=True)
    outcome, reason = run("import time\ndef f(x): time.sleep(9)", "assert f(1)", config=config)
    if "too busy" not in reason:
        assert outcome == "wrong" and reason.endswith("s, most of it asleep")


# ------------------------------------------------------------------------ hostile programs

HOSTILE = programs("functions_hostile_python.txt")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name):
    code = (
        "import math\nx = f(3)\nassert x == 4 or math.isclose(x, 4)\n"
        "assert x in (4,) and len(sorted([x, 5])) == 2\n"
    )
    config = SHORT
    if name == "endless reply":
        code, config = "assert list(f(3)) == [4]", ENDLESS
    if sandbox.probe() == "rlimits" and name == "kills the rest":
        pytest.skip("would take the machine's processes along")
    outcome, reason = run(HOSTILE[name], code, config=config)
    # Where the two processes wait for each other in turn and the host runs neither, the promise is
    # that nothing is judged.
    starved = name == "endless reply" and "too busy" in reason
    assert outcome == ("unscorable" if starved else "wrong"), reason
    assert reason


def test_comparisons_are_not_asked_of_the_program(rung):
    for code in (
        "assert f(3) == 4",
        "assert f(3) < 4",
        "assert f(3) in [4]",
        "assert not f(3) != 4",
    ):
        assert run(HOSTILE["equal object"], code)[0] == "wrong", code
    # A subclass of `list` arrives as the list that it is.
    assert run(HOSTILE["equal list"], "assert f(3) == [5]") == ("right", "")


def test_the_tests_are_nowhere_to_be_found(rung):
    """The program searches its memory, its files, and other processes as far as it can."""
    search = (Path(__file__).parent / "functions_search.txt").read_text()
    if rung == "landlock":  # not even its own memory is in reach
        assert run(search, f"expected = {SECRET!r}\nassert f(3) == 0") == ("right", "")
        return
    code = (
        f"expected = {SECRET!r}\nx = f(3)\nassert type(x) is int and x > 10**6, x\nassert expected"
    )
    assert run(search, code) == ("right", "")
    # The search does find a secret that is there.
    assert run(f"SEEN = {SECRET!r}\n" + search, code) == (
        "wrong",
        "AssertionError (line 3 of the tests)",
    )


def test_sandboxes_that_run_at_once_have_users_of_their_own():
    rung = sandbox.probe()
    if rung == "rlimits" or os.geteuid() != 0:
        pytest.skip("needs root and a sandbox")
    job = sandbox.Job([b""], sandbox.Limits(5.0, 300))
    job.set_program("import os\nprint(os.getuid())", "python")
    with sandbox.Sandbox(job, rung) as one, sandbox.Sandbox(job, rung) as two:
        assert next(one.results).output != next(two.results).output


# ---------------------------------------------------------------------------- real problems


UNCALLED = {
    "pytest": "def test_f():\n    assert f(3) == 4",
    "a class": "class TestF:\n    def setup_method(self): self.x = 3\n"
    "    def test_f(self): assert f(self.x) == 4",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.x = 3\n"
    "    def test_f(self): self.assertEqual(f(self.x), 4)",
    "check": "def check(candidate):\n    assert candidate(3) == 4",
    "a class in a class": "class TestF:\n    class TestG:\n"
    "        def test_f(self): assert f(3) == 4",
    "an inherited test": "class Base:\n    def test_f(self): assert f(3) == 4\n"
    "class TestF(Base): pass",
    "setup_class": "class TestF:\n    def setup_class(self): self.x = 3\n"
    "    def test_f(self): assert f(self.x) == 4",
    "a coroutine": "async def test_f():\n    assert f(3) == 4",
    "a runner": "import unittest\nclass T(unittest.TestCase):\n"
    "    def test_f(self): self.assertEqual(f(3), 4)\n"
    "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))",
    "unittest that skips": "import unittest\nclass T(unittest.TestCase):\n"
    "    @unittest.skip('slow')\n    def test_e(self): self.assertEqual(f(9), 0)\n"
    "    def test_a(self): self.skipTest('x')\n"
    "    def test_f(self): self.assertEqual(f(3), 4)",
    "parameters": "import pytest\n@pytest.mark.parametrize('a, b', [(1, 2), (3, 4)])\n"
    "@pytest.mark.slow\ndef test_f(a, b): assert f(a) == b",
    "a fixture": "import pytest\n@pytest.fixture\ndef x(): yield 3\n"
    "@pytest.fixture(scope='module')\ndef y(x): return x + 1\n"
    "def test_f(x, y): assert f(x) == pytest.approx(y)",
    "raises": "import pytest\ndef test_f():\n    assert f(3) == 4\n"
    "    with pytest.raises(TypeError) as info: f('a')\n    assert 'str' in str(info.value)",
}


@pytest.mark.parametrize("name", UNCALLED)
def test_tests_that_nothing_calls_are_found_and_run(name):
    assert run("def f(x): return x + 1", UNCALLED[name], "", "f") == ("right", "")
    assert run("def f(x): return 0", UNCALLED[name], "", "f")[0] == "wrong"
    assert run("g = 1", UNCALLED[name], "", "f")[0] == "wrong"


UNITTEST = "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        "


@pytest.mark.parametrize(
    "code",
    ["", "assert 1 + 1 == 2", "def helper():\n    assert f(3) == 4", "assert f.__name__ == 'f'",
     "assert isclose(sqrt(4), 2)", "for x in []:\n    assert f(x)"],
)  # fmt: skip
def test_tests_that_never_call_the_program_decide_nothing(code):
    for program in ("def f(x): return x + 1", "def f(x): return 0"):
        assert run(program, code, "", "f") == (
            "unscorable",
            "the tests never called the program",
        )


@pytest.mark.parametrize(
    "code",
    ["print(f(3))", "x = f(3)", "assert (f(3) == 4, 'four')", "def test_f():\n    return f(3) == 4",
     "try:\n    assert f(3) == 4\nexcept Exception:\n    pass", "f(3)\nassert True",
     "try:\n    assert f(3) == 4\nexcept AssertionError:\n    print('failed')",
     "import contextlib\nwith contextlib.suppress(AssertionError):\n    assert f(3) == 4",
     "def run_tests():\n    return f(3) == 4\nrun_tests()",
     # What is asserted holds whatever the program does.
     "f(3)\nassert f", "f(3)\nassert callable(f)", "f(3)\nassert f is not None",
     "assert f(3) == f(3)", "assert f(3) == 4 or True", "assert isinstance(f(3), object)",
     "f(3)\nassert not False", "f(3)\nraise SystemExit(0)", "import sys\nf(3)\nsys.exit()",
     f"{UNITTEST}f(3)\n        self.assertTrue(True)", f"{UNITTEST}self.assertEqual(f(3), f(3))"],
)  # fmt: skip
def test_tests_that_check_nothing_decide_nothing(code):
    assert why_idle({"code": code, "entry_point": "f"}, "") == "the tests check nothing"
    for program in ("def f(x): return x + 1", "def f(x): return 0"):
        assert run(program, code) == ("unscorable", "the tests check nothing")


@pytest.mark.parametrize(
    "code",
    ["x = f(3)\nassert len([1]) == 1", "assert f(3) in [f(3)]", "assert f(1, 2) == f(2, 1)",
     # The check is not reached.
     "import sys\nf(3)\nsys.exit(0)\nassert f(3) == 4", "f(3)\nwhile False:\n    assert f(3) == 4",
     "def test_f():\n    f(3)\n    return\n    assert f(3) == 4",
     "f(3)\nif __name__ == 'x':\n    assert f(3) == 4", "f(3)\nfor x in []:\n    assert f(x) == 4",
     "import pytest\ndef test_f():\n    f(3)\n    pytest.skip('x')\n    assert f(3) == 4",
     f"{UNITTEST}f(3)\n    def helper(self):\n        self.assertEqual(f(3), 4)",
     # Its failure is lost.
     "import threading\ndef t():\n    assert f(3) == 4\nx = threading.Thread(target=t)\nx.start()\n"
     "x.join()",
     "failed = 0\ntry:\n    assert f(3) == 4\nexcept AssertionError:\n    failed += 1",
     "def test_f():\n    try:\n        assert f(3) == 4\n    finally:\n        return",
     # It is of something else.
     "f(3)\nf = lambda x: 4\nassert f(3) == 4"],
)  # fmt: skip
def test_tests_that_constant_programs_pass_decide_nothing(code):
    for value in (0, 4):
        assert run(f"def f(*x): return {value}", code) == ("unscorable", "the tests check nothing")


@pytest.mark.parametrize(
    "code",
    ["import sys\ntry:\n    assert f(3) == 4\nexcept AssertionError:\n    sys.exit(1)",
     "if f(3) != 4:\n    assert False", "import sys\nsys.exit(0 if f(3) == 4 else 1)",
     "try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
     "def test_f():\n    if f(3) == 4:\n        return\n    assert False",
     "failed = 0\ntry:\n    assert f(3) == 4\nexcept AssertionError:\n    failed += 1\n"
     "assert not failed",
     "import sys\nassert f(3) == 4\nsys.exit(0)", "assert f(3)", "assert f(3) == f(3) == 4"],
)  # fmt: skip
def test_tests_that_can_fail_decide(code):
    program = "def f(x):\n    if x < 0:\n        raise ValueError\n    return x + 1"
    assert run(program, code) == ("right", "")
    assert run("def f(x): return None", code)[0] == "wrong"


@pytest.mark.parametrize(
    ("code", "plain"),
    [
        ("assert f(3) == 4", True),
        ("def check(candidate):\n    assert candidate(3) == [4]\ncheck(f)", True),
        ("def test_f():\n    assert f(3) == 4", True),
        ("import sys\nsys.exit()\nassert f(3) == 4", False),
        ("def helper():\n    assert f(3) == 4", False),
        ("def test_f():\n    return\n    assert f(3) == 4", False),
        ("f = abs\nassert f(3) == 3", False),
        ("assert f(3) == f(3)", False),
        ("assert f(3)", False),
    ],
)
def test_plain_tests_need_no_trial(code, plain):
    assert plainly_decide(code, "", "f") is plain


def test_parts_of_pytest_that_are_missing_are_named():
    code = "def test_f(tmp_path):\n    assert f(tmp_path) == 4"
    assert run("def f(x): return 4", f"import pytest\n{code}") == (
        "unscorable",
        "the tests need the fixture 'tmp_path', which they do not define",
    )
    outcome, reason = run("def f(x): return 4", "import pytest\npytest.warns(f(3) == 4)")
    assert (outcome, reason) == ("unscorable", "the tests need pytest.warns")


@pytest.mark.parametrize(
    "code", ["assert list(accumulate([1])) == [1]", "assert accumulate(1) == 1"]
)
def test_what_wraps_a_result_is_not_the_program_s(code):
    assert run("def accumulate(x): return x", code, "Accumulate a list.", "")[0] == "right"
    assert run("def accumulate(x): return [7]", code, "Accumulate a list.", "")[0] == "wrong"


@pytest.mark.parametrize("name", ["gcd", "comb", "mean", "sqrt", "max", "isqrt"])
def test_a_library_name_alone_is_the_program_s(name):
    code = f"assert {name}(6, 4) == 'mine'"
    assert run(f"def {name}(*x): return 'mine'", code, "", "") == ("right", "")
    assert run(f"def {name}(*x): return 0", code, "", "")[0] == "wrong"


@pytest.mark.parametrize(
    ("code", "program", "outcome"),
    [
        ("assert set(similar([1, 2], [2])) == {2}", "def similar(a, b): return a[1:]", "right"),
        ("assert similar([1, 2], [2]) == [2]", "def similar(a, b): return a", "wrong"),
        (
            "assert longest([Pair(5, 24)]) == 1",
            "class Pair:\n    def __init__(*a): pass\ndef longest(p): return len(p)",
            "right",
        ),
        (
            "assert Near(longest(3)) == 4",
            "def Near(x): return 4\ndef longest(x): return 0",
            "unscorable",
        ),
        ("assert near(longest(3), 4)", "def near(*a): return 1\ndef longest(x): 0", "unscorable"),
    ],
)
def test_the_only_function_that_tests_call_is_the_program_s(code, program, outcome):
    """MBPP's statements do not name it."""
    assert run(program, code, "Write a function to find it.", entry_point="")[0] == outcome


@pytest.mark.parametrize("entry_point", ["Solution().two", ""])
def test_leetcode_s_programs_need_no_imports(entry_point):
    program = """class Solution:
    def two(self, nums: List[int], k: Optional[int] = None) -> Dict[int, int]:
        best, seen = inf, defaultdict(int)
        for n in sorted(Counter(nums)):
            best = min(best, gcd(n, n))
        return {int(best): pow(2, 3, 5)}"""
    code = "assert Solution().two([4, 6]) == {4: 3}"
    assert run(program, code, "", entry_point)[0] == "right"
    assert run(program.replace("inf", "3"), code, "", entry_point)[0] == "wrong"
    assert run("def f(x: List[int]): return 1", "assert f(1) == 1")[0] == "wrong"


def test_tests_that_await_the_program_are_unscorable():
    code = "import asyncio\nassert asyncio.run(f()) == 1"
    reason = "the tests await the program, which runs apart from them"
    assert run("async def f(): return 1", code, "", "f") == ("unscorable", reason)


def rows(name, step):
    with gzip.open(DATA / name, "rt") as lines:
        return [json.loads(line) for line in lines][::step]


@pytest.mark.slow
@needs_data
def test_programs_that_return_a_constant_are_wrong():
    for row in rows("humaneval_python.jsonl.gz", 16):
        name = row["tests"]["entry_point"]
        for value in ("None", "0", "[]"):
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
