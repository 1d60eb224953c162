import copy
import random

import pytest
import torch

from tests.trainer.rollouts import TEMPERATURE, batch, completion, model, trainer, with_own_logprobs
from tramontane.config import GeneratorConfig, TrainerConfig
from tramontane.trainer.parity import (
    ParityError,
    check,
    compare,
    differing_parameters,
    fingerprint,
    first_deviating_layer,
    tolerance,
)


def altered(original, name, factor=1.05):
    other = copy.deepcopy(original)
    with torch.no_grad():
        other.get_parameter(name).mul_(factor)
    return other


def evidence(ours, other, ids):
    """The diagnosis' evidence, with `other` as the generator's model."""
    ours_trainer = trainer(tied=False)
    ours_trainer.model.load_state_dict(ours.state_dict())
    other_trainer = trainer(tied=False)
    other_trainer.model.load_state_dict(other.state_dict())
    return {
        "weights": (fingerprint(other.state_dict()), fingerprint(ours.state_dict())),
        "hidden": (other_trainer.hidden_states(ids), ours_trainer.hidden_states(ids)),
    }


def test_the_same_model_passes():
    t = trainer()
    b = with_own_logprobs(t, batch())
    mismatch = compare([s.logprobs for s in b.sequences], t.logprobs(b.sequences, TEMPERATURE))
    assert mismatch.mean == mismatch.maximum == 0
    assert mismatch.tokens == sum(len(s.token_ids) for s in b.sequences)
    check(mismatch, tolerance(t.config, GeneratorConfig()))


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("lm_head.weight", "hidden states agree in all layers: look at the output head"),
        ("model.layers.1.self_attn.k_proj.weight", "first after block 2 of 2"),
        ("model.embed_tokens.weight", "deviate from the embeddings on"),
    ],
)
def test_the_gate_fires_on_an_altered_tensor_and_names_it(name, layer):
    ours = model(tied=False)
    other = altered(ours, name)
    generator, trained = trainer(tied=False), trainer(tied=False)
    generator.model.load_state_dict(other.state_dict())
    trained.model.load_state_dict(ours.state_dict())
    sequences = with_own_logprobs(generator, batch()).sequences
    mismatch = compare([s.logprobs for s in sequences], trained.logprobs(sequences, TEMPERATURE))
    ids = [*sequences[0].prompt_ids, *sequences[0].token_ids]
    with pytest.raises(ParityError) as error:
        check(mismatch, 1e-3, **evidence(ours, other, ids))
    assert f"weights differ in {name} (1 of " in str(error.value)
    assert layer in str(error.value)


def test_a_temperature_that_differs_is_named_when_all_else_agrees():
    ours = model()
    fingerprints = fingerprint(ours.state_dict())
    c = completion(random.Random(0))
    mismatch = compare([c.logprobs], [[x + 0.5 for x in c.logprobs]])
    assert mismatch.mean == pytest.approx(0.5)
    settings = {"temperature": (1.0, 0.7), "dtype": ("float32", "float32")}
    with pytest.raises(ParityError) as error:
        check(mismatch, 1e-3, weights=(fingerprints, fingerprints), settings=settings)
    assert "temperature differs: generator 1.0, trainer 0.7" in str(error.value)
    assert "the weights agree" in str(error.value)
    assert "dtype" not in str(error.value) and "rounding" not in str(error.value)


@pytest.mark.parametrize("replayed", [True, False])
def test_experts_that_are_not_replayed_are_the_first_suspect(replayed):
    c = completion(random.Random(0))
    mismatch = compare([c.logprobs], [[x + 0.5 for x in c.logprobs]])
    settings = {"dtype": ("bfloat16", "bfloat16")}
    with pytest.raises(ParityError) as error:
        check(mismatch, 0.05, settings=settings, replayed=replayed)
    assert ("set trainer.router_replay to true" in str(error.value)) is not replayed
    assert "to tell rounding from a fault" in str(error.value)


def test_a_log_prob_that_is_no_number_shuts_the_gate():
    c = completion(random.Random(0), length=4)
    with pytest.raises(ParityError, match="token 2"):
        check(compare([c.logprobs], [[*c.logprobs[:2], float("nan"), c.logprobs[3]]]), 0.05)


def test_fingerprints_tell_a_small_step_from_rounding():
    torch.manual_seed(0)
    w = {"w": 0.02 * torch.randn(300, 300), "norm": torch.ones(300)}
    fingerprints = fingerprint(w)
    rounded = fingerprint({n: x.bfloat16() for n, x in w.items()})
    assert differing_parameters(rounded, fingerprints, 1e-2) == []
    for change in (w["w"] * 1.02, -w["w"], w["w"].T, w["w"] + 4e-4 * torch.randn(300, 300).sign()):
        assert differing_parameters(fingerprint({**w, "w": change}), fingerprints, 1e-4) == ["w"]
    assert fingerprint({"zero": torch.zeros(3)}) == {"zero": 0.0}


def test_tied_weights_may_have_one_name_or_two():
    fingerprints = fingerprint(model(tied=True).state_dict())
    once = {n: v for n, v in fingerprints.items() if n != "lm_head.weight"}
    assert differing_parameters(once, fingerprints, 1e-4) == []
    assert differing_parameters(fingerprints, once, 1e-4) == []
    assert differing_parameters({**fingerprints, "lm_head.weight": 9.0}, fingerprints, 1e-4) == [
        "lm_head.weight"
    ]


def test_hidden_states_are_compared_layer_by_layer():
    states = [torch.ones(3, 4), torch.ones(3, 4), torch.ones(3, 4)]
    assert first_deviating_layer(states, states, 1e-3) is None
    nan = [states[0], states[1] * float("nan"), states[2]]
    assert first_deviating_layer(nan, states, 1e-3) == 1


@pytest.mark.parametrize(
    ("trainer_dtype", "generator_dtype", "limit"),
    [
        ("float32", "float32", 1e-3),
        ("bfloat16", "float32", 0.05),
        ("float32", "bfloat16", 0.05),
    ],
)
def test_the_tolerance_follows_the_coarser_dtype(trainer_dtype, generator_dtype, limit):
    generator = GeneratorConfig(dtype=generator_dtype)
    assert tolerance(TrainerConfig(dtype=trainer_dtype), generator) == limit
    assert tolerance(TrainerConfig(dtype=trainer_dtype, parity_tolerance=0.2), generator) == 0.2
