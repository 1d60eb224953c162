"""Problems whose data is drawn: sums in several hands, bar charts, shapes, clocks, tables, mazes.

Each exists in words too (`bars` beside `drawn_bars`; of one seed, the same problems), so that what
is seen and what is reasoned can be told apart. Pillow draws, with its own font: a picture is the
same on every machine that has the same Pillow.
"""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, NamedTuple

from tramontane.models.images import data_uri, pillow

from .arithmetic import chain, expression
from .language import Language, pick

DRAWN = "drawn_"  # before the name of a kind
SIDE = 112  # pixels of a picture
INKS = ("black", "navy", "darkred", "darkgreen", "purple")
PAPERS = ("white", "ivory", "lightyellow", "honeydew", "lavender")
SHAPES = ("circle", "square", "triangle")
NAMES = "ABCDEFGH"
# By level, from 1.
BARS = (2, 2, 3, 3, 4, 5, 6, 7)  # of a chart
TALLEST = (6, 9, 9, 12, 12, 15, 20, 20)  # its highest value
COUNTED = (4, 6, 8, 10, 12, 14, 16, 18)  # most shapes in a picture
MINUTES = (60, 30, 15, 10, 5, 5, 1, 1)  # step of a clock's times
ROWS = (2, 2, 3, 3, 4, 4, 5, 5)  # of a table
CELLS = (4, 5, 5, 6, 7, 8, 9, 10)  # a side of a maze

Draw = Callable[[Any], None]  # draws on a `PIL.ImageDraw`


class Drawing(NamedTuple):
    """A drawn problem."""

    question: str
    words: str  # what the picture shows
    answer: str
    draw: Draw
    canonical: str  # what decides its split: what is shown, in no language

    @property
    def in_words(self) -> str:
        """The same problem as text."""
        return f"{self.words}\n{self.question}"

    def picture(self) -> str:
        """The picture as a data URI, on paper of some color."""
        Image, ImageDraw, _ = pillow()
        image = Image.new("RGB", (SIDE, SIDE), pick(Random(self.words), PAPERS))
        self.draw(ImageDraw.Draw(image))
        file = io.BytesIO()
        image.save(file, "PNG")
        return data_uri(file.getvalue())


def draw(rng: Random, kind: str, lang: Language, level: int) -> Drawing:
    """A problem of a kind, drawn or in words. Its picture is not made yet."""
    kind = kind.removeprefix(DRAWN)
    canonical, answer, drawn, slots = _SCENES[kind](rng, level - 1)
    words = canonical
    if kind == "shapes":
        words = ", ".join(lang.shapes[name] for name in words.split(", "))
        slots = {"shape": lang.shapes[slots["shape"]]}
    question = lang.drawings[kind].format(**slots)
    return Drawing(question, words, str(answer), drawn, canonical)


Scene = tuple[
    str, int, Draw, dict[str, str]
]  # words, answer, how it is drawn, the question's slots


def _sum(rng: Random, place: int) -> Scene:
    steps = chain(rng, place + 1)
    formula = expression(steps)
    return formula, steps[-1][3], partial(_write, formula, pick(rng, INKS), rng.random()), {}


def _write(text: str, ink: str, hand: float, on: Any) -> None:
    """Write a text on lines that fit. Each hand has its size, and its own way off the line."""
    size, rng = 13 + int(6 * hand), Random(hand)
    _, _, fonts = pillow()
    font, x, y = fonts.load_default(size), 4.0, 6.0
    for word in text.replace("(", " (").replace(")", ") ").split():
        width = font.getlength(word)
        if x + width > SIDE - 4 and x > 4:
            x, y = 4.0, y + 1.4 * size
        for char in word:
            on.text((x, y + 3 * hand * (rng.random() - 0.5)), char, ink, font=font)
            x += font.getlength(char)
        x += font.getlength(" ")


def _bars(rng: Random, place: int) -> Scene:
    names = NAMES[: BARS[place]]
    values = {name: 1 + int(TALLEST[place] * rng.random()) for name in names}
    low, high = sorted(rng.sample(names, 2), key=lambda name: values[name])
    words = ", ".join(f"{name}: {value}" for name, value in values.items())
    drawn = partial(_chart, values, TALLEST[place], pick(rng, INKS))
    return words, values[high] - values[low], drawn, {"a": high, "b": low}


def _chart(values: dict[str, int], top: int, ink: str, on: Any) -> None:
    _, _, fonts = pillow()
    font, width, unit = fonts.load_default(11), (SIDE - 16) / len(values), (SIDE - 26) / top
    for number, (name, value) in enumerate(values.items()):
        left, foot = 14 + number * width, SIDE - 14
        on.rectangle((left + 2, foot - value * unit, left + width - 3, foot), fill=ink)
        on.text((left + width / 2 - 4, SIDE - 13), name, "black", font=font)
    for value in range(0, top + 1, 1 if top <= 9 else 5):
        y = SIDE - 14 - value * unit
        on.line((10, y, SIDE, y), "gray")
        on.text((0, y - 6), str(value), "black", font=fonts.load_default(8))


def _shapes(rng: Random, place: int) -> Scene:
    count = 2 + int((COUNTED[place] - 1) * rng.random())
    kinds = [pick(rng, SHAPES) for _ in range(count)]
    asked = pick(rng, SHAPES)
    places = rng.sample(range(25), count)
    inks = [pick(rng, INKS) for _ in kinds]
    drawn = partial(_scatter, [*zip(kinds, places, inks, strict=True)])
    return ", ".join(kinds), kinds.count(asked), drawn, {"shape": asked}


def _scatter(shapes: list[tuple[str, int, str]], on: Any) -> None:
    for kind, place, ink in shapes:
        x, y = 14 + 21 * (place % 5), 14 + 21 * (place // 5)
        if kind == "circle":
            on.ellipse((x - 7, y - 7, x + 7, y + 7), fill=ink)
        else:
            sides, turn = (4, 45) if kind == "square" else (3, 0)
            on.regular_polygon((x, y, 9), sides, turn if kind == "triangle" else 0, fill=ink)


def _clock(rng: Random, place: int) -> Scene:
    step = MINUTES[place]
    time = step * int(720 / step * rng.random())
    words = f"{time // 60 or 12}:{time % 60:02}"
    return words, time, partial(_face, time, pick(rng, INKS)), {}


def _face(time: int, ink: str, on: Any) -> None:
    middle, radius = SIDE / 2, SIDE / 2 - 6

    def hand(turn: float, start: float, end: float, width: int) -> None:
        x, y = math.sin(2 * math.pi * turn), -math.cos(2 * math.pi * turn)
        ends = [middle + at * radius * axis for at in (start, end) for axis in (x, y)]
        on.line(ends, ink, width)

    on.ellipse((6, 6, SIDE - 6, SIDE - 6), outline=ink, width=2)
    for hour in range(12):
        hand(hour / 12, 0.88 if hour % 3 else 0.78, 1, 2)
    hand(time / 720, 0, 0.5, 4)
    hand(time % 60 / 60, 0, 0.8, 2)


def _table(rng: Random, place: int) -> Scene:
    columns, rows = NAMES[: 2 + place // 3], ROWS[place]
    cells = [[1 + int(9 * (1 + place) * rng.random()) for _ in columns] for _ in range(rows)]
    asked = int(len(columns) * rng.random())
    lines = [[*columns], *([str(cell) for cell in row] for row in cells)]
    words = "\n".join(" ".join(line) for line in lines)
    answer = sum(row[asked] for row in cells)
    return words, answer, partial(_grid, lines, pick(rng, INKS)), {"column": columns[asked]}


def _grid(lines: list[list[str]], ink: str, on: Any) -> None:
    _, _, fonts = pillow()
    font, width, height = (
        fonts.load_default(12),
        (SIDE - 8) / len(lines[0]),
        (SIDE - 8) / len(lines),
    )
    for row, line in enumerate(lines):
        for column, text in enumerate(line):
            x, y = 4 + column * width, 4 + row * height
            on.rectangle((x, y, x + width, y + height), outline="gray")
            on.text((x + 4, y + height / 2 - 7), text, ink if row else "black", font=font)


def _maze(rng: Random, place: int) -> Scene:
    """A maze whose ways are as wide as a cell; the answer is the length of the shortest."""
    side = CELLS[place]
    while True:
        walls = {(x, y) for x in range(side) for y in range(side) if rng.random() < 0.3}
        walls -= {(0, 0), (side - 1, side - 1)}
        if (steps := _shortest(walls, side)) is not None:
            break
    signs = {(0, 0): "S", (side - 1, side - 1): "G", **dict.fromkeys(walls, "#")}
    lines = ["".join(signs.get((x, y), ".") for x in range(side)) for y in range(side)]
    return "\n".join(lines), steps, partial(_walls, lines, pick(rng, INKS)), {}


def _shortest(walls: set[tuple[int, int]], side: int) -> int | None:
    """Steps from the first cell to the last; None without a way."""
    seen, queue = {(0, 0)}, deque([((0, 0), 0)])
    while queue:
        (x, y), steps = queue.popleft()
        if (x, y) == (side - 1, side - 1):
            return steps
        for cell in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
            if cell not in seen | walls and min(cell) >= 0 and max(cell) < side:
                seen.add(cell)
                queue.append((cell, steps + 1))
    return None


def _walls(lines: list[str], ink: str, on: Any) -> None:
    _, _, fonts = pillow()
    side, font = (SIDE - 8) / len(lines), fonts.load_default(10)
    for row, line in enumerate(lines):
        for column, sign in enumerate(line):
            x, y = 4 + column * side, 4 + row * side
            fill = ink if sign == "#" else None
            on.rectangle((x, y, x + side, y + side), outline="gray", fill=fill)
            if sign in "SG":
                on.text((x + side / 2 - 3, y + side / 2 - 6), sign, "black", font=font)


_SCENES: dict[str, Callable[[Random, int], Scene]] = {
    "sums": _sum,
    "bars": _bars,
    "shapes": _shapes,
    "clocks": _clock,
    "tables": _table,
    "mazes": _maze,
}
IN_WORDS = tuple(kind for kind in _SCENES if kind != "sums")  # `generate` has sums of its own
KINDS = tuple(f"{DRAWN}{kind}" for kind in _SCENES)
