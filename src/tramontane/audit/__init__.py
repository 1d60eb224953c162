"""Searches recorded rollouts for reward hacking and verifier errors; see docs/audit.md.

`audit` is the entry point. `recorded` reads the rows, `collect` keeps the data for the findings,
`suspicion` judges single completions, `disputes` asks other verifiers, and `findings` has the
result and its page.
"""
