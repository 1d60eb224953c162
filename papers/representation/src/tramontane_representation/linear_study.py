"""The study `byol-linear`: the three methods on random symmetric dynamics.

An arm is a method, a seed is a set of random dynamics and random starts. All arms of a seed share
both, so that they can be compared draw by draw. Source: arXiv 2406.02035.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from tramontane.config import Section, key_error, parse
from tramontane_representation.dynamics import Family, draw_dynamics, draw_start, orthonormal
from tramontane_representation.linear import (
    FUNCTIONS,
    METHODS,
    Method,
    flow,
    function_error,
    low_rank_error,
    named_eigenspace,
    objective_bound,
    subspace_distance,
    trace_objective,
)

TIE = 1e-6  # relative difference of objectives below which both methods count as best
SAME_SPAN = 0.05  # sine of the largest angle, below which two spans are the same
RECORDED_TIMES = 40


class LinearSettings(Section):
    """Keys of an arm of `byol-linear`."""

    method: Method
    """Method whose representation is measured."""
    family: Family = "sinkhorn"
    """Family of the dynamics used to measure objectives and errors."""
    draws: int = Field(100, ge=2)
    """Number of random dynamics."""
    starts: int = Field(8, ge=1)
    """Starts per dynamics; the best end by the method's own objective counts."""
    shared_starts: int = Field(128, ge=1)
    """The same for dynamics with shared eigenvectors, used to measure convergence."""
    time: float = Field(150.0, gt=0)
    """Length of the flow; `limits` scales it for each draw."""
    states: int = Field(10, ge=2)
    """Number of states."""
    actions: int = Field(4, ge=2)
    """Number of actions; with one, BYOL-Π and BYOL-AC would be the same."""
    width: int = Field(4, ge=1)
    """Columns of Φ."""
    discount: float = Field(0.0, ge=0, lt=1)
    """γ of the value functions; 0: of one step."""

    @model_validator(mode="after")
    def _fits(self) -> LinearSettings:
        if self.width > self.states:
            raise key_error(
                f"{self.width} columns of Φ are more than its {self.states} rows: width may be "
                f"{self.states} at most",
                "width",
                "states",
            )
        return self


def run_arm(keys: dict[str, Any], seed: int, folder: Path) -> dict[str, float]:
    """Measures of one method on one set of draws; writes the path of the flow to `metrics.jsonl`.

    Returns:
        `objective_METHOD`: mean trace objective, for each of the three. `fit_METHOD`: mean squared
        error of the low-rank fit. `value`, `q`, `advantage`: mean squared error of the best linear
        fit of the functions, summed over states. `wins`: share of draws in which no other
        method ends at a higher value of this method's objective; `wins_one_start`: the same
        with one start. `gram_drift`: largest change of an entry of ΦᵀΦ. On dynamics with shared
        eigenvectors: `shared_span`, share of draws that end at a span of eigenvectors;
        `shared_named`, share that end at the method's eigenspace; `shared_named_one_start`; and
        `shared_bound`, mean of the objective divided by its maximum.

    Raises:
        InputError: invalid keys.
    """
    settings = parse(LinearSettings, keys, "study byol-linear")
    dynamics = _draw(settings, settings.family, seed)
    every = {m: _ends(m, dynamics, settings, settings.starts, seed) for m in METHODS}
    best = {m: best_start(m, dynamics, ends) for m, ends in every.items()}
    method, phi = settings.method, best[settings.method]
    measures = {
        "wins": best_share(method, dynamics, best),
        "wins_one_start": best_share(method, dynamics, {m: e[:, 0] for m, e in every.items()}),
        "gram_drift": _write_path(settings, dynamics, seed, folder),
    }
    for name in METHODS:
        measures[f"objective_{name}"] = _mean(trace_objective(name, dynamics, phi))
        measures[f"fit_{name}"] = _mean(low_rank_error(name, dynamics, phi))
    for function in FUNCTIONS:
        measures[function] = _mean(function_error(function, dynamics, phi, settings.discount))
    return measures | _on_shared_eigenvectors(settings, seed)


def _mean(values: np.ndarray) -> float:
    return float(values.mean())


def _ends(
    method: Method, dynamics: np.ndarray, settings: LinearSettings, starts: int, seed: int
) -> np.ndarray:
    return limits(
        method, dynamics, starts=starts, time=settings.time, width=settings.width, seed=seed
    )


def _draw(settings: LinearSettings, family: Family, seed: int) -> np.ndarray:
    return draw_dynamics(
        family, settings.draws, states=settings.states, actions=settings.actions, seed=seed
    )


def best_share(method: Method, dynamics: np.ndarray, ends: dict[Method, np.ndarray]) -> float:
    """Share of draws in which `method` is highest at its own objective, ties (`TIE`) included.

    Args:
        method: the method, and its objective.
        dynamics: T_a.
        ends: orthonormal Φ of each method: [draws, states, width].
    """
    values = {m: trace_objective(method, dynamics, phi) for m, phi in ends.items()}
    top = np.max(list(values.values()), axis=0)
    return float(np.mean(values[method] >= top - TIE * np.abs(top)))


def limits(
    method: Method, dynamics: np.ndarray, *, starts: int, time: float, width: int, seed: int
) -> np.ndarray:
    """Φ after the flow from random starts: [draws, starts, states, width].

    Dynamics are scaled so that the largest eigenvalue of `target_matrix` is 1. This scales the time
    of each draw's flow and leaves its path as it is, so that fast and slow draws reach their ends
    together. Ends are made orthonormal exactly, which leaves their span as it is.
    """
    draws, _, states, _ = dynamics.shape
    begin = draw_start(draws * starts, states=states, width=width, seed=seed)
    largest = objective_bound(method, dynamics, 1)
    scaled = dynamics / np.sqrt(largest)[:, None, None, None]
    ends = flow(method, np.repeat(scaled, starts, axis=0), begin, [time], max_step=1.0)[-1]
    return orthonormal(ends).reshape(draws, starts, states, width)


def best_start(method: Method, dynamics: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The end with the highest objective of the method, for each draw: [draws, states, width].

    A trace objective has local maxima, at spans of eigenvectors other than the named ones.

    Args:
        method: the objective.
        dynamics: T_a.
        ends: [draws, starts, states, width], orthonormal.
    """
    draws, starts, states, width = ends.shape
    flat = ends.reshape(draws * starts, states, width)
    values = trace_objective(method, np.repeat(dynamics, starts, axis=0), flat)
    chosen = values.reshape(draws, starts).argmax(1)
    return np.asarray(ends[np.arange(draws), chosen])


def _on_shared_eigenvectors(settings: LinearSettings, seed: int) -> dict[str, float]:
    """End point of the method if all actions share their eigenvectors."""
    method, width = settings.method, settings.width
    dynamics = _draw(settings, "commuting", seed)
    ends = _ends(method, dynamics, settings, settings.shared_starts, seed)
    phi = best_start(method, dynamics, ends)
    named = named_eigenspace(method, dynamics, width)
    value = trace_objective(method, dynamics, phi)
    return {
        "shared_span": _mean(invariance(dynamics, phi) < SAME_SPAN),
        "shared_named": _mean(subspace_distance(phi, named) < SAME_SPAN),
        "shared_named_one_start": _mean(subspace_distance(ends[:, 0], named) < SAME_SPAN),
        "shared_bound": _mean(value / objective_bound(method, dynamics, width)),
    }


def invariance(dynamics: np.ndarray, phi: np.ndarray) -> np.ndarray:
    """max_a ‖(I − ΦΦᵀ)T_aΦ‖ of an orthonormal Φ: [draws]; 0 for a span of shared eigenvectors."""
    moved = dynamics @ phi[:, None]
    outside = moved - phi[:, None] @ (np.swapaxes(phi, -1, -2)[:, None] @ moved)
    return np.asarray(np.linalg.norm(outside, axis=(-2, -1)).max(1))


def _write_path(settings: LinearSettings, dynamics: np.ndarray, seed: int, folder: Path) -> float:
    """Write means over draws along the first start's flow; return the largest drift of ΦᵀΦ."""
    times = np.geomspace(settings.time / 1000, settings.time, RECORDED_TIMES).tolist()
    start = draw_start(settings.draws, states=settings.states, width=settings.width, seed=seed)
    path = flow(settings.method, dynamics, start, times)
    gram = np.swapaxes(path, -1, -2) @ path
    drift = np.abs(gram - np.eye(settings.width)).max((1, 2, 3))
    with (folder / "metrics.jsonl").open("w") as file:
        for time, phi, moved in zip(times, path, drift, strict=True):
            line = {"time": time, "gram_drift": float(moved)}
            for method in METHODS:
                value = trace_objective(method, dynamics, phi)
                line[f"objective_{method}"] = _mean(value)
            for function in FUNCTIONS:
                line[function] = _mean(function_error(function, dynamics, phi, settings.discount))
            file.write(json.dumps(line) + "\n")
    return float(drift.max())
