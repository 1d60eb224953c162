"""The three methods on a linear representation: losses, semi-gradients, ODEs, trace objectives,
and how well the result fits the dynamics and value functions.

A representation Φ is `[draws, states, width]`; `dynamics` is `[draws, actions, states, states]`,
symmetric (module `dynamics`). States and actions are uniform. All functions work on all
draws at once. Source: arXiv 2406.02035.

BYOL-AC predicts Φᵀy from Φᵀx with a matrix P_a for each action, BYOL-Π with one matrix P for all of
them. BYOL-Π is therefore BYOL-AC on dynamics with the single action T = mean T_a, and BYOL-VAR is
the difference AC − Π of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

Method = Literal["pi", "ac", "var"]
METHODS: tuple[Method, ...] = get_args(Method)

Function = Literal["value", "q", "advantage"]
FUNCTIONS: tuple[Function, ...] = get_args(Function)
BEST: dict[Function, Method] = {"value": "pi", "q": "ac", "advantage": "var"}

BLOCK = 128  # draws that are integrated together, so that they stay in the processor's cache
MAX_STEP = 0.5  # keeps ΦᵀΦ within 1e-3 for eigenvalues of T_a up to 1


def mean_dynamics(dynamics: np.ndarray) -> np.ndarray:
    """The policy's transition matrix T as dynamics with one action: [draws, 1, states, states]."""
    return np.asarray(dynamics.mean(axis=1, keepdims=True))


def centered_dynamics(dynamics: np.ndarray) -> np.ndarray:
    """T_a − T for each action: [draws, actions, states, states]."""
    return dynamics - mean_dynamics(dynamics)


def method_dynamics(method: Method, dynamics: np.ndarray) -> np.ndarray:
    """The matrices with which BYOL-AC becomes the method: T for Π, T_a for AC, T_a − T for VAR.

    ODE and trace objective of AC are quadratic in T_a, so that the difference AC − Π is their
    variance over actions.
    """
    if method == "pi":
        return mean_dynamics(dynamics)
    return dynamics if method == "ac" else centered_dynamics(dynamics)


def predictors(dynamics: np.ndarray, phi: np.ndarray) -> np.ndarray:
    """The predictors that minimize the loss exactly: P_a = (ΦᵀΦ)⁻¹ΦᵀT_aΦ, [draws, actions, k, k].

    With `mean_dynamics` the result is the single predictor of BYOL-Π.
    """
    transposed = np.swapaxes(phi, -1, -2)
    gram = (transposed @ phi)[:, None]
    return np.linalg.solve(gram, transposed[:, None] @ dynamics @ phi[:, None])


def loss(
    method: Method, dynamics: np.ndarray, phi: np.ndarray, target: np.ndarray | None = None
) -> np.ndarray:
    """The method's loss with exact predictors, for stochastic dynamics: [draws].

    E‖P_aᵀΦᵀx − Φ̄ᵀy‖² over uniform states x and actions a, and y ~ T_a(x, ·); Π has P for P_a.

    Args:
        method: the loss of AC less that of Π for `var`.
        dynamics: T_a.
        phi: Φ.
        target: Φ̄, the representation under the stop-gradient; None: Φ.
    """
    if method == "var":
        return loss("ac", dynamics, phi, target) - loss("pi", dynamics, phi, target)
    target = phi if target is None else target
    chosen = predictors(mean_dynamics(dynamics) if method == "pi" else dynamics, phi)
    predicted = phi[:, None] @ chosen  # [draws, actions or 1, states, k]
    crossed = (predicted * (dynamics @ target[:, None])).sum((-1, -2)).mean(1)
    # Uniform states stay uniform under doubly stochastic dynamics: E‖Φ̄ᵀy‖² = ‖Φ̄‖² / states.
    squares = (predicted**2).sum((-1, -2)).mean(1) + (target**2).sum((-1, -2))
    return np.asarray((squares - 2 * crossed) / phi.shape[-2])


def velocity(method: Method, dynamics: np.ndarray, phi: np.ndarray) -> np.ndarray:
    """The right-hand side of the method's ODE: dΦ/dt, [draws, states, k].

    |A|⁻¹ Σ_a (T_aΦ − ΦP_a)P_aᵀ for AC. With orthonormal Φ it is
    |A|⁻¹ Σ_a (I − ΦΦᵀ)T_aΦΦᵀT_aᵀΦ. Written with the exact predictors it conserves ΦᵀΦ from any
    start of full rank. It is −states/2 times the semi-gradient of `loss`.
    """
    return _velocity(_rows(method_dynamics(method, dynamics)), phi)


def _rows(matrices: np.ndarray) -> np.ndarray:
    """Matrices of all actions with the same row of each next to each other: [draws, states ·
    actions, states]. One product for each draw then has T_aΦ of all actions side by side."""
    draws, actions, states, _ = matrices.shape
    return matrices.swapaxes(1, 2).reshape(draws, states * actions, states)


def _velocity(rows: np.ndarray, phi: np.ndarray) -> np.ndarray:
    draws, states, width = phi.shape
    moved = (rows @ phi).reshape(draws, states, -1)
    actions = moved.shape[-1] // width
    # A copy: of a matrix and its transpose, NumPy makes half a product and mirrors it, slowly.
    transposed = np.ascontiguousarray(np.swapaxes(phi, -1, -2))
    gram, inner = transposed @ phi, transposed @ moved
    # [draws, k, actions · k]. An inverse of k columns takes half of the time of more columns.
    chosen = np.linalg.inv(gram) @ inner
    stacked = chosen.reshape(draws, width, actions, width).transpose(0, 2, 3, 1)
    stacked = stacked.reshape(draws, actions * width, width)  # rows: P_aᵀ, action after action
    return np.asarray((moved - phi @ chosen) @ stacked / actions)


def semi_gradient(method: Method, dynamics: np.ndarray, phi: np.ndarray) -> np.ndarray:
    """The gradient of `loss` in Φ, targets and exact predictors fixed: [draws, states, k]."""
    return -2 / phi.shape[-2] * velocity(method, dynamics, phi)


def descend(
    method: Method, dynamics: np.ndarray, phi: np.ndarray, *, steps: int, learning_rate: float
) -> np.ndarray:
    """Φ after semi-gradient steps, each with exact predictors (the faster of two time scales)."""
    for _ in range(steps):
        phi = phi - learning_rate * semi_gradient(method, dynamics, phi)
    return phi


def flow(
    method: Method,
    dynamics: np.ndarray,
    phi: np.ndarray,
    times: Sequence[float],
    max_step: float = MAX_STEP,
) -> np.ndarray:
    """The ODE's solution from Φ at time 0, by the classical Runge-Kutta method.

    Args:
        method: the vector field.
        dynamics: T_a.
        phi: Φ at time 0.
        times: times of the solution, ascending.
        max_step: largest step of the integration.

    Returns:
        [times, draws, states, k].
    """
    rows = _rows(method_dynamics(method, dynamics))
    blocks = [slice(first, first + BLOCK) for first in range(0, len(phi), BLOCK)]
    return np.concatenate(
        [_solution(rows[block], phi[block], times, max_step) for block in blocks], axis=1
    )


def _solution(
    rows: np.ndarray, phi: np.ndarray, times: Sequence[float], max_step: float
) -> np.ndarray:
    found, now = [], 0.0
    for end in times:
        steps = int(np.ceil((end - now) / max_step))
        for _ in range(steps):
            phi = _runge_kutta(rows, phi, (end - now) / steps)
        now = end
        found.append(phi)
    return np.stack(found)


def _runge_kutta(rows: np.ndarray, phi: np.ndarray, step: float) -> np.ndarray:
    first = _velocity(rows, phi)
    second = _velocity(rows, phi + step / 2 * first)
    third = _velocity(rows, phi + step / 2 * second)
    fourth = _velocity(rows, phi + step * third)
    return phi + step / 6 * (first + 2 * second + 2 * third + fourth)


def trace_objective(method: Method, dynamics: np.ndarray, phi: np.ndarray) -> np.ndarray:
    """f(Φ) of an orthonormal Φ, which the method's ODE never lowers: [draws].

    f_Π = Tr[ΦᵀTΦΦᵀTΦ]; f_AC is the mean over actions of the same with T_a; f_VAR = f_AC − f_Π.
    The ODE is a quarter of the gradient of f along orthonormal matrices.
    """
    matrices = method_dynamics(method, dynamics)
    inner = np.swapaxes(phi, -1, -2)[:, None] @ matrices @ phi[:, None]
    return np.asarray((inner * np.swapaxes(inner, -1, -2)).sum((-1, -2)).mean(1))


def target_matrix(method: Method, dynamics: np.ndarray) -> np.ndarray:
    """The matrix whose top eigenvectors the method seeks: [draws, states, states].

    T² for Π, |A|⁻¹ Σ_a T_a² for AC, and their difference for VAR, which is the variance of T_a over
    actions: E[D_a²] = (E D_a)² + Var(D_a) for each shared eigenvector.
    """
    if method == "var":
        return target_matrix("ac", dynamics) - target_matrix("pi", dynamics)
    if method == "pi":
        dynamics = mean_dynamics(dynamics)
    return np.asarray((dynamics @ dynamics).mean(1))


def named_eigenspace(method: Method, dynamics: np.ndarray, width: int) -> np.ndarray:
    """Eigenvectors of the `width` largest eigenvalues of `target_matrix`: [draws, states, width].

    They maximize the trace objective among orthonormal Φ if the T_a share their eigenvectors (for Π
    always).
    """
    _, vectors = np.linalg.eigh(target_matrix(method, dynamics))
    return np.asarray(vectors[..., ::-1][..., :width])


def objective_bound(method: Method, dynamics: np.ndarray, width: int) -> np.ndarray:
    """Sum of the `width` largest eigenvalues of `target_matrix`, an upper bound of f: [draws]."""
    eigenvalues = np.linalg.eigvalsh(target_matrix(method, dynamics))
    return np.asarray(eigenvalues[..., -width:].sum(-1))


def subspace_distance(phi: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Sine of the largest principal angle between the spans of two orthonormal matrices: [draws].

    0 for equal spans, 1 if a direction of one span is orthogonal to the other span.
    """
    cosines = np.linalg.svd(np.swapaxes(phi, -1, -2) @ other, compute_uv=False)
    return np.asarray(np.sqrt(np.clip(1 - cosines[..., -1] ** 2, 0, None)))


def low_rank_error(method: Method, dynamics: np.ndarray, phi: np.ndarray) -> np.ndarray:
    """min ‖D_a − ΦP_aΦᵀ‖² (Frobenius), mean over actions, for an orthonormal Φ: [draws].

    D is T for Π, T_a for AC, and T_a − T for VAR. The minimum is at P_a = ΦᵀD_aΦ and equals the
    mean of ‖D_a‖² less the trace objective, so that minimizing the one maximizes the other.
    """
    matrices = method_dynamics(method, dynamics)
    fitted = phi[:, None] @ (np.swapaxes(phi, -1, -2)[:, None] @ matrices @ phi[:, None])
    residual = matrices - fitted @ np.swapaxes(phi, -1, -2)[:, None]
    return np.asarray((residual**2).sum((-1, -2)).mean(1))


def function_error(
    function: Function, dynamics: np.ndarray, phi: np.ndarray, discount: float = 0.0
) -> np.ndarray:
    """Expected squared error of the best linear fit by an orthonormal Φ, over all states: [draws].

    The expectation is over rewards R ~ N(0, I) of the next state, the mean is over actions, and the
    sum over states. With W = Σ_t γᵗTᵗ:

    - `value`: V = TWR.
    - `q`: Q_a = T_aWR, with weights for each action.
    - `advantage`: Q_a − V.

    The error is E‖(I − ΦΦᵀ)MR‖² = ‖(I − ΦΦᵀ)M‖² for M = TW, T_aW or (T_a − T)W. For every Φ the
    error of Q is the error of V plus that of the advantage.

    Args:
        function: the function to fit.
        dynamics: T_a.
        phi: Φ.
        discount: γ; 0: functions of one step, as in the paper.
    """
    matrix = method_dynamics(BEST[function], dynamics)
    if discount:
        policy = mean_dynamics(dynamics)
        matrix = matrix @ np.linalg.inv(np.eye(phi.shape[-2]) - discount * policy)
    residual = matrix - phi[:, None] @ (np.swapaxes(phi, -1, -2)[:, None] @ matrix)
    return np.asarray((residual**2).sum((-1, -2)).mean(1))
