"""The Berkeley Function-Calling Leaderboard: its files, and their rows as problems."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tramontane.data.files import read_rows, require_file
from tramontane.errors import InputError
from tramontane.verifier.calls import expected_calls

Row = dict[str, Any]

ANSWERS = "possible_answer"
_TASK = """\
{question}

You can call these functions, described in JSON:

{functions}

Answer with the calls that the task needs, and nothing else, as a list in Python's syntax with the
name of every argument: [name(argument=value, …), …]"""


def bfcl_rows(source: str) -> Iterator[tuple[str, Row]]:
    """(location, row) of every question, and its `ground_truth`. `datasets` cannot load the files:
    each category is a file of questions, with the answers in a file of the same name in
    `possible_answer/`.

    Args:
        source: a local file of questions, or `REPOSITORY#FILE` on the hub.

    Raises:
        InputError: no such files, a damaged file, or a question without an answer.
    """
    questions, answers = _files(source)
    accepted = {}
    for where, row in read_rows(str(answers)):
        if row.get("id") is None or row.get("ground_truth") is None:
            raise InputError(f"{where}: an answer needs `id` and `ground_truth`")
        accepted[str(row["id"])] = row["ground_truth"]
    for where, row in read_rows(str(questions)):
        name = str(row.get("id"))
        if name not in accepted:
            raise InputError(f"{where}: {answers} has no answer for id {name!r}")
        yield where, {**row, "ground_truth": accepted[name]}


def bfcl(row: Row) -> Row:
    """A question with one turn as a problem of the domain `calls`: functions and answer format are
    part of the statement, so that the system prompt can be the same as in training.

    Raises:
        ValueError: a row with a different layout or several turns, or one whose expected calls are
            impossible.
    """
    turns: Any = row.get("question")
    functions: Any = row.get("function")
    if not isinstance(turns, list) or len(turns) != 1 or not all(map(_is_message, turns[0])):
        raise ValueError("`question` must be a list of one turn, a list of chat messages")
    if isinstance(functions, str):  # JSON text in some tables
        functions = json.loads(functions)
    if isinstance(functions, dict):
        functions = [functions]
    expected_calls({**row, "function": functions})
    question = "\n\n".join(message["content"].strip() for message in turns[0])
    listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    return {
        "id": row.get("id"),
        "problem": _TASK.format(question=question, functions=listed),
        "domain": "calls",
        "language": "en",
        "function": functions,
        "ground_truth": row["ground_truth"],
    }


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("content"), str)


def _files(source: str) -> tuple[Path, Path]:
    """Local paths of the files of questions and answers."""
    name, _, file = source.partition("#")
    if not file:
        questions = Path(source).expanduser()
        answers = questions.parent / ANSWERS / questions.name
        require_file(questions)
        require_file(answers)
        return questions, answers
    from huggingface_hub import hf_hub_download

    try:
        found = [
            Path(hf_hub_download(name, part, repo_type="dataset"))
            for part in (file, f"{ANSWERS}/{file}")
        ]
    except Exception as error:
        # The hub's client raises many types; all mean that the files are not available.
        raise InputError(
            f"data {source!r}: the hub's files cannot be fetched ({type(error).__name__}: "
            f"{error}); give local files: NAME@{file}, with the answers in {ANSWERS}/{file} next "
            f"to it"
        ) from error
    return found[0], found[1]
