#!/usr/bin/env bash
# pydantic 2.14.4 describes mappings with tuples as keys in a JSON Schema that no JSON object fits.
#
# Expected: the schema of `dict[tuple[int, int], int]` is refused, or objects that it allows are read.
# Seen: it allows any object with integers as values, and every object with a key is refused.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'pydantic==2.14.4'
"$folder/venv/bin/python" - <<'PYTHON'
import json

from pydantic import TypeAdapter, ValidationError

adapter = TypeAdapter(dict[tuple[int, int], int])
schema = adapter.json_schema()
print(schema)
assert schema["type"] == "object"
failed = 0
for key in ("1,2", "[1, 2]", "(1, 2)", "1"):
    try:
        adapter.validate_json(json.dumps({key: 3}))
    except ValidationError:
        failed += 1
print(f"{failed} of 4 spellings of the key (1, 2) are refused")
assert failed == 4, "a key of a JSON object is read as a tuple now"
PYTHON
