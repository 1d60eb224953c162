#!/usr/bin/env bash
# pytest 9.2.0 and pytest-xdist 3.8.0: groups of tests are spread over processes.
#
# Expected: with --dist loadgroup, tests that are marked xdist_group("g") run in one process, as they do
# under pytest 9.1.1. Seen: they run in all, and nothing says so: xdist adds the group to a private field
# of a test, from which pytest 9.2 no longer takes a test's name.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/test_group.py" <<'PYTHON'
import os
import time

import pytest


@pytest.mark.xdist_group("g")
@pytest.mark.parametrize("n", range(8))
def test_where(n):
    time.sleep(0.2)
    with open("processes.txt", "a") as file:
        print(os.getpid(), file=file)
PYTHON
processes() {
    python3 -m venv "$folder/$1"
    "$folder/$1/bin/pip" install --quiet "pytest==$1" 'pytest-xdist==3.8.0'
    (cd "$folder" && rm -f processes.txt && "$1/bin/python" -m pytest -q -n 2 --dist loadgroup > /dev/null)
    sort -u "$folder/processes.txt" | wc -l
}
old=$(processes 9.1.1)
new=$(processes 9.2.0)
echo "processes of one group: $old under pytest 9.1.1, $new under pytest 9.2.0"
[ "$old" = 1 ] && [ "$new" = 2 ]
