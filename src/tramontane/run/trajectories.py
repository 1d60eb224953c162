"""Recorded trajectories that a run is trained on besides its own samples (`data.trajectories`).

They are rollouts of earlier runs, and files of responses with rewards, as groups for
`controller.replay`.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tramontane.config import Config, TrajectoriesConfig
from tramontane.controller.replay import Replay, ReplayRules
from tramontane.controller.verifiers import Verifiers
from tramontane.data.files import read_rows
from tramontane.data.load import FIELDS, RowRules, parse_problem
from tramontane.data.prompts import PromptEncoder
from tramontane.environments.chat_format import ChatFormat
from tramontane.errors import InputError
from tramontane.generator.endings import Detokenizer
from tramontane.run.columns import versions_of
from tramontane.run.rollouts import check_text, files, read_rollouts, turns_of
from tramontane.sft.examples import continuation
from tramontane.tokens import ELSEWHERE, INSERTED, EarlierSequence, floats, ints
from tramontane.types import Completion, Group, Problem, Verdict
from tramontane.verifier.custom import Response

ALIASES = {
    "response": ("response", "completion"),
    "reward": ("reward", "score", "label", "thumbs"),
    "token_ids": ("token_ids",),
    "logprobs": ("logprobs",),
}
THUMBS = {"up": 1.0, "down": 0.0, "👍": 1.0, "👎": 0.0}
LARGEST = 1e30  # largest reward, so that all computed values are finite in float32
CHECKED = 8  # rows of each run whose tokens are decoded, to detect a different tokenizer

RUN_COLUMNS = [
    *("group", "problem_id", "problem", "images", "domain", "reference", "language", "difficulty"),
    *("effort", "text", "token_ids", "logprobs", "version_spans", "finish_reason"),
    *("reward", "verdict", "reason", "answer", "parts"),
    *("ending", "ending_reason", "turns", "earlier", "prompt_ids"),
]


@dataclass(frozen=True)
class Trajectory:
    """One recorded completion; its log-probs are NaN if none are recorded."""

    problem: Problem
    completion: Completion
    verdict: Verdict


@dataclass
class Trajectories:
    """The trajectories of a run, checked.

    Args:
        config: the run's config.
        items: all that fit, in the order of the sources.
        lines: number of trajectories, and of those skipped by reason, as text.
    """

    config: Config
    items: list[Trajectory]
    lines: dict[str, str] = field(default_factory=dict)

    def replay(self) -> Replay:
        """The trajectories whose rewards are within the bounds, in groups of at most `group_size`
        completions of one problem.

        Raises:
            InputError: none is left.
        """
        settings = _settings(self.config)
        options, groups = self.config.trainer.objective.options, self._groups(settings)
        rules = ReplayRules(
            seed=self.config.seed,
            shuffle=self.config.data.shuffle,
            behavior=options.uses_behavior,
            refresh_all=settings.behavior == "refreshed",
            refresh_every=settings.refresh_every,
        )
        return Replay(groups, rules)

    async def regrade(self, verifiers: Verifiers) -> None:
        """Replace the rewards with the verdicts of this run's verifiers, if the config says so."""
        if not _settings(self.config).regrade:
            return
        lengths = self.config.pipeline.l_max, self.config.pipeline.l_cache
        reward = self.config.conversation.reward
        siblings: dict[tuple[str | None, ...], list[int]] = defaultdict(list)
        for place, item in enumerate(self.items):
            problem = item.problem  # files may use one id for different problems
            siblings[problem.id, problem.problem, problem.answer].append(place)
        futures = [
            verifiers.score(
                self.items[group[0]].problem,
                [Response.of(self.items[place].completion, reward) for place in group],
                lengths,
            )
            for group in siblings.values()
        ]
        graded = await asyncio.gather(*map(asyncio.wrap_future, futures))
        verdicts = dict(zip(chain(*siblings.values()), chain(*graded), strict=True))
        self.items = [
            replace(item, verdict=verdicts[place])
            for place, item in enumerate(self.items)
            if verdicts[place].verdict != "unscorable"
        ]

    def _groups(self, settings: TrajectoriesConfig) -> list[Group]:
        low = -math.inf if settings.min_reward is None else settings.min_reward
        high = math.inf if settings.max_reward is None else settings.max_reward
        kept = [item for item in self.items if low <= item.verdict.reward <= high]
        if not kept:
            raise InputError(
                f"data.trajectories: none of {len(self.items):,} trajectories has a reward within "
                f"min_reward and max_reward"
            )
        options = self.config.trainer.objective.options
        if options.of_sampler and any(math.isnan(item.completion.logprobs[0]) for item in kept):
            raise InputError(
                f"data.trajectories: some have no logprobs of the policy that sampled them, which "
                f"objective {self.config.trainer.objective.name!r} needs; add them to the rows, or "
                f"set its initial_value to group"
            )
        if settings.standardize:
            kept = _standardized(kept)
        siblings: dict[tuple[int, ...], list[Trajectory]] = defaultdict(list)
        for item in kept:
            siblings[tuple(item.completion.sequences[0].prompt_ids)].append(item)
        size = self.config.pipeline.group_size
        parts = [
            members[start : start + size]
            for members in siblings.values()
            for start in range(0, len(members), size)
        ]
        return [_group(-1 - number, members) for number, members in enumerate(parts)]


def load_trajectories(
    config: Config,
    encoder: PromptEncoder,
    context: int | None,
    problems: Mapping[str, Problem] = MappingProxyType({}),
) -> Trajectories:
    """Read all sources. Trajectories longer than the run's limits are skipped.

    Args:
        config: the run's config, with `data.trajectories`.
        encoder: makes the prompts, as for the run's own problems.
        context: the model's context in tokens; None: unknown.
        problems: the run's own problems by id, whose tests replace what rollouts do not record.

    Raises:
        InputError: no such source, a bad row (with file and line), a different tokenizer's tokens,
            a problem that cannot be regraded, or no trajectory left.
    """
    settings = _settings(config)
    found: list[Trajectory] = []
    for source in settings.sources:
        read = _run_rows if Path(source).expanduser().is_dir() else _file_rows
        for item in read(source, config, encoder):
            found.append(_gradable(item, problems, config) if settings.regrade else item)
    longest = max(stage.pipeline.l_max for stage in config.by_stage())
    prompt = config.data.max_prompt_tokens or context or math.inf
    whole = context or math.inf

    def fits(completion: Completion) -> bool:
        first = completion.sequences[0].prompt_ids
        sizes = (len(s.prompt_ids) + len(s.token_ids) for s in completion.sequences)
        short = len(first) <= prompt and completion.n_tokens <= longest
        return short and max(sizes) <= whole

    fitting = [item for item in found if fits(item.completion)]
    lines = {
        "trajectories": f"{len(fitting):,} from {', '.join(settings.sources)}; "
        f"{settings.share:.0%} of each batch, to which the staleness bound does not apply"
    }
    if skipped := len(found) - len(fitting):
        lines["skipped trajectories"] = (
            f"{skipped:,}, longer than pipeline.l_max {longest:,}, data.max_prompt_tokens or the "
            f"model's context"
        )
    if not fitting:
        raise InputError(
            f"data.trajectories: none of {len(found):,} trajectories fits within pipeline.l_max "
            f"{longest:,}, data.max_prompt_tokens and the versions asked for"
        )
    trajectories = Trajectories(config, fitting, lines)
    if not settings.regrade:
        trajectories.replay()  # raises here if nothing is left
    return trajectories


def _settings(config: Config) -> TrajectoriesConfig:
    assert config.data.trajectories is not None
    return config.data.trajectories


def _gradable(item: Trajectory, problems: Mapping[str, Problem], config: Config) -> Trajectory:
    problem = item.problem
    if problem.tests is None and problem.id in problems:
        problem = problems[problem.id]
    for need in config.verifier.domains[problem.domain].needs:
        if not getattr(problem, need):
            raise InputError(
                f"data.trajectories.regrade: {problem.source}: problem {problem.id!r} has no "
                f"{need}, which domain {problem.domain!r} needs; add it to the rows, or keep the "
                f"recorded rewards"
            )
    return replace(item, problem=problem)


def _run_rows(source: str, config: Config, encoder: PromptEncoder) -> Iterator[Trajectory]:
    """The sampled and graded completions in an earlier run's rollouts."""
    settings, folder = _settings(config), Path(source).expanduser()
    newest = math.inf if settings.max_version is None else settings.max_version
    recorded = files(folder / "rollouts")
    if not recorded:
        raise InputError(
            f"data.trajectories {source!r}: a folder without rollouts/update_*.parquet; give the "
            f"folder of a run that recorded its rollouts, or a file"
        )
    detokenizer = Detokenizer(encoder.tokenizer, encoder.response)
    prompts: dict[tuple[str, str | None], list[int]] = {}
    number = 0
    for file in recorded:
        for row in read_rollouts(file, RUN_COLUMNS):
            versions = [v for v in row["versions"] if v >= 0]
            if row["group"] < 0 or row["verdict"] == "unscorable" or not versions:
                continue  # itself a recorded trajectory, or one without a reward
            check_text(row, file, "a trajectory")
            if number < CHECKED:
                _check_tokenizer(row, file, detokenizer)
            number += 1
            if max(versions) > newest:
                continue
            effort = row.get("effort")
            asked = row["problem"], effort if effort in encoder.levels else None
            if asked not in prompts:
                prompts[asked] = encoder.at(asked[1]).encode(asked[0])
            item = _of_run(row, source, prompts[asked])
            at_level = config.data.at_efforts([item.problem], filter(None, asked[1:]))
            yield replace(item, problem=at_level[0]) if at_level else item


def _of_run(row: dict[str, Any], source: str, prompt: list[int]) -> Trajectory:
    problem = Problem(
        id=row["problem_id"],
        domain=row["domain"],
        problem=row["problem"],
        answer=row["reference"],
        language=row["language"],
        difficulty=row["difficulty"],
        source=source,
    )
    parts = {name: value for name, value in row["parts"].items() if value is not None}
    verdict = Verdict(row["reward"], parts, row["verdict"], row["reason"], answer=row["answer"])
    completion = Completion(
        group=0,
        index=0,
        prompt_ids=prompt,
        **_elsewhere(row),
        finish_reason=row["finish_reason"],
        text=row["text"],
    )
    if row.get("ending"):
        completion.prompt_ids = row["prompt_ids"]
        completion.ending, completion.ending_reason = row["ending"], row["ending_reason"]
        completion.turns = turns_of(row["turns"])
        completion.earlier = [
            EarlierSequence(s["prompt_ids"], **_elsewhere(s | {"versions": spans}))
            for s in row["earlier"]
            for spans in [versions_of(s["version_spans"])]
        ]
    return Trajectory(problem, completion, verdict)


def _elsewhere(row: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens of a row, as sampled elsewhere."""
    return {
        "token_ids": ints(row["token_ids"]),
        "logprobs": floats(row["logprobs"]),
        "versions": ints(INSERTED if v == INSERTED else ELSEWHERE for v in row["versions"]),
    }


def _check_tokenizer(row: dict[str, Any], file: Path, detokenizer: Detokenizer) -> None:
    size, written = len(detokenizer.tokenizer), row["token_ids"]
    known = all(token < size for token in written)
    if turns := row.get("turns"):
        written = written[turns[-1]["start"] : turns[-1]["end"]]
    if not known or "".join(detokenizer.decode(written).split()) not in "".join(
        row["text"].split()
    ):
        raise InputError(
            f"{file}: its tokens do not spell its texts with this model's tokenizer; give the "
            f"responses of another model as text, in a JSONL file"
        )


def _file_rows(source: str, config: Config, encoder: PromptEncoder) -> Iterator[Trajectory]:
    fields = _settings(config).fields
    if unknown := fields.keys() - {*FIELDS, *ALIASES, "prompt"}:
        known = ", ".join(("prompt", *ALIASES, *FIELDS))
        raise InputError(
            f"data.trajectories.fields: {', '.join(sorted(unknown))} unknown; use {known}"
        )
    names = {name: columns for name, columns in fields.items() if name not in ALIASES}
    if "prompt" in names:
        names["problem"] = names.pop("prompt")
    domain, domains = config.data.domain, config.verifier.domains
    rules = RowRules(names, domain, domains, gradable=False, key="data.trajectories.fields")
    prefix = Path(source).name
    for where, row in read_rows(source):
        line = where.rstrip("]").replace("[", ":").rpartition(":")[2]
        problem = parse_problem(row, where, rules, default_id=f"{prefix}-{line}", source=source)

        def value(name: str, row: dict[str, Any] = row) -> Any:
            columns = (fields[name],) if name in fields else ALIASES[name]
            return next((row[c] for c in columns if row.get(c) is not None), None)

        yield _of_file(value, where, problem, encoder)


def _of_file(
    value: Callable[[str], Any], where: str, problem: Problem, encoder: PromptEncoder
) -> Trajectory:
    reward = _reward(value("reward"), where)
    text = _response(value("response"), where)
    tokens, logprobs = value("token_ids"), value("logprobs")
    if tokens is None:
        rest = continuation(text, encoder.response.prefix)
        rest += ChatFormat(encoder).turn_end
        tokens = encoder.tokenizer(rest, add_special_tokens=False)["input_ids"]
        if logprobs is not None:
            raise InputError(f"{where}: logprobs without the token_ids that they belong to")
    size = len(encoder.tokenizer)
    if not _numbers(tokens, int) or not tokens or not all(0 <= t < size for t in tokens):
        raise InputError(f"{where}: token_ids must be whole numbers from 0 to {size - 1:,}")
    if logprobs is not None and not (
        _numbers(logprobs, float)
        and len(logprobs) == len(tokens)
        and all(-math.inf < logprob <= 0 for logprob in logprobs)
    ):
        raise InputError(f"{where}: logprobs must be as many numbers as token_ids, of at most 0")
    completion = Completion(
        group=0,
        index=0,
        prompt_ids=encoder.encode(problem.prompt, where),
        token_ids=ints(tokens),
        logprobs=floats([math.nan] * len(tokens) if logprobs is None else logprobs),
        versions=ints([ELSEWHERE] * len(tokens)),
        finish_reason="stop",
        text=text,
    )
    # A file has rewards and no verdicts; a reward above 0 counts as right.
    return Trajectory(problem, completion, Verdict(reward, {}, "right" if reward > 0 else "wrong"))


def _response(value: Any, where: str) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0].get("content")
    if not isinstance(value, str) or not value.strip():
        raise InputError(
            f"{where}: no text in field 'response'; name the column in data.trajectories.fields"
        )
    return value


def _reward(found: Any, where: str) -> float:
    if isinstance(found, str):
        found = THUMBS.get(found.strip().lower(), found)
    if isinstance(found, bool | int | float) and abs(found) <= LARGEST:
        return float(found)
    raise InputError(
        f"{where}: no reward: give a number, true or false, or up or down, in field 'reward', or "
        f"name the column in data.trajectories.fields (found {found!r})"
    )


def _numbers(values: Any, kind: type) -> bool:
    kinds = (int,) if kind is int else (int, float)
    return isinstance(values, list) and all(
        isinstance(v, kinds) and not isinstance(v, bool) for v in values
    )


def _standardized(items: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories with rewards of mean 0 and standard deviation 1; 0 if all are equal."""
    rewards = np.array([item.verdict.reward for item in items])
    scaled = (rewards - rewards.mean()) / (rewards.std() or 1.0)
    return [
        replace(item, verdict=replace(item.verdict, reward=float(reward)))
        for item, reward in zip(items, scaled, strict=True)
    ]


def _group(number: int, members: Sequence[Trajectory]) -> Group:
    completions = [
        replace(
            item.completion,
            group=number,
            index=index,
            logprobs=array("f", item.completion.logprobs),
            earlier=[replace(sequence) for sequence in item.completion.earlier],
        )
        for index, item in enumerate(members)
    ]
    return Group(number, members[0].problem, completions, [item.verdict for item in members])
