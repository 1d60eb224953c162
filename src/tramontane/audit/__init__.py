"""Searches recorded rollouts for reward hacking and verifier errors; see docs/rewards.md.

`audit` is the entry point. `recorded` reads the rows, `collect` keeps what the findings need,
`suspicion` and `opinions` judge single completions, `disputes` asks the other verifiers, and
`page` writes the result.
"""
