"""Sizes of a model from its config alone: no weights are read or allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
from transformers.pytorch_utils import Conv1D

from tramontane.errors import InputError
from tramontane.models import loading
from tramontane.models.cached import Cached
from tramontane.models.families import ForwardFails, transformers_fails
from tramontane.models.latent import up_projections
from tramontane.models.states import stateful_layers
from tramontane.models.wrapped import LOADING

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_NOTHING = Cached(0)


class LinearLayer(NamedTuple):
    """A linear layer of a model: `torch.nn.Linear`, or GPT-2's, which stores its weight as
    [inputs, outputs]."""

    name: str  # name of the module
    # inputs, outputs: widths.
    inputs: int
    outputs: int
    head: bool  # True for the output head
    tied: bool  # True if another module has the same weight
    plain: bool = True  # False if the model computes more, or other things, with it than W x + b
    eight_bits: bool = True  # False if `generator.weights` leaves it in full


def linear_layers(model: PreTrainedModel) -> tuple[LinearLayer, ...]:
    """The linear layers of a model, possibly on the meta device, in its order."""
    uses = Counter(id(tensor) for tensor in model.state_dict(keep_vars=True).values())
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    # Mamba's kernels read these weights themselves (arXiv 2312.00752); only its mixers have a D.
    read = {
        f"{name}.{part}"
        for name, module in model.named_modules()
        if hasattr(module, "A_log") and hasattr(module, "D")
        for part in ("dt_proj", "out_proj")
    }
    plain = type(embeddings) is torch.nn.Embedding
    absorbed = up_projections(model)

    def tied(module: torch.nn.Linear | Conv1D) -> bool:
        return uses[id(module.weight)] > 1

    return tuple(
        LinearLayer(
            name,
            *_widths(module),
            module is head,
            tied(module),
            # Routers of experts are subclasses that return more than one tensor.
            type(module).forward in (torch.nn.Linear.forward, Conv1D.forward) and name not in read,
            type(module) is torch.nn.Linear
            and module not in absorbed
            and (module is not head or plain or not tied(module)),
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
    )


def _widths(layer: torch.nn.Linear | Conv1D) -> tuple[int, int]:
    """Inputs and outputs."""
    if isinstance(layer, Conv1D):
        return layer.nx, layer.nf
    return layer.in_features, layer.out_features


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
    cached: Cached = _NOTHING  # what a generator keeps of a sequence

    @property
    def head(self) -> int:
        """Parameters of the output head; the input embeddings have as many, or are tied to it."""
        return self.vocabulary * self.hidden

    @property
    def tied(self) -> bool:
        """True if the output head is the input embeddings."""
        return self.outside < 2 * self.head

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of a token's keys and values over all layers; 1 for a model without attention."""
        return self.cached.token * DTYPE_BYTES[dtype] or 1

    def state_bytes(self, dtype: str) -> int:
        """Bytes of the states of one sequence over all layers."""
        return self.cached.sequence * DTYPE_BYTES[dtype]


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


_counted: dict[tuple[str, str, bool], ModelShape] = {}


def load_shape(model: str, *, classifier: bool = False) -> ModelShape:
    """The sizes of a model.

    Args:
        model: a name in `KNOWN_SHAPES`, the path of a `config.json`, a folder that holds one,
            `tiny`, or a Hugging Face name. Weights and tokenizer are not needed.
        classifier: count it as a sequence classifier.

    Raises:
        InputError: no config there, not a causal LM's, or of weights that cannot be loaded.
    """
    config = load_shape_config(model)
    if not classifier:
        loading.quantization(model, config)
    return shape_of(config, model, classifier=classifier)


def load_shape_config(model: str) -> Any:
    """The config of a model of which weights and tokenizer may be absent, named as in `load_shape`.

    Raises:
        InputError: no config there, or not a causal LM's.
    """
    if sizes := KNOWN_SHAPES.get(model):
        return MistralConfig(**sizes)
    path = Path(model).expanduser()
    return loading.load_config(str(path.parent.absolute()) if path.is_file() else model)


def shape_of(config: Any, name: str, *, classifier: bool = False) -> ModelShape:
    """The sizes of the model of a transformers config, counted once on a model without memory.

    Raises:
        InputError: the config is not that of a causal LM, or of a `classifier`.
    """
    key = (config.to_json_string(use_diff=False), name, classifier)
    if key not in _counted:
        _counted[key] = _count(config, name, classifier)
    return _counted[key]


def _count(config: Any, name: str, classifier: bool) -> ModelShape:
    text = config.get_text_config()
    kind = "sequence classifier" if classifier else "causal LM"
    auto = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    if type(text) not in auto._model_mapping:
        raise InputError(f"model {name!r}: not a {kind} of transformers ({text.model_type})")
    with transformers_fails(f"code of {text.model_type}"), LOADING, torch.device("meta"):
        model = auto.from_config(text)
    blocks = set(model._no_split_modules or ())
    by_block = [
        [p.numel() for p in module.parameters()]
        for module in model.modules()
        if type(module).__name__ in blocks
    ]
    sizes = [sum(block) for block in by_block]
    parameters = list(model.parameters())  # tied tensors once
    total = sum(p.numel() for p in parameters)
    linear = linear_layers(model)
    cached = _cached(model, text)
    return ModelShape(
        name=name,
        parameters=total,
        block=max(sizes, default=0),
        outside=total - sum(sizes),
        matrix=max((n for block in by_block for n in block), default=0),
        layers=len(sizes) or text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=_intermediate(text, linear),
        heads=cached.heads,
        kv_heads=cached.kv_heads,
        head_dim=cached.head_dim,
        vocabulary=text.vocab_size,
        context=loading.context_length(text),
        linear_layers=linear,
        soft_capped=getattr(text, "final_logit_softcapping", None) is not None,
        stateful=bool(stateful_layers(model)),
        cached=cached,
    )


# Names that configs give the width of an MLP, or of one of its experts.
_WIDTHS = ("moe_intermediate_size", "intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner")


def _intermediate(config: Any, layers: Sequence[LinearLayer]) -> int:
    """Width of the MLP, over all experts that a token visits; the widest linear layer's where the
    config does not say."""
    found = next((x for name in _WIDTHS if (x := getattr(config, name, None))), None)
    if found is None:
        found = [layer.outputs for layer in layers if not layer.head] or 4 * config.hidden_size
    # Some have a number for each layer.
    width = max(found) if isinstance(found, list) else found
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    return int(width) * int(max(chosen) if isinstance(chosen, list) else chosen)


def _cached(model: PreTrainedModel, config: Any) -> Cached:
    try:
        with transformers_fails(f"code of {type(model).__name__}"):
            return Cached.of(model)
    except ForwardFails:
        return Cached.by(model, config)
