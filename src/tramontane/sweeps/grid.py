"""The cells of a sweep: values of config keys, all combinations or some drawn at random."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, floor, log
from random import Random
from typing import Any

from tramontane.errors import InputError

SEED = "seed"
DIGITS = 3  # significant digits of a drawn number
MAX_DRAWS = 1000  # for each cell, until one differs from the others
MAX_PART = 60  # characters of a value in a folder's name
MAX_CELL = 150  # bytes of the whole name
_RANGE = re.compile(r"(log:)?([-+.\deE]+)\.\.([-+.\deE]+)")
_OPEN, _CLOSE = "[{(", "]})"


@dataclass(frozen=True)
class Axis:
    """A key and its values, as texts in YAML.

    Args:
        key: dotted path of a config key.
        values: the values; empty for a range.
        ends: ends of a range of numbers.
        log: draw the logarithm uniformly.
    """

    key: str
    values: tuple[str, ...] = ()
    ends: tuple[str, str] | None = None
    log: bool = False

    def draw(self, random: Random) -> str:
        """One of the values, or a number of the range: whole if both ends are."""
        if self.ends is None:
            return random.choice(self.values)
        low, high = map(float, self.ends)
        whole = all(re.fullmatch(r"[-+]?\d+", end) for end in self.ends)
        top = high + whole  # of whole numbers, both ends are as likely as the others
        value = exp(random.uniform(log(low), log(top))) if self.log else random.uniform(low, top)
        return str(min(floor(value), int(high))) if whole else f"{value:.{DIGITS}g}"


def axis_of(text: str) -> Axis:
    """The axis of `key=value,value,…`, or of `key=LOW..HIGH` and `key=log:LOW..HIGH`.

    Commas inside brackets or quotes belong to a value: `data.playground.levels=[1,2],[3,4]` has
    two values. A quote is one at the beginning of a text, as in YAML.

    Raises:
        InputError: not of this form.
    """
    key, separator, given = text.partition("=")
    if not (separator and key and given):
        raise InputError(f"{text!r}: write it as key=value,value, e.g. seed=0,1,2")
    if match := _RANGE.fullmatch(given):
        return _range(text, key, (match[2], match[3]), bool(match[1]))
    values = _split(text, given)
    if "" in values:
        raise InputError(f"{text!r}: an empty value; remove a comma")
    if twice := [value for value, count in Counter(values).items() if count > 1]:
        raise InputError(f"{text!r}: {twice[0]} is given twice; remove one")
    return Axis(key, tuple(values))


def _range(text: str, key: str, ends: tuple[str, str], in_log: bool) -> Axis:
    try:
        low, high = map(float, ends)
    except ValueError:
        raise InputError(f"{text!r}: the ends of a range are numbers, LOW..HIGH") from None
    if low >= high or (in_log and low <= 0):
        positive = " and above 0" if in_log else ""
        raise InputError(f"{text!r}: the ends of a range must be in order{positive}")
    return Axis(key, ends=ends, log=in_log)


def _split(text: str, given: str) -> list[str]:
    parts, opened, quote = [""], "", ""
    for character in given:
        if character == "," and not opened and not quote:
            parts.append("")
            continue
        parts[-1] += character
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and parts[-1][:-1].rstrip()[-1:] in (
            "",
            *_OPEN,
            ",",
            ":",
            character,
        ):
            quote = character  # inside a word it is an apostrophe; doubled, part of a text
        elif character in _OPEN:
            opened += character
        elif character in _CLOSE:
            if not opened or _OPEN.index(opened[-1]) != _CLOSE.index(character):
                raise InputError(f"{text!r}: {character} without {_OPEN[_CLOSE.index(character)]}")
            opened = opened[:-1]
    if opened or quote:
        raise InputError(f"{text!r}: {opened[-1:] or quote} is not closed")
    return [part.strip() for part in parts]


def cells_of(
    axes: Sequence[Axis], random: int | None = None, draw_seed: int = 0
) -> list[dict[str, str]]:
    """The values of each cell by key.

    Args:
        axes: the keys; each once.
        random: number of cells to draw, each of which runs with every seed (`seed`) that is given;
            None: all combinations. The first cells of a larger number are the same.
        draw_seed: of the draws.

    Raises:
        InputError: a key given twice, a range without `random`, or more cells than there are.
    """
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise InputError(f"{key}: given twice; give all its values at once, {key}=a,b")
    ranges = [axis for axis in axes if axis.ends]
    if ranges and (random is None or any(axis.key == SEED for axis in ranges)):
        of = "--random N draws from a range" if random is None else "seed: give its values"
        raise InputError(f"{ranges[0].key}: {of}; or give values, {ranges[0].key}=a,b")
    if random is None:
        combinations = product(*(axis.values for axis in axes))
        return [dict(zip(keys, values, strict=True)) for values in combinations]
    drawn = [axis for axis in axes if axis.key != SEED]
    seeds = next((axis.values for axis in axes if axis.key == SEED), None)
    cells = _drawn(drawn, random, Random(draw_seed))
    return [cell | {SEED: seed} for cell in cells for seed in seeds] if seeds else cells


def _drawn(axes: Sequence[Axis], count: int, random: Random) -> list[dict[str, str]]:
    """Different cells, in the order of their draws."""
    if count < 1:
        raise InputError(f"--random {count}: draw at least 1")
    drawn_cells: dict[tuple[str, ...], None] = {}
    for _ in range(count * MAX_DRAWS):
        drawn_cells[tuple(axis.draw(random) for axis in axes)] = None
        if len(drawn_cells) == count:
            break
    else:
        raise InputError(
            f"--random {count}: there are no more than {len(drawn_cells)} different cells without "
            f"their seeds: give keys more values, or ranges (LOW..HIGH)"
        )
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, values, strict=True)) for values in drawn_cells]


def cell_name(axes: Sequence[Axis], values: Mapping[str, Any]) -> str:
    """The name of a cell and its folder: `learning_rate=0.0001,seed=0`, of the keys that vary.

    Args:
        axes: the keys of the sweep.
        values: the cell's values by key: those of the config, which are the same however they were
            written, or texts.
    """
    varying = [axis.key for axis in axes if axis.ends or len(axis.values) > 1]
    last = {key: key.rpartition(".")[2] for key in varying}
    same = Counter(last.values())
    names = {key: key if same[name] > 1 else name for key, name in last.items()}
    name = ",".join(f"{names[key]}={_part(values[key])}" for key in varying) or "only"
    return name if len(name.encode()) <= MAX_CELL else f"{name[:MAX_PART]}-{_digest(name)}"


def _part(value: Any) -> str:
    text = f"{value:.15g}" if isinstance(value, float) else str(value)
    clean = re.sub(r"[^\w.+-]+", "-", text)
    if clean == text and len(text) <= MAX_PART:
        return text
    return f"{clean.strip('-')[:MAX_PART]}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
