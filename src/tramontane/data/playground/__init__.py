"""The playground: generated problems and pre-training traces for the tiny base model.

Multi-step arithmetic (`sums`), word problems (`stories`), small Python tasks (`programs`), and
problems that need a tool or are a game of several turns (`tasks`) are generated from a seed, in the
paper's seven languages. The base model's pre-training traces have deliberate flaws, so that
reinforcement learning has something to improve.
"""

from .conversations import conversation, examples
from .generate import KINDS, problems, split_of
from .language import LANGUAGES
from .traces import Style, drills, sample_style, trace
