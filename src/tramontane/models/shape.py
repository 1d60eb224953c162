"""Sizes of a model from its config alone: no weights are read or allocated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    MistralConfig,
    PreTrainedModel,
)

from tramontane.errors import InputError
from tramontane.models import loading
from tramontane.models.states import stateful_layers
from tramontane.models.wrapped import LOADING

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class LinearLayer(NamedTuple):
    """A linear layer of a model."""

    name: str  # name of the module
    # inputs, outputs: widths.
    inputs: int
    outputs: int
    head: bool  # True for the output head
    tied: bool  # True if another module has the same weight
    plain: bool = True  # False if the model computes more, or other things, with it than W x + b


def linear_layers(model: PreTrainedModel) -> tuple[LinearLayer, ...]:
    """The linear layers of a model, possibly on the meta device, in its order."""
    uses = Counter(id(tensor) for tensor in model.state_dict(keep_vars=True).values())
    head = model.get_output_embeddings()
    # Mamba's kernels read these weights themselves (arXiv 2312.00752); only its mixers have a D.
    read = {
        f"{name}.{part}"
        for name, module in model.named_modules()
        if hasattr(module, "A_log") and hasattr(module, "D")
        for part in ("dt_proj", "out_proj")
    }
    return tuple(
        LinearLayer(
            name,
            module.in_features,
            module.out_features,
            module is head,
            uses[id(module.weight)] > 1,
            # Routers of experts are subclasses that return more than one tensor.
            type(module).forward is torch.nn.Linear.forward and name not in read,
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    )


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only language model."""

    name: str  # readable name of the model
    parameters: int  # of the whole model; tied tensors count once
    block: int  # parameters of the largest block
    outside: int  # parameters outside the blocks: embeddings, last norm and head
    matrix: int  # numbers in the largest tensor of a block
    layers: int  # number of blocks
    hidden: int  # width of the residual stream
    intermediate: int  # width of the MLP, over all experts that a token visits
    heads: int  # query heads of a layer
    kv_heads: int  # heads of keys and values of a layer
    head_dim: int  # width of a head
    vocabulary: int  # rows of the output head
    context: int | None  # maximum number of positions; None if the config does not say
    linear_layers: tuple[LinearLayer, ...] = ()  # all linear layers
    # True if the logits are not a linear function of the head's output, so that all logits of a
    # microbatch must be in memory (`trainer.head`).
    soft_capped: bool = False
    stateful: bool = False  # True if layers carry state from token to token

    @property
    def head(self) -> int:
        """Parameters of the output head; the input embeddings have as many, or are tied to it."""
        return self.vocabulary * self.hidden

    @property
    def tied(self) -> bool:
        """True if the output head is the input embeddings."""
        return self.outside < 2 * self.head

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of a token's keys and values over all layers; as `models.memory` computes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]


# Models with known sizes, whose files are not needed. Mistral Small 3.1 is the base of Magistral
# Small; Mistral publishes no sizes of Medium 3, so Mistral Large 2 stands for it. LlamaRL (arXiv
# 2505.24034) trained Llama 3.1, whose architecture is the same.
_COMMON = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072}
KNOWN_SHAPES: dict[str, dict[str, Any]] = {
    name: {
        **_COMMON,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
    }
    for name, layers, hidden, heads, intermediate, vocabulary in (
        ("llama-3.1-8b", 32, 4096, 32, 14336, 128256),
        ("llama-3.1-70b", 80, 8192, 64, 28672, 128256),
        ("llama-3.1-405b", 126, 16384, 128, 53248, 128256),
        ("mistral-small-24b", 40, 5120, 32, 32768, 131072),
        ("mistral-large-123b", 88, 12288, 96, 28672, 32768),
    )
}


def load_shape(model: str, *, classifier: bool = False) -> ModelShape:
    """The sizes of a model.

    Args:
        model: a name in `KNOWN_SHAPES`, the path of a `config.json`, a folder that holds one,
            `tiny`, or a Hugging Face name. Weights and tokenizer are not needed.
        classifier: count it as a sequence classifier.

    Raises:
        InputError: no config there, or not a causal LM's.
    """
    if sizes := KNOWN_SHAPES.get(model):
        return shape_of(MistralConfig(**sizes), model, classifier=classifier)
    path = Path(model).expanduser()
    folder = str(path.parent.absolute()) if path.is_file() else model
    return shape_of(loading.load_config(folder), model, classifier=classifier)


def shape_of(config: Any, name: str, *, classifier: bool = False) -> ModelShape:
    """The sizes of the model of a transformers config, counted on a model without memory.

    Raises:
        InputError: the config is not that of a causal LM, or of a `classifier`.
    """
    text = config.get_text_config()
    kind = "sequence classifier" if classifier else "causal LM"
    auto = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    try:
        with LOADING, torch.device("meta"):
            model = auto.from_config(text)
    except ValueError as error:
        raise InputError(f"model {name!r}: not a {kind} ({error})") from None
    blocks = set(model._no_split_modules or ())
    by_block = [
        [p.numel() for p in module.parameters()]
        for module in model.modules()
        if type(module).__name__ in blocks
    ]
    sizes = [sum(block) for block in by_block]
    parameters = list(model.parameters())  # tied tensors once
    total = sum(p.numel() for p in parameters)
    expert = int(getattr(text, "moe_intermediate_size", None) or text.intermediate_size)
    return ModelShape(
        name=name,
        parameters=total,
        block=max(sizes, default=0),
        outside=total - sum(sizes),
        matrix=max((n for block in by_block for n in block), default=0),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=expert * (getattr(text, "num_experts_per_tok", None) or 1),
        heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocabulary=text.vocab_size,
        context=loading.context_length(text),
        linear_layers=linear_layers(model),
        soft_capped=getattr(text, "final_logit_softcapping", None) is not None,
        stateful=bool(stateful_layers(model)),
    )
