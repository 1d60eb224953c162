"""The page of a comparison: figures side by side, tests, calibration, and some transcripts."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

from tramontane.pages import render
from tramontane.workplace import write_whole
from tramontane_oversight.config import OversightConfig, cast_of
from tramontane_oversight.figures import Comparison
from tramontane_oversight.transcript import LETTERS, Transcript


def write_page(config: OversightConfig, comparison: Comparison, path: Path) -> None:
    """Write the page as one HTML file without scripts."""
    page = render(
        Path(__file__).with_name("page.html.j2"),
        title=config.name,
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
            (ratings.arms, kind, sorted(group.items(), key=lambda item: -item[1].value))
            for ratings in comparison.elo
            for kind, groups in (("model", ratings.models), ("model, side", ratings.sides))
            for group in groups
        ],
        languages=sorted({c for found in comparison.figures.values() for c in found.by_language}),
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


def _samples(transcripts: list[Transcript]) -> list[Transcript]:
    """The first discussion that ended with the right verdict, and the first with a wrong one."""
    judged = [t for t in transcripts if not t.fault and t.verdict is not None]
    firsts = [next((t for t in judged if t.judged_right is right), None) for right in (True, False)]
    return [t for t in firsts if t is not None]
