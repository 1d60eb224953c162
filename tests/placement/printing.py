"""Rewards that print. Imports next to nothing, so that the processes of verifiers start fast."""

import sys


def loud(problem, text, n_tokens):
    """Prints a text no terminal's encoding need have."""
    print("reads", problem.id, "…\ud800")
    print("worried", file=sys.stderr)
    return 1.0


def unfinished(problem, text, n_tokens):
    """Prints without a line's end."""
    print("thinks", end="")
    return 1.0
