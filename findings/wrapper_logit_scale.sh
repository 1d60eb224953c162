#!/usr/bin/env bash
# transformers 5.23.0: Aya Vision ignores the `logit_scale` of its text config.
#
# Expected: on text alone, the wrapper's logits are those of its text half.
# Seen: with a scale of 1/4, the text half's logits are a quarter of the wrapper's, which has an output head
# of its own and applies no scale.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers

transformers.logging.set_verbosity_error()
text = {
    "model_type": "cohere2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}
vision = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8,
}
ids = torch.randint(3, 60, (1, 8), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def spread(scale):
    torch.manual_seed(0)
    config = transformers.AyaVisionConfig(
        text_config=text | {"logit_scale": scale}, vision_config=vision, image_token_id=63
    )
    whole = transformers.AyaVisionForConditionalGeneration(config).eval()
    half = transformers.Cohere2ForCausalLM(config.text_config).eval()
    half.model.load_state_dict(whole.model.language_model.state_dict())
    half.lm_head.weight.copy_(whole.lm_head.weight)
    return [float(model(input_ids=ids).logits.std()) for model in (whole, half)]


(whole_1, half_1), (whole_4, half_4) = spread(1.0), spread(0.25)
print(f"logits with a scale of 1 and of 1/4: wrapper {whole_1:.4f} {whole_4:.4f}, "
      f"its text half alone {half_1:.4f} {half_4:.4f}")
assert whole_1 == whole_4, "the wrapper reads its text half's logit_scale now"
assert abs(half_4 / half_1 - 0.25) < 1e-5
PYTHON
