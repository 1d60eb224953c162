"""Compares protocols on the same questions: implements `tramontane oversight`.

The folder holds, for each arm, `ARM/replies.jsonl` (every reply, in the order of arrival),
`ARM/transcripts.jsonl` and `ARM/transcripts.md` (readable); and `figures.json` and
`oversight.html`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

from tramontane.data.files import read_rows
from tramontane.errors import InputError
from tramontane.evaluation.basis import weights_hash
from tramontane.journals import Journal, check_same
from tramontane.workplace import owned_folder, whole_file, write_whole
from tramontane_oversight.agents import Agent, open_agents
from tramontane_oversight.config import (
    ModelConfig,
    OversightConfig,
    WorkedExamples,
    cast_of,
)
from tramontane_oversight.figures import (
    Comparison,
    Ratings,
    elo_of,
    figures_of,
    paired_test,
    unjudged,
)
from tramontane_oversight.page import write_page
from tramontane_oversight.play import Game, play, recorded_replies
from tramontane_oversight.protocols import PROTOCOLS, Episode
from tramontane_oversight.questions import load_questions, source_of
from tramontane_oversight.transcript import Question, Transcript
from tramontane_oversight.wording import load_wording

Progress = Callable[[int, int], None]  # discussions ended, and in all

# Files in an arm's folder.
REPLIES = "replies.jsonl"
SETTINGS = "settings.json"
REMEDY = "name another folder (out), or remove this one"


def compare_protocols(
    config: OversightConfig, on_progress: Progress = lambda done, total: None
) -> Comparison:
    """Play every arm on every question, and write the folder `config.out`.

    Replies recorded by an earlier process are not requested again, and discussions resume.

    Args:
        config: questions, models and arms.
        on_progress: called when a discussion has ended.

    Raises:
        InputError: an unreadable source, model or wording, a model that cannot answer, a folder
            with replies for different settings, or, after everything else is written, an arm
            without judged discussions.
    """
    with owned_folder(config.out, "compared"):
        return _compare(config, Path(config.out), on_progress)


def _compare(config: OversightConfig, out: Path, on_progress: Progress) -> Comparison:
    settings = {name: _settings(config, name) for name in config.arms}
    for name in config.arms:
        check_same(out / name / REPLIES, out / name / SETTINGS, settings[name], REMEDY)
    questions = load_questions(config.questions)
    examples = {name: _examples(arm.examples) for name, arm in config.arms.items()}
    agents = open_agents(_used(config), load_wording(config.wording))
    with ExitStack() as stack:
        games: dict[str, list[Game]] = {}
        for name, arm in config.arms.items():
            _record(out / name, settings[name])
            journal = stack.enter_context(Journal(out / name / REPLIES))
            cast = {role: agents[model] for role, model in cast_of(arm).items()}
            games[name] = _games(config, name, questions, cast, journal, examples[name])
        total = sum(map(len, games.values()))
        for done, _ in enumerate(play(_interleaved(games), config.concurrent), 1):
            on_progress(done, total)
    transcripts = {name: [game.transcript for game in games[name]] for name in games}
    for name, found in transcripts.items():
        _write_transcripts(out / name, found)
    comparison = compared(config, transcripts)
    write_whole(out / "figures.json", json.dumps(comparison.to_dict(), indent=1))
    write_page(config, comparison, out / "oversight.html")
    if comparison.faults:
        arms = "; ".join(f"arm {name!r}: {fault}" for name, fault in comparison.faults.items())
        others = f"; the other arms' figures are in {out}" if comparison.figures else ""
        raise InputError(arms + others)
    return comparison


def compared(config: OversightConfig, transcripts: dict[str, list[Transcript]]) -> Comparison:
    """The figures of played arms."""
    faults = {name: fault for name, arm in transcripts.items() if (fault := unjudged(arm))}
    judged = {name: arm for name, arm in transcripts.items() if name not in faults}
    tests = {}
    for first, second in combinations(judged, 2):
        test = paired_test(judged[first], judged[second], config.permutations)
        if test is not None:
            tests[first, second] = test
    figures = {name: figures_of(arm) for name, arm in judged.items()}
    return Comparison(transcripts, figures, tests, _ratings(config, judged), faults)


def _ratings(config: OversightConfig, judged: Mapping[str, list[Transcript]]) -> list[Ratings]:
    """Elo ratings of the debaters of arms that differ in protocol and debaters only."""
    arms: dict[str, list[str]] = {}
    for name in judged:
        if config.arms[name].protocol.endswith("debate"):
            arm = config.arms[name]
            terms = arm.model_dump_json(exclude={"protocol", "agent", "opponent", "preference"})
            arms.setdefault(f"{terms} {cast_of(arm).get('preference')}", []).append(name)
    found = []
    for names in arms.values():
        casts = {name: cast_of(config.arms[name]) for name in names}
        debates = [
            (casts[name]["agent"], casts[name]["opponent"], transcript)
            for name in names
            for transcript in judged[name]
        ]
        found.append(Ratings(tuple(names), **elo_of(debates)))
    return found


def _games(
    config: OversightConfig,
    name: str,
    questions: Sequence[Question],
    cast: Mapping[Any, Agent],
    journal: Journal,
    examples: Sequence[Transcript],
) -> list[Game]:
    arm, recorded = config.arms[name], recorded_replies(journal)
    games = []
    for question in questions:
        episode = Episode(question, arm.protocol, arm, config.seed)
        games.append(
            Game(
                key=f"{config.seed}/{name}/{question.id}",
                episode=episode,
                moves=PROTOCOLS[arm.protocol](episode),
                cast=cast,
                journal=journal,
                recorded=recorded.get(question.id, {}),
                examples=[e for e in examples if e.question.id != question.id],
            )
        )
    return games


def _interleaved(games: Mapping[str, Sequence[Game]]) -> Iterator[Game]:
    """Question by question, so that all arms progress together."""
    for games_of_question in zip(*games.values(), strict=True):
        yield from games_of_question


def _used(config: OversightConfig) -> dict[str, Any]:
    """The models that an arm uses; others are not loaded."""
    used = {model for arm in config.arms.values() for model in cast_of(arm).values()}
    return {name: model for name, model in config.models.items() if name in used}


def _examples(config: WorkedExamples | None) -> list[Transcript]:
    """Worked examples from a file of transcripts; those without a right answer are skipped."""
    if config is None:
        return []
    path = Path(config.file)
    if not path.is_file():
        raise InputError(f"examples.file: {path}: no such file; an arm's folder has one")
    found = []
    for where, row in read_rows(str(path)):
        try:
            found.append(Transcript.from_dict(row))
        except (LookupError, AttributeError, TypeError) as error:
            raise InputError(
                f"examples.file: {where}: not a transcript ({type(error).__name__}: {error}); give "
                f"the `transcripts.jsonl` of an earlier arm"
            ) from None
    return [e for e in found if e.question.right is not None and not e.fault][: config.count]


def _settings(config: OversightConfig, name: str) -> dict[str, Any]:
    """The settings that an arm's replies depend on, in JSON types."""
    whole, arm = config.model_dump(mode="json"), config.arms[name]
    models = {model: whole["models"][model] for model in cast_of(arm).values()}
    kept = {key: whole[key] for key in ("seed", "questions", "wording")}
    named = [source_of(config.questions), config.wording]
    named += [arm.examples.file] if arm.examples else []
    return {
        "arm": whole["arms"][name],
        "models": models,
        **kept,
        "files": _hashes(named),
        "weights": _weights([config.models[model] for model in models]),
    }


def _hashes(names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of those that are files, since replies depend on their content."""
    paths = {name: Path(name).expanduser() for name in names}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in paths.items()
        if path.is_file()
    }


def _weights(models: Sequence[ModelConfig]) -> dict[str, str]:
    """Hashes of the checkpoints, since a model may be retrained in the same folder."""
    found = {m.checkpoint.path: m.checkpoint.files for m in models if m.checkpoint}
    return {path: weights_hash(files) for path, files in sorted(found.items())}


def _has_replies(folder: Path) -> bool:
    replies = folder / REPLIES
    return replies.is_file() and replies.stat().st_size > 0


def _record(folder: Path, settings: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not _has_replies(folder):
        write_whole(folder / SETTINGS, json.dumps(settings, indent=1))


def _write_transcripts(folder: Path, transcripts: Sequence[Transcript]) -> None:
    with whole_file(folder / "transcripts.jsonl") as rows:
        for transcript in transcripts:
            rows.write(json.dumps(transcript.to_dict(), ensure_ascii=False).encode() + b"\n")
    with whole_file(folder / "transcripts.md") as page:
        page.write(f"# {folder.name}\n\n".encode())
        page.writelines(transcript.markdown().encode() for transcript in transcripts)
