"""Converts rows of public datasets that need more than a renaming of columns.

A layout is a function of one row that returns the row with the fields of docs/data.md, or None if
it is not a problem with a checkable answer. `data.catalog` names the layout of each known set.
"""

from __future__ import annotations

import ast
import base64
import binascii
import hashlib
import io
import json
import pickle
import random
import re
import zlib
from collections.abc import Callable
from typing import Any

from tramontane.data.bfcl import bfcl
from tramontane.errors import InputError
from tramontane.types import IMAGE
from tramontane.verifier.instructions import instructions_of

Row = dict[str, Any]
Layout = Callable[[Row], "Row | None"]

MAX_DECODED_BYTES = 2**30  # of one row's encoded tests; a release's largest row decodes to 0.2 GB

_LETTER = r"Give the letter of the right choice, as in $\boxed{B}$."
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MMMU_IMAGE = re.compile(r"<image ([1-7])>")

# DAPO's statements include an answer format that contradicts ours.
_DAPO_OPENING = re.compile(
    r"\s*Solve the following math problem step by step\.[^\n]*\bAnswer: \$Answer\b[^\n]*\n+"
)
_DAPO_CLOSING = re.compile(r'\n+Remember to put your answer on its own line after "Answer:"\.?\s*$')


def verl(row: Row) -> Row:
    """The layout of verl's training files: a chat, and the reference in `reward_model`.

    The reference of a math problem is an answer, or (Skywork) a JSON list of one; that of a
    programming problem is tests as JSON text.
    """
    chat, graded = (_json_or_text(_need(row, name)) for name in ("prompt", "reward_model"))
    if not isinstance(chat, list) or not chat:
        raise ValueError("`prompt` must be a list of messages")
    if not isinstance(graded, dict):
        raise ValueError("`reward_model` must have a `ground_truth`")
    reference = graded.get("ground_truth")
    *before, statement = chat
    text = _DAPO_CLOSING.sub("", _DAPO_OPENING.sub("", statement["content"]))
    messages = [*before, {"role": statement.get("role", "user"), "content": text}]
    rest = {k: v for k, v in row.items() if k not in ("prompt", "reward_model")}
    problem = {**rest, "problem": messages if before else text}
    index = (row.get("extra_info") or {}).get("index")
    if index is not None:
        problem["id"] = str(index)
    value = _json_or_text(reference)
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(value, dict) or (isinstance(first, dict) and "input" in first):
        return problem | {"tests": value}
    # A list of several answers is itself an answer, e.g. an interval.
    return problem | {"answer": first if isinstance(value, list) and len(value) == 1 else reference}


def numina(row: Row) -> Row | None:
    """NuminaMath 1.5: skips proofs, and rows with an incomplete problem or solution or without an
    answer."""
    valid = all(row.get(k) in (None, "Yes") for k in ("problem_is_valid", "solution_is_valid"))
    answer = str(row.get("answer") or "").strip()
    return row if valid and answer not in ("", "proof", "notfound") else None


def big_math(row: Row) -> Row:
    """Big-Math: the solve rate of Llama 3.1 8B is the problem's pass rate, from 0 to 1. A row's
    `domain`, a list of topics, is renamed `topic`, since a problem's domain names its verifier."""
    rest = {k: v for k, v in row.items() if k != "domain"}
    return {**rest, "topic": row.get("domain"), "pass_rate": row.get("llama8b_solve_rate")}


def intellect3(row: Row) -> Row:
    """INTELLECT-3: tests are in `info`, as JSON text; the pass rate is Qwen3 4B's."""
    rest = {k: v for k, v in row.items() if k not in ("info", "question")}
    problem = {**rest, "problem": _need(row, "question")}
    rates = [v for k, v in row.items() if k.startswith("avg@") and isinstance(v, int | float)]
    if rates:
        problem["pass_rate"] = rates[0]
    info = _json_or_text(row.get("info"))
    if isinstance(info, dict) and info.get("tests"):
        problem["tests"] = _tests(_json_or_text(info["tests"]), info.get("fn_name"))
    return problem


def dolci(row: Row) -> Row | None:
    """Dolci: `dataset` names the kind of the reference. Math and programs have verifiers here;
    instructions and chats, which need a judge, are skipped."""
    kinds = row.get("dataset")
    kind = " ".join(kinds) if isinstance(kinds, list) else str(kinds)
    reference = row.get("ground_truth")
    first = reference[0] if isinstance(reference, list) and reference else reference
    rest = {k: v for k, v in row.items() if k not in ("prompt", "ground_truth", "dataset")}
    statement = str(_need(row, "prompt")).removeprefix("user: ")
    problem = {**rest, "problem": statement, "kind": kind}
    if "math" in kind:
        return problem | {"answer": first}
    if "code" in kind:
        return problem | {"tests": _tests(_json_or_text(first), None)}
    return None


def gpqa(row: Row) -> Row:
    """GPQA: a question with four choices; the answer is a letter. The order of the choices depends
    only on the question's text, so it is the same in all evaluations and favors no letter."""
    question = str(_need(row, "Question")).strip()
    right = str(_need(row, "Correct Answer")).strip()
    choices = [right, *(str(_need(row, f"Incorrect Answer {i}")).strip() for i in (1, 2, 3))]
    random.Random(hashlib.sha256(question.encode()).hexdigest()).shuffle(choices)
    return {
        "id": row.get("Record ID"),
        "problem": _chosen(question, choices),
        "answer": _LETTERS[choices.index(right)],
        "domain": "math",
        "subject": row.get("High-level domain"),
    }


def mmmu(row: Row) -> Row | None:
    """MMMU, and MMMU-Pro's text with images: `<image 1>` in the question and in its choices is the
    place of `image_1`. Skips rows without an answer (the test split's), and with several."""
    choices, answer = _choices(row), str(_need(row, "answer")).strip()
    if answer in ("", "?") or answer.startswith(("['", '["')):
        return None
    text = _chosen(str(_need(row, "question")).strip(), choices)
    places = _MMMU_IMAGE.findall(text)
    images = [_need(row, f"image_{number}") for number in places]
    if not places:
        images = [image for n in range(1, 8) if (image := row.get(f"image_{n}"))]
    return {
        "id": row.get("id"),
        "problem": _MMMU_IMAGE.sub(IMAGE, text),
        "answer": answer,
        "images": images,
        "domain": "math",
        "subject": row.get("subfield") or row.get("subject"),
    }


def mmmu_pro_vision(row: Row) -> Row:
    """MMMU-Pro's vision rows, whose question and choices are in the image."""
    return {
        "id": row.get("id"),
        "problem": f"Answer the question in the image. {_LETTER}",
        "answer": _need(row, "answer"),
        "image": _need(row, "image"),
        "domain": "math",
        "subject": row.get("subject"),
    }


def mathvista(row: Row) -> Row | None:
    """MathVista: `image` is a path in its own repository, and `decoded_image` the image. Skips rows
    without an answer (the test split's)."""
    answer = str(row.get("answer") or "").strip()
    if not answer:
        return None
    choices, kind = row.get("choices") or [], row.get("answer_type")
    question = str(_need(row, "question")).strip()
    if choices:
        answer = _LETTERS[[*map(str, choices)].index(answer)]
    elif kind == "float":
        question += f" Round to {int(_need(row, 'precision'))} decimals."
    elif kind == "list":
        question += " Give the answer as a list, as in [1, 2]."
    if unit := row.get("unit"):
        question += f" (Unit: {unit})"
    details = row.get("metadata") or {}
    return {
        "id": row.get("pid"),
        "problem": _chosen(question, choices),
        "answer": answer,
        "image": _need(row, "decoded_image"),
        "domain": "math",
        "language": {"english": "en", "chinese": "zh"}.get(str(details.get("language"))),
        "task": details.get("task"),
    }


def _choices(row: Row) -> list[Any]:
    """The choices of MMMU, a list as Python's text; none for an open question."""
    given = row.get("options") or []
    found = ast.literal_eval(given) if isinstance(given, str) else given
    if not isinstance(found, list):
        raise ValueError("`options` must be a list")
    return found


def _chosen(question: str, choices: list[Any]) -> str:
    """A question with its choices, each with a letter."""
    if not choices:
        return question
    lines = [f"{letter}. {choice}" for letter, choice in zip(_LETTERS, choices, strict=False)]
    return "\n".join([question, "", *lines, "", _LETTER])


def livecodebench(row: Row) -> Row:
    """LiveCodeBench: public and private tests combined; a program reads standard input, or, with
    starter code, completes a function."""
    shown = _cases(row.get("public_test_cases"))
    cases = _with_function([*shown, *_cases(row.get("private_test_cases"))], row)
    return {
        "id": row.get("question_id"),
        "problem": _with_starter(_need(row, "question_content"), row),
        "tests": {"rules": "livecodebench", "shown": len(shown), "cases": cases},
        "domain": "code",
        "level": row.get("difficulty"),
        "platform": row.get("platform"),
        "contest_date": row.get("contest_date"),
    }


def deepcoder_lcb(row: Row) -> Row:
    """DeepCoder's part of LiveCodeBench: the function's name and the starter code are in the row,
    not in its tests."""
    rest = {k: v for k, v in row.items() if k not in ("starter_code", "metadata")}
    cases = _cases(_need(row, "tests"))
    return {
        **rest,
        "problem": _with_starter(_need(row, "problem"), row),
        "tests": {"rules": "livecodebench", "cases": _with_function(cases, row)},
        "domain": "code",
    }


def olympiadbench(row: Row) -> Row:
    """OlympiadBench: the final answers as one list, with the unit that the question omits."""
    answers = _need(row, "final_answer")
    texts = [str(a).strip().strip("$").strip() for a in _as_list(answers)]
    unit = str(row.get("unit") or "").strip().strip("$")
    answer = ", ".join(texts)
    rest = {k: v for k, v in row.items() if k not in ("question", "final_answer", "language")}
    hint = f" Give the answer in {unit}." if unit else ""
    language = {"English": "en", "Chinese": "zh"}.get(str(row.get("language")))
    return {
        **rest,
        "problem": f"{str(_need(row, 'question')).strip()}{hint}",
        "answer": answer,
        "language": language,
        "domain": "math",
    }


def humaneval(row: Row) -> Row:
    """HumanEval: the function's head and docstring, with its `check` as the tests."""
    name = _need(row, "entry_point")
    head = str(_need(row, "prompt")).rstrip()
    return {
        "id": row.get("task_id"),
        "problem": f"Complete this Python function, and give the whole of it in one block:\n\n"
        f"```python\n{head}\n```",
        "tests": {
            "type": "python_assert",
            "code": f"{_need(row, 'test')}\n\ncheck({name})\n",
            "entry_point": name,
        },
        "solution": f"{head}\n{row.get('canonical_solution') or ''}",
        "domain": "code",
    }


def mbpp(row: Row) -> Row:
    """MBPP, full (`text`) or sanitized (`prompt`): the first assertion is part of the statement,
    since only it names the function."""
    asserts = list(_need(row, "test_list"))
    if not asserts:
        raise ValueError("no assertions in column 'test_list'")
    imports = row.get("test_imports") or _as_list(row.get("test_setup_code") or [])
    text = str(row.get("prompt") or _need(row, "text")).strip()
    return {
        "id": f"mbpp-{_need(row, 'task_id')}",
        "problem": f"{text}\n\nThe program must pass:\n\n```python\n{asserts[0]}\n```",
        "tests": {
            "type": "python_assert",
            "code": "\n".join([*imports, *asserts, *(row.get("challenge_test_list") or [])]) + "\n",
        },
        "solution": row.get("code"),
        "domain": "code",
    }


def ifeval(row: Row) -> Row:
    """IFEval: `instruction_id_list`, and the arguments of each in `kwargs`, where the dataset lists
    the arguments of all kinds, null if a kind does not have them."""
    instructions = instructions_of(row)
    return {
        "id": f"ifeval-{_need(row, 'key')}",
        "problem": _need(row, "prompt"),
        "domain": "instructions",
        "instruction_id_list": [kind for kind, _ in instructions],
        "kwargs": [{k: v for k, v in given.items() if v is not None} for _, given in instructions],
    }


def ifeval_loose(row: Row) -> Row:
    """IFEval under its loose criterion (`verifier.instructions`)."""
    return {**ifeval(row), "loose": True}


LAYOUTS: dict[str, Layout] = {
    layout.__name__: layout
    for layout in (
        verl, numina, big_math, intellect3, dolci, deepcoder_lcb,
        gpqa, mmmu, mmmu_pro_vision, mathvista, livecodebench, olympiadbench,
        humaneval, mbpp, ifeval, ifeval_loose, bfcl,
    )
}  # fmt: skip


def converted(layout: Layout, row: Row, where: str) -> Row | None:
    """One row with the fields of docs/data.md.

    Raises:
        InputError: the row does not have this layout; the message begins with `where`.
    """
    try:
        return layout(row)
    except (
        LookupError, SyntaxError, TypeError, ValueError, AttributeError, RecursionError,
        OverflowError,
    ) as error:  # fmt: skip
        raise InputError(
            f"{where}: not a row of the layout {layout.__name__!r}: {error}; the row has "
            f"{', '.join(sorted(row))}"
        ) from None


class _NoClasses(pickle.Unpickler):
    """Unpickles text and numbers, but nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"encoded tests name {module}.{name}, which text never does")


def _cases(value: Any) -> list[Row]:
    """Test cases: JSON text, possibly pickled, compressed and base64-encoded."""
    if value is None or isinstance(value, list):
        return list(value or [])
    text = str(value)
    if not text.lstrip().startswith("["):
        try:
            packed = base64.b64decode(text, validate=True)
            decoder = zlib.decompressobj()
            content = decoder.decompress(packed, MAX_DECODED_BYTES)
            if decoder.unconsumed_tail:
                raise ValueError(f"encoded tests of more than {MAX_DECODED_BYTES:,} bytes")
            text = _NoClasses(io.BytesIO(content)).load()
        except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError) as error:
            raise ValueError(f"encoded tests that cannot be decoded ({error})") from None
    return list(json.loads(text))


def _with_starter(statement: Any, row: Row) -> str:
    """LiveCodeBench's statement, with the format of its answer."""
    starter = str(row.get("starter_code") or "").strip()
    task = (
        f"Complete this Python code, and give the whole of it in one block:\n\n"
        f"```python\n{starter}\n```"
        if starter
        else "Write a Python program that reads standard input and writes standard output."
    )
    return f"{str(statement).strip()}\n\n{task}"


def _with_function(cases: list[Row], row: Row) -> list[Row]:
    """LiveCodeBench's test cases, with the function's name from the row's metadata."""
    metadata = _json_or_text(row.get("metadata"))
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    return [{**case, "fn_name": name} for case in cases]


def _need(row: Row, name: str) -> Any:
    value = row.get(name)
    if value is None:
        raise ValueError(f"no value in column {name!r}")
    return value


def _json_or_text(value: Any) -> Any:
    """The value of JSON text with a list or an object; any other value unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # a list in LaTeX, e.g. an interval
        return value


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _tests(value: Any, function: Any) -> Any:
    """Tests in a form that `data.code` reads: assertions are joined into a program."""
    if isinstance(value, list) and value and all(isinstance(x, str) for x in value):
        return {"type": "python_assert", "code": "\n".join(value) + "\n"}
    if isinstance(value, dict) and function and "fn_name" not in value:
        return {**value, "fn_name": function}
    return value
