"""Closed forms, conservation and gradients of the linear methods."""

import numpy as np
import pytest
import torch

from tramontane_representation.dynamics import (
    FAMILIES,
    characters,
    draw_dynamics,
    draw_start,
    two_bits,
)
from tramontane_representation.linear import (
    BEST,
    FUNCTIONS,
    METHODS,
    Method,
    descend,
    flow,
    function_error,
    loss,
    low_rank_error,
    mean_dynamics,
    named_eigenspace,
    objective_bound,
    predictors,
    semi_gradient,
    subspace_distance,
    target_matrix,
    trace_objective,
    velocity,
)
from tramontane_representation.linear_study import (
    best_share,
    best_start,
    invariance,
    limits,
)

STOCHASTIC = ("sinkhorn", "involutions")
NAMED_PAIRS = {"pi": (0, 2), "ac": (0, 1), "var": (1, 3)}  # of 1, χ₁, χ₂, χ₁χ₂


@pytest.mark.parametrize("family", FAMILIES)
def test_random_dynamics_are_symmetric_and_stochastic_where_stated(family: str) -> None:
    dynamics = draw_dynamics(family, 5, states=7, actions=3, seed=1)
    assert dynamics.shape == (5, 3, 7, 7)
    np.testing.assert_allclose(dynamics, np.swapaxes(dynamics, -1, -2), atol=1e-12)
    if family in STOCHASTIC:
        assert dynamics.min() >= 0
        np.testing.assert_allclose(dynamics.sum(-1), 1, atol=1e-9)
    assert not np.allclose(dynamics, draw_dynamics(family, 5, states=7, actions=3, seed=2))


def test_eigenvalues_of_the_two_bits() -> None:
    """Enumerated from the flip probabilities: (1 − 2p) for a bit that flips with probability p."""
    vectors = characters()
    first = np.array([1 - 2 * 0.05, 1 - 2 * 0.95])
    second = 1 - 2 * 0.25
    by_action = np.stack([[1, 1], first, [second, second], first * second])  # [4, actions]
    expected = {
        "pi": by_action.mean(1) ** 2,
        "ac": (by_action**2).mean(1),
        "var": by_action.var(1),
    }
    np.testing.assert_allclose(expected["pi"], [1, 0, 0.25, 0], atol=1e-12)
    np.testing.assert_allclose(expected["ac"], [1, 0.81, 0.25, 0.2025], atol=1e-12)
    np.testing.assert_allclose(expected["var"], [0, 0.81, 0, 0.2025], atol=1e-12)
    for method in METHODS:
        matrix = target_matrix(method, two_bits())[0]
        np.testing.assert_allclose(
            vectors.T @ matrix @ vectors, np.diag(expected[method]), atol=1e-12
        )


@pytest.mark.parametrize("method", METHODS)
def test_each_method_ends_at_its_own_pair_of_characters(method: Method) -> None:
    named = characters()[None, :, NAMED_PAIRS[method]]
    dynamics = np.repeat(two_bits(), 20, axis=0)
    starts = limits(method, dynamics, starts=8, time=100, width=2, seed=3)
    ends = best_start(method, dynamics, starts)
    assert subspace_distance(ends, named).max() < 1e-4
    assert subspace_distance(named_eigenspace(method, two_bits(), 2), named).max() < 1e-7


def test_the_second_moment_of_an_eigenvalue_is_its_squared_mean_plus_its_variance() -> None:
    dynamics = draw_dynamics("commuting", 6, seed=4)
    _, basis = np.linalg.eigh(dynamics[:, 0])
    by_action = np.einsum("dxi,daxy,dyi->dai", basis, dynamics, basis)
    second = np.einsum("dxi,dxy,dyi->di", basis, target_matrix("ac", dynamics), basis)
    np.testing.assert_allclose(second, by_action.mean(1) ** 2 + by_action.var(1), atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_ode_is_the_formula_of_the_paper(method: Method, family: str) -> None:
    dynamics, phi = draw_dynamics(family, 4, seed=5), draw_start(4, seed=6)

    def pi(matrices: np.ndarray) -> np.ndarray:
        outer = phi @ np.swapaxes(phi, -1, -2)
        projected = np.eye(10) - outer
        terms = [
            projected @ matrices[:, a] @ outer @ np.swapaxes(matrices[:, a], -1, -2) @ phi
            for a in range(matrices.shape[1])
        ]
        return sum(terms) / len(terms)

    policy, ac = pi(mean_dynamics(dynamics)), pi(dynamics)
    expected = {"pi": policy, "ac": ac, "var": ac - policy}[method]
    np.testing.assert_allclose(velocity(method, dynamics, phi), expected, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_predictors_are_exact_and_the_step_is_the_semi_gradient(method: Method) -> None:
    """By automatic differentiation of the enumerated expectation over (x, a, y)."""
    dynamics = torch.tensor(draw_dynamics("sinkhorn", 1, states=5, actions=3, seed=7)[0])
    start = draw_start(1, states=5, width=2, seed=8) * 1.3  # any full rank, not only orthonormal
    phi = torch.tensor(start[0], requires_grad=True)
    target = torch.tensor(start[0])

    def enumerated(matrices: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for a, matrix in enumerate(matrices):
            errors = ((phi @ matrix)[:, None] - target[None]) ** 2  # [x, y, k]
            total = total + (dynamics[a] * errors.sum(-1)).sum() / 5 / 3
        return total

    exact = torch.tensor(predictors(dynamics.numpy()[None], start)[0])
    policy = torch.tensor(predictors(mean_dynamics(dynamics.numpy()[None]), start)[0, 0])
    for matrices in ([*exact], [policy] * 3):
        shared = len({id(m) for m in matrices}) == 1
        leaves = [m.clone().requires_grad_() for m in ([policy] if shared else matrices)]
        gradients = torch.autograd.grad(enumerated(leaves * 3 if shared else leaves), leaves)
        assert max(float(g.abs().max()) for g in gradients) < 1e-12
    parts = {"ac": enumerated([*exact]), "pi": enumerated([policy] * 3)}
    value = parts["ac"] - parts["pi"] if method == "var" else parts[method]
    (gradient,) = torch.autograd.grad(value, phi)
    found = semi_gradient(method, dynamics.numpy()[None], start)[0]
    np.testing.assert_allclose(found, gradient.numpy(), atol=1e-12)
    assert loss(method, dynamics.numpy()[None], start)[0] == pytest.approx(float(value.detach()))


@pytest.mark.parametrize("method", METHODS)
def test_the_ode_is_a_quarter_of_the_gradient_along_orthonormal_matrices(method: Method) -> None:
    dynamics, phi = draw_dynamics("gaussian", 3, seed=9), draw_start(3, seed=10)
    moved = velocity(method, dynamics, phi)
    step = 1e-6
    up = trace_objective(method, dynamics, phi + step * moved)
    down = trace_objective(method, dynamics, phi - step * moved)
    squares = (moved**2).sum((-1, -2))
    np.testing.assert_allclose((up - down) / (2 * step), 4 * squares, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_the_flow_conserves_the_gram_matrix_and_never_lowers_its_objective(
    method: Method, family: str
) -> None:
    dynamics, phi = draw_dynamics(family, 20, seed=11), draw_start(20, seed=12)
    path = flow(method, dynamics, phi, np.linspace(0.5, 20, 20).tolist(), max_step=0.1)
    gram = np.swapaxes(path, -1, -2) @ path
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(4), gram.shape), atol=2e-5)
    values = np.stack([trace_objective(method, dynamics, p) for p in path])
    assert np.diff(values, axis=0).min() > -1e-6
    # The derivative of ΦᵀΦ is 0 at any Φ of full rank.
    scaled = phi @ np.diag([0.5, 1.0, 2.0, 3.0])
    inner = np.swapaxes(scaled, -1, -2) @ velocity(method, dynamics, scaled)
    assert np.abs(inner).max() < 1e-12


def test_semi_gradient_steps_follow_the_flow() -> None:
    dynamics, phi = draw_dynamics("sinkhorn", 5, seed=13), draw_start(5, seed=14)
    for method in METHODS:
        solution = flow(method, dynamics, phi, [4.0], max_step=0.05)[0]
        gaps = []
        for rate in (1.0, 0.5, 0.25):  # time of a step: 2 · rate / states
            steps = round(4.0 / (2 * rate / 10))
            end = descend(method, dynamics, phi, steps=steps, learning_rate=rate)
            gaps.append(np.abs(end - solution).max())
        assert gaps[2] < 0.6 * gaps[1] < 0.36 * gaps[0] < 0.05  # Euler: the error halves


@pytest.mark.parametrize("method", METHODS)
def test_no_representation_exceeds_the_named_eigenspace(method: Method) -> None:
    """With shared eigenvectors; checked against every set of eigenvectors and random spans."""
    dynamics = draw_dynamics("commuting", 30, states=6, seed=15)
    bound = objective_bound(method, dynamics, 2)
    named = named_eigenspace(method, dynamics, 2)
    np.testing.assert_allclose(trace_objective(method, dynamics, named), bound, rtol=1e-9)
    _, basis = np.linalg.eigh(dynamics[:, 0])
    for i in range(6):
        for j in range(i):
            pair = basis[..., [i, j]]
            assert (trace_objective(method, dynamics, pair) <= bound + 1e-12).all()
    for seed in range(20):
        phi = draw_start(30, states=6, width=2, seed=seed)
        assert (trace_objective(method, dynamics, phi) <= bound).all()


def test_low_rank_fits_rank_representations_as_trace_objectives_do() -> None:
    dynamics, phi = draw_dynamics("involutions", 4, seed=16), draw_start(4, seed=17)
    sizes = {
        "pi": (dynamics.mean(1) ** 2).sum((-1, -2)),
        "ac": (dynamics**2).sum((-1, -2)).mean(1),
    }
    sizes["var"] = sizes["ac"] - sizes["pi"]
    for method in METHODS:
        np.testing.assert_allclose(
            low_rank_error(method, dynamics, phi),
            sizes[method] - trace_objective(method, dynamics, phi),
            atol=1e-12,
        )


@pytest.mark.parametrize("discount", [0.0, 0.9])
def test_errors_of_functions_are_those_of_least_squares(discount: float) -> None:
    dynamics = draw_dynamics("sinkhorn", 1, states=6, actions=2, seed=18)
    phi = draw_start(1, states=6, width=2, seed=19)
    policy = dynamics[0].mean(0)
    later = np.linalg.inv(np.eye(6) - discount * policy)
    errors = dict.fromkeys(FUNCTIONS, 0.0)
    for reward in np.eye(6):  # E‖MR‖² over N(0, I) is the sum over unit rewards
        value = policy @ later @ reward
        q = [matrix @ later @ reward for matrix in dynamics[0]]
        for name, targets in (("value", [value]), ("q", q), ("advantage", [x - value for x in q])):
            for target in targets:
                _, residual, _, _ = np.linalg.lstsq(phi[0], target)
                errors[name] += float(residual.sum()) / len(targets)
    for name, error in errors.items():
        found = function_error(name, dynamics, phi, discount)[0]
        assert found == pytest.approx(error)
    assert errors["q"] == pytest.approx(errors["value"] + errors["advantage"])


def test_each_method_is_best_at_its_own_objective_in_99_of_100_draws() -> None:
    dynamics = draw_dynamics("sinkhorn", 100, seed=0)
    every = {m: limits(m, dynamics, starts=4, time=150, width=4, seed=0) for m in METHODS}
    ends = {m: best_start(m, dynamics, found) for m, found in every.items()}
    for method in METHODS:
        assert best_share(method, dynamics, ends) >= 0.99, method
        first = {m: found[:, 0] for m, found in every.items()}
        assert best_share(method, dynamics, first) >= 0.95, method
    for function, method in BEST.items():
        errors = {m: function_error(function, dynamics, end).mean() for m, end in ends.items()}
        assert min(errors, key=errors.__getitem__) == method, function


@pytest.mark.slow
def test_the_best_of_many_starts_is_the_named_eigenspace_of_pi() -> None:
    """Π's maximiser is known on the study's dynamics too, where the matrices share no vectors."""
    dynamics = draw_dynamics("sinkhorn", 100, seed=0)
    named = named_eigenspace("pi", dynamics, 4)
    few, many = (
        limits("pi", dynamics, starts=starts, time=time, width=4, seed=0)
        for starts, time in ((8, 150), (32, 300))
    )
    ends = [few[:, 0], *(best_start("pi", dynamics, found) for found in (few, many))]
    reached = [np.mean(subspace_distance(end, named) < 0.05) for end in ends]
    assert reached == pytest.approx([0.17, 0.55, 1], abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_limit_is_the_named_eigenspace_if_actions_share_eigenvectors(method: Method) -> None:
    """Draws with a small gap between kept and dropped eigenvalues converge slowly: left out."""
    dynamics = draw_dynamics("commuting", 2000, seed=20)
    spectrum = np.linalg.eigvalsh(target_matrix(method, dynamics))
    dynamics = dynamics[spectrum[:, -4] - spectrum[:, -5] > 0.05][:100]
    assert len(dynamics) == 100
    ends = best_start(
        method, dynamics, limits(method, dynamics, starts=128, time=40, width=4, seed=21)
    )
    assert np.mean(invariance(dynamics, ends) < 0.05) >= 0.99
    assert np.mean(subspace_distance(ends, named_eigenspace(method, dynamics, 4)) < 0.05) >= 0.99
