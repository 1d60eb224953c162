"""What a report holds, for tests."""

import json
import re
from pathlib import Path
from typing import Any


def answers_of(report: Path) -> dict[str, Any]:
    """The answers inside a report, by what the page asks for."""
    (data,) = re.findall(
        r'<script type="application/json" id="answers">(.*?)</script>', report.read_text()
    )
    return dict(json.loads(data))
