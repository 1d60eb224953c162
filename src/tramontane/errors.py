"""The one exception for what a user can mend: a config, a file, a model, an environment."""


class InputError(Exception):
    """Something given from outside is wrong; the message names it and the remedy."""
