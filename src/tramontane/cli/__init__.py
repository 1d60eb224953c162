"""The command `tramontane`: one short function per command, one parameter per flag.

The work is in `api`. Modules of this folder hold related commands; the order of their import is
that of `tramontane --help`, group by group.
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
