"""A verifier whose verdict is that of a judge after a debate.

`configs/judged.yaml` trains with it, as `verifier: examples.judged_answers.check`. The discussion
and its participants are in judged_answers.yaml beside this file.
"""

from pathlib import Path

from tramontane.oversight.reward import JudgedAnswer

check = JudgedAnswer(Path(__file__).with_suffix(".yaml"))
