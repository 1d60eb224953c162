#!/usr/bin/env bash
# latex2sympy2_extended 1.11.0, which math-verify reads answers with, drops the exponent of I.
#
# Expected: `I^2` is read as a power, as `x^2` is.
# Seen: `I^2` and `I^n` are read as I alone, without an error, so that a current and its square are one answer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'latex2sympy2_extended[antlr4_13_2]==1.11.0'
"$folder/venv/bin/python" - <<'PYTHON'
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

config = ConversionConfig(lowercase_symbols=False)
found = {
    text: str(latex2sympy(text, normalization_config=None, conversion_config=config))
    for text in ("x^2", "E^2", "I^2", "I^n", "I_1")
}
print(found)
assert found["x^2"] == "x**2"
assert found["I^2"] == found["I^n"] == "I", "an exponent of I is read now"
PYTHON
