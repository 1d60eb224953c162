"""Oversight as a reward: an answer is right if a judge accepts it after a discussion.

So a model can be trained on questions that no verifier can check. A user-defined domain names a
`JudgedAnswer` by import path as its verifier; the training loop needs no changes.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from random import Random
from string import ascii_uppercase
from typing import Literal

from pydantic import model_validator

from tramontane.config import key_error, load_section
from tramontane.errors import InputError
from tramontane.types import Problem
from tramontane_oversight.agents import Agent, open_agents
from tramontane_oversight.config import ModelConfig, Name, Rules, check_variety
from tramontane_oversight.play import Game, play
from tramontane_oversight.protocols import Episode, consult, dispute
from tramontane_oversight.responses import letter_of, without_marks
from tramontane_oversight.transcript import Question, Transcript
from tramontane_oversight.wording import load_wording

# What an opponent argues for, unless the problem has two choices.
OTHER = "Another answer is right."
NOT_JUDGED = "no discussion: "  # prefix of the reason for an answer that is not discussed

NO_VERDICT = "the judge gave no verdict on "  # prefix of the reason if the judge named no answer

_REASON = re.compile(
    rf"(?:the judge accepted |the judge rejected |{NO_VERDICT})\(([A-Z])\) (.*?)"
    r"(?:; probability [\d.]+)?",
    re.DOTALL,
)


class JudgedConfig(Rules):
    """The discussion behind a judged answer, as `JudgedAnswer` reads it."""

    read_by = "tramontane_oversight.reward.JudgedAnswer"
    protocol: Literal["consultancy", "debate"] = "debate"
    """`consultancy`: an agent argues for the answer. `debate`: an opponent argues against it."""
    models: dict[Name, ModelConfig]
    """The participants: `judge` and `agent`, optionally `opponent` and `preference`. By default the
    opponent is the agent's model, and the preference model the judge's."""
    score: Literal["verdict", "probability"] = "verdict"
    """Result of an answer: 1 or 0 by the judge's `verdict`, or the judge's `probability` of it. The
    domain's `pass_mark` is the lowest result that counts as right."""
    wording: str = "default"
    """Prompts: `default`, `brief`, or a YAML file of templates."""
    seed: int = 0
    """Seed of the discussions."""
    transcripts: str | None = None
    """Folder for every transcript, a JSONL file for each grading process. null: none are kept."""

    @model_validator(mode="after")
    def _participants(self) -> JudgedConfig:
        if missing := {"judge", "agent"} - set(self.models):
            raise key_error(f"name the model of {' and '.join(sorted(missing))}", "models")
        roles = {"judge", "agent", "opponent"} & self.models.keys()
        check_variety(self.models, dict(zip(roles, roles, strict=True)), self)
        return self


class JudgedAnswer:
    """A verifier of (problem, answer): the judge's verdict after a discussion of the answer.

    A problem has `choices` in its metadata, and optionally `question` and `article`; the answer is
    the letter or the text of a choice. With two choices, the opponent argues for the other one;
    otherwise, the answer is debated against "Another answer is right", so that a wrong answer is
    never debated against another wrong one. Invalid or empty answers score 0 and are not debated.

    Only simulated participants read the truth, `problem.answer`; it is stored with the transcripts
    for auditing the judge. Equal answers to a problem share a discussion. A verdict's reason names
    the chosen answer (`judged_choice`).

    Args:
        path: YAML file of a `JudgedConfig`, read when the first answer is judged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._config: JudgedConfig | None = None
        self._agents: dict[str, Agent] = {}
        self._known: dict[tuple[str, str], tuple[float, str]] = {}

    def __call__(self, problem: Problem, answer: str) -> tuple[float, str]:
        """The result from 0 to 1, and the judge's verdict in words.

        Raises:
            RuntimeError: the discussion could not be finished; the completion is unscorable.
            InputError: an invalid file, model or list of choices.
        """
        found = discussed_question(problem, answer, self._open().seed)
        if found is None:
            kind = "one of the choices" if _choices(problem) else "an answer"
            return 0.0, f"{NOT_JUDGED}{answer!r} is not {kind}"
        question, side = found
        key = problem.id, question.choices[side]
        if key not in self._known:
            self._known[key] = self._judge(question, side, _name(problem, key[1]))
        return self._known[key]

    def _open(self) -> JudgedConfig:
        if self._config is None:
            self._config = load_section(JudgedConfig, self.path)
            models = open_agents(self._config.models, load_wording(self._config.wording))
            self._agents = {
                "opponent": models["agent"],
                "preference": models["judge"],
                **models,
            }
        return self._config

    def _judge(self, question: Question, side: int, name: str) -> tuple[float, str]:
        config = self._open()
        episode = Episode(question, config.protocol, config, config.seed)
        episode.transcript.side = side
        episode.transcript.opponent = config.protocol == "debate"
        moves = (dispute if config.protocol == "debate" else consult)(episode)
        key = f"{config.seed}/reward/{question.id}/{question.choices[side]}"
        [game] = play([Game(key, episode, moves, self._agents)], 1)  # type: ignore[arg-type]
        transcript = game.transcript
        if config.transcripts:
            _keep(Path(config.transcripts), transcript)
        if transcript.fault:
            raise RuntimeError(f"the discussion could not be finished: {transcript.fault}")
        return _result(transcript, side, config.score, name)


def discussed_question(problem: Problem, answer: str, seed: int) -> tuple[Question, int] | None:
    """The question to discuss, with its two answers in random order, and the index of the given
    one; None if it is empty or not one of the problem's choices.

    An answer without choices is one line without marks, since the judge reads it.

    Raises:
        InputError: `choices` is not a list of 2 to 26 different texts.
    """
    facts, choices = problem.metadata, _choices(problem)
    given, true = without_marks(answer), without_marks(problem.answer or "")
    if choices:
        chosen = _choice(answer, choices)
        if chosen is None:
            return None
        given = choices[chosen]
        right_choice = _choice(problem.answer or "", choices)
        true = "" if right_choice is None else choices[right_choice]
    if given in ("", OTHER):
        return None
    pair = [given, OTHER if len(choices) != 2 else choices[1 - choices.index(given)]]
    right = int(given != true) if true else None
    side = int(Random(f"{seed}/{problem.id}/order").random() < 0.5)
    if side:
        pair.reverse()
        right = None if right is None else 1 - right
    question = Question(
        id=problem.id,
        text=str(facts.get("question") or problem.problem),
        choices=tuple(pair),
        right=right,
        article=facts.get("article"),
        language=problem.language,
        metadata=dict(facts.get("facts") or {}),
    )
    return question, side


def judged_choice(reason: str) -> tuple[str, str] | None:
    """(letter, text) of the choice that a verdict's reason names; None if it names none."""
    found = _REASON.fullmatch(reason)
    return None if found is None else (found[1], found[2])


def _choices(problem: Problem) -> list[str]:
    given = problem.metadata.get("choices")
    if given is None:
        return []
    texts = [str(choice).strip() for choice in given] if isinstance(given, list | tuple) else []
    if not 2 <= len(set(texts)) == len(texts) <= len(ascii_uppercase):
        raise InputError(
            f"problem {problem.id!r}: `choices` must be a list of 2 to 26 different texts, or be "
            f"left out for an answer in words; found {given!r}"
        )
    return texts


def _choice(answer: str, choices: list[str]) -> int | None:
    """Index of a choice that is given by its text or its letter."""
    text = answer.strip()
    return choices.index(text) if text in choices else letter_of(text, choices)


def _name(problem: Problem, answer: str) -> str:
    choices = _choices(problem)
    return f"({ascii_uppercase[choices.index(answer)]}) {answer}" if choices else "the answer"


def _result(transcript: Transcript, side: int, score: str, name: str) -> tuple[float, str]:
    if transcript.verdict is None or transcript.probability is None:
        return 0.0, f"{NO_VERDICT}{name}"
    probability = transcript.probability if side == 0 else 1 - transcript.probability
    accepted = transcript.verdict == side
    verb = "accepted" if accepted else "rejected"
    words = f"the judge {verb} {name}; probability {probability:.3f}"
    return (probability if score == "probability" else float(accepted)), words


def _keep(folder: Path, transcript: Transcript) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as rows:
        rows.write(json.dumps(transcript.to_dict(), ensure_ascii=False) + "\n")
