"""The command `tramontane`, as `python -m tramontane`."""

from tramontane.cli import main

main()
