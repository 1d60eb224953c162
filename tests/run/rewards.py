"""Rewards of runs. Imports nothing large, so that the processes of verifiers start fast."""

import time


def even(problem, text, n_tokens):
    """A reward that a random model may get."""
    return float(sum(map(ord, text)) % 2 == 0)


def names_the_sum(problem, text, n_tokens):
    return float(str(problem.metadata["sum"]) in text)


def slow(problem, text, n_tokens):
    """Takes its time, without work."""
    time.sleep(0.2)
    return 0.0


def share(texts):
    """The share of the group that wrote the same text."""
    return [texts.count(text) / len(texts) for text in texts]
