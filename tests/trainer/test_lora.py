"""LoRA: exact gradients and updates, merged weights, resume, export, and what is refused."""

import math

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.trainer import rollouts
from tests.trainer.rollouts import equal, model, trainer, with_own_logprobs
from tramontane.config import LoraConfig, TrainerConfig
from tramontane.errors import InputError
from tramontane.models.loading import load_model
from tramontane.models.shape import linear_layers
from tramontane.models.weights import LocalWeights
from tramontane.trainer import lora
from tramontane.trainer.trainer import Trainer

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def batch(version=0):
    """Eight completions: what adapters compute does not depend on how many there are."""
    return rollouts.batch(version, groups=2)


def lora_trainer(tied=True, rank=3, alpha=6.0, **settings):
    own = {k: settings.pop(k) for k in ("rslora", "dropout", "target_modules") if k in settings}
    return trainer(tied, lora=LoraConfig(rank=rank, alpha=alpha, **own), **settings)


def dense(weights, tied=True, **settings):
    """A trainer of all weights, which begins with these."""
    t = trainer(tied, **settings)
    t.model.load_state_dict(weights)
    return t


def fill_b(t, seed=1):
    """Give every B values, as if the adapters had been trained."""
    generator = torch.Generator().manual_seed(seed)
    for layer in lora.adapted_layers(t.model).values():
        weight = layer.lora_B["default"].weight
        weight.data = 0.1 * torch.randn(weight.shape, generator=generator)
    return t


def gradients(t):
    """The first step's gradients by parameter: the first moments are a tenth of them."""
    beta = t.config.betas[0]
    return {n: t.optimizer.state[p]["exp_avg"] / (1 - beta) for n, p in trained(t)}


def trained(t):
    return [(n, p) for n, p in t.model.named_parameters() if p.requires_grad]


def assert_near(found, expected, share=1e-5):
    torch.testing.assert_close(
        found, expected, atol=share * float(expected.detach().abs().max()), rtol=0
    )


def test_untrained_adapters_leave_weights_and_log_probs_bit_for_bit():
    t, plain = lora_trainer(), trainer()
    assert equal(t.weights(), plain.weights())
    sequences = batch().sequences
    assert t.logprobs(sequences, 0.8) == plain.logprobs(sequences, 0.8)


def test_only_adapters_are_trained():
    t = lora_trainer(target_modules=("q_proj", "down_proj"))
    names = [name for name, _ in trained(t)]
    assert len(names) == 2 * 2 * 2
    assert all("lora_" in name and ("q_proj" in name or "down_proj" in name) for name in names)
    assert set(t.optimizer.state) == {p for _, p in trained(t)}
    before = {n: w.clone() for n, w in lora.base_tensors(t.model).items()}
    t.step(batch())
    assert equal(before, {n: w.detach() for n, w in lora.base_tensors(t.model).items()})


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_projections_of_the_dense_gradient(tied, rslora):
    """∂L/∂B = s · (∂L/∂W) Aᵀ and ∂L/∂A = s · Bᵀ (∂L/∂W), at W + s · B A."""
    t = fill_b(lora_trainer(tied, max_grad_norm=1e9, rslora=rslora))
    scale = 6.0 / (math.sqrt(3) if rslora else 3)
    matrices = {
        name: [layer.lora_A["default"].weight.clone(), layer.lora_B["default"].weight.clone()]
        for name, layer in lora.adapted_layers(t.model).items()
    }
    full = dense(t.weights(), tied, max_grad_norm=1e9)
    t.step(batch())
    full.step(batch())
    found, of_weights = gradients(t), gradients(full)
    assert len(matrices) == 2 * len(LAYERS)
    for name, (a, b) in matrices.items():
        whole = of_weights[f"{name}.weight"]
        assert_near(found[f"{name}.lora_A.default.weight"], scale * b.T @ whole)
        assert_near(found[f"{name}.lora_B.default.weight"], scale * whole @ a.T)


def test_clipping_sees_the_adapters_gradient_alone():
    t = lora_trainer()
    metrics = t.step(batch())
    unclipped = lora_trainer(max_grad_norm=1e9)
    unclipped.step(batch())
    norm = torch.stack([g.norm() for g in gradients(unclipped).values()]).norm()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


def test_first_update_is_that_of_adamw_on_the_projected_gradient():
    """B is 0 at first, so that A has no gradient: W moves by s · B A, B = −lr · g / (|g| + ε)."""
    t, full = lora_trainer(max_grad_norm=1e9), trainer(max_grad_norm=1e9)
    before = t.weights()
    a = {n: x.lora_A["default"].weight.clone() for n, x in lora.adapted_layers(t.model).items()}
    t.step(batch())
    full.step(batch())
    of_weights, after = gradients(full), t.weights()
    for name, matrix in a.items():
        gradient = 2.0 * of_weights[f"{name}.weight"] @ matrix.T
        b = -1e-3 * gradient / (gradient.abs() + 1e-8)
        moved = after[f"{name}.weight"] - before[f"{name}.weight"]
        assert_near(moved, 2.0 * b @ matrix, 1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("objective", [{}, {"magistral": {"kl_coef": 0.1}}])
def test_merged_weights_compute_what_the_adapters_compute(tmp_path, dtype, objective):
    t = lora_trainer(dtype=dtype, learning_rate=1e-2, objective=objective)
    for version in range(3):
        t.step(batch(version))
    t.save_weights(tmp_path / "weights")
    sequences = batch(9).sequences
    merged = Trainer(load_model(str(tmp_path / "weights")), trainer(dtype=dtype).config, 1)
    pairs = zip(t.logprobs(sequences, 0.8), merged.logprobs(sequences, 0.8), strict=True)
    limit = 1e-5 if dtype == "float32" else 0.2
    assert all(
        abs(x - y) < limit for ours, theirs in pairs for x, y in zip(ours, theirs, strict=True)
    )


def test_published_weights_are_the_merged_ones():
    t = lora_trainer(learning_rate=1e-2)
    t.step(batch())
    weights = t.publish(LocalWeights())
    found = {n: p.values for bucket in weights.buckets() for p in bucket for n in p.names}
    assert weights.shapes().keys() == trainer().weights().keys()
    assert equal(found, t.weights())
    assert not equal(found, trainer().weights())


@pytest.mark.parametrize("targets", [None, ("lm_head", "q_proj")])
def test_exported_adapters_load_with_peft_and_give_the_merged_models_logits(tmp_path, targets):
    base = model(tied=False)
    base.save_pretrained(tmp_path / "base")
    config = lora_trainer(False, learning_rate=1e-2, target_modules=targets).config
    t = Trainer.load(str(tmp_path / "base"), config, 10)
    for version in range(2):
        t.step(batch(version))
    t.save_weights(tmp_path / "weights")
    t.save_adapters(tmp_path / "adapter")
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids = torch.tensor([list(range(12))])
    before = fresh(ids).logits
    loaded = PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    assert loaded.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    torch.testing.assert_close(loaded(ids).logits, merged(ids).logits, atol=1e-5, rtol=0)
    assert (merged(ids).logits - before).abs().max() > 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_training_equals_uninterrupted_training(tmp_path, dtype):
    settings = {"dtype": dtype, "objective": {"magistral": {"kl_coef": 0.1}}, "schedule": "cosine"}
    t = lora_trainer(**settings)
    t.step(batch(0))
    t.save_state(tmp_path)
    resumed = lora_trainer(**settings)
    resumed.load_state(tmp_path)
    assert equal(resumed.weights(), t.weights())
    for version in (1, 2):
        assert resumed.step(batch(version)) == t.step(batch(version))
    assert equal(resumed.weights(), t.weights())


def test_state_holds_adapters_their_moments_and_nothing_else(tmp_path):
    t = lora_trainer(rank=1)
    t.save_state(tmp_path / "lora")
    trainer().save_state(tmp_path / "full")
    names = {name for name, _ in trained(t)}
    metadata = torch.distributed.checkpoint.FileSystemReader(tmp_path / "lora").read_metadata()
    moments = {f"optimizer.{name}.{k}" for name in names for k in ("step", "exp_avg", "exp_avg_sq")}
    saved = set(metadata.state_dict_metadata)
    assert saved == {f"model.{name}" for name in names} | moments | {"version"}
    with pytest.raises(InputError, match="another model, or other adapters"):
        t.load_state(tmp_path / "full")
    with pytest.raises(InputError, match="another model, or other adapters"):
        lora_trainer(rank=2).load_state(tmp_path / "lora")


def test_reference_is_the_model_without_its_adapters():
    t = lora_trainer(learning_rate=1e-2, objective={"magistral": {"kl_coef": 0.1}})
    assert t._reference is t._working
    assert t.step(batch(0))["kl_reference"] == 0
    assert t.step(batch(1))["kl_reference"] > 0
    sequences = batch().sequences
    trained, initial = t.logprobs(sequences, 0.8), trainer().logprobs(sequences, 0.8)
    with lora.disabled(t._working):
        assert t.logprobs(sequences, 0.8) == initial
    assert t.logprobs(sequences, 0.8) == trained != initial


def test_bfloat16_keeps_one_frozen_base_and_float32_adapters():
    t = lora_trainer(dtype="bfloat16", threads=2)
    masters = dict(t.model.named_parameters())
    for replica in t._replicas.models:
        for name, parameter in replica.named_parameters():
            assert parameter.dtype == torch.bfloat16
            shared = parameter.data_ptr() == masters[name].data_ptr()
            assert shared == (not masters[name].requires_grad)
    assert {p.dtype for p in masters.values() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("settings", [{"threads": 2}, {"gradient_checkpointing": True}], ids=str)
def test_threads_and_activation_checkpointing_change_nothing(settings):
    plain, other = lora_trainer(max_grad_norm=1e9), lora_trainer(max_grad_norm=1e9, **settings)
    plain.step(batch())
    other.step(batch())
    found = gradients(other)
    for name, gradient in gradients(plain).items():
        if "lora_B" in name:  # A has no gradient while B is 0
            assert_near(found[name], gradient)


def test_dropout_touches_gradients_alone():
    t, plain = lora_trainer(dropout=0.5), lora_trainer()
    fill_b(t), fill_b(plain)
    sequences = batch().sequences
    assert t.logprobs(sequences, 0.8) == plain.logprobs(sequences, 0.8)
    with_own_logprobs(t, one := batch())
    with_own_logprobs(plain, other := batch())
    assert t.step(one)["mismatch_age_0"] > 1e-3 > plain.step(other)["mismatch_age_0"]


def test_names_that_no_layer_has_are_refused_with_those_there_are():
    with pytest.raises(InputError, match=r"target_modules: no linear layer has the name 'query'"):
        lora_trainer(target_modules=("q_proj", "query"))
    with pytest.raises(InputError, match="choose from " + ", ".join(LAYERS)):
        lora_trainer(target_modules=("proj",))


def test_tied_output_head_is_refused_and_left_out_by_default():
    with pytest.raises(InputError, match="weight of lm_head is also that of another layer"):
        lora_trainer(target_modules=("lm_head",))
    for tied in (True, False):
        found = lora.targets(linear_layers(model(tied)), LoraConfig())
        assert len(found) == 2 * len(LAYERS)
        assert "lm_head" not in [layer.name for layer in found]


def test_number_of_parameters_is_that_of_the_adapters():
    config = LoraConfig(rank=5, target_modules=("k_proj", "up_proj"))
    t = trainer(lora=config)
    expected = lora.parameters(linear_layers(model()), config)
    assert sum(p.numel() for _, p in trained(t)) == expected


def test_missing_peft_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'tramontane-rl\[lora\]'"):
        lora.check(LoraConfig(), linear_layers(model()))


def test_adapters_begin_by_the_run_s_seed():
    def first(seed):
        config = TrainerConfig(lora=LoraConfig(rank=3, alpha=6.0))
        t = Trainer(model(), config, 10, seed=seed)
        layer = next(iter(lora.adapted_layers(t.model).values()))
        return layer.lora_A["default"].weight.detach()

    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))


def test_adapters_that_compute_something_else_than_their_merged_weights_are_refused():
    t = lora_trainer()
    lora.check_merged(t.model, torch.float32)
    for layer in lora.adapted_layers(t.model).values():
        layer.lora_B["default"].register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(InputError, match="with merged weights, LlamaForCausalLM computes other"):
        lora.check_merged(t.model, torch.float32)
