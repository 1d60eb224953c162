"""The report of a run: one self-contained page, `report.html`.

It shows results before and after with their intervals, plots of every metric over updates, and
completions whose tokens are shaded by the weights version that sampled them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from transformers import PreTrainedTokenizerBase

from tramontane.config import read_settings
from tramontane.errors import InputError, reading
from tramontane.evaluation.evaluate import EvaluationResult, summarize
from tramontane.models.loading import load_tokenizer
from tramontane.models.names import with_tokenizer
from tramontane.run import curves, plots, rollouts
from tramontane.run.folder import RunFolder
from tramontane.types import ThinkingTags
from tramontane.verifier.format import split_response
from tramontane.workplace import read_log, write_whole

Row = dict[str, Any]

SHADES = 6  # background colours for versions, in the template
MAX_TOKENS = 500  # tokens shown of a shaded completion
MAX_SAMPLES = 8


@dataclass(frozen=True)
class Run:
    """The content of a run's folder; parts not yet written are empty."""

    folder: Path
    config: dict[str, Any]
    metrics: list[Row]
    summary: dict[str, Any]
    before: list[Row]
    after: list[Row]
    changes: list[Row]
    restarts: list[Row]

    @classmethod
    def read(cls, folder: Path) -> Run:
        config, summary = folder / "config.yaml", folder / "summary.json"
        with reading(folder / "metrics.jsonl"):
            # A resumed run may have written the line of an update twice: the later line counts.
            metrics = {row["update"]: row for row in read_log(folder / "metrics.jsonl")}
        return cls(
            folder=folder,
            config=read_settings(config) if config.is_file() else {},
            metrics=[metrics[update] for update in sorted(metrics)],
            summary=_read_summary(summary) if summary.is_file() else {},
            before=list(read_log(folder / "evaluation_before.jsonl")),
            after=list(read_log(folder / "evaluation_after.jsonl")),
            changes=list(read_log(folder / "changes.jsonl")),
            restarts=[r for r in read_log(folder / "workers.jsonl") if "restarted_from" in r],
        )


def _read_summary(file: Path) -> Row:
    with reading(file):
        return dict(json.loads(file.read_text("utf-8")))


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into a run's folder, from everything written so far.

    Returns:
        The report's path.
    """
    run = Run.read(Path(run_dir))
    results = _results(run)
    summary = run.summary or _so_far(results)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("tramontane.run").joinpath("report.html.j2").read_text("utf-8")
    page = environment.from_string(source).render(
        name=run.config.get("name", run.folder.name),
        subtitle=_subtitle(run),
        interrupted=not run.summary,
        lost=max(0, RunFolder(run.folder).newest_version - len(run.metrics)),
        last_update=run.metrics[-1]["update"] if run.metrics else 0,
        planned=(run.config.get("pipeline") or {}).get("updates"),
        tiles=_tiles(summary),
        passed=_ends(summary.get("pass_at_1")),
        facts=_facts(run.summary),
        tables=[*_models_table(run.summary), *_tables(results)],
        sections=_sections(run.metrics, summary),
        samples=_samples(run),
        traces=[_trace(row) for row in _spanning(run)],
        changes=run.changes,
        restarts=run.restarts,
        config=yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
    )
    path = run.folder / "report.html"
    write_whole(path, page)
    return path


# ---------------------------------------------------------------------------------- numbers


def _subtitle(run: Run) -> str:
    data = run.config.get("data") or {}
    parts = [run.config.get("model"), data.get("train")]
    parts.append(f"{len(run.metrics)} updates" if run.metrics else None)
    if seconds := run.summary.get("wall_seconds"):
        parts.append(_clock(seconds))
    return " · ".join(str(part) for part in parts if part)


def _ends(measure: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """(`before`, …) and (`after`, …), where measured."""
    return [(when, measure[when]) for when in ("before", "after") if (measure or {}).get(when)]  # type: ignore[index]


def _tiles(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    tiles = []
    for title, key, form in [
        ("Format", "format_rate", "{:.3f}"),
        ("Language", "language_rate", "{:.3f}"),
        ("Thinking tokens", "mean_thinking_tokens", "{:.1f}"),
    ]:
        measure = summary.get(key) or {}
        values = {
            when: "–" if measure.get(when) is None else form.format(measure[when])
            for when in ("before", "after")
        }
        if measure:
            tiles.append({"title": title, **values})
    return tiles


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    pause = summary.get("weight_update_pause_ms") or {}
    stale = summary.get("staleness") or {}
    facts = [
        (title, form.format(summary[key]))
        for title, key, form in [
            ("updates", "updates", "{}"),
            ("trained tokens/s", "trained_tokens_per_second", "{:,.0f}"),
            ("generator idle", "generator_idle_fraction", "{:.1%}"),
            ("generator held by the staleness bound", "generator_held_fraction", "{:.1%}"),
            ("padding", "padding_fraction", "{:.1%}"),
            ("optimizer steps skipped", "skipped_steps", "{:,}"),
            ("unscorable groups dropped", "groups_unscorable", "{:,}"),
            ("unscorable completions trained on as wrong", "unscorable_trained", "{:,}"),
        ]
        if summary.get(key) is not None
    ]
    if summary.get("wall_seconds") is not None:
        facts.insert(0, ("wall time", _clock(summary["wall_seconds"])))
    if pause:
        facts.append(("weight-update pause", f"{pause['p50']:.1f} ms (p99 {pause['p99']:.1f})"))
    if stale:
        facts.append(("staleness", f"{stale['mean']:.2f} versions (max {stale['max']})"))
    return facts


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _results(run: Run) -> dict[str, EvaluationResult]:
    """The evaluations before and after, where available."""
    return {
        when: summarize(rows)
        for when, rows in [("before", run.before), ("after", run.after)]
        if rows and "group" in rows[0]  # excerpts have no groups, so nothing can be counted
    }


def _so_far(results: Mapping[str, EvaluationResult]) -> dict[str, Any]:
    """The evaluation results of a run without a summary yet."""
    keys = ("format_rate", "language_rate", "mean_thinking_tokens")
    measures = {key: {when: getattr(r, key) for when, r in results.items()} for key in keys}
    passed = {when: r.pass_at_1.to_dict() for when, r in results.items()}
    return {"pass_at_1": passed, **measures} if results else {}


def _tables(results: Mapping[str, EvaluationResult]) -> list[dict[str, Any]]:
    """Tables of pass@1 by language and by difficulty, and of pass@k and maj@k, before and after."""
    if not results:
        return []
    first = next(iter(results.values()))
    kinds = {
        "By language": ("language", list(first.by_language)),
        "By difficulty": ("difficulty", list(first.by_difficulty)),
        "Several samples": (
            "k",
            [f"pass@{k}" for k in first.pass_at_k] + [f"maj@{k}" for k in first.maj_at_k if k > 1],
        ),
    }
    return [
        {
            "title": title,
            "ends": list(results),
            "rows": [(key, [_cell(r, kind, key) for r in results.values()]) for key in keys],
        }
        for title, (kind, keys) in kinds.items()
        if keys != ["unknown"]  # one group: all problems
    ]


def _models_table(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Table of the run's models on the held-out problems and on further sets; only after a cold
    start or with further sets, as it would otherwise repeat the other tables."""
    models = [name for name in ("base", "sft", "rl") if name in summary]
    figures = [summary[name] for name in models]
    sets = [key for key in (figures[0] if figures else {}) if key != "format_rate"]
    if len(models) < 3 and sets == ["pass_at_1"]:
        return []
    titles = {"pass_at_1": "held-out problems"}
    rows = [(titles.get(key, key), [model[key] for model in figures]) for key in sets]
    if rows and all("format_rate" in model for model in figures):
        rows.append(("format", [{"value": model["format_rate"]} for model in figures]))
    return [{"title": "Models", "ends": models, "rows": rows}] if rows else []


def _cell(result: EvaluationResult, kind: str, key: str) -> dict[str, float]:
    if kind == "k":
        metric, k = key.split("@")
        estimate = (result.pass_at_k if metric == "pass" else result.maj_at_k)[int(k)]
    else:
        slices = result.by_language if kind == "language" else result.by_difficulty
        estimate = slices[key].pass_at_1
    return estimate.to_dict()


# ------------------------------------------------------------------------------------ plots


def _sections(
    metrics: list[Row], summary: Mapping[str, Any]
) -> list[tuple[str, list[dict[str, Any]]]]:
    learning = plots.line_plots([*curves.LEARNING, plots.custom_rewards(metrics)], metrics)
    passed = plots.pass_rate_plot(metrics, summary)
    learning = [passed if passed and p.title == passed.title else p for p in learning]
    sections: list[tuple[str, list[plots.Plot | None]]] = [
        ("Learning", [*learning, plots.groups_plot(metrics)]),
        (
            "Asynchrony",
            [plots.staleness_plot(metrics), *plots.line_plots(curves.ASYNCHRONY, metrics)],
        ),
        ("Workers", [*plots.line_plots(curves.WORKERS, metrics)]),
    ]
    return [
        (title, [{**vars(p), "svg": Markup(p.svg)} for p in found if p])
        for title, found in sections
        if any(found)
    ]


# -------------------------------------------------------------------------------- completions


def _samples(run: Run) -> list[dict[str, Any]]:
    """The first completion, before and after, of each language's first evaluation problem."""
    tags = ThinkingTags.of((run.config.get("verifier") or {}).get("thinking_tags"))
    after: dict[str, Row] = {}
    for row in run.after:
        after.setdefault(row["problem"], row)
    chosen: dict[str | None, Row] = {}
    for row in run.before or run.after:
        chosen.setdefault(row.get("language"), row)
    samples = []
    for language, row in list(chosen.items())[:MAX_SAMPLES]:
        found = [("before", row if run.before else None), ("after", after.get(row["problem"]))]
        ends = [
            (when, end, (thoughts, answer.lstrip("\n")))
            for when, end in found
            if end
            for thoughts, answer in [split_response(end["text"], tags)]
        ]
        samples.append(
            {
                "problem": row["problem"],
                "language": language,
                "reference": row.get("reference"),
                "ends": ends,
            }
        )
    return samples


def _spanning(run: Run) -> Iterator[Row]:
    """The trained completion sampled by the most weight versions in each of three updates: at one
    third, two thirds and the end of the run. The tokens' texts are `tokens`."""
    files = rollouts.files(run.folder / "rollouts")
    if not files:
        return
    tokenizer = load_tokenizer(str(_model(run)))
    for i in sorted({(len(files) * part - 1) // 3 for part in (1, 2, 3)} - {-1}):
        with suppress(InputError):  # a damaged file, which `tramontane audit` names
            if row := _most_versions(files[i]):
                yield row | {"tokens": token_texts(tokenizer, row["token_ids"])}


def _most_versions(file: Path) -> Row | None:
    """The trained completion of one update sampled by the most versions. Tokens are read for this
    row only, since those of all rows may not fit in memory."""
    spans = [
        (len({*row["versions"]}), -number)
        for number, row in enumerate(rollouts.read_rollouts(file, ["filtered", "version_spans"]))
        if row["versions"] and row["filtered"] is None
    ]
    if not spans:
        return None
    return next(islice(rollouts.read_rollouts(file), -max(spans)[1], None))


def _model(run: Run) -> str | Path:
    """A checkpoint of the run, or else the model it started from."""
    saved = run.folder.glob("checkpoints/step_*/weights/tokenizer.json")
    begun_with = with_tokenizer(run.config.get("model", "tiny"), run.config.get("tokenizer"))
    return next((file.parent for file in saved), begun_with)


def token_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """Text of each token; a character spelt by several tokens is the text of the last."""
    texts: list[str] = []
    pending: list[int] = []  # tokens of an incomplete character
    for token in token_ids:
        pending.append(token)
        text = str(tokenizer.decode(pending))
        partial = text.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < 4
        texts.append("" if partial else text)
        pending = pending if partial else []
    return texts


def _trace(row: Row) -> dict[str, Any]:
    versions = sorted(set(row["versions"]))
    step = (SHADES - 1) / max(1, len(versions) - 1)
    shade = {v: round(i * step) if len(versions) > SHADES else i for i, v in enumerate(versions)}
    shown: Sequence[Any] = list(zip(row["tokens"], row["versions"], row["logprobs"], strict=True))[
        :MAX_TOKENS
    ]
    return {
        **{key: row.get(key) for key in ("problem", "language", "verdict", "update")},
        "reward": row.get("reward") or 0.0,
        "tokens": [(token, version, logprob, shade[version]) for token, version, logprob in shown],
        "more": len(row["tokens"]) - len(shown),
        "legend": [(version, shade[version]) for version in versions],
    }
