"""What garbage collection leaves alone for the rest of a process."""

import gc

_kept = False


def keep() -> None:
    """Leave what was made so far out of all collections, in this process and its forks."""
    global _kept
    gc.freeze()
    _kept = True


def is_kept() -> bool:
    """True if some objects are left out. After `keep`, they are not counted, which visits each."""
    return _kept or gc.get_freeze_count() > 0
