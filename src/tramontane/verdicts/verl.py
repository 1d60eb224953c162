"""verl's custom reward function:

    custom_reward_function.path=pkg://tramontane.verdicts.verl
    custom_reward_function.name=compute_score

`reward_kwargs` may set `kind` (by default `code` if the ground truth is tests, else `math`) and
other arguments of `Grader`. verl has no value for "cannot be judged": the score is 0, and
`unscorable` is 1 in the metrics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tramontane.types import Verdict
from tramontane.verdicts.grader import Grader, Kind, Sample

Score = dict[str, float]


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **options: Any,
) -> Score:
    """The score of one response, and what verl logs beside it: `acc` and `unscorable`."""
    grader, sample = _read(solution_str, ground_truth, extra_info, options)
    return _score(grader.grade([sample])[0])


async def compute_score_async(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **options: Any,
) -> Score:
    """`compute_score` for reward loops that await it."""
    grader, sample = _read(solution_str, ground_truth, extra_info, options)
    return _score((await grader.grade_async([sample]))[0])


def _read(
    solution: str, truth: Any, extra: Mapping[str, Any] | None, options: dict[str, Any]
) -> tuple[Grader, Sample]:
    extra = extra or {}
    # verl's workers add what not every reward function takes, such as `reward_router_address`.
    known = {name: options[name] for name in ("l_max", "l_cache", "settings") if name in options}
    is_tests = isinstance(truth, Mapping | list) or _is_json(truth)
    kind: Kind = options.get("kind") or ("code" if is_tests else "math")
    language = extra.get("language")
    sample = Sample(
        solution,
        None if is_tests or truth is None else str(truth),
        truth if is_tests else None,
        str(extra.get("question") or extra.get("problem") or ""),
        language if len(language or "") == 2 else None,
        int(extra.get("response_length") or 0),
    )
    return Grader(kind, **known), sample


def _is_json(truth: Any) -> bool:
    if not isinstance(truth, str) or not truth.lstrip().startswith(("{", "[{")):
        return False
    try:
        return isinstance(json.loads(truth), dict | list)
    except ValueError:
        return False


def _score(verdict: Verdict) -> Score:
    unscorable = verdict.verdict == "unscorable"
    right = verdict.verdict == "right"
    return {"score": verdict.reward, "acc": float(right), "unscorable": float(unscorable)}
