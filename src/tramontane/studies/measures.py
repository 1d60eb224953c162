"""Measures of a finished run that studies compare."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tramontane.config import LANGUAGES
from tramontane.journals import read_log


@dataclass(frozen=True)
class FinishedRun:
    """A run's folder, read lazily.

    Args:
        folder: the run's folder.
        common_seconds: seconds of training of the fastest among the runs it is compared to.
    """

    folder: Path
    common_seconds: float = math.inf

    @cached_property
    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return content

    @cached_property
    def updates(self) -> list[dict[str, Any]]:
        """The metrics of every update, in order."""
        return list(read_log(self.folder / "metrics.jsonl"))

    def curve(self, key: str) -> np.ndarray:
        """A metric over updates: float, [updates]; NaN where an update does not have it."""
        return np.array([m.get(key, np.nan) for m in self.updates], dtype=np.float64)

    def late(self, key: str, of: Callable[[np.ndarray], np.ndarray] = np.asarray) -> float:
        """Mean of a metric, or of a function of it, over the last quarter of the updates."""
        curve = self.curve(key)
        return float(np.nanmean(of(curve[-max(1, len(curve) // 4) :])))

    def at_common_time(self, key: str) -> float:
        """Mean of a metric over the last quarter of `common_seconds`; NaN without an update
        there. The start does not count, as in `training_seconds` of a summary."""
        seconds = self.curve("wall_seconds")
        seconds = seconds - seconds[-1] + self.summary["training_seconds"]
        there = (seconds > 0.75 * self.common_seconds) & (seconds <= self.common_seconds)
        return float(self.curve(key)[there].mean()) if there.any() else math.nan

    @property
    def after(self) -> dict[str, Any]:
        """The evaluation of the held-out problems after training."""
        result: dict[str, Any] = self.summary["evaluation"]["after"]
        return result

    def in_language(self, code: str, when: str = "after") -> float:
        """pass@1 on the held-out problems in a language; NaN if there are none."""
        part = self.summary["evaluation"][when]["by_language"].get(code)
        return float(part["pass_at_1"]["value"]) if part else math.nan

    def in_other_languages(self, when: str = "after") -> float:
        """Mean pass@1 on the held-out problems over all languages except English."""
        every = self.summary["evaluation"][when]["by_language"]
        return float(np.mean([self.in_language(code, when) for code in every if code != "en"]))

    @cached_property
    def distinct_answers(self) -> float:
        """Different answers per problem among the samples of the evaluation after training."""
        answers: dict[int, set[str]] = defaultdict(set)
        for row in read_log(self.folder / "evaluation_after.jsonl"):
            of_group = answers[row["group"]]
            if row["answer"] is not None:
                # All right answers count as one, however they are written.
                of_group.add("right" if row["verdict"] == "right" else row["answer"].strip())
        return float(np.mean([len(of_group) for of_group in answers.values()]))

    @cached_property
    def distinct_solutions(self) -> float:
        """Share of a problem's right samples, after the first, with a unique text: mean over the
        problems with at least two, NaN without any. Unlike the number of distinct answers, it does
        not fall merely because wrong answers become fewer."""
        texts: dict[int, list[str]] = defaultdict(list)
        for row in read_log(self.folder / "evaluation_after.jsonl"):
            if row["verdict"] == "right":
                texts[row["group"]].append(row["text"].strip())
        shares = [(len(set(found)) - 1) / (len(found) - 1) for found in texts.values() if found[1:]]
        return float(np.mean(shares)) if shares else math.nan


@dataclass(frozen=True)
class Measure:
    """A figure of a run.

    Args:
        title: name on pages, with the unit.
        value: reads it from a run.
        format: number format on pages.
        compares: with the evaluation before training, which the run must then make.
        bounds: lowest and highest value of a share; None: not a share.
        samples: behind each figure of a share; 0: those of the evaluation.
    """

    title: str
    value: Callable[[FinishedRun], float]
    format: str = ".3f"
    compares: bool = False
    bounds: tuple[float, float] | None = None
    samples: int = 0

    def rounding(self, value: float) -> float:
        """Half a unit of the last digit that is shown of a value."""
        digits, kind = int(self.format[:-1].replace(",", "").lstrip(".")), self.format[-1]
        if kind != "f" and value:  # digits count from the first that is not 0
            digits -= math.floor(math.log10(abs(value))) + (kind == "g")
        return 0.5 * 10.0**-digits


SHARE = (0.0, 1.0)


def _of_set(name: str) -> Callable[[FinishedRun], float]:
    return lambda run: float(run.summary["rl"][name]["value"])


def _gain_on_set(name: str) -> Callable[[FinishedRun], float]:
    return lambda run: _of_set(name)(run) - float(run.summary["base"][name]["value"])


def _of_language(code: str) -> Measure:
    return Measure(f"pass@1, {code}", lambda run: run.in_language(code), bounds=SHARE)


def returned(name: str, title: str, format: str, samples: int = 0) -> Measure:
    """A measure returned by a study's `runner`, with samples a share; NaN if it was not finite."""

    def value(run: FinishedRun) -> float:
        found = run.summary["measures"][name]
        return math.nan if found is None else float(found)

    return Measure(title, value, format, bounds=SHARE if samples else None, samples=samples)


MEASURES: dict[str, Measure] = {
    "pass_at_1": Measure("pass@1", lambda run: run.after["pass_at_1"]["value"], bounds=SHARE),
    "gain": Measure(
        "gain of pass@1",
        lambda run: (
            run.after["pass_at_1"]["value"]
            - run.summary["evaluation"]["before"]["pass_at_1"]["value"]
        ),
        compares=True,
    ),
    "pass_at_4": Measure("pass@4", lambda run: run.after["pass_at_k"]["4"]["value"], bounds=SHARE),
    "maj_at_4": Measure("maj@4", lambda run: run.after["maj_at_k"]["4"]["value"], bounds=SHARE),
    "distinct_answers": Measure(
        "distinct answers a problem", lambda run: run.distinct_answers, ".2f"
    ),
    "distinct_solutions": Measure(
        "distinct right solutions", lambda run: run.distinct_solutions, bounds=SHARE
    ),
    "format_rate": Measure("format rate", lambda run: run.after["format_rate"], bounds=SHARE),
    "language_rate": Measure("language rate", lambda run: run.after["language_rate"], bounds=SHARE),
    "thinking_tokens": Measure(
        "thinking tokens", lambda run: run.after["mean_thinking_tokens"], ".1f"
    ),
    "completion_tokens": Measure(
        "tokens a completion", lambda run: run.after["mean_completion_tokens"], ".1f"
    ),
    "late_reward": Measure("reward, last quarter", lambda run: run.late("reward")),
    "timed_pass_rate": Measure(
        "pass rate in training, at equal time",
        lambda run: run.at_common_time("pass_rate"),
        bounds=SHARE,
    ),
    "late_entropy": Measure("entropy, last quarter (nats)", lambda run: run.late("entropy")),
    "mismatch": Measure(
        "KL(μ ‖ π), last quarter (nats)", lambda run: run.late("kl_behavior"), ".2g"
    ),
    # A logarithm, since a single token far from π_ref can be most of an update's mean.
    "late_log_kl": Measure(
        "log₁₀ KL(π ‖ π_ref), last quarter", lambda run: run.late("kl_reference", np.log10), ".2f"
    ),
    "grad_norm": Measure("gradient norm, last quarter", lambda run: run.late("grad_norm"), ".3g"),
    "kept_share": Measure(
        "groups trained on",
        lambda run: float(
            run.curve("groups_kept").sum()
            / (run.curve("groups_kept") + run.curve("groups_filtered")).sum()
        ),
        bounds=SHARE,
    ),
    "tokens_per_second": Measure(
        "trained tokens/s", lambda run: run.summary["trained_tokens_per_second"], ",.0f"
    ),
    "peak_memory": Measure("peak memory (MiB)", lambda run: run.summary["peak_memory_mib"], ",.0f"),
    "minutes": Measure("minutes", lambda run: run.summary["training_seconds"] / 60, ".2f"),
    **{f"pass_at_1_{code}": _of_language(code) for code in LANGUAGES},
    "gain_others": Measure(
        "gain of pass@1, other languages than English",
        lambda run: run.in_other_languages() - run.in_other_languages("before"),
        compares=True,
    ),
    "language_gap": Measure(
        "pass@1 of English less that of the others",
        lambda run: run.in_language("en") - run.in_other_languages(),
    ),
    "maths": Measure("pass@1, maths", _of_set("maths"), bounds=SHARE),
    "code": Measure("pass@1, code", _of_set("code"), bounds=SHARE),
    "maths_gain": Measure("gain of pass@1, maths", _gain_on_set("maths"), compares=True),
    "code_gain": Measure("gain of pass@1, code", _gain_on_set("code"), compares=True),
}
