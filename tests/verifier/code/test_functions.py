"""Function tests: honest and hostile programs, and the values that travel between processes."""

import gzip
import json
import math
import os
import shutil
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.paths import DATA
from tramontane.config import VerifierConfig
from tramontane.types import Problem
from tramontane.verifier.code import cpp, sandbox
from tramontane.verifier.code.grade import judge, time_limit
from tramontane.verifier.code.inside import tests_side, wire

# Long enough on a loaded machine; hostile programs, which may be late, have little time.
CONFIG = VerifierConfig(code_timeout_s=20.0, allow_unsandboxed=True)
SHORT = VerifierConfig(code_timeout_s=0.8, allow_unsandboxed=True)
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
needs_gpp = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SECRET = "xyzzy" + "-41-" + "plugh"


@pytest.fixture(params=["bubblewrap", "landlock"])  # one with namespaces, one without
def rung(request, monkeypatch):
    if reason := sandbox.why_not(request.param):
        pytest.skip(f"{request.param} does not work here: {reason}")
    monkeypatch.setattr(sandbox, "probe", lambda: request.param)
    return request.param


def run(program, code, statement="", entry_point="f", tag="python", config=CONFIG):
    tests = {"type": f"{tag}_assert", "code": code, "entry_point": entry_point}
    problem = Problem("p", "code", statement, tests=tests)
    return judge(f"```{tag}\n{program}\n```", problem, config)[:2]


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
    assert run(*HONEST[name].split("--- tests")) == ("right", "")


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
    endless = run("def f(x):\n    while True: pass", code, config=SHORT)
    assert endless == ("wrong", "timed out after 0.8 s")
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

HOSTILE = programs("functions_hostile_python.txt")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name):
    code = (
        "import math\nx = f(3)\nassert x == 4 or math.isclose(x, 4)\n"
        "assert x in (4,) and len(sorted([x, 5])) == 2\n"
    )
    if name == "endless reply":
        code = "assert list(f(3)) == [4]"
    if sandbox.probe() == "rlimits" and name == "kills the rest":
        pytest.skip("would take the machine's processes along")
    outcome, reason = run(HOSTILE[name], code, config=SHORT)
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


# ------------------------------------------------------------------------------------- C++

CPP_CODE = "#undef NDEBUG\n#include <assert.h>\nint main() {\n    assert(f(3) == 4);\n}\n"
HOSTILE_CPP = programs("functions_hostile_cpp.txt")


@pytest.mark.slow
@needs_gpp
@pytest.mark.parametrize("name", HOSTILE_CPP)
def test_hostile_cpp(name):
    outcome, reason = run(HOSTILE_CPP[name], CPP_CODE, tag="cpp", config=SHORT)
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


@pytest.mark.slow
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
void change(vector<vector<int>>& grid, string& s, long long& n) {
    grid[0].push_back(7);
    s += "!";
    ++n;
}
template <class T> T twice(T x) { return x + x; }
int over(int x) { return 1; }
int over(double x) { return 2; }
tuple<int, array<char, 2>, optional<unordered_set<int>>> some() { return {1, {'a', 'b'}, {{3}}}; }
const string& named() { static string s = "name"; return s; }
deque<set<int, greater<int>>> sets(list<complex<double>> l) {
    return {{1, 2}, {(int)l.back().imag()}};
}
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


@pytest.mark.slow
@needs_gpp
def test_cpp_finds_no_tests():
    if sandbox.probe() == "rlimits":
        pytest.skip("rlimits alone do not promise this")
    program = """
#include <bits/stdc++.h>
using namespace std;
bool has(const string& path) {
    ifstream file(path, ios::binary);
    string text((istreambuf_iterator<char>(file)), {}), needle("hgulp-14-yzzyx");
    reverse(needle.begin(), needle.end());
    return text.find(needle) != string::npos;
}
vector<string> f() {
    vector<string> found;
    for (auto root : {"/program", "/tmp", "/inside"})
        for (auto& file : filesystem::recursive_directory_iterator(root))
            if (file.is_regular_file() && has(file.path())) found.push_back(file.path());
    if (has("/proc/self/exe")) found.push_back("itself");
    return found;
}
"""
    code = CPP_CODE.replace("f(3) == 4", f'f().empty() && "{SECRET}"')
    assert run(program, code, tag="cpp") == ("right", "")
    assert run(f"// {SECRET}\n" + program, code, tag="cpp")[1].startswith("assertion failed")


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


def test_definitions_are_read_from_code_alone():
    text = 'auto s = R"(" {)";\n// int g() {\nint main() { return 0; }\nint f() { return 1; }\n'
    assert [(d.name, d.declaration) for d in cpp.definitions(text)] == [("f", "int f()")]


def test_only_types_of_the_standard_library_reach_the_tests():
    def signature(arguments):
        line = f"0000 W bool tramontane::exported<0, {arguments}>(int (*)())"
        return cpp.signatures(line, ["f"])["f"]

    string = "std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >"
    assert signature(f"{string} const&, char const*, int&") == (string, ["char const*", "int&"])
    view = "std::basic_string_view<char, std::char_traits<char> >"
    assert signature(f"int, {view}") == ("int", [view])
    for bad in ("evil", "int); int main(", "int*", "std::function<int ()>", 'int"', "char const*",
                view):  # fmt: skip
        assert isinstance(signature(f"{bad}, int"), str), bad


@pytest.mark.slow
@needs_gpp
def test_cpp_names_of_the_library():
    """A program may use names of library headers that it does not include."""
    program = "using namespace std;\nint count, left, write;\nint f(int x) { return x + 1; }"
    using = program.replace("return", "return count +")
    assert run(using, CPP_CODE, tag="cpp") == ("right", "")
    twice = "#include <bits/stdc++.h>\nint g;\n#include <bits/stdc++.h>\n"
    assert run(twice + "int f(int x) { return x + 1; }", CPP_CODE, tag="cpp") == ("right", "")


def test_sandboxes_that_run_at_once_have_users_of_their_own(tmp_path):
    rung = sandbox.probe()
    if rung == "rlimits" or os.geteuid() != 0:
        pytest.skip("needs root and a sandbox")
    (tmp_path / "main.py").write_text("import os\nprint(os.getuid())")
    job = sandbox.Job(tmp_path, [b""], sandbox.Limits(5.0, 300), source="main.py")
    with sandbox.Sandbox(job, rung) as one, sandbox.Sandbox(job, rung) as two:
        assert next(one.results).output != next(two.results).output


def test_time_limit_covers_both_compilers():
    def limit(kind):
        return time_limit(Problem("p", "code", "", tests={"type": kind, "code": ""}), CONFIG)

    assert limit("cpp_assert") - limit("python_assert") == sandbox.COMPILE_SECONDS


# ---------------------------------------------------------------------------- real problems


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


@needs_gpp
@pytest.mark.parametrize(
    ("declaration", "tests", "body"),
    [
        ("int strlen(string s)", 'strlen("") == 0 && strlen("abc") == 3', "return s.size();"),
        ("double round(double x)", "round(2.4) == 9", "return 9;"),
        ("int abs(vector<int> v)", "abs({1, 2}) == 3", "return v[0] + v[1];"),
        ("int index(string s, char c)", "index(\"abc\", 'b') == 1", "return s.find(c);"),
    ],
)
def test_names_of_the_c_library(declaration, tests, body):
    statement = f"#include <string>\nusing namespace std;\n{declaration}{{\n"
    code = f"#undef NDEBUG\n#include <assert.h>\nint main() {{ assert({tests}); }}\n"
    head = "#include <bits/stdc++.h>\nusing namespace std;\n"
    assert run(f"{head}{declaration} {{ {body} }}", code, statement, tag="cpp") == ("right", "")
    other = run(
        f"{head}int other(int x) {{ return x; }}", code + "\n// other(1)", statement, tag="cpp"
    )
    assert other[0] == "wrong"
    assert "define" in other[1]
