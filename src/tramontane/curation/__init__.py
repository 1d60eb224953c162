"""Turns raw problem sets into a set worth training on (arXiv 2506.10910, section 4.1).

A curation is a list of stages over a stream of rows. Every row ends as kept, rewritten or dropped,
with the deciding stage and its reason. A stage is one file here, one section of `CurateConfig` and
one line of `pipeline.STAGES`.
"""
