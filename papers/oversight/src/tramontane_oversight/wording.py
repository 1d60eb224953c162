"""The prompts of participants, from a file of templates.

`default` and `brief` are in the package; a path names a file with the same keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from tramontane.config import read_settings
from tramontane.errors import InputError
from tramontane_oversight.transcript import LETTERS, Call, Question, Task, Transcript, Turn

WORDINGS = ("default", "brief")

# A call and a worked example that need every template.
_TURNS = (Turn(0, "agent", 0, "", ""), Turn(0, "judge", None, "", ""))
_QUESTION = Question("", "", ("", ""), 0, article="-")
_EXAMPLE = Transcript(_QUESTION, "consultancy", list(_TURNS))
_FULL_CALL = Call("judge", "judge", _QUESTION, _TURNS, article="-", candidates=("",))


class Wording(BaseModel):
    """Templates of the prompts; `{names}` are filled in, and the key of a task is its prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    article: str
    argument: str
    inquiry: str
    nothing: str
    answer: str
    argue: str
    quoting: str
    ask: str
    judge: str
    arguments: str
    hidden: str
    example: str
    prefer: str
    candidate: str

    def prompt(self, call: Call, examples: Sequence[Transcript] = ()) -> str:
        """The prompt of a call.

        Args:
            call: what is asked, and what the participant sees.
            examples: discussions shown to the judge before its own, with the right verdicts.
        """
        slots = self._slots(call)
        if call.task == "judge":
            slots["examples"] = "".join(self._example(example, call) for example in examples)
        template: str = getattr(self, call.task)
        return template.format(**slots)

    def _slots(self, call: Call) -> dict[str, str | int]:
        question = call.question
        turns = [self._turn(turn) for turn in call.turns]
        transcript = "\n".join(turns) or self.nothing
        side = call.side if call.side is not None else 0
        hidden = self.hidden if question.article and not call.article else ""
        candidates = [
            self.candidate.format(number=number, text=text)
            for number, text in enumerate(call.candidates, 1)
        ]
        return {
            "article": self.article.format(article=call.article) if call.article else "",
            "question": question.text,
            "a": question.choices[0],
            "b": question.choices[1],
            "hidden": hidden,
            "letter": LETTERS[side],
            "answer": question.choices[side],
            "round": call.round + 1,
            "rounds": call.rounds,
            "quoting": f"{self.quoting} " if self.quoting and call.article else "",
            "transcript": transcript,
            "arguments": self.arguments.format(transcript=transcript, hidden=hidden)
            if turns
            else hidden,
            "candidates": "\n".join(candidates),
            "examples": "",
        }

    def _turn(self, turn: Turn) -> str:
        if turn.side is None:
            return self.inquiry.format(text=turn.text)
        return self.argument.format(letter=LETTERS[turn.side], round=turn.round + 1, text=turn.text)

    def _example(self, example: Transcript, call: Call) -> str:
        """A discussion as the judge would see it, with the right verdict."""
        assert example.question.right is not None
        shown = Call(
            role="judge",
            task="judge",
            question=example.question,
            turns=tuple(example.turns),
            article=example.question.article if call.article else None,
        )
        slots = self._slots(shown)
        case = self.judge.format(**slots)
        return self.example.format(case=case, letter=LETTERS[example.question.right])


def load_wording(name: str) -> Wording:
    """The templates of the package by name, or of a YAML file.

    Raises:
        InputError: no such file, keys that are missing or unknown, or a slot that a template does
            not have.
    """
    source = files(__package__) / "wordings" / f"{name}.yaml" if name in WORDINGS else name
    if name not in WORDINGS and not Path(name).is_file():
        raise InputError(
            f"wording: {name!r} is not a file; built-in wordings: {', '.join(WORDINGS)}"
        )
    raw = read_settings(Path(str(source)))
    try:
        wording = Wording.model_validate(raw)
        for task in get_args(Task):  # with everything that a template may show
            wording.prompt(replace(_FULL_CALL, task=task), [_EXAMPLE])
    except ValidationError as error:
        faults = "; ".join(f"{e['loc'][0]}: {e['msg']}" for e in error.errors())
        raise InputError(f"wording {name!r}: {faults}") from None
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"wording {name!r}: a template with an unknown slot ({error}); "
            f"tramontane_oversight/wordings/default.yaml has the slots of each; double a literal "
            f"brace"
        ) from None
    return wording
