"""Many runs in one folder: a grid of config values, and the processes that run it."""
