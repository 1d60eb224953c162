#!/usr/bin/env bash
# transformers 5.23.0: the processor of Mistral 3 and Pixtral needs torchvision, though its images are made by Pillow.
#
# Expected: as with LLaVA's processor, which falls back to its image processor of Pillow, AutoProcessor or
# PixtralProcessor works without torchvision, as `PixtralImageProcessorPil` exists.
# Seen: the class is a placeholder that raises ImportError, and its module cannot be imported, since it takes one
# function of arithmetic on sizes from the module of the torchvision image processor. And a very narrow image, such as
# 1 x 2000 pixels, is refused with an error about size keys: its width becomes 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6 pillow==12.3.0
"$folder/venv/bin/python" - <<'PYTHON'
import importlib

import transformers
from PIL import Image

transformers.logging.set_verbosity_error()
pixels = transformers.PixtralImageProcessorPil(size={"longest_edge": 1540}, patch_size=14)
made = pixels(Image.new("RGB", (100, 50)), return_tensors="pt")
print("PixtralImageProcessorPil:", made["image_sizes"])
try:
    importlib.import_module("transformers.models.pixtral.processing_pixtral")
except ModuleNotFoundError as error:
    print("processing_pixtral:", error)
    assert error.name == "torchvision"
else:
    raise SystemExit("the module can be imported now")
try:
    pixels(Image.new("RGB", (1, 2000)), return_tensors="pt")
except ValueError as error:
    print("1 x 2000 pixels:", error)
else:
    raise SystemExit("a narrow image is processed now")
PYTHON
