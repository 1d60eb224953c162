#!/usr/bin/env bash
# transformers 5.23.0: reading `head_dim` of a Gemma 4 config raises, whatever default is given.
#
# Expected: `getattr(config, "head_dim", None)` is a number, or None.
# Seen: AmbiguousGlobalPerLayerAttributeError, since layers have different ones; as it is no AttributeError,
# the default of getattr does not help.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import transformers

config = transformers.Gemma4TextConfig(
    num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
    head_dim=16, global_head_dim=32,
)
try:
    found = getattr(config, "head_dim", None)
except Exception as error:
    print(f"getattr(config, 'head_dim', None) raises {type(error).__name__}, "
          f"an AttributeError: {isinstance(error, AttributeError)}")
    assert not isinstance(error, AttributeError), "getattr's default is used now"
else:
    raise SystemExit(f"head_dim is {found} now")
PYTHON
