"""The command `tramontane`, as a program and as `python -m tramontane`."""

import os
import signal


def main() -> None:
    """Run the command. Ctrl-C while it is imported ends it without a traceback, with 130."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from tramontane.cli import main as command

    signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


if __name__ == "__main__":
    main()
