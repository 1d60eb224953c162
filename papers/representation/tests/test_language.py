"""The text-state environment, and self-prediction next to supervised fine-tuning."""

import json
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tramontane.config import ObjectiveConfig, TrainerConfig
from tramontane.data.prompts import PromptEncoder
from tramontane.errors import InputError
from tramontane.models.loading import load_model, load_tokenizer
from tramontane.studies.study import load_study
from tramontane.trainer import Trainer
from tramontane_representation import language_study
from tramontane_representation.language import (
    SelfPredictiveSFT,
    Solution,
    slipped,
    solutions,
    state_latents,
)
from tramontane_representation.language_study import LanguageSettings, run_arm, split_by_prompt
from tramontane_representation.losses import SelfPredictionConfig
from tramontane_representation.probes import held_out_r2, residual


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(load_tokenizer("tiny"))


def drawn(encoder: PromptEncoder, count: int, seed: int = 0) -> list[Solution]:
    return [*islice(solutions(encoder, "test", seed, levels=(1, 4), p=0.6), count)]


def test_states_end_after_the_sentence_of_a_step(encoder: PromptEncoder) -> None:
    for solution in drawn(encoder, 50):
        decode = encoder.tokenizer.decode
        bounds = zip(solution.starts[:-1], solution.starts[1:], strict=True)
        for number, (begin, end) in enumerate(bounds):
            step = decode(solution.token_ids[begin:end])
            assert step.startswith("<think>") == (number == 0)
            assert step.count("=") == 1 and step.rstrip().endswith(".")
        assert "\\boxed" in decode(solution.token_ids[solution.starts[-1] :])
        assert solution.token_ids[-1] == encoder.tokenizer.eos_token_id


def test_the_values_are_those_of_the_behavior_policy() -> None:
    """V by enumerating what the policy does next, against the share of right solutions."""
    values = Solution([], [], (0, 1, 2, 3), (True, True, False, False)).values(0.6)
    np.testing.assert_allclose(values, [0.6**3, 0.6**2, 0, 0])
    chain = [(3, "+", 4, 7), (7, "*", 2, 14), (14, "-", 5, 9)]
    rng = Random(1)
    ends = [slipped(chain, rng, 0.6) for _ in range(4000)]
    for t in range(4):
        following = [right[-1] for _, right in ends if right[t]]
        assert np.mean(following) == pytest.approx(0.6 ** (3 - t), abs=0.04)
    for steps, right in ends:
        assert right[0] and list(right) == sorted(right, reverse=True)
        assert right[-1] == (steps == chain)
        assert all(first[3] == second[0] for first, second in pairwise(steps))


def test_a_prompt_is_fitted_or_held_out(encoder: PromptEncoder) -> None:
    stream = solutions(encoder, "test", 0, levels=(1, 1), p=0.75)
    unseen = [*islice(stream, 400)]
    fitted = split_by_prompt(unseen, 0)
    sides = [{tuple(s.prompt_ids) for s, f in zip(unseen, fitted, strict=True) if f == side}
             for side in (True, False)]  # fmt: skip
    assert len(sides[0] | sides[1]) < len(unseen)  # some prompts came twice
    assert not sides[0] & sides[1]
    assert 0.6 < fitted.mean() < 0.8


def test_counting_steps_explains_nothing_and_knowing_what_is_right_does() -> None:
    rng = np.random.default_rng(0)
    counted, right, value, cells = [], [], [], []
    for _ in range(1000):
        steps = int(rng.integers(1, 4))
        flags = np.cumprod([1, *(rng.random(steps) < 0.75)])
        for t, flag in enumerate(flags):
            counted.append(np.eye(5)[[steps - t, steps]].ravel())
            right.append([float(flag), rng.standard_normal()])
            value.append([0.75 ** (steps - t) * flag])
            cells.append([t, steps])
    y, known = np.array(value), np.arange(len(value)) < 0.7 * len(value)
    labels = np.array(cells)
    rest = residual(y, labels, known)
    counts = np.array(counted)
    assert held_out_r2(counts, y, known) > 0.04
    assert abs(held_out_r2(residual(counts, labels, known), rest, known)) < 0.005
    assert held_out_r2(residual(np.array(right), labels, known), rest, known) > 0.9


def test_the_hook_sees_the_latents_of_the_states(encoder: PromptEncoder, one_layer: str) -> None:
    """The objective's latents, actions and targets are those of a plain forward pass."""
    model = load_model(one_layer)
    batch = drawn(encoder, 5, seed=2)
    config = SelfPredictionConfig(method="ac", steps=2, hidden=0, normalize=False)
    expected = state_latents(model, batch)
    objective = SelfPredictiveSFT(model, config)
    seen = []
    inner = objective.predictions.forward
    objective.predictions.forward = lambda *parts: seen.append(parts) or inner(*parts)
    settings = TrainerConfig(
        objective=ObjectiveConfig(name="sft"), dtype="float32", microbatch_tokens=150
    )
    trainer = Trainer(model, settings, 1)
    trainer.objective = objective
    trainer.step(objective.begin(batch))
    assert len(seen) > 1  # microbatches
    assert sum(int(parts[3].sum()) for parts in seen) == objective.transitions
    rows = {}
    for latents, actions, targets, valid in seen:
        for i in range(len(latents)):
            key = round(float(latents[i].detach().double().sum()), 3)
            rows[key] = (latents[i], actions[i], targets[i], valid[i])
    for solution, states in zip(batch, expected, strict=True):
        for t in range(solution.steps):
            latent, _, target, valid = rows[round(float(states[t].double().sum()), 3)]
            torch.testing.assert_close(latent, states[t], atol=1e-4, rtol=1e-4)
            assert valid.tolist() == [True, t + 1 < solution.steps]
            torch.testing.assert_close(target[0], states[t + 1], atol=1e-4, rtol=1e-4)
    assert max(float(p.grad.abs().max()) for p in objective.predictions.parameters()) > 0


def test_without_a_method_training_is_supervised_fine_tuning(
    encoder: PromptEncoder, one_layer: str
) -> None:
    batch = drawn(encoder, 4, seed=3)
    weights = []
    for own in (False, True):
        model = load_model(one_layer)
        settings = TrainerConfig(objective=ObjectiveConfig(name="sft"), dtype="float32")
        trainer = Trainer(model, settings, 1)
        objective = SelfPredictiveSFT(model, SelfPredictionConfig())
        if own:
            trainer.objective = objective
        trainer.step(objective.begin(batch))
        weights.append(trainer.weights())
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


@pytest.mark.parametrize("method", ["pi", "ac", "var"])
def test_the_auxiliary_loss_is_a_mean_over_the_batch_however_it_is_cut(
    method: str, encoder: PromptEncoder, one_layer: str
) -> None:
    batch = drawn(encoder, 6, seed=4)
    gradients, seen = [], []
    for tokens in (150, 100_000):
        torch.manual_seed(0)
        model = load_model(one_layer)
        objective = SelfPredictiveSFT(model, SelfPredictionConfig(method=method, steps=2, weight=3))
        inner = objective.predictions.forward
        parts: list[tuple[torch.Tensor, ...]] = []
        objective.predictions.forward = lambda *p, of=inner, to=parts: to.append(p) or of(*p)
        settings = TrainerConfig(
            objective=ObjectiveConfig(name="sft"), dtype="float32", microbatch_tokens=tokens
        )
        trainer = Trainer(model, settings, 1)
        trainer.objective = objective
        trainer.step(objective.begin(batch))
        gradients.append([p.grad.clone() for p in objective.predictions.parameters()])
        seen.append(parts)
    assert len(seen[0]) > 1 == len(seen[1])
    # The gradient of the mean over the whole batch, of latents as they were.
    objective.predictions.zero_grad()
    (whole,) = seen[1]
    objective.predictions.forward(*(part.detach() for part in whole))[0].backward()
    expected = [p.grad for p in objective.predictions.parameters()]
    for found in gradients:
        for first, second in zip(found, expected, strict=True):
            torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-3)


def test_the_auxiliary_loss_moves_the_model(encoder: PromptEncoder, one_layer: str) -> None:
    batch, weights = drawn(encoder, 4, seed=3), []
    for weight in (0.0, 3.0):
        torch.manual_seed(0)
        model = load_model(one_layer)
        settings = TrainerConfig(objective=ObjectiveConfig(name="sft"), dtype="float32")
        trainer = Trainer(model, settings, 1)
        trainer.objective = SelfPredictiveSFT(
            model, SelfPredictionConfig(method="ac", weight=weight)
        )
        trainer.step(trainer.objective.begin(batch))
        weights.append(trainer.weights())
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_probes_fit_values_and_not_the_number_of_steps(
    encoder: PromptEncoder, one_layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, unseen = load_model(one_layer), drawn(encoder, 500)

    def counts(solution: Solution) -> np.ndarray:
        t = np.arange(solution.steps + 1)
        return np.concatenate([np.eye(8)[t], np.eye(8)[solution.steps - t]], axis=1)

    def values(solution: Solution) -> np.ndarray:
        found = solution.values(0.6)
        t = np.arange(len(found))  # which the probe has to know in order to see the values
        return np.stack([found + 10 * t, [*found[1:], 0] - 7 * t**2], axis=1)

    found = {}
    for latent in (counts, values):
        latents = [torch.tensor(latent(solution)) for solution in unseen]
        monkeypatch.setattr(language_study, "state_latents", lambda *_, known=latents: known)
        found[latent] = language_study.probe_latents(model, unseen, 0.6, seed=0)
    assert min(found[values].values()) > 0.999
    assert max(found[counts].values()) < 0.05


SMALL = {"steps": 2, "batch_tokens": 400, "probe_solutions": 30, "auxiliary": {"method": "ac"}}


@pytest.fixture(scope="module")
def small(one_layer: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return arm({"model": one_layer}, tmp_path_factory.mktemp("small"))


def arm(changes: dict[str, Any], folder: Path) -> dict[str, float]:
    """The measures of an arm, and the last line of its log."""
    found = run_arm({**SMALL, **changes}, 0, folder)
    return found | json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({"auxiliary": {"method": "ac", "predictor_speed": 50.0}}, ["error_ac"]),
        ({"auxiliary": {"method": "ac", "predictor_speed": 1e-9}}, ["error_ac"]),
        ({"learning_rate": 5e-3}, ["error_ac", "nll", "q"]),
        ({"levels": (3, 3)}, ["nll", "q_before", "q"]),
        ({"step_right": 0.5}, ["nll", "q_before", "q"]),
        ({"batch_tokens": 800}, ["nll", "q"]),
        ({"probe_solutions": 40}, ["q_before", "q"]),
    ],
    ids=str,
)
def test_every_key_of_an_arm_is_read(
    changes: dict[str, Any],
    changed: list[str],
    small: dict[str, float],
    one_layer: str,
    tmp_path: Path,
) -> None:
    found = arm({"model": one_layer, **changes}, tmp_path)
    for name in changed:
        assert abs(found[name] - small[name]) > 1e-4 * abs(small[name]), name
    if "auxiliary" in changes:  # the predictors alone are faster or slower
        faster = changes["auxiliary"]["predictor_speed"] > 5
        assert (found["error_ac"] < small["error_ac"]) == faster


def test_an_arm_returns_every_measure_of_the_study(one_layer: str, tmp_path: Path) -> None:
    study = load_study("byol-language")
    for keys in study.arms.values():
        LanguageSettings(**{**study.base, **keys})
    keys = {"model": one_layer, "steps": 2, "batch_tokens": 400, "probe_solutions": 30}
    found = run_arm({**keys, "auxiliary": {"method": "var", "steps": 2}}, 0, tmp_path)
    assert found.keys() == study.measures.keys()
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert {study.over, *study.plots} <= line.keys() | {"error_pi", "error_ac"}
    assert 0 < line["nll"] < 3


def test_an_unknown_key_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="study byol-language: auxiliary.methd: .*'method'"):
        run_arm({"auxiliary": {"methd": "pi"}}, 0, tmp_path)
