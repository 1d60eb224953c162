"""Compile and repair: each program is answered with the first shown test that it fails.

    python examples/repair.py [key=value ...]

The environment `repair` runs what the model writes in a sandbox and shows it the failure; hidden
tests decide the reward. The result has pass@1 after the first turn and after all three. See
docs/repair.md for the whole run, of which this is the beginning.
"""

import sys

import tramontane

SHORTER = ["pipeline.updates=2", "pipeline.n_batch=32", "pipeline.n_async=48"]
SHORTER += ["cold_start.steps=60", "evaluation.problems=12"]

if __name__ == "__main__":
    tramontane.train("configs/repair.yaml", ["name=repaired", *(sys.argv[1:] or SHORTER)])
