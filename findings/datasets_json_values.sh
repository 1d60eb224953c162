#!/usr/bin/env bash
# datasets 5.2.0 reads other values from JSON lines than are written there, without a word.
#
# Expected: a text stays a text, and an integer an integer or an error. Seen: a column of dates becomes
# times; integers above 64 bits become floats, which lose digits; and in a column that has texts and
# numbers, the texts "007", "null", "true" and "[1, 2]" become 7, nothing, true and a list.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'datasets==5.2.0' 'pyarrow==26.0.1'
export HF_HOME="$folder/cache" HF_DATASETS_DISABLE_PROGRESS_BARS=1
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import datetime
import json
import sys
from pathlib import Path

from datasets import load_dataset


def read(name: str, values: list) -> list:
    path = Path(sys.argv[1]) / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"answer": value}) + "\n" for value in values))
    found = load_dataset("json", data_files=str(path), split="train")["answer"][:]
    print(values, "->", found)
    return found


assert read("dates", ["2024-05-01"]) == [datetime.datetime(2024, 5, 1)], "dates are texts now"
[large] = read("large", [12345678901234567890123])
assert isinstance(large, float) and int(large) != 12345678901234567890123, "integers are exact now"
mixed = read("mixed", ["007", 7, "null", "true", "[1, 2]", "x"])
assert mixed == [7, 7, None, True, [1, 2], "x"], "texts beside numbers are read otherwise now"
PYTHON
