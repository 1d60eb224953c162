"""Symmetric transition matrices per action, drawn at random or given in closed form.

`dynamics` is always `[draws, actions, states, states]`, float64: `dynamics[d, a, x, y]` is the
probability of state y after action a in state x. States and actions are uniform, so that the
transition matrix of the policy is the mean over actions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np

Family = Literal["sinkhorn", "involutions", "commuting", "gaussian"]
FAMILIES: tuple[Family, ...] = get_args(Family)

SINKHORN_SIGMA = 2.0  # of log entries: a state has a few likely successors
SINKHORN_ROUNDS = 400
INVOLUTIONS = 3  # random involutions that a matrix of that family mixes


def draw_dynamics(
    family: Family, draws: int, *, states: int = 10, actions: int = 4, seed: int = 0
) -> np.ndarray:
    """Random symmetric dynamics: [draws, actions, states, states].

    The paper only says "random symmetric". The families are:

    - `sinkhorn`: log-normal entries (σ = 2), made symmetric and scaled so that rows sum to 1.
    - `involutions`: a random convex combination of three random involutions (permutations that are
      their own inverse), so that each action has few successors.
    - `commuting`: one random orthonormal eigenbasis for all actions, with eigenvalues uniform in
      [-1, 1]. Not stochastic, but all maximizers are known exactly.
    - `gaussian`: symmetric Gaussian entries (spectral radius near 1). Not stochastic.

    Raises:
        ValueError: no such family.
    """
    if family not in _DRAWN:
        raise ValueError(f"family is {family!r}, but it must be one of {', '.join(FAMILIES)}")
    return _DRAWN[family](np.random.default_rng(seed), (draws, actions, states, states))


def _sinkhorn(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    entries = rng.lognormal(sigma=SINKHORN_SIGMA, size=shape)
    matrix = (entries + np.swapaxes(entries, -1, -2)) / 2
    scale = np.ones(shape[:-1])
    for _ in range(SINKHORN_ROUNDS):
        # The square root of both updates keeps one scale for rows and columns.
        scale = np.sqrt(scale / (matrix @ scale[..., None])[..., 0])
    return scale[..., None] * matrix * scale[..., None, :]


def _involutions(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    draws, actions, states, _ = shape
    weights = rng.dirichlet(np.ones(INVOLUTIONS), (draws, actions))
    # Pairs of a random order are swapped; with an odd number of states the last state stays.
    order = rng.permuted(
        np.broadcast_to(np.arange(states), (draws, actions, INVOLUTIONS, states)), axis=-1
    )
    pairs = states // 2
    image = order.copy()
    image[..., : 2 * pairs : 2] = order[..., 1 : 2 * pairs : 2]
    image[..., 1 : 2 * pairs : 2] = order[..., : 2 * pairs : 2]
    matrices = np.zeros((draws, actions, INVOLUTIONS, states, states))
    np.put_along_axis(
        matrices.reshape(draws, actions, INVOLUTIONS, -1), order * states + image, 1.0, axis=-1
    )
    return np.einsum("dam,damxy->daxy", weights, matrices)


def _commuting(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    draws, actions, states, _ = shape
    basis = orthonormal(rng.standard_normal((draws, states, states)))
    eigenvalues = rng.uniform(-1, 1, (draws, actions, states))
    return np.einsum("dxi,dai,dyi->daxy", basis, eigenvalues, basis)


def _gaussian(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    normal = rng.standard_normal(shape)
    return (normal + np.swapaxes(normal, -1, -2)) / np.sqrt(8 * shape[-1])


_DRAWN: dict[Family, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "sinkhorn": _sinkhorn,
    "involutions": _involutions,
    "commuting": _commuting,
    "gaussian": _gaussian,
}


def two_bits() -> np.ndarray:
    """Two independent bits and two actions: [1, 2, 4, 4], states 00, 01, 10, 11.

    Action 0 flips the first bit with probability 0.05, action 1 with 0.95; both flip the second
    bit with 0.25. The characters 1, χ₁, χ₂ and χ₁χ₂ (`characters`) are eigenvectors of both
    matrices, and the three methods prefer three different pairs of them.
    """
    return np.stack([np.kron(_flip(p), _flip(0.25)) for p in (0.05, 0.95)])[None]


def _flip(p: float) -> np.ndarray:
    return np.array([[1 - p, p], [p, 1 - p]])


def characters() -> np.ndarray:
    """The eigenvectors 1, χ₁, χ₂, χ₁χ₂ of `two_bits`, normalized: [4 states, 4 characters]."""
    sign = np.array([1.0, -1.0])
    one = np.ones(2)
    pairs = [(one, one), (sign, one), (one, sign), (sign, sign)]
    return np.stack([np.kron(first, second) for first, second in pairs], axis=1) / 2


def orthonormal(matrix: np.ndarray) -> np.ndarray:
    """An orthonormal basis of the columns' span, by QR with positive diagonal: same shape."""
    q, r = np.linalg.qr(matrix)
    sign = np.where(np.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)
    return np.asarray(q * sign[..., None, :])


def draw_start(draws: int, *, states: int = 10, width: int = 4, seed: int = 0) -> np.ndarray:
    """Orthonormal representations, uniform among all: Φ, [draws, states, width]."""
    rng = np.random.default_rng(seed)
    return orthonormal(rng.standard_normal((draws, states, width)))
