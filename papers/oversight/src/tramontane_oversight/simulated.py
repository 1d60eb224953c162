"""Agents with a stated accuracy and persuasiveness, for which every figure has a closed form.

An argument has a strength in Elo points. A judge that sees strengths E for the right and F for the
wrong answer, each the mean over its arguments, chooses the right one with the odds

    accuracy / (1 − accuracy) · 10^(susceptibility · (E − F) / 500).

So an agent that wins a share w of its consultancies before an impartial judge (accuracy ½) has the
strength 500 · log10(w / (1 − w)), and debates follow the paper's Elo formula (arXiv 2407.04622).

Without arguments a judge states its accuracy as the probability of its answer, and is calibrated.
After arguments it states none, since it cannot know which side is right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from random import Random

from tramontane.errors import InputError
from tramontane_oversight.agents import Immediate
from tramontane_oversight.config import SimulatedModel
from tramontane_oversight.figures import SCALE
from tramontane_oversight.transcript import LETTERS, Call, Reply, Transcript

_STRENGTH = re.compile(r"\[strength ([+-]\d+(?:\.\d+)?)\]")


def strength_of(text: str) -> float:
    """The strength that a simulated argument states, in Elo points; 0 for other texts."""
    found = _STRENGTH.search(text)
    return float(found[1]) if found else 0.0


class SimulatedAgent(Immediate):
    """A participant whose replies are drawn by its stated probabilities.

    Args:
        config: accuracy and persuasiveness.
        seed: with the key of a call, determines the reply.
    """

    def __init__(self, config: SimulatedModel, seed: int) -> None:
        super().__init__()
        self.config, self.seed = config, seed

    def reply(self, key: str, call: Call, examples: Sequence[Transcript]) -> Reply:
        if call.task == "argue":
            return Reply(self._argument(call, key))
        if call.task == "ask":
            return Reply("Why?")
        if call.task == "prefer":
            strengths = [strength_of(text) for text in call.candidates]
            return Reply(str(1 + strengths.index(max(strengths))))
        rng = self._random(key)
        if call.task == "judge" and call.turns:
            return Reply(_letter(call, self._persuaded(call), rng))
        accuracy = self._accuracy(call)
        return Reply(_letter(call, accuracy, rng), probability=accuracy)

    def _random(self, key: str) -> Random:
        """The randomness of a reply. To seed it takes longer than all else in most replies."""
        return Random(f"{self.seed}/{key}")

    def _argument(self, call: Call, key: str) -> str:
        assert call.side is not None
        rates = self.config.persuasiveness
        rate = rates.right if call.side == call.question.right else rates.wrong
        strength = SCALE * math.log10(rate / (1 - rate))
        if self.config.spread:
            strength += self._random(key).gauss(0, self.config.spread)
        letter, answer = LETTERS[call.side], call.question.choices[call.side]
        return f"The answer is ({letter}) {answer}. [strength {strength:+.3f}]"

    def _persuaded(self, call: Call) -> float:
        """Probability of choosing the right answer after the arguments."""
        prior = self._accuracy(call)
        if prior in (0.0, 1.0):
            return prior
        means = [_mean_strength(call, side) for side in range(2)]
        right = call.question.right
        assert right is not None
        gap = self.config.susceptibility * (means[right] - means[1 - right])
        odds = prior / (1 - prior) * 10 ** (gap / SCALE)
        return odds / (1 + odds)

    def _accuracy(self, call: Call) -> float:
        blind = call.question.article is not None and call.article is None
        return self.config.blind_accuracy if blind else self.config.accuracy


def _mean_strength(call: Call, side: int) -> float:
    strengths = [strength_of(turn.text) for turn in call.turns if turn.side == side]
    return sum(strengths) / len(strengths) if strengths else 0.0


def _letter(call: Call, accuracy: float, rng: Random) -> str:
    """An answer that is right with probability `accuracy`."""
    right = call.question.right
    if right is None:
        raise InputError(
            f"question {call.question.id!r}: simulated agents need the right answer, which is "
            f"unknown; use models instead"
        )
    return f"Answer: {LETTERS[right if rng.random() < accuracy else 1 - right]}"
