"""Curves and completions as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

Row = dict[str, Any]
SHADINGS = ("log-prob", "ratio", "advantage", "version", "none")
# Colors that are read on dark and on light: the background of a token, from weak to strong.
_LOW = ("#4a2f10", "#6b4110", "#8f5512", "#b86c14")
_PLUS = ("#16351f", "#1c5130", "#226e41", "#298c53")
_MINUS = ("#3b1730", "#5a2148", "#7b2b62", "#9c367d")
_VERSIONS = ("#1f4a63", "#6b4110", "#226e41", "#7b2b62", "#5c5212", "#7a2630")
_VERDICTS = {"right": "green", "wrong": "red", "malformed": "magenta", "unscorable": "yellow"}
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille character, by column
MARGIN = 10  # columns of the labels at the left of a plot


def plot(points: Sequence[tuple[float, float]], width: int, height: int, log: bool = False) -> Text:
    """A curve in braille dots, with the ends of both axes.

    Args:
        points: (x, y); y that are not finite, or not above 0 with `log`, are left out.
        width: of the whole text, in characters.
        height: of the whole text, in lines.
        log: logarithmic y axis.
    """
    kept = [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not log)]
    if not kept:
        return Text("nothing recorded yet")
    xs, ys = zip(*kept, strict=True)
    values = [math.log10(y) for y in ys] if log else list(ys)
    columns, lines = max(4, width - MARGIN), max(2, height - 1)
    cells = [[0] * columns for _ in range(lines)]
    low, high = min(values), max(values)
    places = [
        (_place(x, min(xs), max(xs), 2 * columns), _place(v, high, low, 4 * lines))
        for x, v in zip(xs, values, strict=True)
    ]
    for before, after in zip([places[0], *places], places, strict=False):
        for x, y in _line(before, after):
            cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    labels = {0: f"{max(ys):.4g}", lines - 1: f"{min(ys):.4g}"}
    text = Text()
    for number, line in enumerate(cells):
        text.append(f"{labels.get(number, ''):>{MARGIN - 1}} ", "dim")
        text.append("".join(chr(0x2800 + cell) for cell in line) + "\n", "cyan")
    ends = f"{xs[0]:g}", f"{xs[-1]:g}"
    text.append(" " * MARGIN + ends[0] + ends[1].rjust(columns - len(ends[0])), "dim")
    return text


def _place(value: float, first: float, last: float, count: int) -> int:
    """Place of a value among `count` places from `first` to `last`."""
    return round((value - first) / (last - first) * (count - 1)) if last != first else count // 2


def _line(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    (x0, y0), (x1, y1) = start, end
    steps = max(abs(x1 - x0), abs(y1 - y0), 1)
    for n in range(steps + 1):
        yield round(x0 + (x1 - x0) * n / steps), round(y0 + (y1 - y0) * n / steps)


def shaded(tokens: Row, of: Row, kind: str) -> Text:
    """Generated tokens, each with a background by its figure.

    Args:
        tokens: `text`, `tokens_text`, `logprobs`, `log_ratios` and `versions` of a completion or of
            a turn.
        of: the completion, with `advantage` and all `versions`.
        kind: one of `SHADINGS`.
    """
    order = {v: n for n, v in enumerate(sorted({*of["versions"]}))}
    text = Text()
    if kind == SHADINGS[-1] or not tokens["tokens_text"]:
        return text.append(_printable(tokens["text"]))
    for n, piece in enumerate(tokens["tokens_text"]):
        text.append(_printable(piece), _shade(kind, tokens, of, order, n))
    return text


def _shade(kind: str, tokens: Row, of: Row, order: dict[int, int], n: int) -> str:
    if kind == "version":
        return f"on {_VERSIONS[order[tokens['versions'][n]] % len(_VERSIONS)]}"
    if kind == "log-prob":
        return _scaled(-tokens["logprobs"][n] / 4, _LOW, _LOW)  # full at a probability of 0.018
    if kind == "ratio" and tokens["log_ratios"]:
        return _scaled(tokens["log_ratios"][n] / math.log(1.5), _PLUS, _MINUS)
    if kind == "advantage" and of["advantage"] is not None:
        return _scaled(of["advantage"] / 2, _PLUS, _MINUS)
    return ""


def _scaled(value: float, plus: Sequence[str], minus: Sequence[str]) -> str:
    place = math.ceil(min(1.0, abs(value)) * len(plus) - 0.2)
    return f"on {(plus if value > 0 else minus)[place - 1]}" if place > 0 else ""


def _printable(text: str) -> str:
    """A model's text without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def _pictures(text: Text, of: Row) -> None:
    for shown in of["pictures"]:
        tokens = "" if shown["tokens"] is None else f", {shown['tokens']:,} tokens"
        text.append(f"images/{_printable(shown['file'])}{tokens}\n", "dim")


def completion(found: Row, kind: str) -> Text:
    """A completion, or a conversation turn by turn, with its rewards; as of `details.rollout`."""
    text = Text()
    _heading(text, f"update {found['update']}, completion {found['index']}")
    text.append(str(found["verdict"]), f"bold {_VERDICTS.get(found['verdict'], '')}")
    text.append(f"  reward {_number(found['reward'])}  advantage {_number(found['advantage'])}")
    text.append(f"  {found['tokens']} tokens  {found['finish_reason']}\n")
    parts = "  ".join(f"{name} {_number(value)}" for name, value in (found["parts"] or {}).items())
    text.append("  ".join(filter(None, (parts, found["reason"]))) + "\n", "dim")
    _heading(text, f"problem {found['problem_id']}")
    text.append(f"{_printable(found['prompt'] or found['problem'] or '')}\n")
    _pictures(text, found)
    text.append(f"reference: {_printable(str(found['reference']))}\n", "dim")
    for number, turn in enumerate(found["turns"] or [], 1):
        reward = "" if turn["reward"] is None else f", reward {_number(turn['reward'])}"
        _heading(text, f"model, turn {number}{reward}")
        text.append(shaded(turn, found, kind)).append("\n")
        for call in turn["calls"]:
            _heading(text, f"{call['name'] or 'a call that cannot be read'}({call['arguments']})")
            text.append(f"{_printable(call['answer'])}\n", "red" if call["error"] else "")
        for message in turn["messages"]:
            if message["role"] != "tool":
                _heading(text, message["role"])
                text.append(f"{_printable(message['content'])}\n")
            _pictures(text, message)
    if found["ending"]:
        _heading(text, f"ended: {found['ending']} {found['ending_reason'] or ''}")
    if not found["turns"]:
        _heading(text, f"completion, shaded by {kind}")
        text.append(shaded(found, found, kind)).append("\n")
    return text


def _heading(text: Text, title: str) -> None:
    text.append(f"\n{_printable(title)}\n" if text else f"{_printable(title)}\n", "bold underline")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
