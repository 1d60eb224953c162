"""The exception for errors that a user can fix: in a config, a file, a model, an environment."""


class InputError(Exception):
    """An input is wrong; the message names the input and the remedy."""
