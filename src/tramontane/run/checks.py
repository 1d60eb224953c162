"""Whether a run has anything to learn, checked as its groups are graded.

A group whose rewards are all equal teaches nothing and is filtered (arXiv 2506.10910, section 2.1).
If every group is filtered, no batch ever forms. The run then ends with a diagnosis instead of
waiting for one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from tramontane.config import Config
from tramontane.environments.loading import environment_of, load
from tramontane.errors import InputError
from tramontane.evaluation import EvaluationResult, malformed
from tramontane.placement.printed import printable
from tramontane.run.figures import share
from tramontane.run.folder import RunFolder
from tramontane.run.sample import Decode, messages_of
from tramontane.types import FAILED, Completion, FilterReason, Group, Problem, Verdict
from tramontane.verifier import functions
from tramontane.verifier.group_rewards import NO_NUMBER

Fate = Literal["unscorable", "failed", "right", "cut off", "malformed", "wrong"]

REASONS = 6  # verdict reasons in a table, at most
PATIENCE = 4  # factor on `max_groups_without_signal` for a run that has had groups to learn from

# Remedies for malformed completions depend on what is missing: `malformed.remedies`.
ADVICE: dict[Fate, tuple[str, ...]] = {
    "cut off": (
        "raise pipeline.l_max: completions reach it before they have given an answer",
        "if the model keeps writing after its answer, it does not know how to end: name what ends "
        "its turns in generator.stop, or begin with supervised training on complete responses "
        "(tramontane sft, cold_start)",
    ),
    "wrong": (
        "give easier problems (data.train), or drop those that are never solved "
        "(data.min_pass_rate, by the pass rates of tramontane curate)",
        "raise pipeline.group_size: a larger group is more likely to solve a hard problem once",
        "raise pipeline.l_max, or begin with supervised training on worked solutions (tramontane "
        "sft, cold_start)",
    ),
    "right": (
        "give harder problems (data.train), or drop those that are solved "
        "(data.max_pass_rate, data.curriculum.retire_after)",
    ),
    "failed": (
        "correct the function, at the line named above: it must return a result for every text",
        "if it timed out, make it faster or raise verifier.timeout_s (the domain's timeout_s; of "
        "an environment, conversation.step_timeout); if its worker died, raise verifier.memory_mb "
        "(conversation.memory_mb)",
        "tramontane score calls it on recorded responses, without training",
    ),
    "unscorable": (
        "tramontane doctor tells whether the sandbox works on this machine",
        "for `timed out` or `killed`, raise verifier.timeout_s, verifier.code_timeout_s or "
        "verifier.memory_mb",
        "for `judge: …`, see that its model answers, and in the form asked for (verifier.judge)",
        "a reference that cannot be read must be corrected in the data, or its row removed",
    ),
}


MOST: dict[Fate, str] = {
    "failed": "most completions could not be graded: your reward, verifier or environment failed",
}
NO_VALUE = (
    "let a reward function return a number for every text: one for which all return None cannot be "
    "judged, and its group is dropped",
)
NO_REWARD = (
    "let the environment give a reward by its last turn: `step` returns (messages, reward, done), "
    "and a class in TRL's shape has `get_reward`",
    "or let the verifier of the problem's domain judge what the model wrote: "
    "conversation.reward: verifier",
)
CUT_SHORT = (
    "or let conversations reach their end: raise conversation.turns, or pipeline.l_max for turns "
    "that are cut off",
)
CONSTANT = (
    "let the reward differ between completions of one problem: equal rewards teach nothing",
    "tramontane score calls it on recorded responses, without training",
)


FAILURES = 16  # kinds of failures of the user's code that are shown


class NoSignal(InputError):
    """No group can be learned from; the message holds the diagnosis."""


class Tally:
    """Counts over graded groups. Memory does not grow with the number or length of groups.

    Args:
        config: the run's.
        decode: returns the text of a prompt's tokens.
    """

    def __init__(self, config: Config, decode: Decode) -> None:
        self._config, self._decode = config, decode
        self._earned: set[str] = set()  # what the user's code gave, in words; at most two
        self.groups = self.kept = self.completions = self.cut_off = self.unread_calls = 0
        self._filtered: Counter[str] = Counter()  # groups by reason
        self._unjudged = 0  # groups that were dropped for a completion that could not be judged
        self._reasons: Counter[str] = Counter()  # completions by verdict and reason
        self._fates: Counter[Fate] = Counter()  # completions
        # The problem and the first completion of each fate.
        self._examples: dict[Fate, tuple[Problem, Completion, Verdict]] = {}

    def add(self, group: Group, filtered: FilterReason | None, unread_calls: int = 0) -> None:
        """Count one group, with the reason if it was filtered, and its calls that do not parse."""
        self.groups += 1
        self.unread_calls += unread_calls
        self.kept += filtered is None
        if filtered:
            self._filtered[_general(str(filtered))] += 1
            self._unjudged += filtered.kind == "unscorable"
        for completion, verdict in zip(group.completions, group.verdicts, strict=True):
            fate = _fate(completion, verdict)
            self.completions += 1
            self.cut_off += completion.finish_reason == "length"
            self._fates[fate] += 1
            self._reasons[_general(_judgment(completion, verdict))] += 1
            self._examples.setdefault(fate, (group.problem, completion, verdict))
            if len(self._earned) < 2:
                self._earned.add(self._given(group.problem, completion, verdict))

    @property
    def are_dropped(self) -> bool:
        """True if most groups were dropped for a completion that could not be judged."""
        return 2 * self._unjudged > self.groups

    @property
    def main_fate(self) -> Fate:
        """The most frequent fate of a completion, or of those for which most groups were
        dropped."""
        fates: Iterable[Fate] = ("unscorable", "failed") if self.are_dropped else self._fates
        return max(fates, key=self._fates.__getitem__)

    @property
    def constant(self) -> str:
        """What the user's code gave all completions, if that was always the same; else empty."""
        given = next(iter(self._earned), "") if len(self._earned) == 1 else ""
        return f"{given} for all {self.completions:,} completions" if given else ""

    def diagnosis(self) -> str:
        """Counts, one whole completion, and advice, as lines of text."""
        fate = self.main_fate
        problem, completion, verdict = self._examples[fate]
        headline = MOST.get(fate, f"most completions are {fate}")
        if self.are_dropped and 2 * self._fates[fate] < self.completions:
            headline = "most groups were dropped, each for a completion that could not be judged"
        advice = list(ADVICE.get(fate, ()))
        if fate == "failed" and completion.ending == "environment_failed":
            advice.pop()  # `score` calls no environment
        elif fate == "malformed":
            advice = malformed.remedies(verdict.reason, cut_off=False)
        elif "without a reward" in verdict.reason:
            cut_short = completion.ending != "completed"
            advice = [*NO_REWARD, *CUT_SHORT] if cut_short else [*NO_REWARD]
            headline = self.constant or headline
        elif verdict.reason == NO_NUMBER:
            advice = list(NO_VALUE)
        elif self.constant:
            by_functions = self._config.conversation.reward == "verifier"
            advice = list(CONSTANT if by_functions else CONSTANT[:1])
            headline = self.constant
        shown = malformed.excerpt(completion.text)
        if completion.ending is not None:
            messages = messages_of(problem, completion, self._decode)
            shown = malformed.excerpt("\n".join(f"{role}: {text}" for role, text in messages))
        shown = printable(shown, keep="\n")
        counts = [(count, reason) for reason, count in self._reasons.most_common(REASONS)]
        if rest := self.completions - sum(count for count, _ in counts):
            counts.append((rest, "other"))
        return "\n".join(
            [
                "  completions",
                *(_row(count, self.completions, reason) for count, reason in counts),
                "  groups",
                _row(self.kept, self.groups, "kept"),
                *(
                    _row(count, self.groups, f"filtered: {reason}")
                    for reason, count in self._filtered.most_common(REASONS)
                ),
                f"  a completion ({printable(_judgment(completion, verdict))}) of the problem "
                f"{printable(_shortened(problem.problem))}",
                *(f"  │ {line}" for line in shown.split("\n")),
                f"  {headline}; try, in this order:",
                *(f"  - {remedy}" for remedy in advice),
            ]
        )

    def _given(self, problem: Problem, completion: Completion, verdict: Verdict) -> str:
        """What the user's environment or reward functions gave a completion, in words; empty if
        something else decides its reward too."""
        weights, domains = self._config.verifier.reward, self._config.verifier.domains
        if verdict.verdict not in ("right", "wrong"):
            return ""
        if completion.ending and self._config.conversation.reward != "verifier":
            if all(turn.reward is None for turn in completion.turns):
                return "your environment gave no reward before it was cut short, which counts as 0,"
            value = verdict.parts.get("correctness", 0.0) / (weights.correctness or 1)
            return f"your environment gave {value:.4g}"
        if domains[problem.domain].verifier is not None:
            return ""
        values = [
            (c.name, verdict.parts.get(c.name, 0.0) / c.weight) for c in weights.custom if c.weight
        ]
        listed = ", ".join(f"{value:.4g} ({name})" for name, value in values)
        return f"your functions returned {listed}" if values else ""


class SignalMonitor:
    """Follows the groups of a run as they are graded.

    A run ends when none of its first `pipeline.max_groups_without_signal` groups is kept; after the
    first kept group, when none of `PATIENCE` times as many consecutive groups is. The user is
    warned of the first failure of each kind of a reward, verifier or environment of theirs, and
    each time the share of kept groups, over that many groups, falls below
    `pipeline.min_kept_share`. A run whose model has tools also ends when the first groups have no
    call that parses: whatever it learns, it is not to use them.

    Args:
        config: the run's config.
        folder: the run's folder, named in messages.
        warn: called with a warning.
        updates: updates done so far.
        decode: returns the text of a prompt's tokens.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        warn: Callable[[str], None],
        updates: int,
        decode: Decode,
    ) -> None:
        self._tally = partial(Tally, config, decode)
        self.limit = max(stage.pipeline.groups_without_signal for stage in config.by_stage())
        self.min_share = config.pipeline.min_kept_share
        self.folder, self.warn = folder, warn
        self.ever_kept = updates > 0
        self._unkept = self._tally()  # since the last kept group
        self._data = config.data
        # Groups with tools, until the first call that parses; None after it.
        self._uncalled = None if updates else self._tally()
        self._window, self._share_is_low, self._constant = self._tally(), False, False
        self._reward_is_set = config.conversation.reward_is_set
        self._failures: set[str] = set()  # kinds that were shown

    def graded(
        self, group: Group, filtered: FilterReason | None, tools: Sequence[str] = ()
    ) -> None:
        """Count a group that was graded, with the reason if it was filtered, and the names of the
        tools that the model could call.

        Raises:
            NoSignal: too many consecutive groups were filtered, or no tool was called.
        """
        self._watch_calls(group, filtered, tools)
        self._watch_rewards(group)
        self._watch_failures(group)
        self._unkept.add(group, filtered)
        self._window.add(group, filtered)
        if filtered is None:
            self._unkept, self.ever_kept = self._tally(), True
        # Groups graded while the run ends do not raise again.
        if self._unkept.groups == self.limit * (PATIENCE if self.ever_kept else 1):
            raise NoSignal(self._end())
        if self._window.groups == self.limit:
            self._judge_window()

    def _watch_calls(
        self, group: Group, filtered: FilterReason | None, tools: Sequence[str]
    ) -> None:
        calls = [c for answer in group.completions for turn in answer.turns for c in turn.calls]
        if self._uncalled is None or any(call.name for call in calls):
            self._uncalled = None
            return
        if not tools:
            return
        self._uncalled.add(group, filtered, len(calls))
        if self._uncalled.groups == self.limit:
            raise NoSignal(
                f"{self.folder}: none of the first {self.limit} groups "
                f"(pipeline.max_groups_without_signal) has a tool call that can be read "
                f"({', '.join(tools)}); {self._uncalled.unread_calls:,} calls could not be read\n"
                f"{self._uncalled.diagnosis()}\n"
                f"Name the form in which the model writes calls (conversation.calls), begin with "
                f"supervised training on traces with calls (tramontane sft, cold_start), or remove "
                f"the tools"
            )

    def _watch_rewards(self, group: Group) -> None:
        """Warn once of rewards that nobody chose to ignore."""
        turns = (turn for answer in group.completions for turn in answer.turns)
        if not self._reward_is_set and any(turn.reward is not None for turn in turns):
            self._reward_is_set = True
            environment = load(environment_of(self._data, group.problem) or "")
            self.warn(
                f"{environment.__qualname__} gives rewards, which do not count: "
                f"set conversation.reward to last or sum, or to verifier to ignore them"
            )

    def _watch_failures(self, group: Group) -> None:
        """Show the first failure of each kind of the user's code, with its place."""
        for completion, verdict in zip(group.completions, group.verdicts, strict=True):
            if len(self._failures) == FAILURES or _fate(completion, verdict) != "failed":
                continue
            if (kind := functions.kind_of_failure(verdict.reason)) not in self._failures:
                self._failures.add(kind)
                self.warn(
                    f"a completion could not be graded (pipeline.unscorable): "
                    f"{printable(verdict.reason)}. Later failures of this kind are counted only "
                    f"(`failures` of the metrics and the summary)"
                )

    def _judge_window(self) -> None:
        window, self._window = self._window, self._tally()
        if window.constant and not self._constant:
            remedy = (NO_REWARD if "gave no reward" in window.constant else CONSTANT)[0]
            self.warn(f"{window.constant}, which teaches nothing: {remedy}")
        self._constant = bool(window.constant)
        was_low, kept_share = self._share_is_low, window.kept / window.groups
        self._share_is_low = kept_share < self.min_share
        if self._share_is_low and not was_low:
            self.warn(
                f"only {window.kept} of the last {window.groups} groups can be learned from "
                f"({share(kept_share)}, below pipeline.min_kept_share)\n{window.diagnosis()}"
            )

    def _end(self) -> str:
        groups, resume = self._unkept.groups, f"{RunFolder(self.folder).resume_command} key=value"
        if not self.ever_kept:
            return (
                f"{self.folder}: none of the first {groups} groups can be learned from "
                f"(pipeline.max_groups_without_signal), so nothing was trained\n"
                f"{self._unkept.diagnosis()}\n"
                f"Nothing is trained yet, so any key may change: {resume}"
            )
        return (
            f"{self.folder}: none of the last {groups} groups can be learned from ({PATIENCE} "
            f"times pipeline.max_groups_without_signal)\n{self._unkept.diagnosis()}\n"
            f"If the completions were better in earlier updates, a step was too large: resume with "
            f"a lower trainer.learning_rate, from an older checkpoint if need be (delete the newer "
            f"one's folder): {resume}"
        )


def evaluation_warnings(before: EvaluationResult) -> list[str]:
    """Warnings about a model measured before training: rates of 0, and what they mean."""
    completions = before.n_problems * before.samples
    if before.format_rate == 0:
        return [
            f"evaluation before training: format rate 0. None of {completions:,} completions has "
            f"the required format, and a malformed completion earns no reward at all; if training "
            f"finds none either, the run ends. evaluation_before.jsonl has the completions with "
            f"their reasons; {share(before.length_limited_rate)} were cut off at pipeline.l_max"
        ]
    k, best = max(before.pass_at_k.items())
    if best.value == 0:
        samples = "1 sample" if k == 1 else f"{k} samples"
        return [
            f"evaluation before training: pass@{k} is 0. None of {before.n_problems:,} problems "
            f"was solved in {samples}, so training learns little but other parts of the reward, if "
            f"it has any (format, language), until the model solves some; easier problems or "
            f"supervised training first would help"
        ]
    return []


def _fate(completion: Completion, verdict: Verdict) -> Fate:
    if verdict.verdict == "unscorable":
        failed = functions.failed(verdict.reason) or completion.ending in FAILED
        return "failed" if failed else "unscorable"
    if verdict.verdict == "right":
        return "right"
    # With a wrong start, more tokens would not help.
    if completion.finish_reason == "length" and not verdict.reason.startswith("does not start"):
        return "cut off"
    return "malformed" if verdict.verdict == "malformed" else "wrong"


def _judgment(completion: Completion, verdict: Verdict) -> str:
    reason = f": {verdict.reason}" if verdict.reason else ""
    cut_off = ", cut off at l_max" if completion.finish_reason == "length" else ""
    return f"{verdict.verdict}{reason}{cut_off}"


def _general(reason: str) -> str:
    """A reason without its numbers, except line numbers of files, so that equal causes are counted
    together."""
    return printable(re.sub(r"(?<![:\w])\d+(?:\.\d+)?", "N", reason))[:100]


def _row(count: int, total: int, text: str) -> str:
    return f"    {count:>7,}  {share(count / total):>5}  {text}"


def _shortened(problem: str) -> str:
    flat = " ".join(problem.split())
    return flat if len(flat) <= 200 else f"{flat[:200]}…"
