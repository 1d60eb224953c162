"""The precompiled standard header of C++, cached on the machine."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

TOOL_SECONDS = 120.0  # limit for g++ to print its version or compile a header


@functools.cache
def precompiled(flags: tuple[str, ...]) -> Path | None:
    """A folder with `bits/stdc++.h` compiled with these flags; None if g++ has no such header.

    The folder is made once and kept in the user's cache, or in the system's for root, since
    programs then run as another user.
    """
    version = subprocess.run(
        ["g++", "--version"], capture_output=True, text=True, timeout=TOOL_SECONDS
    ).stdout
    second = "#include_next <bits/stdc++.h>\n"  # for a program that includes the header twice
    kind = (flags, version, os.uname().machine, second, "readable")
    key = hashlib.sha256(repr(kind).encode()).hexdigest()[:16]
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path("/var/cache" if os.geteuid() == 0 else users)
    folder = cache / "tramontane" / f"headers-{key}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    (made / "bits").mkdir()
    (made / "bits" / "stdc++.h").write_text(second)
    (made / "empty.hpp").write_text("#include <bits/stdc++.h>\n")
    target = str(made / "bits" / "stdc++.h.gch")
    command = ["g++", *flags, "-x", "c++-header", "-o", target, str(made / "empty.hpp")]
    if subprocess.run(command, capture_output=True, timeout=TOOL_SECONDS).returncode != 0:
        shutil.rmtree(made)
        return None  # then programs that include the header do not compile either
    for path in (folder.parent, made, *made.rglob("*")):  # programs may run as another user
        path.chmod(0o755 if path.is_dir() else 0o644)
    try:
        made.rename(folder)  # atomic: the folder is complete or absent
    except OSError:  # another worker was faster
        shutil.rmtree(made)
    return folder
