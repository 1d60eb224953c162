"""LoRA where peft's rules for names, or the model's use of its weights, would break it: mixtures of
experts with dense layers or shared experts, routers, Mamba mixers, and GPT-2's layers, which store
their weights as [in, out]."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.test_families import MOE, saved
from tests.trainer.rollouts import batch
from tramontane.config import LoraConfig, TrainerConfig
from tramontane.errors import InputError
from tramontane.models.loading import load_model
from tramontane.models.shape import linear_layers
from tramontane.trainer import Trainer, lora
from tramontane.trainer.head import plain_predictions
from tramontane.trainer.rows import pack_row

ROUTED = MOE | {"head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1}
ROUTED |= {"topk_group": 1, "first_k_dense_replace": 1, "num_local_experts": 4}
LATENT = {"num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 16, "kv_lora_rank": 12}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_num_shared_experts": 1}
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
DELTA |= {"linear_num_value_heads": 4, "shared_expert_intermediate_size": 16}
DELTA |= {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1}
KINDS = {
    "deepseek_v3": ROUTED | LATENT,
    "glm4_moe": ROUTED,
    "ernie4_5_moe": ROUTED | ERNIE,
    "hunyuan_v1_moe": ROUTED | {"moe_topk": 2, "num_shared_expert": 1},
    "dots1": ROUTED,
    "afmoe": ROUTED | {"num_dense_layers": 1, "num_shared_experts": 1},
    "qwen3_next": ROUTED | DELTA,
    "qwen3_moe": ROUTED | {"mlp_only_layers": [0]},
    "llama4_text": ROUTED | {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 2},
    "falcon_h1": MAMBA | {"head_dim": 8, "mamba_d_state": 8},
    "phimoe": {"num_local_experts": 4},
    "ctrl": {"n_embd": 32, "dff": 48, "n_layer": 2, "n_head": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}
LORA = LoraConfig(rank=3, alpha=6.0)


def logits(model):
    with torch.no_grad():
        return model.float().eval()(torch.arange(2, 20)[None], use_cache=False).logits


def wide_adapters(path, config=LORA):
    """A trainer whose adapters change what the model computes."""
    t = Trainer.load(path, TrainerConfig(dtype="float32", lora=config), 1)
    generator = torch.Generator().manual_seed(1)
    for layer in lora.adapted_layers(t.model).values():
        weight = layer.lora_B["default"].weight
        weight.data = 0.1 * torch.randn(weight.shape, generator=generator)
    return t


@pytest.mark.parametrize("kind", KINDS)
def test_saved_weights_and_adapters_compute_what_the_trainer_computes(tmp_path, kind):
    base = saved(tmp_path / "base", kind, **KINDS[kind])
    t = wide_adapters(base)
    whole = AutoModelForCausalLM.from_pretrained(base)
    assert t.weights().keys() == whole.state_dict().keys()
    expected = {x.name for x in linear_layers(whole) if x.plain and not (x.head or x.tied)}
    assert lora.adapted_layers(t.model).keys() == expected

    t.save_weights(tmp_path / "weights")
    sequences = batch(9, groups=2).sequences
    merged, row = load_model(str(tmp_path / "weights")), pack_row(sequences, torch.device("cpu"))
    theirs = plain_predictions(merged, row, 0.8).logprobs.detach()
    ours = t.logprobs(sequences, 0.8)
    with lora.disabled(t._working):
        before = t.logprobs(sequences, 0.8)
    ours, before = (torch.tensor([p for s in x for p in s]) for x in (ours, before))
    torch.testing.assert_close(ours, theirs, atol=5e-4, rtol=0)
    assert (ours - before).abs().max() > 0.5

    t.save_adapters(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    torch.testing.assert_close(logits(loaded), logits(plain), atol=1e-4, rtol=0)


def test_adapters_with_dropout_on_dense_layers_beside_experts_load_with_peft(tmp_path):
    base = saved(tmp_path / "base", "glm4_moe", **KINDS["glm4_moe"])
    t = wide_adapters(base, LoraConfig(rank=3, alpha=6.0, rslora=True, dropout=0.1))
    t.save_weights(tmp_path / "weights")
    t.save_adapters(tmp_path / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(base)
    loaded = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    torch.testing.assert_close(logits(loaded), logits(plain), atol=1e-4, rtol=0)


def test_a_model_that_would_be_saved_without_its_experts_is_refused(tmp_path):
    """By peft's own rule for names, the experts get adapters of another kind."""
    model = load_model(saved(tmp_path, "glm4_moe", **KINDS["glm4_moe"]))
    names = list(model.state_dict())
    lora.check_complete(names, model)
    targets = ["model.layers.0.mlp.gate_proj", "up_proj", "down_proj"]
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=targets), model)
    with pytest.raises(InputError, match=r"saved without its own .*experts.*lora\.target_modules"):
        lora.check_complete(names, model)


def test_a_weight_that_the_model_reads_itself_is_refused_before_any_step(tmp_path):
    keys = ROUTED | LATENT | {"zero_expert_num": 1, "moe_topk": 2}
    path = saved(tmp_path, "longcat_flash", **keys)
    with pytest.raises(InputError, match=r"reads the weight of .*router\.classifier itself"):
        wide_adapters(path)
    names = ("q_a_proj", "o_proj", "gate_proj")
    assert lora.adapted_layers(wide_adapters(path, LoraConfig(target_modules=names)).model)


@pytest.mark.parametrize(
    ("kind", "name"), [("llama4_text", "router"), ("falcon_h1", "mamba.out_proj")]
)
def test_routers_and_weights_of_mamba_kernels_are_refused_by_name(tmp_path, kind, name):
    model = load_model(saved(tmp_path, kind, **KINDS[kind]))
    with pytest.raises(InputError, match=rf"does not use .*{name} as a plain linear layer"):
        lora.targets(linear_layers(model), LoraConfig(target_modules=(name,)))
