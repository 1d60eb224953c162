#!/usr/bin/env bash
# transformers 5.23.0: AutoModelForCausalLM does not know Mistral 4, for which there is a causal LM.
#
# Expected: a config whose causal LM is a public class of the package is built by AutoModelForCausalLM.
# Seen: "Unrecognized configuration class".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import transformers

assert transformers.Mistral4ForCausalLM.config_class is transformers.Mistral4Config
try:
    transformers.AutoModelForCausalLM.from_config(transformers.Mistral4Config())
except ValueError as error:
    print(str(error).partition("\n")[0][:160])
else:
    raise SystemExit("AutoModelForCausalLM knows Mistral 4 now")
PYTHON
