r"""How many of one unit make another: 1 L is 1000 cm^3, and 72 km/h are 20 m/s.

Only exact factors are here. Temperatures have no common zero, so they are not converted, and
bytes, bushels and the like, which differ by country or trade, equal only themselves.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

_PREFIXES = {
    "T": 12, "G": 9, "M": 6, "k": 3, "h": 2, "da": 1, "": 0, "d": -1, "c": -2, "m": -3, "µ": -6,
    "n": -9, "p": -12,
}  # fmt: skip
# By dimension, in a base unit. `{…}` takes the prefixes.
_TABLE = """
m: {m} 1, in 0.0254, ft 0.3048, yd 0.9144, mi 1609.344
g: {g} 1, t 1000000, lb 453.59237, oz 28.349523125
s: {s} 1, min 60, h 3600, day 86400, week 604800
m^3: {L} 0.001
m^2: ha 10000
J: {J} 1, {Wh} 3600, {cal} 4.184
year: month 1/12, year 1, decade 10, century 100
cup: cup 1, pt 2, qt 4, gal 16
tsp: tsp 1, tbsp 3
usd: usd 1, cent 0.01
deg: deg 1, arcminute 1/60, arcsecond 1/3600
W: {W} 1
N: {N} 1
Pa: {Pa} 1
V: {V} 1
A: {A} 1
Hz: {Hz} 1
Ω: {Ω} 1
C: {C} 1
F: {F} 1
mol: {mol} 1
eV: {eV} 1
"""
_MONEY = {("usd", 1), ("eur", 1)}  # both have cents


def _read_table() -> dict[str, tuple[Fraction, str, int]]:
    units = {}
    for line in _TABLE.strip().splitlines():
        base, _, entries = line.partition(": ")
        dimension, _, power = base.partition("^")
        for entry in entries.split(", "):
            name, factor = entry.split()
            for prefix, exponent in _PREFIXES.items() if name[0] == "{" else (("", 0),):
                scale = Fraction(factor) * Fraction(10) ** exponent
                units[prefix + name.strip("{}")] = (scale, dimension, int(power or 1))
    return units


_UNITS = _read_table()
_FACTOR = re.compile(r"([^·^]+)(?:\^(-?\d+))?")


@lru_cache(maxsize=1024)
def measure(unit: str) -> tuple[Fraction, frozenset[tuple[str, int]]]:
    """A unit's size in base units, and its dimension: (1/1000, {(m, 3)}) for `L`. A unit that is
    not in the table is a dimension of its own.

    Args:
        unit: a canonical name, as `units.split_unit` gives it: `km·h^-1`.
    """
    size, powers = Fraction(1), dict[str, int]()
    for name, exponent in _FACTOR.findall(unit):
        scale, dimension, power = _UNITS.get(name, (Fraction(1), name, 1))
        raised = int(exponent or 1)
        size *= scale**raised
        powers[dimension] = powers.get(dimension, 0) + power * raised
    return size, frozenset((name, power) for name, power in powers.items() if power)


def ratio(unit: str, other: str) -> Fraction | None:
    """How many of `other` make one `unit`: 1000 for `km` and `m`; None for different
    dimensions."""
    (size, dimension), (other_size, other_dimension) = measure(unit), measure(other)
    if dimension != other_dimension and not (
        "cent" in (unit, other) and dimension | other_dimension == _MONEY
    ):
        return None
    return size / other_size


def units_of(unit: str) -> list[str]:
    """All units of one name that a quantity in `unit` may be in, itself first."""
    if unit not in _UNITS:
        return [unit]
    dimension = _UNITS[unit][1:]
    return [unit, *(name for name, (_, *other) in _UNITS.items() if tuple(other) == dimension)]


def is_known(unit: str) -> bool:
    """True for a unit of measurement that is in the table."""
    return unit in _UNITS
