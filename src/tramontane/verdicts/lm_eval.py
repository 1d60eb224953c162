r"""A filter and metrics of lm-evaluation-harness. In `utils.py` beside a task's YAML:

    from tramontane.verdicts.lm_eval import process_results

and in the YAML, `process_results: !function utils.process_results` with the metric `math_verdict`;
or, after `import tramontane.verdicts.lm_eval`, the filter `tramontane` and the metric `tramontane`
by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lm_eval.api.metrics  # noqa: F401 (registers the aggregations)
from lm_eval.api.filter import Filter
from lm_eval.api.registry import register_filter, register_metric

from tramontane.types import PAPER_TAGS
from tramontane.verdicts.grader import verify
from tramontane.verifier.format import last_box

NO_ANSWER = "[invalid]"  # as the harness's own filters say it


@register_filter("tramontane")
class Answers(Filter):  # type: ignore[misc]
    r"""Replaces each response by the content of the last `\boxed{}` after its thoughts."""

    def apply(self, resps: Iterable[Sequence[str]], docs: Any) -> list[list[str]]:
        """The answers of each document's responses."""
        return [[_answer(response) for response in responses] for responses in resps]


@register_metric(
    metric="tramontane",
    higher_is_better=True,
    output_type="generate_until",
    aggregation="mean",
)
def verdict(references: Sequence[str], predictions: Sequence[str], **_: Any) -> float:
    """1 if one of the references is the answer; with or without the filter."""
    [prediction] = predictions
    return float(any(_right(prediction, reference) for reference in references))


def process_results(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """`math_verdict` of the first response, by the document's `answer`."""
    return {"math_verdict": float(_right(results[0], str(doc["answer"])))}


def _answer(response: str) -> str:
    box = last_box(response.rpartition(PAPER_TAGS.closing)[2])
    return NO_ANSWER if box is None else box


def _right(prediction: str, reference: str) -> bool:
    return verify(prediction, reference).verdict == "right"
