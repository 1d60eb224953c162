"""The two C++ sources of a function test.

One is the program, with code that serves its functions. The other is the tests, with stand-in
functions of the same signatures, which call the program's process. Only names are read from the
program's text. Signatures come from its compiler, and only types of the standard library are let
through into the tests' source.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

from tramontane.verifier.code import inside

TESTS_FLAGS = ("-std=c++20", "-O0")
_NO_CODE = re.compile(
    r"""R"(?P<end>[^(\s]*)\(.*?\)(?P=end)"      # a raw string
    | /\*.*?(?:\*/|\Z) | //[^\n]*               # comments
    | "(?:\\.|[^"\\\n])*" | '(?:\\.[^'\n]{0,8}|[^'\\\n])'
    | ^[ \t]*\#(?:\\\n|[^\n])*                  # the preprocessor's lines
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_HEAD = re.compile(
    r"(?P<template>template\b.*)?\b(?P<name>[A-Za-z_]\w*)\s*\((?P<parameters>.*)\)"
    r"\s*(?:noexcept\b.*|->.*)?$",
    re.DOTALL,
)
_CALL = re.compile(r"\b([A-Za-z_]\w*)\s*\(")
_EXPORTED = re.compile(r"tramontane::exported<(\d+), (.*)>\(.*\(\*\)\(")
_WORDS = re.compile(r"char const\*|[A-Za-z_]\w*|\d+u?l*|::|[<>,&]|\s+")
_TYPES = re.findall(
    r"\w+",
    "bool char short int long float double signed unsigned wchar_t char8_t char16_t char32_t const"
    " void std __cxx11 basic_string basic_string_view char_traits allocator vector deque list array"
    " pair tuple optional complex set multiset unordered_set unordered_multiset map multimap"
    " unordered_map unordered_multimap less greater hash equal_to",
)


class Definition(NamedTuple):
    """A function's definition at the top level of a text."""

    name: str
    declaration: str  # the text before the opening brace
    text: str  # the text through the closing brace; "" if there is none
    is_template: bool


class Signature(NamedTuple):
    """A function's types, as the compiler writes them."""

    result: str
    parameters: list[str]


def blanked(text: str) -> str:
    """The text with comments, strings and preprocessor lines replaced by spaces."""
    return _NO_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def called_names(text: str) -> set[str]:
    """Names followed by an opening parenthesis."""
    return set(_CALL.findall(blanked(text)))


def definitions(text: str) -> list[Definition]:
    """The functions that a text defines outside of all braces."""
    code = blanked(text)
    found = []
    start = depth = 0
    head: tuple[int, int] = (0, 0)
    for match in re.finditer(r"[{};]|\n[ \t]*\n", code):
        position, sign = match.start(), match[0]
        if sign == "{":
            if depth == 0:
                head = (start, position)
            depth += 1
        elif sign == "}":
            depth = max(0, depth - 1)
            if depth == 0:
                if definition := _definition(text, code, *head, position + 1):
                    found.append(definition)
                head = (0, 0)
                start = position + 1
        elif depth == 0:  # a blank line separates prose from code
            start = match.end()
    if depth and (definition := _definition(text, code, *head, None)):
        found.append(definition)
    return found


def _definition(text: str, code: str, start: int, brace: int, end: int | None) -> Definition | None:
    match = _HEAD.search(code[start:brace].strip())
    if match is None or match["name"] in ("main", "if", "for", "while", "switch"):
        return None
    declaration = code[start:brace].strip()
    whole = "" if end is None else text[start:end].strip()
    return Definition(match["name"], declaration, whole, bool(match["template"]))


def helpers(statement: str) -> dict[str, str]:
    """The functions that the statement defines completely, by name.

    The tests take these functions from the statement: a program that redefines them would decide
    its own tests.
    """
    return {d.name: d.text for d in definitions(statement) if d.text}


def exported_names(program: str, tests: str, statement: str) -> list[str]:
    """The program's functions that the tests call; not those that tests or statement define."""
    elsewhere = {d.name for d in definitions(tests)} | helpers(statement).keys()
    return sorted({d.name for d in definitions(program)} & (called_names(tests) - elsewhere))


def missing_names(program: str, tests: str, statement: str) -> list[str]:
    """The functions that the statement declares and the tests call, and the program lacks: the C
    library may have others of the same names."""
    declared = {d.name for d in definitions(statement) if not d.text}
    return sorted((declared & called_names(tests)) - {d.name for d in definitions(program)})


def is_declared(name: str, program: str, statement: str) -> bool:
    """True if the statement declares the function in the same words as the program."""
    return bool(_declarations(name, statement) & _declarations(name, program))


def _declarations(name: str, text: str) -> set[str]:
    return {re.sub(r"\s", "", d.declaration) for d in definitions(text) if d.name == name}


@functools.cache
def _prefix() -> str:
    return (Path(inside.__file__).parent / "rpc.hpp").read_text(encoding="utf-8")


def program_source(program: str, names: list[str], statement: str) -> str:
    """The program, and the code that serves the functions of these names.

    `main` is the server's; it stands before the program, so the program's macros cannot change it.
    """
    defined = definitions(program)
    declared = {d.name: d.declaration for d in definitions(statement)}
    lines = []
    for number, name in enumerate(names):
        same = [d for d in defined if d.name == name]
        function = f"&::{name}"
        if (len(same) > 1 or same[0].is_template) and name in declared:
            # Of several functions of this name, serve the one that the statement declares.
            lines.append(f"namespace tramontane_{number} {{ {declared[name]}; }}")
            function = f"static_cast<decltype(&tramontane_{number}::{name})>({function})"
        lines.append(_exported(name, number, function, same[0]))
    start = "int main() { return tramontane::serve(); }\n#define main tramontane_own_main\n"
    served = "\n".join(lines)
    return f'{_prefix()}{start}#line 1 "main.cpp"\n{program}\n#line 1 "exports"\n{served}\n'


def _exported(name: str, number: int, function: str, definition: Definition) -> str:
    """A line that serves a function; where the C library has another function of that name
    (`strlen`), the program's is found by its own declaration."""
    line = f"auto tramontane_{name} = tramontane::exported<{number}>({{}});"
    cast = f"static_cast<decltype(&tramontane_own_{number}::{name})>(&::{name})"
    return "\n".join(
        [
            "#ifdef TRAMONTANE_CAST",
            f"namespace tramontane_own_{number} {{ {definition.declaration}; }}",
            line.format(cast),
            "#else",
            line.format(function),
            "#endif",
        ]
    )


def print_signatures(compiler: list[str]) -> list[str]:
    """A command that compiles, and prints the signatures of the exported functions.

    The whole library stands before the program, because it is precompiled. In that company a
    program's name such as `count` can be ambiguous; the command then compiles again with the few
    headers that the server needs. If the address of a function is ambiguous, since the C library
    has another of its name, the command compiles again with its declaration.
    """
    script = """
    again=
    while ! errors=$("$@" $again 2>&1)
    do
        case $errors in
        *"overloaded function"*) again="$again -DTRAMONTANE_CAST" ;;
        *" is ambiguous"* | *" redeclared as "*) again="$again -DTRAMONTANE_LEAN" ;;
        *) echo "$errors" >&2; exit 1 ;;
        esac
        case $again in *"CAST -DTRAMONTANE_CAST"* | *LEAN*LEAN* | *CAST*CAST*)
            echo "$errors" >&2; exit 1 ;;
        esac
    done
    nm -C "$0" | grep "tramontane::exported<"
    """
    return ["/bin/sh", "-c", script, "{box}/main", *compiler]


def signatures(printed: str, names: list[str]) -> dict[str, Signature | str]:
    """For each name the signature, or the reason why it cannot be called from another process."""
    found: dict[str, Signature | str] = {}
    for line in printed.splitlines():
        if match := _EXPORTED.search(line):
            number, (result, *parameters) = int(match[1]), _split(match[2])
            if number < len(names):
                found[names[number]] = _checked(result, parameters)
    return {name: found.get(name, "has no signature") for name in names}


def _checked(result: str, parameters: list[str]) -> Signature | str:
    for type_ in [result, *parameters]:
        words = _WORDS.findall(type_)
        known = all(not word.isidentifier() or word in _TYPES for word in words)
        if "".join(words) != type_ or not known:
            return f"takes or gives a {type_[:80]}, which is no plain value"
    if "char const*" in result or "string_view" in result:
        return "gives a string that it does not own"
    return Signature(re.sub(r"( const)?&{1,2}$", "", result), parameters)


def _split(arguments: str) -> list[str]:
    """The arguments of a template."""
    parts, depth = [""], 0
    for sign in arguments:
        depth += (sign in "<(") - (sign in ">)")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def tests_source(code: str, found: dict[str, Signature | str], statement: str) -> str:
    """The tests, with stand-in functions for the program's.

    A stand-in hides functions of the same name that the libraries have: `strlen("abc")` would
    choose the C library's, which fits better than `int strlen(string)`.
    """
    lines = ["using namespace std;", "namespace tramontane_tests {"]
    for number, (name, signature) in enumerate(found.items()):
        assert isinstance(signature, Signature)
        result, types = signature
        parameters = ", ".join(f"{type_} a{i}" for i, type_ in enumerate(types))
        listed = ", ".join([result, *types])
        arguments = "".join(f", a{i}" for i in range(len(types)))
        lines.append(
            f"{result} {name}({parameters}) "
            f"{{ return tramontane::call<{listed}>({number}{arguments}); }}"
        )
    lines += ["}", "using namespace tramontane_tests;"]
    complete = helpers(statement)
    if called_names(code) & complete.keys():
        lines += complete.values()
    hidden = _with_usings(code, " ".join(f"using tramontane_tests::{name};" for name in found))
    return f"{_prefix()}\n" + "\n".join(lines) + f'\n#line 1 "tests"\n{hidden}\n'


def _with_usings(code: str, usings: str) -> str:
    """The tests with declarations at the start of the body of each function."""
    text = blanked(code)
    depth, bodies = 0, []
    for match in re.finditer(r"[{}]", text):
        if match[0] == "{":
            if depth == 0 and re.search(r"\)[\w\s]*$", text[: match.start()]):
                bodies.append(match.end())
            depth += 1
        else:
            depth = max(0, depth - 1)
    for position in reversed(bodies):
        code = f"{code[:position]} {usings} {code[position:]}"
    return code
