#!/usr/bin/env bash
# huggingface_hub 2.4.0: when the hub cannot be reached, the error is of httpx2, not of httpx.
#
# Expected: `except httpx.HTTPError` (or requests' errors, as before 1.0) around calls of HfApi catches
# a refused connection. Seen: httpx2.ConnectError, which has no class of httpx among its bases, even
# where httpx is installed too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'huggingface_hub==2.4.0' 'httpx==0.28.1'
HF_ENDPOINT=http://127.0.0.1:9 HF_HUB_DISABLE_TELEMETRY=1 "$folder/venv/bin/python" - <<'PYTHON'
import httpx
from huggingface_hub import HfApi

try:
    HfApi(token="none").model_info("a/b")
except Exception as error:
    bases = [f"{base.__module__}.{base.__name__}" for base in type(error).__mro__]
    print(bases)
    assert not isinstance(error, httpx.HTTPError), "httpx catches it now"
    assert any(base.startswith("httpx2.") for base in bases), "it is of another library now"
else:
    raise SystemExit("nothing listens at port 9, and the call succeeded")
PYTHON
