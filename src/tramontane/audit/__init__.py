"""Searches recorded rollouts for reward hacking and verifier errors; see docs/rewards.md.

`audit` is the entry point. `recorded` reads the rows, `collect` keeps the data for the findings,
`suspicion` and `opinions` judge single completions, `disputes` queries the other verifiers, and
`page` writes the result.
"""
