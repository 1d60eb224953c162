#!/usr/bin/env bash
# transformers 5.23.0: WhisperForCausalLM ignores `logits_to_keep`.
#
# Expected: like other causal LMs, it returns the logits of the positions that are asked for, here two.
# Seen: those of all ten positions, without an error or a warning, so that whoever reads the first two reads
# other positions'.
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
config = transformers.WhisperConfig(
    vocab_size=64, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)
whisper = transformers.WhisperForCausalLM(config).eval()
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
llama = transformers.LlamaForCausalLM(config).eval()
ids, wanted = torch.randint(3, 64, (1, 10)), torch.tensor([4, 9])
shapes = {
    type(model).__name__: tuple(model(input_ids=ids, logits_to_keep=wanted).logits.shape)
    for model in (llama, whisper)
}
print(shapes)
assert shapes["LlamaForCausalLM"] == (1, 2, 64), "Llama's logits are others"
assert shapes["WhisperForCausalLM"] == (1, 10, 64), "Whisper reads logits_to_keep now"
PYTHON
