#!/usr/bin/env bash
# transformers 5.23.0: ShieldGemma 2 by the auto class for images and text loses its text layers' weights when
# it is saved and loaded again.
#
# Expected: `AutoModelForImageTextToText` reads what a model of its own has written.
# Seen: it makes a Gemma 3 of ShieldGemma 2's config, whose files name the text layers
# `model.language_model.model. ...`; loading does not find them there, initializes them anew, raises nothing,
# and returns the model. With ShieldGemma 2's own class, all weights come back.
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
text = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}
vision = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}
config = transformers.ShieldGemma2Config(
    text_config=text, vision_config=vision, mm_tokens_per_image=4, boi_token_index=60,
    eoi_token_index=61, image_token_index=62, yes_token_index=1, no_token_index=2,
)


def lost(model: torch.nn.Module) -> list[str]:
    """Names of the weights that differ after saving and loading, constant ones left out."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder).state_dict()
    drawn = [(name, x) for name, x in model.state_dict().items() if x.unique().numel() > 1]
    return [name for name, x in drawn if not torch.equal(x, again[name])]


own = lost(transformers.ShieldGemma2ForImageClassification(config))
auto = transformers.AutoModelForImageTextToText.from_config(config)
text = [n for n, x in auto.state_dict().items() if "language_model" in n and x.unique().numel() > 1]
found = lost(auto)
print("ShieldGemma2ForImageClassification lost:", own)
print(f"AutoModelForImageTextToText ({type(auto).__name__}) lost:", found)
assert not own, "its own class loses weights too"
assert found and set(text) <= set(found), "the auto class reads the text layers back"
PYTHON
