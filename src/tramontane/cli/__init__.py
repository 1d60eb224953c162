"""The command `tramontane`: one short function per command, one parameter per flag.

The functions that do the work are those of `import tramontane`. Each module holds related commands;
they are imported in the order of `tramontane --help`.
"""

from tramontane.errors import importing

with importing():
    from tramontane.cli import (  # noqa: I001
        training,
        sampling,
        recipes,
        grading,
        planning,
        studies,
        sweeps,
    )
    from tramontane.cli.terminal import app, main
