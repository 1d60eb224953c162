"""Small random models of three families, and transformers' own forward as the engine's reference.

The models' weights have a wide distribution, so that next-token distributions are far from uniform
and a wrong key, position or mask shows.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tramontane.types import Completion, SamplingParams

torch.set_num_threads(1)  # a second thread slows down models as small as these

VOCAB = 97
EOS = 2
LAYERS = 2
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 9}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 12}),
}


def make_model(
    family: str = "llama", tied: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    config_class, model_class, extra = FAMILIES[family]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
        **extra,
    )
    torch.manual_seed(seed)
    return model_class(config).to(dtype).eval().requires_grad_(False)


def twin(model: PreTrainedModel, attention: str = "eager") -> PreTrainedModel:
    """The same weights with transformers' own attention."""
    other = copy.deepcopy(model)
    other.set_attn_implementation(attention)
    return other


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>"] + [f"w{i}" for i in range(3, VOCAB)]
    core = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", bos_token="<s>", pad_token="<pad>"
    )


def make_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def make_requests(
    groups: int,
    size: int,
    seed: int = 0,
    lengths: tuple[int, int] = (1, 40),
    tokens: tuple[int, int] = (1, 40),
    **sampling,
) -> list[Completion]:
    """Groups of mixed prompt lengths, members of mixed `max_tokens`."""
    rng = random.Random(seed)
    out = []
    for group in range(groups):
        prompt = make_prompt(rng, rng.randint(*lengths))
        for index in range(size):
            params = SamplingParams(rng.randint(*tokens), **sampling)
            out.append(
                Completion.requested(group, index, prompt, rng.getrandbits(70) - 2**69, params)
            )
    return out


def finish(engine) -> dict[tuple[int, int], Completion]:
    """Run an engine or generator until nothing is unfinished; completions by (group, index)."""
    done = {}
    for _ in range(5000):
        for completion in engine.step():
            key = completion.group, completion.index
            assert key not in done
            done[key] = completion
        if not (engine.unfinished if hasattr(engine, "unfinished") else engine.pending()):
            return done
    raise AssertionError("the engine did not finish within 5,000 steps")


def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], tokens: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs [T, V] of every token of a completion, by one plain forward of `model`."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].float()
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / (temperature or 1.0), -1)


def plain_logprobs(
    model: PreTrainedModel, completions: Iterable[Completion], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Log-probs [T] of each completion's tokens, by one plain forward of `model` over all of them,
    padded behind their ends, where none of their tokens attends to."""
    completions = list(completions)
    rows = [torch.tensor([*c.prompt_ids, *c.token_ids]) for c in completions]
    with torch.no_grad():
        logits = model(pad_sequence(rows, batch_first=True)).logits.float()
    found = []
    for c, row in zip(completions, logits, strict=True):
        row = row[len(c.prompt_ids) - 1 :][: len(c.token_ids)]
        found.append(chosen(torch.log_softmax(row / (temperature or 1.0), -1), c.token_ids))
    return found


def chosen(logprobs: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Log-probs [T] of the given tokens, from [T, V]."""
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
