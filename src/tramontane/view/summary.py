"""A run's summary: results before and after with their intervals, facts, examples, changes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any

import yaml

from tramontane.errors import reading
from tramontane.journals import read_log
from tramontane.run import rollouts
from tramontane.run.figures import MEASURES, clock, facts
from tramontane.run.folder import RunFolder
from tramontane.types import ThinkingTags
from tramontane.verifier.format import split_response
from tramontane.view.details import pictures, with_pictures
from tramontane.view.rollouts import UpdateFile
from tramontane.view.runs import Run
from tramontane.view.timeline import events_of

if TYPE_CHECKING:
    from tramontane.evaluation.evaluate import EvaluationResult
    from tramontane.statistics import Estimate

Row = dict[str, Any]
Results = Mapping[str, "EvaluationResult"]  # `before` and `after`, where measured
MAX_SAMPLES = 8  # evaluation problems shown, in turn from each language
MIN_SAMPLES = 3  # evaluation problems shown of a single language
MAX_EVENTS = 200  # the newest
MAX_POINTS = 100  # of a curve


def summary(run: Run) -> Row:
    """The content of the page's first view, from everything written so far.

    Raises:
        InputError: a file is damaged.
    """
    written = _written(run)
    ends = {when: list(read_log(run.path / f"evaluation_{when}.jsonl")) for when in _ENDS}
    results = _results(ends)
    figures = written or _so_far(results, run.rates)
    updates = sorted({row["update"] for row in read_log(run.path / "metrics.jsonl")})
    events = events_of(run.path)
    return {
        "subtitle": _subtitle(run, len(updates), written),
        "notes": _notes(run, updates, finished=bool(written)),
        "passed": _measured(figures.get("pass_at_1")),
        "tiles": _tiles(figures),
        "facts": facts(written),
        "tables": [*_models_table(written), *_tables(results), *_tokens_table(results)],
        "accuracy": [c for when, rows in ends.items() for c in accuracy_over_tokens(when, rows)],
        "samples": _samples(run, ends["before"], ends["after"]),
        "traces": traces(run),
        "changes": list(read_log(run.path / "changes.jsonl")),
        "restarts": [r for r in read_log(run.path / "workers.jsonl") if "restarted_from" in r],
        "events": events[-MAX_EVENTS:],
        "events_left_out": max(0, len(events) - MAX_EVENTS),
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
        if run.config
        else "",
    }


_ENDS = ("before", "after")


def _written(run: Run) -> Row:
    file = run.path / "summary.json"
    with reading(file):
        return dict(json.loads(file.read_text("utf-8"))) if file.is_file() else {}


# ---------------------------------------------------------------------------------- numbers


def _subtitle(run: Run, updates: int, written: Row) -> str:
    config = run.config
    parts = [config.get("model"), (config.get("data") or {}).get("train")]
    parts.append(f"{updates} update{'s' * (updates != 1)}" if updates else None)
    if seconds := written.get("wall_seconds"):
        parts.append(clock(seconds))
    return " · ".join(str(part) for part in parts if part)


def _notes(run: Run, updates: list[int], *, finished: bool) -> list[tuple[str, str]]:
    """(heading, text) of what a reader must know first."""
    notes = []
    planned = (run.config.get("pipeline") or {}).get("updates")
    if not finished:
        of = f" of {planned}" if planned else ""
        notes.append(
            (
                "This run has not ended.",
                f"Its newest update is {max(updates, default=0)}{of}; there is no measurement "
                "after training yet. tramontane train --resume with this folder continues it.",
            )
        )
    if (lost := RunFolder(run.path).newest_version - len(updates)) > 0:
        notes.append(
            (
                "Metrics are lost.",
                f"metrics.jsonl lacks {lost} of the updates before the newest checkpoint; curves "
                "and averages are of the others.",
            )
        )
    return notes


def _measured(measure: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """(`before`, …) and (`after`, …), where measured."""
    return [(when, measure[when]) for when in _ENDS if measure and measure.get(when)]


def _tiles(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    tiles = []
    for name, key, show in MEASURES:
        measure = figures.get(key) or {}
        values = {when: "–" if measure.get(when) is None else show(measure[when]) for when in _ENDS}
        if measure:
            tiles.append({"title": name.capitalize(), **values})
    return tiles


def _results(ends: Mapping[str, list[Row]]) -> Results:
    from tramontane.evaluation.evaluate import summarize  # takes a second to import

    return {
        when: summarize(rows)
        for when, rows in ends.items()
        if rows and "group" in rows[0]  # excerpts have no groups, so nothing can be counted
    }


def _so_far(results: Results, rates: Sequence[str]) -> dict[str, Any]:
    measures = {key: {when: getattr(r, key) for when, r in results.items()} for key in rates}
    passed = {when: r.pass_at_1.to_dict() for when, r in results.items()}
    return {"pass_at_1": passed, **measures} if results else {}


def _tables(results: Results) -> list[Row]:
    """Tables of pass@1 by language and by difficulty, and of pass@k and maj@k."""
    found = {when: _estimates(result) for when, result in results.items()}
    return [
        {
            "title": title,
            "ends": list(found),
            "rows": [(key, [e[title][key].to_dict() for e in found.values()]) for key in rows],
        }
        for title, rows in next(iter(found.values()), {}).items()
        # One group is all problems, and pass@1 alone stands above.
        if rows and list(rows) not in (["unknown"], ["pass@1"])
    ]


def _estimates(result: EvaluationResult) -> dict[str, dict[str, Estimate]]:
    samples = {f"pass@{k}": e for k, e in result.pass_at_k.items()}
    samples |= {f"maj@{k}": e for k, e in result.maj_at_k.items() if k > 1}
    return {
        "By language": {name: part.pass_at_1 for name, part in result.by_language.items()},
        "By difficulty": {name: part.pass_at_1 for name, part in result.by_difficulty.items()},
        "By effort": {name: part.pass_at_1 for name, part in result.by_effort.items()},
        "Several samples": samples,
    }


def _tokens_table(results: Results) -> list[Row]:
    """Table of the mean length of completions by level of effort, if there are levels."""
    ends = [result.by_effort for result in results.values()]
    rows = [
        (name, [{"value": end[name].mean_completion_tokens} for end in ends])
        for name in (ends[0] if ends else ())
    ]
    return [{"title": "Tokens by effort", "ends": list(results), "rows": rows}] if rows else []


def accuracy_over_tokens(when: str, rows: Sequence[Row]) -> list[Row]:
    """For each level of effort, a curve of an evaluation: by number of tokens, the share of
    completions that are right and no longer than that; none without levels.

    Returns:
        `name` and `points` [(tokens, share)], at most `MAX_POINTS`.
    """
    curves = []
    for effort in dict.fromkeys(row.get("effort") for row in rows if row.get("effort")):
        asked = [r for r in rows if r["effort"] == effort and r["verdict"] != "unscorable"]
        lengths = sorted(row["tokens"] for row in asked if row["verdict"] == "right")
        reached = [(tokens, n / len(asked)) for n, tokens in enumerate(lengths, 1)]
        points = [(0, 0.0), *dict(reached).items()]
        step = -(-len(points) // MAX_POINTS)
        curves.append({"name": f"{effort}, {when}", "points": points[-1::-step][::-1]})
    return curves


def _models_table(written: Mapping[str, Any]) -> list[Row]:
    """Table of the run's models on the held-out problems and on further sets; only after a cold
    start or with further sets, as it would otherwise repeat the other tables."""
    models = [name for name in ("base", "sft", "rl") if name in written]
    figures = [written[name] for name in models]
    sets = [key for key in (figures[0] if figures else {}) if key != "format_rate"]
    if len(models) < 3 and sets == ["pass_at_1"]:
        return []
    titles = {"pass_at_1": "held-out problems"}
    rows = [(titles.get(key, key), [model[key] for model in figures]) for key in sets]
    if rows and all("format_rate" in model for model in figures):
        rows.append(("format", [{"value": model["format_rate"]} for model in figures]))
    return [{"title": "Models", "ends": models, "rows": rows}] if rows else []


# -------------------------------------------------------------------------------- completions


def _samples(run: Run, before: list[Row], after: list[Row]) -> list[Row]:
    tags = ThinkingTags.of((run.config.get("verifier") or {}).get("thinking_tags"))
    ends = {"before": _by_problem(before), "after": _by_problem(after)}
    samples = []
    for row in _chosen(before or after):
        asked = {when: found[_asked(row)] for when, found in ends.items() if _asked(row) in found}
        samples.append(
            {
                "problem": row["problem"],
                "pictures": [*pictures(row, run, [])],
                "language": row.get("language"),
                "reference": row.get("reference"),
                "ends": [(when, _judged(rows, tags, run)) for when, rows in asked.items()],
            }
        )
    return samples


def _asked(row: Row) -> tuple[Any, ...]:
    """The same for the completions of a problem at a level of effort: the same question about
    another image is another problem."""
    return row["problem"], *row.get("image_files", ()), row.get("effort")


def _by_problem(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """The completions of each problem, at each level of effort."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(_asked(row), []).append(row)
    return found


def _chosen(rows: Sequence[Row]) -> list[Row]:
    """The first completion of some problems: the first of each language, then the second ones."""
    problems: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        problems.setdefault((*_asked(row), row.get("language")), row)
    languages: dict[Any, list[Row]] = {}
    for row in problems.values():
        languages.setdefault(row.get("language"), []).append(row)
    ordered = chain.from_iterable(zip_longest(*languages.values()))
    wanted = min(MAX_SAMPLES, max(MIN_SAMPLES, len(languages)))
    return [*islice(filter(None, ordered), wanted)]


def _judged(rows: Sequence[Row], tags: ThinkingTags, run: Run) -> Row:
    """The first of a problem's completions with their most frequent verdict, and how many of them
    are right."""
    row = next(row for row in rows if row["verdict"] == _usual(rows)[0])
    thoughts, answer = split_response(row["text"], tags)
    kept = {key: row.get(key) for key in ("verdict", "reward", "reason")}
    kept["turns"] = with_pictures(row.get("turns"), run)
    prompt = run.tokens.text(row.get("prompt_ids"))
    right = sum(row["verdict"] == "right" for row in rows)
    kept |= {"right": right, "of": len(rows)}
    return kept | {"thoughts": thoughts, "answer": answer.lstrip("\n"), "prompt": prompt}


def _usual(rows: Sequence[Row]) -> list[str]:
    """The verdicts, the most frequent first."""
    return [verdict for verdict, _ in Counter(row["verdict"] for row in rows).most_common()]


def traces(run: Run) -> list[Row]:
    """`update`, `row` and `why` of the completions shown of training.

    `typical`, of the updates at one third, two thirds and the end of the run: of the trained
    completions with the update's most frequent verdict, the one that the most weight versions
    sampled. `best`, of the last update: the one with the highest reward, likewise.
    """
    parts = [part for part in run.rollouts.refresh() if not part.damage]
    places = sorted({(len(parts) * third - 1) // 3 for third in (1, 2, 3)} - {-1})
    shown = {}
    for place in places:
        trained = _trained(parts[place])
        if trained:
            shown[parts[place].update, _typical(trained)] = "typical"
            if place == len(parts) - 1:
                shown.setdefault((parts[place].update, _best(trained)), "best")
    return [{"update": update, "row": row, "why": why} for (update, row), why in shown.items()]


def _trained(part: UpdateFile) -> list[Row]:
    """The completions of an update that were trained on, with their `row`."""
    names = ["filtered", "verdict", "reward", "version_spans"]
    rows = enumerate(rollouts.read_rollouts(part.path, names))
    return [{"row": n, **row} for n, row in rows if row["versions"] and row["filtered"] is None]


def _typical(rows: Sequence[Row]) -> int:
    verdict = _usual(rows)[0]
    return _most_versions([row for row in rows if row["verdict"] == verdict])


def _best(rows: Sequence[Row]) -> int:
    highest = max(row["reward"] for row in rows)
    return _most_versions([row for row in rows if row["reward"] == highest])


def _most_versions(rows: Sequence[Row]) -> int:
    """The `row` sampled by the most weight versions, the first of several."""
    return int(max(rows, key=lambda row: len({*row["versions"]}))["row"])
