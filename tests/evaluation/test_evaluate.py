"""Evaluation with a scripted generator and pool, so that every figure is known."""

import asyncio
import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from tramontane.config import GeneratorConfig, TimeoutsConfig, VerifierConfig
from tramontane.controller.verifiers import Grading
from tramontane.data.prompts import PromptEncoder
from tramontane.data.tokenizer import train_tokenizer
from tramontane.evaluation import EvaluationResult, mean_interval, summarize
from tramontane.evaluation.evaluate import Evaluation, vote
from tramontane.evaluation.settings import Sampling
from tramontane.generator import Generator
from tramontane.journals import Journal
from tramontane.placement import WaitTimeout
from tramontane.statistics import counts_of, paired_difference
from tramontane.types import Completion, Problem, Verdict
from tramontane.verifier.pool import PoolStats, VerifierPool

SAMPLING = Sampling(samples=4, max_tokens=8)
PROBLEMS = [
    Problem("a", "math", "1 + 1?", "2", language="en", difficulty=1),
    Problem("b", "math", "2 + 2 ?", "4", language="fr", difficulty=2),
    Problem("c", "math", "3 + 3?", "6", language="en"),
]
# One row per problem: the answer boxed in each of four samples; None is malformed.
ANSWERS: list[list[str | None]] = [
    ["2", "2.0", "2", "3"],
    ["5", "4", None, "5"],
    [None, None, None, None],
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["What is 1 + 1?", "so it is"] * 20, 400)


def response(answer: str | None) -> str:
    return "so it is" if answer is None else f"<think>so it is</think>\n\\boxed{{{answer}}}"


def evaluated(
    generator: Any,
    pool: Any,
    problems: list[Problem],
    *args: Any,
    sampling: Sampling = SAMPLING,
    seconds: float = 60,
) -> EvaluationResult:
    """Evaluate with one generator; `args` are the journal and the progress."""
    encoder = PromptEncoder(generator.tokenizer)
    evaluation = Evaluation(problems, sampling, encoder, *args)
    limits = TimeoutsConfig(verification=seconds / 2, start=seconds / 2)

    async def complete(problem: Problem, requests: list[Completion]) -> list[Completion]:
        generator.submit(requests)
        ended: list[Completion] = []
        while generator.pending():
            ended += generator.step()
        return sorted(ended, key=lambda completion: completion.index)

    asyncio.run(evaluation.run(complete, Grading(pool, limits)))
    return summarize(evaluation.rows)


class ScriptedGenerator:
    """Finishes one completion per step, the last submitted first."""

    def __init__(self, answers: list[list[str | None]], tokenizer: PreTrainedTokenizerBase) -> None:
        self.answers, self.tokenizer = answers, tokenizer
        self.requests: list[Completion] = []
        self.seeds: list[int] = []

    def submit(self, requests: list[Completion]) -> None:
        self.requests += requests
        self.seeds += [r.seed for r in requests]

    def pending(self) -> list[Completion]:
        return self.requests

    def step(self) -> list[Completion]:
        r = self.requests.pop()
        text = response(self.answers[-1 - r.group][r.index])
        reason = "length" if self.answers[-1 - r.group][r.index] is None else "stop"
        ids = self.tokenizer(text)["input_ids"]
        return [Completion(r.group, r.index, r.prompt_ids, ids, [0.0], [0], reason, text)]


class PatientPool:
    """Waits for the given limits only."""

    def time_limit(self, problem: Problem, n: int) -> float:
        return 0.0

    def stats(self) -> PoolStats:
        return PoolStats()


class ScriptedPool(PatientPool):
    """Returns scripted verdicts, all at the end and in the reverse order of the requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[Future[list[Verdict]], list[Verdict]]] = []

    def score(self, problem: Problem, responses: list[tuple[str, int]]) -> Future[list[Verdict]]:
        future: Future[list[Verdict]] = Future()
        self.asked.append((future, [self._verdict(problem, text) for text, *_ in responses]))
        if len(self.asked) == len(PROBLEMS):
            for waiting, verdicts in reversed(self.asked):
                waiting.set_result(verdicts)
        return future

    @staticmethod
    def _verdict(problem: Problem, text: str) -> Verdict:
        if "boxed" not in text:
            return Verdict(0.0, {"format": 0.0}, "malformed", "does not start with <think>")
        answer = text.split("{")[1].rstrip("}")
        parts = {"format": 0.1, "language": 0.1 if problem.language == "en" else 0.0}
        if answer == "3":
            return Verdict(0.0, dict.fromkeys(parts, 0.0), "unscorable", "late", answer=answer)
        right = answer.removesuffix(".0") == problem.answer
        return Verdict(1.0, parts, "right" if right else "wrong", answer=answer)


def test_every_figure(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    file = tmp_path / "completions.jsonl"
    with Journal(file) as record:
        result = evaluated(
            ScriptedGenerator(ANSWERS, tokenizer),
            ScriptedPool(),
            PROBLEMS,
            record,
            lambda done, total: progress.append((done, total)),
        )
    assert (result.n_problems, result.samples) == (3, 4)
    assert result.pass_at_1 == mean_interval([1, 1 / 4, 0], 3)  # the unscorable is no sample
    assert result.pass_at_k[2] == mean_interval([1, 1 / 2, 0], 3)
    assert result.pass_at_k[4] == mean_interval([1, 1, 0], 3)
    # Equal spellings are one vote, malformed ones have none: "2" wins, then "5" over "4".
    assert result.maj_at_k[4] == mean_interval([1, 0, 0], 3)
    assert set(result.pass_at_k) == set(result.maj_at_k) == {1, 2, 4}
    assert result.format_rate == pytest.approx(6 / 11)
    assert result.language_rate == pytest.approx(3 / 11)
    assert result.unscorable_rate == pytest.approx(1 / 12)
    assert result.failures == {"late": 1}
    assert result.length_limited_rate == pytest.approx(5 / 12)
    lengths = [len(tokenizer(response(a))["input_ids"]) for row in ANSWERS for a in row]
    assert result.mean_completion_tokens == pytest.approx(sum(lengths) / 12)
    thoughts = len(tokenizer("so it is", add_special_tokens=False)["input_ids"])
    assert result.mean_thinking_tokens == pytest.approx(thoughts * 7 / 12)
    assert list(result.by_language) == ["en", "fr"]
    assert result.by_language["en"].n_problems == 2
    assert result.by_language["en"].pass_at_1 == mean_interval([1, 0], 3)
    assert list(result.by_difficulty) == ["1", "2", "unknown"]
    assert progress[-1] == (12, 12)

    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["problem_id"], r["index"]) for r in rows] == [
        (p, i) for p in "abc" for i in range(4)
    ]
    assert summarize(rows) == result
    assert json.loads(json.dumps(result.to_dict()))["pass_at_1"]["value"] == pytest.approx(5 / 12)


def test_levels_of_effort_are_measured_apart_and_a_problem_counts_once_in_all() -> None:
    right = {"low": [[1, 0], [0, 0]], "high": [[1, 1], [1, 0]]}  # by problem and sample
    blank = {"domain": "math", "language": "en", "difficulty": 1, "answer": "2", "text": ""}
    rows = [
        blank
        | {
            "group": 2 * place + number,
            "problem_id": str(number),
            "effort": level,
            "tokens": 10 * (1 + place),
            "thinking_tokens": 5,
            "finish_reason": "stop",
            "verdict": "right" if sample else "wrong",
            "reward": float(sample),
            "reason": "",
            "parts": {},
        }
        for place, (level, of_problems) in enumerate(right.items())
        for number, samples in enumerate(of_problems)
        for sample in samples
    ]
    result = summarize(rows)
    assert list(result.by_effort) == ["low", "high"]
    low, high = result.by_effort.values()
    assert low.pass_at_1 == mean_interval([0.5, 0], 2) and low.mean_completion_tokens == 10
    assert high.pass_at_1 == mean_interval([1, 0.5], 2) and high.mean_completion_tokens == 20
    assert result.pass_at_1 == mean_interval([0.75, 0.25], 4)
    assert (low.mean_reward, high.mean_reward, result.mean_reward) == (0.25, 0.75, 0.5)
    assert result.pass_at_k[2] == mean_interval([1, 0.5], 4)
    assert summarize([row | {"effort": None} for row in rows]).by_effort == {}


def test_what_could_not_be_judged_is_no_sample_and_without_any_there_is_no_problem() -> None:
    blank = {"domain": "math", "language": "en", "difficulty": 1, "answer": "2", "text": ""}
    blank |= {
        "tokens": 1,
        "thinking_tokens": 1,
        "finish_reason": "stop",
        "parts": {},
        "reward": 0.5,
    }

    def rows(*groups: str) -> list[dict[str, Any]]:
        verdicts = {"r": "right", "w": "wrong", "u": "unscorable"}
        return [
            blank | {"group": g, "problem_id": str(g), "verdict": verdicts[v], "reason": "lost"}
            for g, group in enumerate(groups)
            for v in group
        ]

    found = summarize(rows("rwuu", "uuuu", "uuur"))
    assert (found.n_problems, found.samples, found.unscorable_rate) == (3, 4, 9 / 12)
    assert found.pass_at_1 == mean_interval([1 / 2, 1], 1)
    assert found.pass_at_k[4] == mean_interval([1, 1], 1)
    assert found.by_language["en"].pass_at_1 == found.pass_at_1
    assert found.failures == {"lost": 9}
    assert summarize(rows("uu", "uu")).pass_at_1.value == 0
    first, second = counts_of(rows("rw", "uu", "rr")), counts_of(rows("rr", "rr", "uw"))
    difference = paired_difference(first, second)
    assert (difference.n_problems, difference.value) == (2, -1 / 4)


def test_a_problem_draws_the_same_numbers_in_any_set(tokenizer: PreTrainedTokenizerBase) -> None:
    def seeds(problems: list[Problem], seed: int) -> list[int]:
        generator = ScriptedGenerator([["2"] * 2] * len(problems), tokenizer)
        pool = VerifierStub()
        evaluated(generator, pool, problems, sampling=Sampling(samples=2, seed=seed))
        return generator.seeds

    assert seeds(PROBLEMS[1:2], 0) == seeds(PROBLEMS[:2], 0)[2:]
    assert len({*seeds(PROBLEMS, 0), *seeds(PROBLEMS, 1)}) == 12


class VerifierStub(PatientPool):
    def score(self, problem: Problem, responses: list[tuple[str, int]]) -> Future[list[Verdict]]:
        future: Future[list[Verdict]] = Future()
        future.set_result([Verdict(0.0, {}, "wrong")] * len(responses))
        return future


class SilentPool(PatientPool):
    def score(self, problem: Problem, responses: list[tuple[str, int]]) -> Future[list[Verdict]]:
        return Future()


def test_a_pool_that_hangs_is_an_error(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(WaitTimeout, match=r"no verdict within 0\.01 s \(timeouts.verification"):
        evaluated(ScriptedGenerator(ANSWERS, tokenizer), SilentPool(), PROBLEMS, seconds=0.01)


class SlowPool(SilentPool):
    """Grades one completion per wait, and answers once all of a problem are graded."""

    graded = 0

    def score(self, problem: Problem, responses: list[tuple[str, int]]) -> Future[list[Verdict]]:
        self.count, self.future = len(responses), Future[list[Verdict]]()
        return self.future

    def stats(self) -> PoolStats:
        self.graded += 1
        if self.graded == self.count:
            self.future.set_result([Verdict(0.0, {}, "wrong")] * self.count)
        return PoolStats(verdicts=self.graded)


def test_a_pool_that_grades_slowly_is_waited_for(tokenizer: PreTrainedTokenizerBase) -> None:
    generator = ScriptedGenerator(ANSWERS, tokenizer)
    result = evaluated(generator, SlowPool(), PROBLEMS[:1], seconds=0.01)
    assert result.pass_at_1.value == 0


def test_with_the_real_verifier(tokenizer: PreTrainedTokenizerBase) -> None:
    with VerifierPool(VerifierConfig(), l_max=8, l_cache=2) as pool:
        result = evaluated(ScriptedGenerator(ANSWERS, tokenizer), pool, PROBLEMS)
    assert result.pass_at_1 == mean_interval([3 / 4, 1 / 4, 0], 4)
    assert result.format_rate == pytest.approx(7 / 12)


def test_with_a_real_generator(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation="packed",
    )
    generator = Generator(LlamaForCausalLM(config), tokenizer, GeneratorConfig(), 5, 256)

    def measure(file: Path) -> str:
        with Journal(file) as record:
            result = evaluated(generator, VerifierStub(), PROBLEMS, record)
        assert result.mean_completion_tokens > 1
        assert result.length_limited_rate > 0
        assert not generator.pending()
        return file.read_text()

    assert measure(tmp_path / "once.jsonl") == measure(tmp_path / "again.jsonl")


def test_votes_are_spelt_alike() -> None:
    assert vote("0.5") == vote(r"\frac{1}{2}") == vote("½")
    assert vote("1,000") == vote("1000")
    assert vote("x+1") != vote("x+2")
    assert vote(None) is None
