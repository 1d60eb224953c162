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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from tramontane.errors import InputError
from tramontane.evaluation.checkpoint import evaluate_checkpoint
from tramontane.evaluation.settings import SamplingOptions, settings_for
from tramontane.journals import Journal, check_same, read_log
from tramontane.pages import render
from tramontane.studies.analyses import draw_law, write_analysis
from tramontane.studies.fits import LengthLaw, Series, fit_length
from tramontane.studies.plane import (
    Plane,
    files_of,
    principal_plane,
    trajectory,
    write_directions,
    write_point,
)
from tramontane.studies.plots import COLOURS, new_figure, save
from tramontane.workplace import owned_folder, write_whole

MARGIN = 0.25  # of the trajectory's extent, around it on each side
Ranges = tuple[float, float, float, float]
OnPoint = Callable[[int, int], None]  # points evaluated, points in all


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


def study_landscape(
    run: str | Path,
    *,
    points: int = 7,
    ranges: Ranges | None = None,
    sampling: SamplingOptions | None = None,
    out: str | Path | None = None,
    on_point: OnPoint = lambda done, total: None,
) -> Landscape:
    """Evaluate the plane of a run's principal components, with the run's own settings; write
    `landscape.md` and its plots.

    Args:
        run: a run folder with its checkpoints (`checkpoint.every`, `checkpoint.keep`): three, or
            two and the model that it began with.
        points: number of points along each axis.
        ranges: (α_1 from, to, α_2 from, to) relative to the final checkpoint, in units of the
            Euclidean norm of weights; None: around the trajectory. The paper: about −0.5 to 1.5,
            and −0.6 to 0.3, without its unit.
        sampling: sampling of a point, if different from the run's evaluations. The paper uses a
            fixed set of 512 prompts with 16 completions each.
        out: folder of the result; None: `RUN/landscape`. Existing points are kept.
        on_point: called with (points evaluated, points in all).

    Raises:
        InputError: too few checkpoints, fewer than three points, an empty range, an invalid
            option, or a landscape of different checkpoints or settings in `out`.
    """
    run = Path(run)
    folder = Path(out) if out else run / "landscape"
    with owned_folder(folder, "drawn as a landscape"):
        checkpoints = trajectory(run)
        plane = _plane(run, folder, checkpoints)
        axes = _axes(plane, points, ranges)
        final = checkpoints[max(checkpoints)]
        rows = _evaluate(run, folder, final, axes, sampling or {}, on_point)
        found = _result(tuple(checkpoints), plane, axes, rows)
        _draw(found, folder)
        content = {
            "axes": [axis.tolist() for axis in found.axes],
            "reward": found.reward.tolist(),
            "tokens": found.tokens.tolist(),
            "direction": found.direction.tolist(),
            "correlation": found.correlation,
            "law": asdict(found.law),
        }
        laws = {run.name: found.law}
        text = render("studies/landscape.md.j2", found=found, name=run.name, laws=laws)
        write_analysis(folder, "landscape", text, content)
    return found


def _axes(plane: Plane, points: int, ranges: Ranges | None) -> tuple[np.ndarray, np.ndarray]:
    """Values of α_1 and of α_2: float64, [points] each."""
    if points < 3:
        raise InputError(f"{points} points along each axis; contours take 3")
    if ranges is None:
        low, high = plane.coordinates.min(0), plane.coordinates.max(0)
        margin = MARGIN * (high - low)
        low, high = low - margin, high + margin
    else:
        low, high = np.array(ranges).reshape(2, 2).T
    if not (low < high).all():
        raise InputError(f"the range from {low.tolist()} to {high.tolist()} is empty")
    first, second = np.linspace(low, high, points).T
    return first, second


def _evaluate(
    run: Path,
    out: Path,
    final: Path,
    axes: tuple[np.ndarray, np.ndarray],
    options: SamplingOptions,
    on_point: OnPoint,
) -> list[dict[str, Any]]:
    """A row for each point, α_1 first."""
    settings = {"options": dict(options), "axes": [axis.tolist() for axis in axes]}
    record, remedy = out / "settings.json", "name another folder, or remove both files"
    check_same(out / "points.jsonl", record, settings, remedy)
    write_whole(record, json.dumps(settings, indent=1) + "\n")
    directions = [out / "direction_1", out / "direction_2"]
    numbers = range(len(axes[0]))
    places = [(i, j) for j in numbers for i in numbers]
    with Journal(out / "points.jsonl") as journal:
        done = {(row["i"], row["j"]): row for row in journal}
        on_point(len(done), len(places))
        for i, j in places:
            if (i, j) in done:
                continue
            place = (float(axes[0][i]), float(axes[1][j]))
            write_point(final, directions, place, point := out / "point")
            row = {"i": i, "j": j, "place": place, **_measure(run, point, options)}
            journal.add(row)
            done[i, j] = row
            on_point(len(done), len(places))
    shutil.rmtree(out / "point", ignore_errors=True)
    return [done[place] for place in places]


def _plane(run: Path, out: Path, found: Mapping[int, Path]) -> Plane:
    file, folders = out / "plane.json", [*found.values()]
    checkpoints = {
        "run": str(run.resolve()),
        "updates": list(found),
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


def _measure(run: Path, point: Path, options: SamplingOptions) -> dict[str, float]:
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
    centered = places - places.mean(0)
    gradient = np.linalg.lstsq(centered, tokens - tokens.mean(), rcond=None)[0]
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


def _draw(found: Landscape, folder: Path) -> None:
    figure, (reward, tokens) = new_figure(2, 3.6)
    _contours(reward, found, found.reward, "raw reward")
    _contours(tokens, found, found.tokens, "tokens of a completion")
    save(figure, folder / "landscape.svg")
    figure, (axes,) = new_figure()
    axes.scatter(found.tokens.ravel(), found.reward.ravel(), s=14, color=COLOURS[0])
    draw_law(axes, found.law, color=COLOURS[1])
    save(figure, folder / "length.svg")


def _contours(axes: Axes, found: Landscape, values: np.ndarray, title: str) -> None:
    axes.grid(False)
    filled = axes.contourf(*found.axes, values, levels=12, cmap="viridis")
    axes.figure.colorbar(filled, ax=axes, shrink=0.85)
    places = found.plane.coordinates
    axes.plot(*places.T, color="white", linewidth=2.4)
    axes.plot(*places.T, "o-", color="#c03a2b", linewidth=1.1, markersize=3)
    axes.plot(0, 0, "*", color="#c03a2b", markeredgecolor="white", markersize=13)
    extents = np.array([np.ptp(axis) for axis in found.axes])
    size = 0.25 * float((extents / np.maximum(np.abs(found.direction), 1e-9)).min())
    axes.annotate(
        "",
        xy=tuple(size * found.direction),
        xytext=(0, 0),
        arrowprops={"arrowstyle": "->", "color": "white", "linewidth": 1.6},
    )
    axes.set_xlabel("α₁")
    axes.set_ylabel("α₂")
    axes.set_title(title, loc="left", fontsize=10)
