"""Traces for supervised fine-tuning, harvested from a finished run's rollouts.

Magistral Small learned from the right answers of Medium's training (arXiv 2506.10910, section 5):
early short ones were skipped, their number per problem was limited, and problems with a low pass
rate were drawn more often. The paper gives no numbers; `HarvestConfig` has ours.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tramontane.errors import InputError
from tramontane.recipes.config import HarvestConfig
from tramontane.run.columns import read_rows
from tramontane.run.folder import RunFolder
from tramontane.run.rollouts import check_text, files
from tramontane.types import ThinkingTags
from tramontane.workplace import owned_file, whole_file, write_whole

_COLUMNS = ("update", "problem_id", "verdict", "finish_reason", "text", "version_spans")


@dataclass
class Harvest:
    """Counts of a harvest.

    Args:
        completions: recorded completions.
        left_out: skipped completions by reason; each has at most one reason.
        kept: distinct written traces.
        rows: written rows, repeats included.
        problems: problems with at least one kept trace.
        updates: updates of the run.
        early_updates: the first updates, whose short traces are skipped.
        short_tokens: an early trace below this length is short.
        mean_tokens: mean length of the written rows, in tokens.
        mean_pass_rate: mean over rows of their problem's pass rate.
    """

    completions: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    rows: int = 0
    problems: int = 0
    updates: int = 0
    early_updates: int = 0
    short_tokens: float = 0.0
    mean_tokens: float = 0.0
    mean_pass_rate: float = 0.0


class _Trace(NamedTuple):
    """A right completion: its number in the run, update, length in tokens, and a hash of its
    text."""

    number: int
    update: int
    tokens: int
    digest: bytes


def harvest(
    run: str | Path,
    out: str | Path,
    config: HarvestConfig | None = None,
    tags: ThinkingTags | None = None,
) -> Harvest:
    """Write the traces of a finished run as JSONL that `tramontane sft` reads.

    A row has `prompt` (the problem's statement), `response`, and, for information, `problem_id`,
    `pass_rate` (share of right ones among the problem's judged completions in this run), `update`
    and `tokens`. The order is shuffled. Counts are written next to the file, to
    `NAME.summary.json`. The rollouts are read twice, a few rows at a time; for a trace that is not
    written, only a hash is in memory.

    Args:
        run: folder of the run.
        out: the file; an existing one is replaced.
        config: rules of the selection.
        tags: thinking tags of the model to train; None: the run's.

    Raises:
        InputError: no finished run, no rollouts, no trace left, or no file can be written there.
    """
    config, out = config or HarvestConfig(), Path(out)
    with owned_file(out, "harvested"):
        folder = finished_run(run)
        run_tags = ThinkingTags.of(folder.config().verifier.thinking_tags)
        found = Harvest()
        traces, judged = _read(folder.path, found)
        rates = {problem: len(traces[problem]) / count for problem, count in judged.items()}
        copies = _copies(_select(traces, config, found), rates, config, found)
        if not copies:
            counts = ", ".join(f"{why}: {n:,}" for why, n in found.left_out.items()) or "no rows"
            raise InputError(
                f"{folder.path}: no trace is left to learn from ({counts}); relax the harvest's "
                f"keys"
            )
        rows = _rows(folder.path, copies, rates, (run_tags, tags or run_tags))
        random.Random(config.seed).shuffle(rows)
        write_rows(out, rows)
        found.kept, found.rows = len(copies), len(rows)
        found.problems = len({row["problem_id"] for row in rows})
        found.mean_tokens = float(np.mean([row["tokens"] for row in rows]))
        found.mean_pass_rate = float(np.mean([row["pass_rate"] for row in rows]))
        write_whole(out.with_suffix(".summary.json"), json.dumps(asdict(found), indent=2) + "\n")
        return found


def finished_run(path: str | Path) -> RunFolder:
    """Open the folder of a finished run.

    Raises:
        InputError: not a run folder, or not finished.
    """
    folder, _ = RunFolder.open(path)
    if not folder.finished:
        raise InputError(
            f"{path}: this run is not finished; finish it with: {folder.resume_command}"
        )
    return folder


def _read(run: Path, found: Harvest) -> tuple[dict[str, list[_Trace]], Counter[str]]:
    """The right completions by problem, and the number of judged completions of each problem."""
    traces: dict[str, list[_Trace]] = {}
    judged: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    for number, row in _completions(run, _COLUMNS):
        found.completions += 1
        found.updates = max(found.updates, row["update"])
        problem, verdict = row["problem_id"], row["verdict"]
        right = traces.setdefault(problem, [])
        judged[problem] += verdict != "unscorable"
        if verdict != "right":
            left_out[verdict] += 1
            continue
        digest = hashlib.blake2b(row["text"].encode(), digest_size=16).digest()
        tokens = sum(span["tokens"] for span in row["version_spans"])
        if row["finish_reason"] == "length":
            digest = b""  # right, but cut off: counts only for the pass rate
        right.append(_Trace(number, row["update"], tokens, digest))
    found.left_out = dict(left_out)
    return traces, Counter({p: n for p, n in judged.items() if n})


def _select(
    traces: Mapping[str, list[_Trace]], config: HarvestConfig, found: Harvest
) -> dict[str, list[_Trace]]:
    left_out = Counter(found.left_out)
    found.early_updates = int(config.early * found.updates)
    late = [t.tokens for right in traces.values() for t in right if t.update > found.early_updates]
    found.short_tokens = float(np.quantile(late, config.short)) if late else 0.0
    chosen = {}
    for problem in sorted(traces):
        kept: dict[bytes, _Trace] = {}
        for trace in traces[problem]:
            if not trace.digest:
                left_out["cut off at the length limit"] += 1
            elif trace.update <= found.early_updates and trace.tokens < found.short_tokens:
                left_out["early and short"] += 1
            elif trace.digest in kept:
                left_out["same text as another"] += 1
            else:
                kept[trace.digest] = trace
        texts = list(kept.values())
        random.Random(f"{config.seed}/{problem}").shuffle(texts)
        left_out["over the limit per problem"] += max(0, len(texts) - config.per_problem)
        if texts:
            chosen[problem] = texts[: config.per_problem]
    found.left_out = {reason: count for reason, count in left_out.items() if count}
    return chosen


def _copies(
    chosen: Mapping[str, list[_Trace]],
    rates: Mapping[str, float],
    config: HarvestConfig,
    found: Harvest,
) -> dict[int, int]:
    """Copies of each trace, by its number in the run. With a limit, traces are drawn with weights
    proportional to their mean numbers of copies. Systematic sampling in a random order rounds
    these means."""
    pairs = [(trace, problem) for problem, texts in chosen.items() for trace in texts]
    draw = random.Random(f"{config.seed}/copies")
    draw.shuffle(pairs)
    means = [1 + (config.upsample - 1) * (1 - rates[problem]) for _, problem in pairs]
    if config.limit is not None and config.limit < len(pairs):
        kept = _drawn(means, config.limit, draw)
        found.left_out["over the limit in all"] = len(pairs) - len(kept)
        pairs, means = [pairs[i] for i in kept], [means[i] for i in kept]
    # One uniform offset for all: each trace gets its mean, rounded up or down, and so does the sum.
    offset, total = draw.random(), 0.0
    copies = {}
    for (trace, _), mean in zip(pairs, means, strict=True):
        before, total = total, total + mean
        copies[trace.number] = int(total + offset) - int(before + offset)
    return copies


def _drawn(weights: list[float], count: int, draw: random.Random) -> list[int]:
    """`count` distinct indices, drawn without replacement with probabilities approximately
    proportional to the weights (Efraimidis and Spirakis, 2006)."""
    keys = [draw.random() ** (1 / weight) for weight in weights]
    return sorted(sorted(range(len(keys)), key=keys.__getitem__)[-count:])


def _completions(run: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number in the run, row) of every recorded completion.

    Raises:
        InputError: the run recorded none.
    """
    paths = files(run / "rollouts")
    if not paths:
        raise InputError(
            f"{run}: it recorded no rollouts to harvest; train with rollouts: all (the default)"
        )
    yield from enumerate(row for file in paths for row in read_rows(file, columns))


def _rows(
    run: Path,
    copies: Mapping[int, int],
    rates: Mapping[str, float],
    tags: tuple[ThinkingTags, ThinkingTags],
) -> list[dict[str, Any]]:
    """The rows to write, each repeated by its number of copies, with the second tags for the
    first."""
    columns = ("update", "problem_id", "problem", "images", "text", "version_spans")
    rows = []
    for number, row in _completions(run, columns):
        if number not in copies:
            continue
        check_text(row, run, "a trace")
        made = {
            "prompt": row["problem"],
            "response": retagged(row["text"], *tags),
            "problem_id": row["problem_id"],
            "pass_rate": round(rates[row["problem_id"]], 4),
            "update": row["update"],
            "tokens": sum(span["tokens"] for span in row["version_spans"]),
        }
        rows += [made] * copies[number]
    return rows


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSONL; the file is complete or absent."""
    with whole_file(file) as out:
        out.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def retagged(response: str, old: ThinkingTags, new: ThinkingTags) -> str:
    """A response with different thinking tags."""
    for before, after in zip(old, new, strict=True):
        response = response.replace(before, after)
    return response
