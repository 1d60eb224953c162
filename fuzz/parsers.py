"""Checks of the parsers: properties that must hold for every text.

A check calls a parser on texts and asserts. Only errors that the parser's docstring names may pass.
`make fuzz` runs the checks in `TARGETS`, guided by coverage; the property tests
(tests/verifier/test_properties.py) run them on texts that hypothesis draws.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import NamedTuple

from fuzz.neighbors import CLASSES, function_tests
from fuzz.vocabulary import ANSWERS, CALLS, FORMS, ODD_VALUES, PART, RESPONSES, ROWS
from tramontane.config import BUILT_IN, DataConfig, VerifierConfig
from tramontane.data.load import load_problems
from tramontane.environments.calls import MAX_CALLS, Parser
from tramontane.errors import InputError
from tramontane.evaluation.score import parse_row
from tramontane.types import PAPER_TAGS, Problem
from tramontane.verifier import language
from tramontane.verifier.code import sandbox
from tramontane.verifier.code.functions import doing_nothing
from tramontane.verifier.code.grade import draw_tests, same_output, time_limit
from tramontane.verifier.code.grade import judge as judge_program
from tramontane.verifier.code.inside import records, wire
from tramontane.verifier.format import boxes, check_format, fences, last_box
from tramontane.verifier.math.grade import can_judge, judge_answer
from tramontane.verifier.math.normalize import normalize, vote
from tramontane.verifier.math.numbers import to_number
from tramontane.verifier.math.units import split_unit
from tramontane.verifier.math.wording import chosen
from tramontane.verifier.reward import grade

PARSE_SECONDS = 1.0  # processor time for a response of maximum length
RESPONSE_LENGTH = 100_000
JUDGE_SECONDS = 5.0  # limit for the verdict on any answer


def check_boxes(text: str) -> None:
    found = boxes(text)
    for start, content, end in found:
        assert text.startswith(r"\boxed", start) and text[content - 1] == "{"
        assert content < end <= len(text) and text[end - 1] == "}"
        inside = text[content : end - 1].replace("\\\\", "")
        inside = re.sub(r"\\.", "", re.sub(r"\\boxed\s*\{", "{", inside), flags=re.DOTALL)
        assert inside.count("{") == inside.count("}")
    assert [end for *_, end in found] == sorted({end for *_, end in found})
    for (a, _, b), (c, _, d) in itertools.pairwise(found):
        assert b <= c or c < a < b < d, "boxes overlap without one holding the other"
    last = last_box(text)
    assert last == (text[found[-1][1] : found[-1][2] - 1] if found else None)
    if last is not None:
        assert last_box(f"{text} and so on") == last


LINE = r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+\Z"


def check_fences(text: str) -> None:
    position = 0
    for tag, body, start, end in fences(text):
        assert position <= start < end <= len(text)
        assert start == 0 or text[start - 1] in "\r\n", "a fence begins within a line"
        assert re.match(r" {0,3}(```|~~~)", text[start:end])
        assert not re.search(r"\s", tag)
        # The body is what lies between the first and the last line, less the fence's indentation.
        between = re.findall(LINE, text[start:end])[1:-1]
        for line, in_body in zip(between, re.findall(LINE, body), strict=True):
            indentation = line.removesuffix(in_body)
            assert line.endswith(in_body) and re.fullmatch(" {0,3}", indentation)
        position = end


def check_parsed(text: str) -> None:
    for domain in ("math", "code"):
        ok, reason, thoughts, answer, _ = check_format(text, BUILT_IN[domain].format)
        assert ok != bool(reason)
        if ok:
            assert text.lstrip() == PAPER_TAGS.around(thoughts) + answer
            assert last_box(answer) is not None if domain == "math" else fences(answer)


def check_normalize(text: str) -> None:
    spelt = normalize(text)
    assert spelt == spelt.strip()
    # A verdict records the normalized answer, which is normalized again when votes are counted.
    assert vote(spelt) == vote(text), (spelt, vote(spelt), vote(text))
    number = to_number(spelt)
    if number is not None:
        assert abs(number.numerator) < 10**900 and number.denominator < 10**900
        if number.denominator == 1 and len(str(number)) < 300:
            assert to_number(normalize(str(number))) == number
    assert len(split_unit(spelt)[0]) <= len(spelt)


def check_prediction(text: str) -> None:
    for reference in _some_answers(text):
        outcome = _judge(text, reference)
        assert outcome != "unscorable" or not can_judge(reference), "an answer made it unscorable"


def check_reference(text: str) -> None:
    for prediction in _some_answers(text):
        _judge(prediction, text)


def _some_answers(text: str) -> list[str]:
    return random.Random(text).sample(ANSWERS, 3)


def check_pair(prediction: str, reference: str) -> None:
    outcome = _judge(prediction, reference)
    if "$" not in prediction and prediction.strip() and len(prediction) < 900:
        assert _judge(f" ${prediction.strip()}$ ", reference) == outcome, "dollars change it"


def check_same(text: str) -> None:
    """An answer is not wrong for itself, unless the judge gives a reason."""
    outcome, reason, *_ = judge_answer(text, text)
    assert outcome != "wrong" or reason not in ("", "not the reference"), reason


def check_variation(text: str) -> None:
    """An addition that changes an answer is not accepted: a factor that might be read as a unit,
    an alternative, a word. A wrong answer is unscorable only where every wrong answer is."""
    if not (text.strip() and len(text) < 200) or judge_answer(text, text).outcome != "right":
        return
    known = judge_answer("\\zeta + 2.71", text).outcome != "unscorable"
    draw = random.Random(text)
    spelt = normalize(text)
    if (number := to_number(spelt)) is not None:
        letters = draw.choice(
            ["xy", "mn", " a b", r"\mathbf{i}", r"\hat{k}", " L W", " sin x", "k"]
        )
        word = draw.choice(["thirds", "doubled", "gross", "negative", "hundredths", "or so"])
        other = draw.choice([" or 77", r" \approx 777777", r", 77", r" \lor 77"])
        # These leave 0 what it is.
        multiples = (letters, rf" \text{{ {word}}}", f" {word}", r" \text{ mod } 1")
        for changed in (*(multiples if number else ()), other):
            assert _judge(f"{spelt}{changed}", text) != "right", changed
            assert not known or _judge(f"{spelt}{changed}", text) == "wrong", changed
        assert not number or _judge(spelt, f"{spelt}{letters}") != "right", letters
        assert _judge("x", rf"x \approx {spelt}") == "wrong"
    elif known:
        assert _judge("77777", text) != "unscorable"


def _check_neighbors(name: str, text: str) -> None:
    for reference, answer, is_right in CLASSES[name](random.Random(text)):
        outcome = _judge(answer, reference)
        assert outcome == ("right" if is_right else "wrong"), (reference, answer, outcome)


def check_function_tests(text: str) -> None:
    """A program that returns None for everything passes no tests."""
    code, statement, entry_point = function_tests(random.Random(text))
    tests = {"type": "python_assert", "code": code, "entry_point": entry_point}
    problem = Problem(text, "code", statement, tests=tests)
    program = doing_nothing(problem) or "f = lambda x: None"
    judged = judge_program(f"```python\n{program}\n```", problem, SANDBOXED)
    assert judged.outcome != "right", (code, judged)


SANDBOXED = VerifierConfig(code_timeout_s=20.0, allow_unsandboxed=True)


def check_numbers(left: str, right: str) -> None:
    a, b = (to_number(normalize(side)) for side in (left, right))
    if a is None or b is None:
        return
    outcomes = _judge(left, right), _judge(right, left)
    if a == b:
        assert outcomes == ("right", "right"), outcomes
    elif not re.search("[.,٫、。．，]", left + right):  # no rounding, no decimal comma
        assert "right" not in outcomes, outcomes
    assert _judge(str(a.numerator + a.denominator), str(a.numerator)) == "wrong"


def _judge(prediction: str, reference: str) -> str:
    outcome, reason, answer, share = judge_answer(prediction, reference)
    assert outcome in ("right", "wrong", "unscorable")
    assert (outcome == "right") == (not reason) == bool(share)
    pred = normalize(prediction)
    shown = pred, chosen(normalize(reference), pred)  # `C` of `(C) 6`
    # Thousands are written without commas where they were read so.
    assert answer is None or answer in (*shown, *(text.replace(",", "") for text in shown))
    return outcome


def check_grade(response: str, reference: str, statement: str) -> None:
    """All axes together: `grade` must not raise, nor reward an answer that it cannot judge."""
    problem = Problem("p", "math", statement, reference)
    verdict = grade(problem, response, 10, VerifierConfig(), 100, 50)
    assert verdict.verdict in ("right", "wrong", "unscorable", "malformed")
    assert verdict.reward == sum(verdict.parts.values())
    assert verdict.reward <= {"right": 1.1, "wrong": 0.2 + 1e-9}.get(verdict.verdict, 0.0)
    assert bool(verdict.reason) == (verdict.verdict != "right")


def check_language(problem: str, thoughts: str, answer: str) -> None:
    for text in (problem, thoughts, answer):
        assert len(language.strip(text)) <= len(text)
        target = language.detect(text)
        for name in {target or "en", "en", "zh"}:
            assert 0 <= language.on_target_share(text, name) <= 1
    language.consistent(problem, thoughts, answer)
    language.consistent(problem, thoughts, answer, "fr")


def check_tests(id_: str, output: str, other: str) -> None:
    data = output.encode(errors="surrogatepass")
    printed = data.decode(errors="replace")
    for tests in ({}, {"checker": "float"}, {"checker": "lines"}, {"ignore_case": True}):
        assert same_output(printed.encode(), printed, tests)
        same_output(data, other, tests)
    known = other.encode(errors="replace").decode()
    assert same_output(printed.encode(), known, {}) == same_output(known.encode(), printed, {})
    cases = [{"input": str(i), "output": ""} for i in range(len(output) % 40)]
    problem = Problem(id_, "code", "", tests={"type": "stdio", "cases": cases})
    drawn = draw_tests(problem, 20)
    assert drawn == draw_tests(problem, 20) == sorted(drawn, key=lambda case: case[0])
    assert len({number for number, _ in drawn}) == min(20, len(cases))


def check_calls(text: str) -> None:
    """In each form, a message has calls that can be recorded, each with a name or an error."""
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
    tokenizer = SimpleNamespace(chat_template=None)
    for form in FORMS:
        message = Parser(tokenizer, form, PAPER_TAGS).parse(text, tools)  # type: ignore[arg-type]
        assert message.text == text and len(message.calls) <= MAX_CALLS
        for call in message.calls:
            assert bool(call.name) != call.error
            json.dumps([call.name, call.arguments], ensure_ascii=False).encode()


def check_row(text: str) -> None:
    """A line of `score`'s input: parsing before the pool's workers have it, recording after."""
    try:
        problem, (response, tokens, *_) = parse_row(text)
    except InputError:
        return
    assert isinstance(response, str) and isinstance(tokens, int)
    assert 0 < time_limit(problem, VerifierConfig()) < float("inf")
    written = json.dumps({"id": problem.id}, ensure_ascii=False).encode(errors="backslashreplace")
    assert json.loads(written) == {"id": problem.id}


def check_odd_row(text: str) -> None:
    """A row with the right fields and values of wrong types; each character chooses a value."""
    choices = [ODD_VALUES[ord(c) % len(ODD_VALUES)] for c in text[:12].ljust(12)]
    tests = dict(zip(("cases", "checker", "float_tolerance", "code"), choices, strict=False))
    tests["type"] = ("stdio", "python_assert", choices[4])[len(text) % 3]
    row = dict(zip(_FIELDS, choices[4:], strict=True))
    row["domain"] = ("math", "code", choices[5])[text.count("a") % 3]
    row["tests"] = (tests, json.dumps(tests), choices[6])[text.count("b") % 3]
    for good in ({}, {"id": "a", "problem": "1+1?", "response": "<think>", "answer": "2"}):
        line = json.dumps(row | good)
        check_row(line)
        check_file(line, "")


def check_file(text: str, name: str) -> None:
    """Rows of training data: problems that can be recorded, or an `InputError`."""
    data = text.encode(errors="surrogatepass")
    if zipped := "z" in name:
        data = gzip.compress(data, mtime=0)
        data = data[: len(data) - name.count("<")] + name.encode(errors="replace")[:8]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl.gz" if zipped else "rows.jsonl")
        path.write_bytes(data)
        try:
            problems = load_problems(
                str(path), DataConfig(train="playground:"), split="train", limit=None, seed=0
            )
        except InputError:
            return
    assert problems and len({p.id for p in problems}) == len(problems)
    for problem in problems:
        assert problem.problem.strip() and (problem.tests if problem.domain == "code" else True)
        json.dumps(vars(problem))
        time_limit(problem, VerifierConfig())


def check_records(text: str) -> None:
    """Bytes from a sandbox, which may have been killed while it wrote a record."""
    ready = records.RECORD.pack(records.READY, 0, 0, 0.0, 0.0, 0.0)
    data = ready + text.encode("utf-8", "surrogatepass")
    reading, writing = os.pipe()
    os.write(writing, data[:60_000])
    os.close(writing)
    limits = [sandbox.Limits(0.02, 300)] * 3
    try:
        results = list(sandbox.Results(reading, limits, keep_going=False))
    finally:
        os.close(reading)
    assert 1 <= len(results) <= 3
    assert all(not result.failure for result in results[:-1])
    assert sum(len(x.output) + records.RECORD.size for x in results[:-1]) <= len(data)


def check_wire(text: str) -> None:
    """A message from a program to its tests: a plain value that can be sent back, or garbage."""
    kept = object()

    def resolve(tag: int, number: int) -> object:
        return kept

    def refer(value: object) -> tuple[int, int]:
        assert value is kept, "an object came out of bytes"
        return wire.MINE, 0

    try:
        value = wire.decode(text.encode("latin-1", "replace"), resolve)
    except wire.Garbage:
        return
    data = wire.encode(value, refer)
    again = wire.decode(data, resolve)
    assert type(again) is type(value) and len(wire.encode(again, refer)) == len(data)


def check_growth(before: str, repeated: str, after: str) -> None:
    """Scans of a response of maximum length, full of repetition, take PARSE_SECONDS at most."""
    repeated = repeated or " "
    text = before + repeated * (RESPONSE_LENGTH // len(repeated)) + after
    response = f"<think></think>{text}"
    scans: list[Callable[[str], object]] = [
        boxes, fences, vote, language.strip, language.detect,
        lambda t: check_format(f"<think></think>{t}", BUILT_IN["math"].format),
        lambda t: language.on_target_share(t, "fr"),
        lambda t: same_output(b"1.0 2", t, {"checker": "float"}),
        lambda t: judge_answer(t, t), lambda t: split_unit(t[:1000]), lambda t: to_number(t),
    ]  # fmt: skip
    language.detect("The model is read from its file once, before the clock runs.")
    for scan in scans:
        started = time.process_time()
        scan(text)
        seconds = time.process_time() - started
        assert seconds < PARSE_SECONDS, f"{scan} took {seconds:.1f} s"
    assert check_format(response, BUILT_IN["math"].format).reason != "does not start with <think>"


_FIELDS = ("id", "problem", "answer", "response", "language", "difficulty", "source",
           "response_tokens")  # fmt: skip


class Target(NamedTuple):
    """A check, with its inputs and limits.

    `seeds` are the texts to start from, `texts` the number of texts that the check takes,
    `seconds` the longest processor time of one call, `share` its share of the fuzzing time.
    """

    check: Callable[..., None]
    seeds: list[str]
    texts: int = 1
    seconds: float = PARSE_SECONDS
    share: int = 1


DRAWN = [f"draw {i}" for i in range(9)]
_PAIRS = [f"{a}{PART}{b}" for a, b in itertools.pairwise(ANSWERS)]
_THREE = [f"{a}{PART}{b}{PART}{a}" for a in RESPONSES for b in RESPONSES]
_RECORD = records.RECORD.pack(0, 2, 0, 0.0, 0.0, 0.0) + b"7\n"
_VALUES = [
    wire.encode(value, lambda kept: (wire.MINE, 0)).decode("latin-1")
    for value in (
        None, -1, 2**70, 1.5, "x", b"x", [1, 2, 3, 4], [1.0] * 4, (1, "a"), {1, 2}, {"a": [None]},
        1j, range(3), object(), int, [[], ()], frozenset("a"), bytearray(b"b"),
    )
]  # fmt: skip
TARGETS = {
    "boxes": Target(check_boxes, RESPONSES),
    "fences": Target(check_fences, RESPONSES),
    "format": Target(check_parsed, RESPONSES),
    "normalize": Target(check_normalize, ANSWERS, share=3),
    "prediction": Target(check_prediction, ANSWERS, seconds=3 * JUDGE_SECONDS, share=4),
    "reference": Target(check_reference, ANSWERS, seconds=3 * JUDGE_SECONDS, share=3),
    "pair": Target(check_pair, _PAIRS, 2, seconds=2 * JUDGE_SECONDS, share=3),
    "same": Target(check_same, ANSWERS, seconds=JUDGE_SECONDS, share=2),
    "variation": Target(check_variation, ANSWERS, seconds=9 * JUDGE_SECONDS, share=2),
    **{
        name: Target(partial(_check_neighbors, name), DRAWN, seconds=9 * JUDGE_SECONDS, share=2)
        for name in CLASSES
    },
    "function-tests": Target(check_function_tests, DRAWN, seconds=JUDGE_SECONDS, share=2),
    "numbers": Target(check_numbers, _PAIRS, 2, seconds=3 * JUDGE_SECONDS, share=2),
    "grade": Target(check_grade, _THREE, 3, seconds=2 * JUDGE_SECONDS, share=2),
    "language": Target(check_language, _THREE, 3, seconds=3, share=2),
    "tests": Target(check_tests, [f"{a}{PART}1.0 2{PART}1 2" for a in ANSWERS], 3),
    "calls": Target(check_calls, CALLS, share=2),
    "row": Target(check_row, ROWS, share=2),
    "odd-row": Target(check_odd_row, ["a", "b" * 12, "abcdefghijkl"], share=2),
    "file": Target(check_file, ["\n".join(ROWS) + PART, ROWS[0] + PART + "z<"], 2, share=2),
    "records": Target(check_records, [(_RECORD * 3).decode()]),
    "wire": Target(check_wire, _VALUES, share=2),
    "growth": Target(check_growth, [PART.join("abc"), *_THREE[:5]], 3, seconds=12, share=3),
}  # fmt: skip


class Late(BaseException):
    """A check took too long. A `BaseException`, so that no `except Exception` hides it."""


def run(target: Target, text: str) -> None:
    """Run a check on a text, split at PART if the check takes several; missing parts are empty.

    Raises:
        Late: the check took more than its processor time. Not raised within a library's C code.
    """

    def late(signum: int, frame: FrameType | None) -> None:
        raise Late(f"more than {target.seconds:g} s of processor time")

    texts = text.split(PART, target.texts - 1)
    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, target.seconds)
    try:
        target.check(*texts, *[""] * (target.texts - len(texts)))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
