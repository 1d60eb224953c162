"""Two views of a representation: low-rank fits of the dynamics, and fits of value functions.

The model-based view asks how well a matrix of rank k fits T, T_a or T_a − T. The model-free view
asks how well linear functions of Φᵀx fit V, Q or the advantage. Source: arXiv 2406.02035.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from tramontane.representation.linear import (
    Method,
    mean_dynamics,
    method_dynamics,
)

Function = Literal["value", "q", "advantage"]
FUNCTIONS: tuple[Function, ...] = get_args(Function)
BEST: dict[Function, Method] = {"value": "pi", "q": "ac", "advantage": "var"}


def low_rank_error(method: Method, dynamics: np.ndarray, phi: np.ndarray) -> np.ndarray:
    """min ‖D_a − ΦP_aΦᵀ‖² (Frobenius), mean over actions, for an orthonormal Φ: [draws].

    D is T for Π, T_a for AC, and T_a − T for VAR. The minimum is at P_a = ΦᵀD_aΦ and equals the
    mean of ‖D_a‖² less the trace objective, so that minimising the one maximises the other.
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
