"""Finds references that no answer equals, and programs that fail their own tests, before a run:
each is graded as the answer of a well-formed response. Without this check, a model is taught that
right answers are wrong."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tramontane.config import VerifierConfig
from tramontane.config.domains import VERIFIERS
from tramontane.types import Problem
from tramontane.verifier.correctness import domain_of
from tramontane.verifier.custom import Response
from tramontane.verifier.format import check_format, sample
from tramontane.verifier.math import can_read
from tramontane.verifier.math.reference import bare_answers, stated
from tramontane.verifier.pool import VerifierPool

TRIED = 256  # references with words around a value, and formulas, that are tried of each source,
TRIED_BY_FUNCTION = 8  # and those of each domain that programs or the user's own verifier grade
SHOWN = 60  # characters of a reference


class _Trial(NamedTuple):
    """A problem, and well-formed responses of which its verifier should call one right."""

    problem: Problem
    texts: list[str]


def warnings(config: VerifierConfig, problems: Sequence[Problem], source: str) -> list[str]:
    """Warnings about references of a source that no answer equals, each with the first of them.

    Args:
        config: domains and formats.
        problems: the source's.
        source: its name, for the messages.
    """
    by_domain: dict[str, list[Problem]] = defaultdict(list)
    for problem in problems:
        if problem.answer or (problem.tests and _solution(problem)):
            by_domain[problem.domain].append(problem)
    told = []
    for domain, found in by_domain.items():
        verifier = config.domains[domain].verifier
        answered = [problem for problem in found if problem.answer]
        if verifier == "code":
            told += _of_code(config, found, source)
        elif not answered:
            continue
        elif verifier == "math":
            told += _of_math(config, answered, source)
        elif verifier and verifier not in VERIFIERS:
            told += _of_function(config, answered, source)
    return told


def _of_math(config: VerifierConfig, problems: list[Problem], source: str) -> list[str]:
    asked = {p.id: bare_answers(p.answer or "") for p in problems}
    worded = [(p, answers) for p in problems if (answers := asked[p.id]) is not None]
    trials = [_trial(config, problem, answers) for problem, answers in worded[:TRIED]]
    wrong = {problem.id for problem in _refused(config, trials)}
    plain = [problem for problem in problems if asked[problem.id] is None]
    wrong |= {problem.id for problem in plain if not _fits(config, problem)}
    formulas = [p for p in plain if re.search(r"\d.*\D|\D.*\d", p.answer or "", re.DOTALL)]
    wrong |= {p.id for p in formulas[:TRIED] if not can_read(stated(p.answer or ""), config.math)}
    found = [problem for problem in problems if problem.id in wrong]
    if not found:
        return []
    tried = f" ({len(trials):,} with words were tried)" * (len(worded) > TRIED)
    return [
        f"data {source!r}: {len(found):,} of {len(problems):,} reference answers{tried} can only "
        f"be equaled word for word, the first at {_shown(found[0])}. Where words are no part of "
        f"the answer, give the answer alone (or in \\boxed{{}}), remove the rows, or name another "
        f"column in data.fields"
    ]


def _of_code(config: VerifierConfig, problems: list[Problem], source: str) -> list[str]:
    solved = [(p, code) for p in problems if (code := _solution(p))]
    form = config.domains[problems[0].domain].format
    step = -(-len(solved) // TRIED_BY_FUNCTION) or 1
    trials = [_Trial(p, [sample(form, code, config.tags)]) for p, code in solved[::step]]
    trials = [trial for trial in trials if all(trial.texts)]
    wrong = _refused(config, trials)
    if not wrong:
        return []
    return [
        f"data {source!r}: {len(wrong):,} of {len(trials):,} solutions tried fail their own row's "
        f"tests, the first at {wrong[0].where or wrong[0].id}: tests, or solutions, are wrong. "
        f"`tramontane curate` (stage `code`) runs all of them"
    ]


def _solution(problem: Problem) -> str:
    """The row's solution in Python, or the first of several; else empty."""
    given = problem.metadata.get("solution") or problem.metadata.get("solutions")
    code = given[0] if isinstance(given, list) and given else given
    try:
        ast.parse(code if isinstance(code, str) else "")
    except (SyntaxError, ValueError):  # another language, or text around it
        return ""
    return code if isinstance(code, str) else ""


def _of_function(config: VerifierConfig, problems: list[Problem], source: str) -> list[str]:
    step = -(-len(problems) // TRIED_BY_FUNCTION)
    trials = [_trial(config, problem, [problem.answer or ""]) for problem in problems[::step]]
    trials = [trial for trial in trials if trial.texts]
    if not trials or len(_refused(config, trials)) < len(trials):
        return []
    domain = trials[0].problem.domain
    return [
        f"data {source!r}: {config.domains[domain].verifier} (verifier.domains.{domain}) judges "
        f"the reference itself wrong as an answer, for each of {len(trials)} problems tried, the "
        f"first at {_shown(trials[0].problem)}: correct the function, or the references"
    ]


def _trial(config: VerifierConfig, problem: Problem, answers: Sequence[str]) -> _Trial:
    form = domain_of(problem, config).format
    texts = [(sample(form, answer, config.tags), answer) for answer in answers]
    return _Trial(
        problem, [t for t, a in texts if check_format(t, form, config.tags).extracted == a]
    )


def _fits(config: VerifierConfig, problem: Problem) -> bool:
    """False if no response in the domain's format can hold the reference, as with a brace that is
    never closed."""
    answer, form = stated(problem.answer or ""), domain_of(problem, config).format
    if form.answer != "boxed" or answer.count("{") == answer.count("}"):
        return True
    return bool(_trial(config, problem, [answer]).texts)


def _refused(config: VerifierConfig, trials: list[_Trial]) -> list[Problem]:
    """The problems of which every text is judged wrong, or which have none."""
    if not any(trial.texts for trial in trials):
        return [trial.problem for trial in trials]
    # The verdict alone: no judge is asked, and no other reward is computed.
    reward = config.reward.model_copy(update={"custom": (), "judge": 0.0})
    alone = config.model_copy(update={"workers": 1, "judge": None, "reward": reward})
    with VerifierPool(alone, sys.maxsize, 0) as pool:
        graded = [pool.score(p, [Response(text, 1) for text in texts]) for p, texts in trials]
        return [
            problem
            for (problem, _), verdicts in zip(trials, graded, strict=True)
            if all(verdict.verdict == "wrong" for verdict in verdicts.result())
        ]


def _shown(problem: Problem) -> str:
    text = " ".join(str(problem.answer).split())
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
    return f"{problem.where or problem.id}: {shown!r}"
