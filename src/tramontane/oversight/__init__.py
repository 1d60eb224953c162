"""Scalable oversight: can a weak judge supervise strong agents? (arXiv 2407.04622)

Protocols are functions of an `Episode` (`protocols`), played by participants of any kind
(`agents`), many at once (`play`), and measured (`figures`). docs/oversight.md is the guide.
"""
