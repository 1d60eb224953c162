#!/usr/bin/env bash
# Pillow 12.3.0: a 16-bit gray image becomes white where it is brighter than 255 of 65,535.
#
# Expected: convert("RGB") scales 16 bits to 8, so that a ramp stays a ramp. Seen: values are cut off
# at 255; of a ramp over the whole range, all but the first steps are white.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'pillow==12.3.0'
"$folder/venv/bin/python" - <<'PYTHON'
import io
import struct

from PIL import Image

ramp = [0, 100, 255, 256, 1000, 20000, 40000, 65535]
image = Image.frombytes("I;16", (len(ramp), 1), struct.pack(f"<{len(ramp)}H", *ramp))
file = io.BytesIO()
image.save(file, "PNG")
opened = Image.open(io.BytesIO(file.getvalue()))
converted = opened.convert("RGB").tobytes()[::3]
print(opened.mode, [*converted])
assert [*converted] == [min(value, 255) for value in ramp], "the conversion is another one now"
PYTHON
