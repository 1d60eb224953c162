"""Models that would compute something else for packed rows are refused when they are loaded."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tramontane.config import TeacherConfig, TrainerConfig
from tramontane.errors import InputError
from tramontane.models.loading import load_model
from tramontane.trainer import Trainer
from tramontane.trainer.teacher import Teacher

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
}
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 64,
    "layer_types": ["full_attention", "sliding_attention"],
}
MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def saved(folder, kind, **keys):
    """A checkpoint with weights so wide that errors show."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | keys))
    for parameter in model.parameters():
        wide = 1.2 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
        parameter.data.add_(torch.randn_like(parameter), alpha=wide)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("llama", {}),
        ("qwen3", {"head_dim": 8} | SLIDING),
        ("gemma2", {"head_dim": 8, "sliding_window": 64}),
        ("mixtral", {"num_local_experts": 4}),
    ],
    ids=str,
)
def test_a_model_that_keeps_sequences_apart_loads_as_it_was(tmp_path, kind, keys, dtype):
    model = load_model(saved(tmp_path, kind, **keys), dtype)
    assert model.config._attn_implementation == "packed"
    window = keys.get("sliding_window")
    assert getattr(model.config, "sliding_window", None) == window
    windows = {w for m in model.modules() if (w := getattr(m, "sliding_window", None))}
    assert windows == ({window} if window else set())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("bloom", {"n_head": 4}),  # its positions are places in the row
        ("stablelm", {}),
        ("doge", {}),  # its mask depends on the content
        ("qwen2_moe", MOE | SLIDING),  # its window is only in the mask
        ("camembert", {"is_decoder": True}),
        ("mpt", {"n_heads": 4}),  # not through the attention interface
        ("falcon", {}),
    ],
    ids=str,
)
def test_a_model_that_would_leak_into_the_next_sequence_is_refused(tmp_path, kind, keys, dtype):
    with pytest.raises(InputError, match=r"packed in one row.*another model"):
        load_model(saved(tmp_path, kind, **keys), dtype)


def test_trainer_and_teacher_refuse_it_at_load(tmp_path):
    path = saved(tmp_path, "stablelm")
    with pytest.raises(InputError, match="than for each alone"):
        Trainer.load(path, TrainerConfig(dtype="float32"), 1)
    with pytest.raises(InputError, match="than for each alone"):
        Teacher.load(path, TeacherConfig(model=path), 64, 0, 96)
