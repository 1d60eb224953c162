r"""The format that a response must have before it is graded (arXiv 2506.10910, section 2.2).

It starts with the opening thinking tag, has exactly one pair of thinking tags, and its answer part
(the text after the closing tag) has a balanced `\boxed{}` (math) or a fenced block with a language
tag (code). The tags are `<think>` and `</think>` in the paper, and configurable here. White space
before the opening tag is ignored, since some chat templates write it and others leave it to the
model. Other domains may require a regular expression, JSON with a schema, or nothing
(`config.FormatConfig`).

Every scan is a single pass over the text, since a response may be long and hostile.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, NoReturn

from tramontane.config import FormatConfig
from tramontane.types import PAPER_TAGS, ThinkingTags

_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
# As in CommonMark: only these end a line, and no backtick may follow an opening of backticks.
_LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n|\Z)")
_FENCE = re.compile(r" {0,3}(?:(`{3,})(?!.*`)|(~{3,}))[ \t]*([^\r\n]*)")
_TAG = re.compile(r"[A-Za-z][\w+#.-]*")


class Parsed(NamedTuple):
    """A response split into its parts; `reason` names the failed condition when not `ok`.

    `answer` is the answer part, `extracted` the part of it passed to a verifier.
    """

    ok: bool
    reason: str
    thoughts: str
    answer: str
    extracted: Any = None


class Fence(NamedTuple):
    """A fenced block: its language tag (may be empty), body, and position in the text."""

    tag: str
    body: str
    start: int
    end: int


def check_format(response: str, form: FormatConfig, tags: ThinkingTags = PAPER_TAGS) -> Parsed:
    """Check every condition of a domain's format, thoughts first, as in the paper.

    If a condition fails, the readable parts are still returned.
    """
    parsed = split_thoughts(response, tags, required=form.needs_thoughts)
    if not form.has_conditions:
        thoughts, answer = (parsed.thoughts, parsed.answer) if parsed.ok else ("", response)
        return Parsed(True, "", thoughts, answer, answer)
    if not parsed.ok:
        return parsed
    reason, extracted = _extract(parsed.answer, form)
    return parsed._replace(ok=not reason, reason=reason, extracted=extracted)


def split_thoughts(response: str, tags: ThinkingTags, *, required: bool) -> Parsed:
    """Split a response into thoughts and answer part.

    Unless thoughts are `required`, a response without any tag is all answer.
    """
    opening, closing = tags
    if not required and opening not in response and closing not in response:
        return Parsed(True, "", "", response)
    response = response.lstrip()
    if not response.startswith(opening):
        return Parsed(False, f"does not start with {opening}", "", "")
    if response.count(opening) > 1:
        return Parsed(False, f"more than one {opening}", "", "")
    if response.count(closing) != 1:
        count = "no" if closing not in response else "more than one"
        return Parsed(False, f"{count} {closing}", "", "")
    thoughts, answer = response[len(opening) :].split(closing)
    return Parsed(True, "", thoughts, answer)


def _extract(answer: str, form: FormatConfig) -> tuple[str, Any]:
    """The condition that an answer part fails (empty if none), and what its verifier receives."""
    if form.regex is not None:
        match = None
        for match in re.finditer(form.regex, answer):  # noqa: B007 (the last one counts)
            pass
        if match is None:
            return "no match of the domain's regular expression in the answer part", None
        names = match.re.groupindex
        return "", match["answer" if "answer" in names else 1 if match.re.groups else 0]
    if form.json_schema is not None:
        blocks = fences(answer)
        return _read_json(blocks[-1].body if blocks else answer, form.json_schema)
    if form.answer == "boxed":
        box = last_box(answer)
        return (r"no balanced \boxed{} in the answer part" if box is None else ""), box
    if form.answer == "fenced":
        blocks = fences(answer)
        if not any(block.tag for block in blocks):
            return "no fenced block with a language tag in the answer part", None
        return "", blocks[0].body
    return "", answer


def _read_json(text: str, schema: dict[str, Any]) -> tuple[str, Any]:
    """The condition of a JSON schema that a text fails (empty if none), and the parsed value.

    The reason names the place and the schema's keyword, not the value, so that equal errors of
    different completions can be counted together.

    Raises:
        Exception: the schema refers to another document, which is never fetched.
    """
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return "no JSON in the answer part", None
    registry: Registry[Any] = Registry()  # the default one reads from the network
    errors = validator_for(schema)(schema, registry=registry).iter_errors(value)
    if (error := best_match(errors)) is not None:
        return f"JSON does not fit the schema at {error.json_path} ({error.validator})", None
    return "", value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def sample(form: FormatConfig, content: str, tags: ThinkingTags = PAPER_TAGS) -> str:
    """A response in a domain's format, with `content` as its answer if the format allows it; empty
    if none is found, which may happen for a regular expression or a schema."""
    thoughts = tags.around("I think about it.")
    answers = [content]
    if form.answer == "boxed":
        answers = [f"The answer is \\boxed{{{content}}}."]
    elif form.answer == "fenced":
        answers = [f"```python\n{content}\n```"]
    elif form.regex is not None:
        answers += ["0", "a", _like(form.regex, content), _like(form.regex, "0")]
    elif form.json_schema is not None:
        answers += [json.dumps(_instance(form.json_schema))]
    texts = (f"{thoughts}{gap}{answer}" for answer in answers for gap in ("\n", ""))
    return next((text for text in texts if check_format(text, form, tags).ok), "")


def _like(regex: str, content: str) -> str:
    """A text that a simple regular expression matches, with `content` for each group."""
    text = re.sub(r"\((?!\?)[^()]*\)|\(\?P<[^()]*\)", lambda _: content, regex)
    text = re.sub(r"\(\?:[^()]*\)[?*]?", "", text)
    text = re.sub(r"\\s[*+?]?", " ", text)
    text = re.sub(r"\\[dw][*+]?|\.[*+]", "0", text)
    return re.sub(r"\\(\W)|[\^$]", r"\1", text)


def _instance(schema: Any) -> Any:
    """The simplest value of a simple JSON schema."""
    if not isinstance(schema, dict):
        return None
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    properties = schema.get("properties", {})
    names = schema.get("required", ())
    simple: dict[Any, Any] = {
        "object": {name: _instance(properties.get(name, {"type": "string"})) for name in names},
        "array": [_instance(schema.get("items"))] * schema.get("minItems", 0),
        "string": "a" * schema.get("minLength", 1),
        "integer": schema.get("minimum", 0),
        "number": schema.get("minimum", 0),
        "boolean": False,
    }
    return simple.get(schema.get("type", "object" if properties else None))


def thinking_text(response: str, tags: ThinkingTags = PAPER_TAGS) -> str:
    """The text between the thinking tags of a response.

    A missing opening tag is assumed at the start, a missing closing tag at the end. Without either
    tag there are no thoughts.
    """
    opening, closing = tags
    if opening not in response and closing not in response:
        return ""
    start = response.find(opening)
    body = response[start + len(opening) :] if start >= 0 else response
    return body.partition(closing)[0]


def split_response(response: str, tags: ThinkingTags = PAPER_TAGS) -> tuple[str, str]:
    """The thoughts of a response with their tags, and the rest; no thoughts without a closing
    tag."""
    thoughts, closing, rest = response.partition(tags.closing)
    return (thoughts + closing, rest) if closing else ("", response)


def boxes(text: str) -> list[tuple[int, int, int]]:
    r"""(start, start of content, end) of each balanced `\boxed{…}`, in the order they close."""
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
    r"""The content of the last balanced `\boxed{…}`; the outermost of nested boxes."""
    found = boxes(text)
    if not found:
        return None
    _, content, end = found[-1]
    return text[content : end - 1]


def fences(text: str) -> list[Fence]:
    """All closed fenced code blocks, as in Markdown.

    A block inside a list is indented: the indentation of its opening is removed from its lines.
    """
    found = []
    opening: Fence | None = None  # the position of its opening line alone
    opened, indent = "", 0
    for line in _LINE.finditer(text):
        match = _FENCE.match(line[0])
        if match is None:
            continue
        marks, info = match[1] or match[2], match[3]
        if opening is None:
            tag = _TAG.match(info)
            opened, indent = marks, len(line[0]) - len(line[0].lstrip(" "))
            opening = Fence(tag[0] if tag else "", "", line.start(), line.end())
        elif marks.startswith(opened) and not info.strip():
            body = text[opening.end : line.start()]
            if indent:
                body = re.sub(rf"(?:^|(?<=[\r\n])) {{1,{indent}}}", "", body)
            found.append(opening._replace(body=body, end=line.end()))
            opening = None
    return found
