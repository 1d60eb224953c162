"""The playground: the embedded world of the tiny base model.

Multi-step arithmetic (`sums`), word problems (`stories`) and small Python tasks (`programs`),
generated from a seed in the paper's seven languages, with the traces that a base model of theirs
is pre-trained on: its failings on purpose, so that reinforcement has something to find.
"""

from .drills import drills
from .generate import KINDS, problems, split_of
from .language import LANGUAGES
from .traces import Mixture, Style, examples, sample_trace, trace

__all__ = [
    "KINDS",
    "LANGUAGES",
    "Mixture",
    "Style",
    "drills",
    "examples",
    "problems",
    "sample_trace",
    "split_of",
    "trace",
]
