"""What runs import, for `tests.forked`, whose server has imported no more than a run does."""

import sys


def no_processor() -> None:
    """Fail where the worker and the trainer of a run import what reads images."""
    import tramontane.generator.generator
    import tramontane.trainer.trainer  # noqa: F401

    assert "tramontane.models.processors" not in sys.modules
