"""A script: `tramontane` with its words, on a Ray cluster of its own with `warm_actors`."""

from functools import partialmethod
from typing import Any

from ray._private.parameter import RayParams

from tests.placement.warm_actors import LAUNCHER
from tramontane.cli import main

if __name__ == "__main__":
    params: Any = RayParams
    params.__init__ = partialmethod(RayParams.__init__, setup_worker_path=LAUNCHER)
    main()
