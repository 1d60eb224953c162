"""The study of this package, and the lessons after which the tiny base takes part in it."""
