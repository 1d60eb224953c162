"""Evaluate a model: sample every problem several times, grade the completions, and count.

`tramontane eval` and the measurements before and after a training run use the same code.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from tramontane.asking import answer_seed
from tramontane.data.images import first_images, images_of, keep, named
from tramontane.data.prompts import PromptEncoder
from tramontane.evaluation.conversed import ConversationFigures, conversation_row
from tramontane.evaluation.malformed import Malformed
from tramontane.evaluation.settings import Sampling
from tramontane.evaluation.thinking import thinking_counters
from tramontane.journals import Journal
from tramontane.statistics import Estimate, maj_at_k, mean_interval, pass_at_k, powers_of_two
from tramontane.types import Completion, Problem, Verdict
from tramontane.verifier.functions import failures
from tramontane.verifier.math.normalize import vote

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

    from tramontane.controller.verifiers import Grading

Row = dict[str, Any]  # a completion with its verdict
T = TypeVar("T")
Complete = Callable[[Problem, list[Completion]], Coroutine[Any, Any, list[Completion]]]


@dataclass(frozen=True)
class Slice:
    """Results for the problems of one language, or of one difficulty, or at one effort."""

    n_problems: int
    pass_at_1: Estimate
    format_rate: float
    language_rate: float
    mean_reward: float
    mean_thinking_tokens: float
    mean_completion_tokens: float


@dataclass(frozen=True)
class EvaluationResult:
    """Results of a model on a set of problems; docs/evaluation.md defines them all.

    Args:
        n_problems, samples: the number of problems, and of completions of each.
        pass_at_1: probability that one completion is right.
        pass_at_k, maj_at_k: by k, powers of two up to `samples`; `maj_at_k` over problems whose
            answers can be equal (not programs), and empty without them.
        format_rate: share of completions that are not malformed.
        language_rate: share of completions with the language reward, including malformed ones.
        mean_reward: over the completions that could be judged.
        mean_thinking_tokens: generated tokens between the thinking tags, over all completions.
        mean_completion_tokens: generated tokens, EOS included, and those of what environments and
            tools answered.
        length_limited_rate: share of completions cut at `max_tokens`.
        unscorable_rate: share of completions that could not be judged, which the estimates and the
            rates of format and language leave out.
        failures: number of these, by the kind of the reason.
        by_language, by_difficulty: `unknown` holds the problems without a language or difficulty.
        by_effort: the same problems at each level of `data.effort`; empty without levels.
        malformed: the malformed completions, by the condition that failed.
        conversations: figures of turns, calls and endings; None without environments and tools.
    """

    n_problems: int
    samples: int
    pass_at_1: Estimate
    pass_at_k: dict[int, Estimate]
    maj_at_k: dict[int, Estimate]
    format_rate: float
    language_rate: float
    mean_reward: float
    mean_thinking_tokens: float
    mean_completion_tokens: float
    length_limited_rate: float
    unscorable_rate: float
    by_language: dict[str, Slice]
    by_difficulty: dict[str, Slice]
    malformed: Malformed
    by_effort: dict[str, Slice]
    conversations: ConversationFigures | None = None
    failures: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON (where the keys `k` become strings)."""
        return asdict(self)


def requests_of(
    problem: Problem, place: int, sampling: Sampling, encoder: PromptEncoder
) -> list[Completion]:
    """The requests of a problem; `place` is its number in the evaluation. Their group is
    −1 − place: negative numbers distinguish them from training's."""
    prompt = encoder.at(problem.effort).encode(problem.prompt, problem.where)
    params = replace(sampling.params, max_tokens=problem.longest(sampling.max_tokens))
    seeds = [answer_seed(sampling.seed, problem.id, j) for j in range(sampling.samples)]
    return Completion.for_seeds(-1 - place, prompt, seeds, params, problem.images)


class Evaluation:
    """The graded completions of an evaluation, as rows.

    Args:
        problems: at least one.
        sampling: how they are sampled.
        encoder: makes the prompts; its tokenizer counts thinking tokens.
        record: journal of the rows; its problems are not generated again.
        on_progress: called with (completions graded, completions in all).

    Attributes:
        rows: the finished rows, in the order of the problems.

    Raises:
        ValueError: no problems.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        sampling: Sampling,
        encoder: PromptEncoder,
        record: Journal | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if not problems:
            raise ValueError("no problems to evaluate")
        self.problems, self.sampling, self.encoder = problems, sampling, encoder
        self.on_progress = on_progress or (lambda done, total: None)
        self.record = record
        self.rows: list[Row] = list(record) if record else []
        self._done = len(self.rows)
        self._thinking = thinking_counters(encoder)
        self._graded: dict[int, tuple[list[Completion], list[Verdict]]] = {}

    async def run(self, complete: Complete, grading: Grading) -> None:
        """Complete and grade all unfinished problems, side by side.

        Args:
            complete: returns the completions of a problem's requests.
            grading: grades them.

        Raises:
            WaitTimeout: the verifiers returned no verdict within their timeout.
            Exception: what `complete` raises.
        """
        taking = asyncio.Lock()  # rows are made outside the event loop, by one thread at a time

        async def measure(place: int, problem: Problem) -> None:
            requests = requests_of(problem, place, self.sampling, self.encoder)
            completions = await complete(problem, requests)
            verdicts = await grading.verdicts(problem, completions)
            async with taking:
                await asyncio.to_thread(self._take, place, completions, verdicts)

        first = len(self.rows) // self.sampling.samples
        await side_by_side(
            measure(place, problem) for place, problem in enumerate(self.problems[first:], first)
        )

    def _take(self, place: int, completions: list[Completion], verdicts: list[Verdict]) -> None:
        """Take the graded completions of a problem. They arrive in any order; rows are written in
        the order of the problems."""
        self._graded[place] = completions, verdicts
        self._done += len(completions)
        while (i := len(self.rows) // self.sampling.samples) in self._graded:
            completed, judged = self._graded.pop(i)
            new = self._rows(i, completed, judged)
            if self.record:
                shown = (image for c in completed for image in images_of(self.problems[i], c))
                keep(shown, self.record.path.with_name("images"))
                self.record.add(*new)
            self.rows += new
        self.on_progress(self._done, len(self.problems) * self.sampling.samples)

    def _rows(
        self, place: int, completions: list[Completion], verdicts: list[Verdict]
    ) -> list[Row]:
        problem, tokens_of = self.problems[place], self.encoder.tokens_of_image
        shown = [first_images(problem, completion) for completion in completions]
        return [
            {
                "group": place,
                "index": completion.index,
                "problem_id": problem.id,
                "problem": problem.problem,
                **(named(images, tokens_of) if images else {}),
                "domain": problem.domain,
                "language": problem.language,
                "difficulty": problem.difficulty,
                "effort": problem.effort,
                "reference": problem.answer,
                "text": completion.text,
                "tokens": completion.n_tokens,
                "thinking_tokens": self._thinking[problem.effort].count(completion),
                "finish_reason": completion.finish_reason,
                "reward": verdict.reward,
                "parts": verdict.parts,
                "verdict": verdict.verdict,
                "reason": verdict.reason,
                "answer": verdict.answer,
                **conversation_row(completion, tokens_of),
            }
            for completion, verdict, images in zip(completions, verdicts, shown, strict=True)
        ]


async def side_by_side(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of coroutines that run together; when one fails, the others are cancelled, and
    its error is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def summarize(rows: Sequence[Row]) -> EvaluationResult:
    """Compute all results from the rows of an evaluation (the same number per `group`).

    Raises:
        ValueError: no rows.
    """
    groups: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["group"]].append(row)
    problems = list(groups.values())
    if not problems:
        raise ValueError("no completions to count")
    n = len(problems[0])
    ks = powers_of_two(n)
    judged = _judged(problems)
    right = [sum(row["verdict"] == "right" for row in group) for group in judged]
    voted = _voted_domains(rows)
    asked = [group for group in judged if group[0]["domain"] in voted]
    votes = [_votes(group) for group in asked]
    return EvaluationResult(
        n_problems=len(problems),
        samples=n,
        **_rates(problems),
        pass_at_k={
            k: _mean(
                judged,
                [pass_at_k(len(g), c, min(k, len(g))) for g, c in zip(judged, right, strict=True)],
            )
            for k in ks
        },
        maj_at_k={
            k: _mean(asked, [maj_at_k(*v, min(k, len(v[0]))) for v in votes]) for k in ks if votes
        },
        length_limited_rate=_rate(rows, lambda row: row["finish_reason"] == "length"),
        unscorable_rate=_rate(rows, lambda row: row["verdict"] == "unscorable"),
        by_language=_slices(problems, "language"),
        by_difficulty=_slices(problems, "difficulty"),
        malformed=Malformed.of(rows),
        by_effort=_slices(problems, "effort", list) if problems[0][0].get("effort") else {},
        conversations=ConversationFigures.of(rows),
        failures=failures(row["reason"] for row in rows if row["verdict"] == "unscorable"),
    )


def _judged(groups: list[list[Row]]) -> list[list[Row]]:
    """The completions of each group that could be judged; all of them if none could."""
    judged = [[row for row in group if row["verdict"] != "unscorable"] for group in groups]
    return [group for group in judged if group] or groups


def hub_results(
    name: str, source: str, result: EvaluationResult, sampling: Sampling
) -> list[EvalResult]:
    """pass@1 and majority of a set of problems, in percent, as entries of a model card.

    Args:
        name: of the problems.
        source: of the problems, as in `data.eval`.
        result: the figures.
        sampling: how they were sampled.
    """
    from huggingface_hub import EvalResult

    drawn = {key: getattr(sampling, key) for key in ("temperature", "top_p", "max_tokens")}
    k = max(result.maj_at_k, default=1)
    figures = {"pass@1": result.pass_at_1}
    figures |= {f"maj@{k}": result.maj_at_k[k]} if k > 1 else {}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=source,
            dataset_name=name,
            metric_type="accuracy",
            metric_name=metric,
            metric_value=round(100 * figure.value, 2),
            metric_args={
                "samples": result.samples,
                **drawn,
                "interval_95": [round(100 * figure.low, 2), round(100 * figure.high, 2)],
            },
        )
        for metric, figure in figures.items()
    ]


def _voted_domains(rows: Sequence[Row]) -> set[str]:
    """Domains whose answers can be equal: not programs, and not domains judged without an answer,
    by environments or by rewards alone."""
    answered = {row["domain"] for row in rows if row["answer"] is not None}
    judged = {row["domain"] for row in rows if row["verdict"] in ("right", "wrong")}
    return (answered | ({"math"} - judged)) - {"code"}


def _votes(group: list[Row]) -> tuple[list[str | None], list[bool]]:
    votes = [vote(row["answer"]) if row["verdict"] != "malformed" else None for row in group]
    return votes, [row["verdict"] == "right" for row in group]


def _slices(
    problems: list[list[Row]], key: str, order: Callable[[Iterable[Any]], list[Any]] = sorted
) -> dict[str, Slice]:
    parts: defaultdict[Any, list[list[Row]]] = defaultdict(list)
    for group in problems:
        parts[group[0][key]].append(group)
    known = order(value for value in parts if value is not None)
    return {
        "unknown" if value is None else str(value): Slice(len(parts[value]), **_rates(parts[value]))
        for value in [*known, *([None] if None in parts else [])]
    }


def _rates(problems: list[list[Row]]) -> dict[str, Any]:
    """The figures that `Slice` and `EvaluationResult` have in common."""
    rows = [row for group in problems for row in group]
    groups = _judged(problems)
    judged = [row for group in groups for row in group]
    rates = [_rate(group, lambda row: row["verdict"] == "right") for group in groups]
    return {
        "pass_at_1": _mean(groups, rates),
        "format_rate": _rate(judged, lambda row: row["verdict"] != "malformed"),
        "language_rate": _rate(judged, lambda row: row["parts"].get("language", 0.0) > 0),
        "mean_reward": _rate(judged, lambda row: row["reward"]),
        "mean_thinking_tokens": _rate(rows, lambda row: row["thinking_tokens"]),
        "mean_completion_tokens": _rate(rows, lambda row: row["tokens"]),
    }


def _mean(groups: Sequence[list[Row]], values: Sequence[float]) -> Estimate:
    """Mean of the groups' values, with its interval. The groups of one problem at several levels of
    effort count as one, since they are alike."""
    of_problem: defaultdict[Any, list[float]] = defaultdict(list)
    for place, (group, value) in enumerate(zip(groups, values, strict=True)):
        of_problem[group[0]["problem_id"] if group[0].get("effort") else place].append(value)
    means = [sum(found) / len(found) for found in of_problem.values()]
    return mean_interval(means, sum(map(len, groups)) // len(means))


def _rate(rows: Sequence[Row], figure: Callable[[Row], float]) -> float:
    return sum(figure(row) for row in rows) / len(rows)
