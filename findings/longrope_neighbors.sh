#!/usr/bin/env bash
# transformers 5.23.0: with longrope (Phi-3), a sequence's logits depend on its neighbors in the batch.
#
# Expected: padding apart, a sequence of 10 tokens has the same logits beside any other.
# Seen: beside one of 20 tokens, which is longer than `original_max_position_embeddings`, they differ by
# several units (9.7): the longest sequence decides which frequencies all rows get.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
half = 8
config = transformers.Phi3Config(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    max_position_embeddings=64, original_max_position_embeddings=16, initializer_range=0.3,
    rope_parameters={
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * half,
        "long_factor": [4.0] * half, "original_max_position_embeddings": 16,
    },
)
model = transformers.Phi3ForCausalLM(config).eval()
short, long = torch.randint(3, 64, (1, 10)), torch.randint(3, 64, (1, 20))


@torch.no_grad()
def logits_of_short(other):
    """The short sequence's logits in a batch with another one, padded on the right."""
    width = max(short.shape[1], other.shape[1])
    pad = lambda ids: torch.nn.functional.pad(ids, (0, width - ids.shape[1]))
    mask = torch.cat([pad(torch.ones_like(short)), pad(torch.ones_like(other))])
    return model(input_ids=torch.cat([pad(short), pad(other)]), attention_mask=mask).logits[0, :10]


alone = model(input_ids=short).logits[0].detach()
beside_short = float((logits_of_short(long[:, :10]) - alone).abs().max())
beside_long = float((logits_of_short(long) - alone).abs().max())
print(f"beside 10 tokens: {beside_short:.1e}; beside 20 tokens: {beside_long:.2f}")
assert beside_short < 1e-4
assert beside_long > 0.1, "each sequence has its own frequencies now"
PYTHON
