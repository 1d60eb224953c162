"""Problems whose data is drawn: sums in several hands, bar charts, shapes, clocks, tables, mazes.

Each exists in words too (`bars` beside `drawn_bars`; of one seed, the same problems), so that what
is seen and what is reasoned can be told apart. Pillow draws, with its own font or by the strokes
of a hand: a picture is the same on every machine that has the same Pillow. What is written stands
on squared paper, a character in a square, so that a small tower can learn to read it.
"""

from __future__ import annotations

import io
import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

from tramontane.models.images import data_uri, pillow

from .arithmetic import Step, chain, expression
from .language import Language, pick

DRAWN = "drawn_"  # before the name of a kind
SIDE = 112  # pixels of a picture
SQUARE = 14  # pixels of a square
SQUARES = SIDE // SQUARE  # in a row
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
PRINTED = 0.4  # share of the hands that are print
# Strokes of written characters: points in a box of 4 by 6, two digits each.
STROKES = {
    "0": "10 30 41 45 36 16 05 01 10",
    "1": "02 20 26",
    "2": "01 10 30 41 42 06 46",
    "3": "00 40 23 33 44 45 36 16 05",
    "4": "30 04 44,32 36",
    "5": "40 00 02 32 43 45 36 06",
    "6": "30 10 03 05 16 36 45 44 33 03",
    "7": "00 40 16",
    "8": "10 30 41 32 12 01 10,12 04 05 16 36 45 44 32",
    "9": "43 13 02 01 10 30 41 43 36 16",
    "+": "03 43,21 25",
    "-": "03 43",
    "*": "11 35,15 31,03 43",
    "/": "06 40",
    "(": "30 12 14 36",
    ")": "10 32 34 16",
}


class Glyph(NamedTuple):
    """A character in a square."""

    char: str
    row: int
    column: int


class Drawing(NamedTuple):
    """A drawn problem."""

    question: str
    words: str  # what the picture shows
    answer: str
    draw: Draw  # all but what is written
    canonical: str  # what decides its split: what is shown, in no language
    written: Sequence[Glyph]
    ink: str
    hand: float  # who writes, from 0 to 1
    steps: Sequence[Step]  # of arithmetic from what is seen to the answer; empty if it takes more

    @property
    def in_words(self) -> str:
        """The same problem as text."""
        return f"{self.words}\n{self.question}"

    def image(self) -> Any:
        """The picture as a PIL image, on paper of some color."""
        Image, ImageDraw, _ = pillow()
        image = Image.new("RGB", (SIDE, SIDE), pick(Random(self.words), PAPERS))
        on = ImageDraw.Draw(image)
        self.draw(on)
        _write(self.written, self.hand, self.ink, on)
        return image

    def picture(self) -> str:
        """The picture as a data URI."""
        file = io.BytesIO()
        self.image().save(file, "PNG")
        return data_uri(file.getvalue())


def draw(rng: Random, kind: str, lang: Language, level: int) -> Drawing:
    """A problem of a kind, drawn or in words. Its picture is not made yet."""
    kind = kind.removeprefix(DRAWN)
    scene = _SCENES[kind](rng, level - 1)
    words, slots = scene.words, scene.slots
    if kind == "shapes":
        words = ", ".join(lang.shapes[name] for name in words.split(", "))
        slots = {"shape": lang.shapes[slots["shape"]]}
    return Drawing(
        question=lang.drawings[kind].format(**slots),
        words=words,
        answer=str(scene.answer),
        draw=scene.draw,
        canonical=scene.words,
        written=scene.written,
        ink=scene.ink,
        hand=scene.hand,
        steps=scene.steps,
    )


class Scene(NamedTuple):
    """A drawing in no language."""

    words: str
    answer: int
    draw: Draw
    ink: str
    slots: Mapping[str, str] = MappingProxyType({})  # of the question
    written: Sequence[Glyph] = ()
    hand: float = 0.0
    steps: Sequence[Step] = ()


def _sum(rng: Random, place: int) -> Scene:
    steps = chain(rng, place + 1)
    formula = expression(steps)
    lines = [""]
    for word in re.findall(r"\d+|[^ ]", formula):
        if len(lines[-1] + word) > SQUARES:
            lines.append("")
        lines[-1] += word
    pitch = max(1, SQUARES // (2 * len(lines)))
    top = int((SQUARES - pitch * (len(lines) - 1)) * rng.random())
    left = int((SQUARES - max(map(len, lines)) + 1) * rng.random())
    written = [
        glyph for row, line in enumerate(lines) for glyph in _line(line, top + pitch * row, left)
    ]
    return Scene(
        formula,
        steps[-1][3],
        lambda on: None,
        pick(rng, INKS),
        written=written,
        hand=rng.random(),
        steps=steps,
    )


def _line(text: str, row: int, left: int) -> list[Glyph]:
    return [Glyph(char, row, left + place) for place, char in enumerate(text)]


def _write(written: Sequence[Glyph], hand: float, ink: str, on: Any) -> None:
    """Write characters in their squares, in print or by strokes. Each hand has its size, slant and
    pen, and its own way off the middle of a square."""
    rng = Random(hand)
    _, _, fonts = pillow()
    size, slant, pen = rng.random(), rng.uniform(-0.25, 0.25), 1 + int(2 * rng.random())
    font = fonts.load_default(12 + int(4 * size))
    for char, row, column in written:
        x = SQUARE * (column + 0.5) + rng.uniform(-1.5, 1.5)
        y = SQUARE * (row + 0.5) + rng.uniform(-1.5, 1.5)
        if hand < PRINTED or char not in STROKES:
            on.text((x, y), char, ink, font=font, anchor="mm")
            continue
        unit = 1.4 + 0.4 * size
        for stroke in STROKES[char].split(","):
            points = [(int(point[0]) - 2, int(point[1]) - 3) for point in stroke.split()]
            line = [
                (x + unit * (a - slant * b) + rng.uniform(-0.5, 0.5), y + unit * b)
                for a, b in points
            ]
            on.line(line, ink, pen, "curve")


def _bars(rng: Random, place: int) -> Scene:
    names = NAMES[: BARS[place]]
    values = {name: 1 + int(TALLEST[place] * rng.random()) for name in names}
    low, high = sorted(rng.sample(names, 2), key=lambda name: values[name])
    words = ", ".join(f"{name}: {value}" for name, value in values.items())
    ink, answer = pick(rng, INKS), values[high] - values[low]
    width = (SIDE - SQUARE) / len(values)
    return Scene(
        words,
        answer,
        partial(_chart, [*values.values()], TALLEST[place], ink),
        ink,
        slots={"a": high, "b": low},
        written=[
            Glyph(name, SQUARES - 1, int(1 + (number + 0.5) * width / SQUARE))
            for number, name in enumerate(names)
        ],
        steps=[(values[high], "-", values[low], answer)],
    )


def _chart(values: list[int], top: int, ink: str, on: Any) -> None:
    _, _, fonts = pillow()
    foot = SIDE - SQUARE
    width, unit = foot / len(values), (foot - 8) / top
    for number, value in enumerate(values):
        left = SQUARE + number * width
        on.rectangle((left + 2, foot - value * unit, left + width - 3, foot), fill=ink)
    for value in range(0, top + 1, 1 if top <= 9 else 5):
        y = foot - value * unit
        on.line((10, y, SIDE, y), "gray")
        on.text((0, y - 6), str(value), "black", font=fonts.load_default(8))


def _shapes(rng: Random, place: int) -> Scene:
    count = 2 + int((COUNTED[place] - 1) * rng.random())
    kinds = [pick(rng, SHAPES) for _ in range(count)]
    asked = pick(rng, SHAPES)
    places = rng.sample(range(25), count)
    inks = [pick(rng, INKS) for _ in kinds]
    drawn = partial(_scatter, [*zip(kinds, places, inks, strict=True)])
    return Scene(", ".join(kinds), kinds.count(asked), drawn, inks[0], {"shape": asked})


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
    ink = pick(rng, INKS)
    return Scene(words, time, partial(_face, time, ink), ink)


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
    across, down = _edges(len(columns)), _edges(len(lines))
    written: list[Glyph] = []
    for row, line in enumerate(lines):
        for column, text in enumerate(line):
            left = across[column] + (across[column + 1] - across[column] - 1) // 2
            written += _line(text, down[row] + (down[row + 1] - down[row] - 1) // 2, left)
    steps: list[Step] = []
    total = cells[0][asked]
    for cell in (line[asked] for line in cells[1:]):
        steps.append((total, "+", cell, total + cell))
        total += cell
    return Scene(
        words,
        total,
        partial(_grid, across, down),
        pick(rng, INKS),
        slots={"column": columns[asked]},
        written=written,
        hand=rng.random(),
        steps=steps,
    )


def _edges(parts: int) -> list[int]:
    """Squares at which the rows or columns of a table begin, and its end."""
    return [SQUARES * part // parts for part in range(parts + 1)]


def _grid(across: list[int], down: list[int], on: Any) -> None:
    for square in across:
        on.line((SQUARE * square, 0, SQUARE * square, SIDE), "gray")
    for square in down:
        on.line((0, SQUARE * square, SIDE, SQUARE * square), "gray")


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
    ink = pick(rng, INKS)
    return Scene("\n".join(lines), steps, partial(_walls, lines, ink), ink)


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
