"""Names of devices."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator


def _device(name: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?|mps", name):
        raise ValueError(f"{name!r} is no device; write cpu, cuda, cuda:N or mps")
    return name


Device = Annotated[str, AfterValidator(_device)]
