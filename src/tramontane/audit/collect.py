"""The audit's collector: takes rollouts one at a time, and keeps the data for the findings."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from tramontane.audit.findings import Audit, Finding, clip
from tramontane.audit.recorded import Rollout
from tramontane.audit.suspicion import describe_cheat, describe_hedge, occurs_in
from tramontane.config import VerifierConfig
from tramontane.run.flattery import flattered, score_of
from tramontane.statistics import majority, merged
from tramontane.verifier.code.idle import why_idle
from tramontane.verifier.format import boxes, check_format, fences, last_box, thinking_text
from tramontane.verifier.math.grade import is_unevaluated
from tramontane.verifier.math.normalize import vote

LONGEST = 1000  # longest answer that is judged, in characters
Pair = tuple[str, str]  # content of a box, and the reference


@dataclass
class Graded:
    """The part of a rollout that is kept; `answer` is the content of its box."""

    file: str
    line: int
    problem_id: str
    verdict: str
    reference: str | None
    answer: str | None
    group: str | int
    index: int | None
    ending: str | None
    calls: int
    images: tuple[str, ...]

    def finding(self, kind: str, detail: str) -> Finding:
        return Finding(kind=kind, detail=detail, **vars(self))


class Collector:
    """Counts and findings of the rollouts seen so far.

    `pairs` has the completions by box and reference, for the other verifiers (`disputes`).

    Args:
        config: thinking tags and domains of the rollouts.
    """

    def __init__(self, config: VerifierConfig) -> None:
        self.config, self.tags = config, config.tags
        self.findings: list[Finding] = []
        self.verdicts: Counter[str] = Counter()
        self.pairs: defaultdict[Pair, list[Graded]] = defaultdict(list)
        self._right: Counter[str] = Counter()  # by verifier
        # In order: the judge's score, beside the verdict of another verifier.
        self._judged: list[tuple[float, Graded]] = []
        self._by_problem: defaultdict[str, Counter[str]] = defaultdict(Counter)
        # By file and group: the normalized answer, if there is one, of each completion.
        self._groups: defaultdict[tuple[str, str | int], list[tuple[str | None, Graded]]]
        self._groups = defaultdict(list)

    def add(self, row: Rollout) -> None:
        thoughts = row.before + thinking_text(row.text, self.tags)
        answer_part = row.text.partition(self.tags.closing)[2]
        verifier = self.config.verifier_of(row.domain)
        box = self._answer(row, answer_part) if verifier == "math" else None
        graded = Graded(
            file=row.file,
            line=row.line,
            problem_id=row.problem_id,
            verdict=row.verdict,
            reference=row.reference,
            answer=None if box is None else box[:LONGEST],
            group=row.group,
            index=row.index,
            ending=row.ending,
            calls=row.calls,
            images=row.images,
        )
        self.verdicts[row.verdict] += 1
        self._by_problem[row.problem_id][row.verdict] += 1
        score = score_of(self.config, row.domain, row.verdict, row.judged)
        if score is not None:
            self._judged.append((score, graded))
        if row.verdict == "unscorable":
            self.findings.append(graded.finding("unscorable", row.reason or "no reason"))
        if verifier == "math":
            self._add_math(graded, thoughts, answer_part)
        elif verifier == "code" and row.verdict == "right" and (blocks := fences(answer_part)):
            self._right["code"] += 1
            if detail := describe_cheat(blocks[0].body, row.tests):
                self.findings.append(graded.finding("program", detail))
            if idle := why_idle(row.tests, row.statement):
                self.findings.append(graded.finding("tests", idle))

    def _answer(self, row: Rollout, answer_part: str) -> str | None:
        """The answer judged by the math verifier: in the paper's format, the last box."""
        form = self.config.domains[row.domain].format
        if form.answer == "boxed":
            return last_box(answer_part)
        extracted = check_format(row.text, form, self.tags).extracted
        return None if extracted is None else str(extracted)

    def _add_math(self, graded: Graded, thoughts: str, answer_part: str) -> None:
        has_verdict = graded.verdict in ("right", "wrong")
        box, reference = graded.answer, graded.reference
        answer = vote(box) if has_verdict and box is not None else None
        self._groups[(graded.file, graded.group)].append((answer, graded))
        if box is None or reference is None or not has_verdict:
            return
        self.pairs[(box, reference)].append(graded)
        if graded.verdict != "right":
            return
        self._right["math"] += 1
        if detail := describe_hedge(box, reference):
            self.findings.append(graded.finding("hedge", detail))
        if len(box) <= LONGEST and is_unevaluated(box, reference):
            self.findings.append(graded.finding("unevaluated", ""))
        if len(boxed := boxes(answer_part)) > 1:
            contents = [clip(answer_part[start : end - 1]) for _, start, end in boxed[:5]]
            detail = f"{len(boxed)}: " + " · ".join(contents)
            self.findings.append(graded.finding("boxes", detail))
        if not occurs_in(box, thoughts) and not occurs_in(reference, thoughts):
            detail = "the thoughts are empty" if not thoughts.strip() else ""
            self.findings.append(graded.finding("not in thoughts", detail))

    def result(self) -> Audit:
        """The audit's result, without the disputes."""
        n = self.verdicts.total()
        right = (self._right["math"], "right math completions")
        result = Audit(self.findings, {}, n)
        kinds = ("hedge", "unevaluated", "boxes", "not in thoughts")
        result.totals = dict.fromkeys(kinds, right)
        programs = (self._right["code"], "right programs")
        result.totals |= {"program": programs, "tests": programs}
        result.totals["judge"] = (len(self._judged), "completions judged twice")
        liked, detail = flattered(self._judged)
        result.findings += [g.finding("judge", f"score {s:.2f}; {detail}") for s, g in liked]
        result.totals["unscorable"] = (n, "completions")
        result.totals["majority"] = (len(self._groups), "groups")
        result.findings += [f for g in self._groups.values() if (f := _majority(g)) is not None]
        rates = {p: (c["unscorable"], c.total()) for p, c in self._by_problem.items()}
        worst = sorted(rates.items(), key=lambda item: -item[1][0] / item[1][1])
        result.unscorable_rates = {problem: rate for problem, rate in worst if rate[0]}
        return result


def _majority(group: list[tuple[str | None, Graded]]) -> Finding | None:
    """A finding if more than half of three or more completions agree on a wrong answer."""
    answers, graded = zip(*group, strict=True)
    votes = merged(answers, [completion.verdict == "right" for completion in graded])
    winner = majority(votes)
    if len(group) < 3 or not isinstance(winner, str):
        return None
    count, first = votes.count(winner), graded[votes.index(winner)]
    if 2 * count <= len(group) or first.verdict != "wrong":
        return None
    return first.finding("majority", f"{count} of {len(group)} answer {clip(winner)}")
