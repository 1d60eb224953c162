"""The page of a comparison: figures side by side, tests, calibration, and some transcripts."""

from __future__ import annotations

from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

from tramontane.oversight.config import OversightConfig, cast_of
from tramontane.oversight.elo import Rating
from tramontane.oversight.questions import LETTERS
from tramontane.oversight.transcript import Transcript
from tramontane.workplace import write_whole

if TYPE_CHECKING:
    from tramontane.oversight.compare import Comparison

SHOWN = 2  # transcripts of each arm: the first right and the first wrong verdict


def write_page(config: OversightConfig, comparison: Comparison, path: Path) -> None:
    """Write the page as one HTML file without scripts."""
    source = resources.files("tramontane.oversight").joinpath("page.html.j2").read_text("utf-8")
    environment = Environment(
        undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(source).render(
        name=config.name,
        source=config.questions.source,
        permutations=config.permutations,
        rows=[_row(config, comparison, name) for name in comparison.figures],
        faults=comparison.faults,
        tests=[
            {"arm": second, "against": first, "test": comparison.tests[first, second]}
            for first, second in combinations(config.arms, 2)
            if (first, second) in comparison.tests
        ],
        elo=[
            (ratings.arms, kind, _sorted(group))
            for ratings in comparison.elo
            for kind, groups in (("model", ratings.models), ("model, side", ratings.sides))
            for group in groups
        ],
        languages=_languages(comparison),
        samples={name: _samples(found) for name, found in comparison.transcripts.items()},
        letters=LETTERS,
    )
    write_whole(path, page)


def _row(config: OversightConfig, comparison: Comparison, name: str) -> dict[str, Any]:
    arm = config.arms[name]
    return {
        "name": name,
        "protocol": arm.protocol,
        "cast": ", ".join(
            model if role == model else f"{role}: {model}" for role, model in cast_of(arm).items()
        ),
        "figures": comparison.figures[name],
    }


def _sorted(ratings: dict[str, Rating]) -> list[tuple[str, Rating]]:
    return sorted(ratings.items(), key=lambda item: -item[1].value)


def _languages(comparison: Comparison) -> list[str]:
    return sorted({code for found in comparison.figures.values() for code in found.by_language})


def _samples(transcripts: list[Transcript]) -> list[Transcript]:
    """The first discussion that ended with the right verdict, and the first with a wrong one."""
    judged = [t for t in transcripts if not t.fault and t.verdict is not None]
    firsts = [next((t for t in judged if t.judged_right is right), None) for right in (True, False)]
    return [t for t in firsts if t is not None][:SHOWN]
