"""The pages that commands write: one Jinja environment and one style for all of them.

The end of a template's name decides how its values are treated: `.html.j2` escapes them, `.md.j2`
leaves them as they are. An HTML template extends `page.html.j2`, which holds the style.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

FOLDER = Path(__file__).parent
STYLE = FOLDER / "style.css"


def render(template: str | Path, **values: Any) -> str:
    """A page's text.

    Args:
        template: its path in this package, such as `curation/report.md.j2`, or an absolute path.
        values: the values and functions that it uses.

    Raises:
        jinja2.UndefinedError: the template uses a value that was not given.
    """
    return _environment().get_template(str(template)).render(values)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(lambda name: (FOLDER / name).read_text("utf-8")),
        autoescape=lambda name: bool(name and name.endswith(".html.j2")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = table_cell
    return environment


def table_cell(text: str) -> str:
    """The text in one cell of a Markdown table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def json_values(value: Any) -> Any:
    """A value for JSON, with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
