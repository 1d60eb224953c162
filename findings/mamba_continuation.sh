#!/usr/bin/env bash
# transformers 5.23.0: Mamba 1 continues a cached sequence wrongly when it is given several tokens at once.
#
# Expected: after a prefill of 6 tokens with a cache, the logits of the next 6 are those of one forward
# over all 12, whether they are given one at a time or together, as with keys and values.
# Seen: one at a time they differ by about 1e-5, together by several units (12.4), without an error or a
# warning: with more than one token, the scan starts from a state of zeros instead of the cached one.
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
config = transformers.MambaConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=0.5
)
model = transformers.MambaForCausalLM(config).eval()
ids = torch.randint(1, 64, (1, 12))


@torch.no_grad()
def largest_difference(step):
    whole = model(ids).logits[:, 6:]
    cache = model(ids[:, :6], use_cache=True).cache_params
    parts = [
        model(ids[:, start : start + step], use_cache=True, cache_params=cache).logits
        for start in range(6, 12, step)
    ]
    return float((torch.cat(parts, 1) - whole).abs().max())


single, together = largest_difference(1), largest_difference(6)
print(f"one token at a time: {single:.1e}; six together: {together:.1f}")
assert single < 1e-3, "continuing one token at a time has changed"
assert together > 1.0, "continuing by several tokens is right now"
PYTHON
