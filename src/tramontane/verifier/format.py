r"""What a response must look like before anything else is graded (arXiv 2506.10910, section 2.2).

It starts with `<think>`, holds exactly one `<think>…</think>` pair, and its answer part (all that
follows `</think>`) has a balanced `\boxed{}` (maths) or a fenced block with a language tag (code).
Every scan here is one pass over the text: a response may be long and hostile.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tramontane.types import Domain

OPEN, CLOSE = "<think>", "</think>"

_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
# As in CommonMark: nothing else ends a line, and behind backticks no backtick may follow.
_LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n|\Z)")
_FENCE = re.compile(r" {0,3}(?:(`{3,})(?!.*`)|(~{3,}))[ \t]*([^\r\n]*)")
_TAG = re.compile(r"[A-Za-z][\w+#.-]*")


class Parsed(NamedTuple):
    """A response split into its parts; `reason` says which condition failed when not `ok`."""

    ok: bool
    reason: str
    thoughts: str
    answer: str


class Fence(NamedTuple):
    """A fenced block: its language tag (empty when there is none), body, and where it stands."""

    tag: str
    body: str
    start: int
    end: int


def check_format(response: str, domain: Domain) -> Parsed:
    """Check every condition of the format reward, in the paper's order."""
    if not response.startswith(OPEN):
        return Parsed(False, f"does not start with {OPEN}", "", "")
    if response.count(OPEN) > 1:
        return Parsed(False, f"more than one {OPEN}", "", "")
    if response.count(CLOSE) != 1:
        what = "no" if CLOSE not in response else "more than one"
        return Parsed(False, f"{what} {CLOSE}", "", "")
    thoughts, answer = response[len(OPEN) :].split(CLOSE)
    if domain == "math" and last_box(answer) is None:
        return Parsed(False, r"no balanced \boxed{} in the answer part", thoughts, answer)
    if domain == "code" and not any(f.tag for f in fences(answer)):
        reason = "no fenced block with a language tag in the answer part"
        return Parsed(False, reason, thoughts, answer)
    return Parsed(True, "", thoughts, answer)


def boxes(text: str) -> list[tuple[int, int, int]]:
    r"""All balanced `\boxed{…}` as (start, start of content, end), in the order they close."""
    found = []
    stack: list[tuple[int, int, bool]] = []
    for match in _BRACE.finditer(text):
        token = match[0]
        if token == "{" or token.startswith("\\boxed"):
            stack.append((match.start(), match.end(), token != "{"))
        elif token == "}" and stack:
            start, content, is_box = stack.pop()
            if is_box:
                found.append((start, content, match.end()))
    return found


def last_box(text: str) -> str | None:
    r"""The content of the last balanced `\boxed{…}`; of boxes within boxes, the outermost."""
    found = boxes(text)
    if not found:
        return None
    _, content, end = found[-1]
    return text[content : end - 1]


def fences(text: str) -> list[Fence]:
    """All closed fenced code blocks, as Markdown sees them: a fence's indentation, as in a list, is
    taken off the block's lines."""
    found = []
    opened: tuple[str, str, int, int, int] | None = None
    for line in _LINE.finditer(text):
        match = _FENCE.match(line[0])
        if match is None:
            continue
        marks, info = match[1] or match[2], match[3]
        if opened is None:
            tag = _TAG.match(info)
            indent = len(line[0]) - len(line[0].lstrip(" "))
            opened = (marks, tag[0] if tag else "", line.start(), line.end(), indent)
        elif marks.startswith(opened[0]) and not info.strip():
            _, tag_name, start, first, indent = opened
            body = text[first : line.start()]
            if indent:
                body = re.sub(rf"(?:^|(?<=[\r\n])) {{1,{indent}}}", "", body)
            found.append(Fence(tag_name, body, start, line.end()))
            opened = None
    return found
