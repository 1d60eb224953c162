"""Completions → rewards: format, correctness, length, language (arXiv 2506.10910, section 2.2).

`reward.grade` grades one completion; `pool.VerifierPool` grades groups in worker processes that are
killed from outside when late.
"""
