#!/usr/bin/env bash
# reasoning-gym 0.1.25: some scorers give full marks to a text that does not depend on the problem.
#
# Expected: score_answer gives full marks to what answers its problem.
# Seen: nan has full marks in complex_arithmetic, since no comparison with it is true; and one sum of 24
# has them in any puzzle24, whose scorer does not ask for the problem's numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet reasoning-gym==0.1.25
"$folder/venv/bin/python" - <<'PYTHON'
from reasoning_gym.factory import create_dataset

for name, text in (("complex_arithmetic", "nan"), ("puzzle24", "1*3*5 + 9")):
    problems = create_dataset(name, size=16, seed=0)
    full = sum(problems.score_answer(text, problems[i]) >= 1 for i in range(16))
    print(f"{name}: full marks for {text!r} in {full} of 16 problems")
    assert full >= 14, "a constant is no longer paid"
PYTHON
