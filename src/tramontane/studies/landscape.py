"""Landscape: reward and length of models on the plane of a run's principal components, around its
final checkpoint (Magistral, arXiv 2506.10910, its analysis).

    OUT/plane.json      the plane, and the settings of the evaluations
    OUT/direction_1/    c_1 as weights; direction_2/ likewise
    OUT/points.jsonl    a line for each evaluated point
    OUT/landscape.md    the page, with its plots
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tramontane.errors import InputError
from tramontane.evaluation.checkpoint import SamplingOptions, evaluate_checkpoint, settings_for
from tramontane.studies.length import LengthLaw, fit_length
from tramontane.studies.plane import (
    Plane,
    files_of,
    principal_plane,
    trajectory,
    write_directions,
    write_point,
)
from tramontane.studies.series import Series
from tramontane.workplace import read_log, write_whole

MARGIN = 0.25  # of the trajectory's extent, around it on each side
OnPoint = Callable[[int, int], None]  # points evaluated, points in all


@dataclass(frozen=True)
class Grid:
    """Points of the plane that are evaluated.

    Args:
        points: number of points along each axis.
        ranges: (α_1 from, to, α_2 from, to) relative to the final checkpoint, in units of the
            Euclidean norm of weights; None: around the trajectory. The paper: about −0.5 to 1.5,
            and −0.6 to 0.3, without its unit.
    """

    points: int = 7
    ranges: tuple[float, float, float, float] | None = None

    def axes(self, plane: Plane) -> tuple[np.ndarray, np.ndarray]:
        """Values of α_1 and of α_2: float64, [points] each.

        Raises:
            InputError: fewer than three points, or an empty range.
        """
        if self.points < 3:
            raise InputError(f"{self.points} points along each axis; contours take 3")
        if self.ranges is None:
            low, high = plane.coordinates.min(0), plane.coordinates.max(0)
            margin = MARGIN * (high - low)
            low, high = low - margin, high + margin
        else:
            low, high = np.array(self.ranges).reshape(2, 2).T
        if not (low < high).all():
            raise InputError(f"the range from {low.tolist()} to {high.tolist()} is empty")
        first, second = (np.linspace(a, b, self.points) for a, b in zip(low, high, strict=True))
        return first, second


@dataclass(frozen=True)
class Landscape:
    """A plane and the figures of its points.

    Args:
        updates: of each checkpoint.
        plane: the two directions, and the checkpoints' places on them.
        axes: values of α_1 and of α_2.
        reward: mean raw reward, without the length penalty: [α_2, α_1].
        tokens: mean tokens of a completion: [α_2, α_1].
        law: raw reward against log length over all points.
        direction: unit vector on the plane along which the length grows fastest (a linear fit).
        correlation: correlation of the raw reward with the log of the length, over all points.
    """

    updates: tuple[int, ...]
    plane: Plane
    axes: tuple[np.ndarray, np.ndarray]
    reward: np.ndarray
    tokens: np.ndarray
    law: LengthLaw
    direction: np.ndarray
    correlation: float


def landscape(
    run: Path,
    out: Path,
    grid: Grid,
    options: SamplingOptions,
    on_point: OnPoint = lambda done, total: None,
) -> Landscape:
    """Evaluate the plane of a run's checkpoints, with the run's own settings; points evaluated by
    an earlier call are kept.

    Args:
        run: a run folder with at least two checkpoints and its starting model, or three.
        out: folder of the result.
        grid: the points.
        options: sampling, if different from the run's evaluations. The paper uses a fixed set of
            512 prompts with 16 completions each.
        on_point: called after each point.

    Raises:
        InputError: too few checkpoints, an invalid option, or a landscape with different settings
            in `out`.
    """
    found = trajectory(run)
    plane = _plane(run, out, found.updates, found.folders)
    axes = grid.axes(plane)
    _check_same(out, {"options": dict(options), "axes": [axis.tolist() for axis in axes]})
    directions = [out / "direction_1", out / "direction_2"]
    places = [(i, j) for j in range(grid.points) for i in range(grid.points)]
    done = {(row["i"], row["j"]): row for row in read_log(out / "points.jsonl")}
    on_point(len(done), len(places))
    for i, j in places:
        if (i, j) in done:
            continue
        place = (float(axes[0][i]), float(axes[1][j]))
        write_point(found.folders[-1], directions, place, point := out / "point")
        row = {"i": i, "j": j, "place": place, **_measure(run, point, options)}
        with (out / "points.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
        done[i, j] = row
        on_point(len(done), len(places))
    shutil.rmtree(out / "point", ignore_errors=True)
    return _result(found.updates, plane, axes, [done[place] for place in places])


def _plane(run: Path, out: Path, updates: Sequence[int], folders: Sequence[Path]) -> Plane:
    """The plane and its directions in `out`, computed once.

    Raises:
        InputError: a plane of different checkpoints in `out`.
    """
    file = out / "plane.json"
    checkpoints = {
        "run": str(run.resolve()),
        "updates": list(updates),
        "files": [files_of(folder) for folder in folders],
    }
    if file.is_file():
        content = json.loads(file.read_text())
        if {key: content.get(key) for key in checkpoints} != checkpoints:
            raise InputError(
                f"{out}: of other checkpoints than those that {run} has now; name another folder, "
                f"or remove it"
            )
        return Plane(*(np.array(content[k]) for k in ("mixtures", "coordinates", "explained")))
    plane = principal_plane(folders)
    write_directions(folders, plane, out)
    arrays = {key: value.tolist() for key, value in vars(plane).items()}
    write_whole(file, json.dumps(checkpoints | arrays, indent=1) + "\n")
    return plane


def _check_same(out: Path, settings: dict[str, Any]) -> None:
    file = out / "settings.json"
    if file.is_file() and json.loads(file.read_text()) != settings:
        raise InputError(
            f"{out}: evaluated with different settings; name another folder, or remove its "
            f"settings.json and points.jsonl"
        )
    write_whole(file, json.dumps(settings, indent=1) + "\n")


def _measure(run: Path, point: Path, options: SamplingOptions) -> dict[str, float]:
    """Figures of the model of one point, on the run's held-out problems."""
    settings = settings_for(str(point), None, run / "config.yaml", [], options)
    rows_file = point / "completions.jsonl"
    result = evaluate_checkpoint(settings, write_to=rows_file)
    rewards = [row["reward"] - row["parts"].get("length", 0.0) for row in read_log(rows_file)]
    return {
        "reward": float(np.mean(rewards)),
        "tokens": result.mean_completion_tokens,
        "pass_at_1": result.pass_at_1.value,
    }


def _result(
    updates: tuple[int, ...],
    plane: Plane,
    axes: tuple[np.ndarray, np.ndarray],
    rows: Sequence[dict[str, Any]],
) -> Landscape:
    reward, tokens = (np.array([row[key] for row in rows]) for key in ("reward", "tokens"))
    logs = np.log(tokens)
    places = np.array([row["place"] for row in rows])
    centred = places - places.mean(0)
    gradient = np.linalg.lstsq(centred, tokens - tokens.mean(), rcond=None)[0]
    size = len(axes[0])
    return Landscape(
        updates=updates,
        plane=plane,
        axes=axes,
        reward=reward.reshape(size, size),
        tokens=tokens.reshape(size, size),
        law=fit_length([Series(tokens, reward)]),
        direction=gradient / max(float(np.linalg.norm(gradient)), 1e-12),
        correlation=float(np.corrcoef(logs, reward)[0, 1]) if np.ptp(logs) else np.nan,
    )
