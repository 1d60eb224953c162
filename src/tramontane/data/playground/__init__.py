"""The playground: generated problems and pre-training traces for the tiny base model.

Multi-step arithmetic (`sums`), word problems (`stories`) and small Python tasks (`programs`) are
generated from a seed, in the paper's seven languages. The base model's pre-training traces have
deliberate flaws, so that reinforcement learning has something to improve.
"""

from .generate import KINDS, problems, split_of
from .language import LANGUAGES
from .traces import Style, drills, examples, sample_trace, trace

__all__ = [
    "KINDS",
    "LANGUAGES",
    "Style",
    "drills",
    "examples",
    "problems",
    "sample_trace",
    "split_of",
    "trace",
]
