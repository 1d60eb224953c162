"""The asynchronous loop (arXiv 2506.10910, section 3, figure 3); start with `pipeline`."""
