"""Linear probes of a frozen representation, for values, Q and advantages.

A probe is ridge regression from standardized features. It is fitted on one part of the states, with
the penalty that has the least leave-one-out error there, and judged on the rest. States must differ
from each other: a state in both parts is remembered, not represented. Its figure is R²,
the share of the variance that it explains, pooled over targets: 1 is perfect, 0 is as good as the
mean, and below 0 is worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RIDGES = tuple(10.0**k for k in range(-4, 3))  # penalties, times the number of states
TRAINING_SHARE = 0.7
LEAST_DEVIATION = 1e-5  # of a feature, as a share of all features' size; below, float32 rounds it
COMPONENTS = 16  # of two representations whose products are features


@dataclass(frozen=True)
class Targets:
    """Functions of N states and A actions, J of them: Q, [N, A, J]."""

    q: np.ndarray

    @property
    def value(self) -> np.ndarray:
        """V under the uniform policy: [N, J]."""
        return np.asarray(self.q.mean(1))

    @property
    def advantage(self) -> np.ndarray:
        """Q − V: [N, A, J]."""
        return np.asarray(self.q - self.q.mean(1, keepdims=True))

    @property
    def value_share(self) -> float:
        """Share of V in the variance of Q over states and actions; the rest is the advantage's."""
        q = self.q - self.q.mean((0, 1))
        return float((q.mean(1) ** 2).sum() * q.shape[1] / (q**2).sum())


def probe(features: np.ndarray, targets: Targets, seed: int = 0) -> dict[str, float]:
    """R² on held-out states of linear functions of the features: `value`, `q`, `advantage`.

    Q and the advantage have weights of their own for each action.

    Args:
        features: [N, width], the representations of N different states.
        targets: the functions to fit.
        seed: of the split into fitted and held-out states.
    """
    states = len(features)
    order = np.random.default_rng(seed).permutation(states)
    fitted = np.zeros(states, dtype=bool)
    fitted[order[: round(TRAINING_SHARE * states)]] = True
    flat = {
        "value": targets.value,
        "q": targets.q.reshape(states, -1),
        "advantage": targets.advantage.reshape(states, -1),
    }
    return dict(zip(flat, held_out_r2s(features, [*flat.values()], fitted), strict=True))


def held_out_r2(features: np.ndarray, targets: np.ndarray, fitted: np.ndarray) -> float:
    """R² of ridge regression on the states that were not fitted; see `held_out_r2s`."""
    return held_out_r2s(features, [targets], fitted)[0]


def held_out_r2s(
    features: np.ndarray, targets: Sequence[np.ndarray], fitted: np.ndarray
) -> list[float]:
    """R² of a ridge regression for each of several functions, on the states that were not fitted.

    A feature that is constant in the fitted states up to rounding (`LEAST_DEVIATION`) is excluded.
    Scaled up to unit variance, it would move the prediction at a held-out state by any amount.

    Args:
        features: [N, width].
        targets: the functions, each [N, J].
        fitted: [N] bool, the states that the regressions see.
    """
    mean, deviation = features[fitted].mean(0), features[fitted].std(0)
    size = float(np.sqrt((features[fitted] ** 2).mean()))
    varies = deviation > max(LEAST_DEVIATION * size, 1e-8)
    x = (features - mean) * varies / np.where(varies, deviation, 1.0)
    decomposed = np.linalg.svd(x[fitted], full_matrices=False)  # most of the time
    found = []
    for y in targets:
        center = y[fitted].mean(0)
        errors = y[~fitted] - center - x[~fitted] @ _ridge(decomposed, y[fitted] - center)
        found.append(float(1 - (errors**2).sum() / ((y[~fitted] - center) ** 2).sum()))
    return found


def residual(x: np.ndarray, cells: np.ndarray, fitted: np.ndarray) -> np.ndarray:
    """x minus its fitted mean in each cell: [N, width].

    R² between residuals is that of a probe beyond a table of the cells.

    Args:
        x: [N, width].
        cells: [N, labels], the labels that tell the cells apart.
        fitted: [N] bool. Cells with none of these keep their x.
    """
    _, cell = np.unique(cells, axis=0, return_inverse=True)
    member = np.eye(cell.max() + 1)[cell.ravel()]
    counts = member[fitted].sum(0)
    means = member[fitted].T @ x[fitted] / np.maximum(counts, 1)[:, None]
    return np.asarray(x - member @ means)


def products(x: np.ndarray, y: np.ndarray, fitted: np.ndarray) -> np.ndarray:
    """Products of the `COMPONENTS` first principal components of x and of y: [N, products].

    Args:
        x: [N, width of x].
        y: [N, width of y].
        fitted: [N] bool, the rows that decide which components are the first.
    """
    first = [_components(part, fitted) for part in (x, y)]
    return np.asarray(np.einsum("ni,nj->nij", *first).reshape(len(x), -1))


def _components(x: np.ndarray, fitted: np.ndarray) -> np.ndarray:
    mean = x[fitted].mean(0)
    axes = np.linalg.svd(x[fitted] - mean, full_matrices=False)[2][:COMPONENTS]
    return np.asarray((x - mean) @ axes.T)


def _ridge(decomposed: tuple[np.ndarray, np.ndarray, np.ndarray], y: np.ndarray) -> np.ndarray:
    """Ridge regression from features by their singular values, with the penalty of `RIDGES` that
    has the least leave-one-out error."""
    u, singular, v = decomposed
    projected = u.T @ y
    found: list[tuple[float, np.ndarray]] = []
    for ridge in RIDGES:
        kept = singular**2 / (singular**2 + ridge * len(u))
        leverage = (u**2 @ kept)[:, None] + 1 / len(u)  # the mean is fitted too
        left_out = (y - u @ (kept[:, None] * projected)) / (1 - leverage)
        scale = singular / (singular**2 + ridge * len(u))
        found.append((float((left_out**2).sum()), v.T @ (scale[:, None] * projected)))
    return min(found, key=lambda pair: pair[0])[1]
