#!/usr/bin/env bash
# transformers 5.23.0: loading a Youtu model resets the embedding of its padding token.
#
# Expected: `from_pretrained` reads what `save_pretrained` wrote.
# Seen: the row of `pad_token_id` is 0 again, and none is reported as missing. With a tied output head,
# which training changes in every row, the model that is read computes other logits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import tempfile

import torch
import transformers

transformers.logging.set_verbosity_error()
config = transformers.AutoConfig.for_model(
    "youtu", vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16,
    qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, pad_token_id=3, bos_token_id=1,
    eos_token_id=2, tie_word_embeddings=True,
)
model = transformers.AutoModelForCausalLM.from_config(config)
with torch.no_grad():
    model.get_input_embeddings().weight.fill_(1.0)  # as training a tied head changes every row
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
rows = again.get_input_embeddings().weight.mean(1)
print("missing:", sorted(info["missing_keys"]), "rows that are not 1:", (rows != 1).nonzero().tolist())
assert not info["missing_keys"]
assert (rows != 1).nonzero().tolist() == [[3]], "the padding token's row is read as it was saved"
assert rows[3] == 0
PYTHON
