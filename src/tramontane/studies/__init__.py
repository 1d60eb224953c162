"""Studies: a claim of a paper, the arms that test it, and a verdict computed from their runs."""
