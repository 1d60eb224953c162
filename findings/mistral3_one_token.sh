#!/usr/bin/env bash
# transformers 5.23.0: Mistral 3 refuses an image of one token, the size of an icon, that stands alone.
#
# Expected: an image of 28 x 28 pixels, one merged patch, gives one feature. Seen: its features are
# squeezed twice, so that the hidden size is split into tokens, and a RuntimeError ends the forward; an
# image of two tokens, and both images together, are read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'torch==2.13.0' 'transformers==5.23.0'
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=16)
text = dict(model_type="mistral", vocab_size=32, num_key_value_heads=1, **sizes)
tower = dict(model_type="pixtral", image_size=56, patch_size=14, **sizes)
config = Mistral3Config(text_config=text, vision_config=tower, image_token_index=10, vision_feature_layer=-1)
model = Mistral3ForConditionalGeneration(config).eval()


def read(*images: tuple[int, int]) -> bool:
    """Whether images of these sizes, in pixels, are read."""
    tokens = sum((height // 28) * (width // 28) for height, width in images)
    ids = torch.tensor([[1, *[10] * tokens, 2]])
    highest, widest = (max(size) for size in zip(*images))
    pixels = torch.rand(len(images), 3, highest, widest)
    try:
        model(input_ids=ids, pixel_values=pixels, image_sizes=torch.tensor(images))
        return True
    except RuntimeError as error:
        print(images, error)
        return False


assert read((28, 56)) and read((28, 28), (28, 56)), "images of two tokens are no longer read"
assert not read((28, 28)), "an image of one token is read now"
PYTHON
