"""The command `tramontane`: one short function per command, one parameter per flag.

The work is in `api`. Each module holds related commands; they are imported in the order of
`tramontane --help`.
"""

from tramontane.cli import (  # noqa: F401, I001
    training,
    sampling,
    recipes,
    grading,
    viewing,
    planning,
    studies,
    oversight,
)
from tramontane.cli.terminal import app, main

__all__ = ["app", "main"]
