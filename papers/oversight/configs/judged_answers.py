"""A verifier whose verdict is that of a judge after a debate.

judged.yaml trains with it, as `verifier: papers.oversight.configs.judged_answers.check`, from the
root of the repository. The discussion and its participants are in judged_answers.yaml.
"""

from pathlib import Path

from tramontane_oversight.reward import JudgedAnswer

check = JudgedAnswer(Path(__file__).with_suffix(".yaml"))
