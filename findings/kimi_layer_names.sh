#!/usr/bin/env bash
# transformers 5.23.0: Kimi K2.5 is saved with its text layers under the name of its tower's blocks.
#
# Expected: `save_pretrained` writes the names of published files, `language_model.model.layers.0. ...`.
# Seen: `language_model.model.blocks.0. ...`: the renaming of the vision tower's blocks, undone on saving,
# meets every name with `layers`. transformers reads the files back; readers of the published names do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import tempfile

import torch
import transformers
from safetensors import safe_open

transformers.logging.set_verbosity_error()
text = {
    "model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "first_k_dense_replace": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
}
vision = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2
}
config = transformers.Kimi_K25Config(
    text_config=text, vision_config=vision, projection_hidden_size=32, image_token_id=60,
    video_token_id=61, vision_start_token_id=62, vision_end_token_id=63,
)
model = transformers.Kimi_K25ForConditionalGeneration(config)
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        names = [name for name in file.keys() if "input_layernorm" in name]
    again = transformers.Kimi_K25ForConditionalGeneration.from_pretrained(folder)
print("in the model:", [n for n, _ in model.named_parameters() if "input_layernorm" in n])
print("in the file: ", names)
assert names == ["language_model.model.blocks.0.input_layernorm.weight"], "other names"
one, two = model.state_dict(), again.state_dict()
assert all(torch.equal(one[name], two[name]) for name in one), "it does not read its own names"
PYTHON
