#!/usr/bin/env bash
# torch 2.13.0: torch._int_mm is exact only on processors with VNNI or AMX.
#
# Expected: a product of int8 matrices with int32 sums is exact on every CPU, or refused. Seen: with
# the instructions of older processors (here by oneDNN's own setting, as on a CPU with AVX2 alone),
# pairs of products are cut off at 16 bits, without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/product.py" <<'PYTHON'
import torch

most = torch.full((32, 64), 127, dtype=torch.int8)
print(int(torch._int_mm(most, most.T)[0, 0]), "of", 127 * 127 * 64)
PYTHON
found=$(ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 "$folder/venv/bin/python" "$folder/product.py")
echo "$found"
[ "$found" != "1032256 of 1032256" ] # fails once it is exact
