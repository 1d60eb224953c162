"""A curation in two passes, compared with the truth, and its effect on training.

    python benchmarks/curation_proof.py [--rows 5000] [--samples 16] [--seeds 3] [--work FOLDER]
                                        [--out FILE] [the trainings' KEY=VALUE ...]

Plants faults in a playground set (`faults.py`) and curates it like a real set:
duplicates, format and tests by rule; a first pass by the tiny base; 60 updates of training on the
kept rows (configs/quickstart.yaml, but levels 1 to 6, and English only); a second pass, over the
input of the first, by the trained checkpoint. The report has

- each fault's precision and recall, after the first pass alone and after both;
- the problems that the first pass drops and the second keeps;
- for each seed, a training of 24 updates from the same base on the raw set, on the rows that the
  first pass kept, and on those that the second kept: pass@1 on held-out problems without faults,
  and completions per update, since groups without diversity are generated in vain.

The interval of a difference between two sets is Student's, over the seeds (each seed has its
held-out problems, the same for all sets).

Finished steps in FOLDER (runs/curation_proof) are not repeated, so the same command continues where
it was stopped. A step that was stopped midway has no time in the report. Prints the report, also
written to FOLDER/report.md, and writes curation_proof.json next to this file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from descendants import used_so_far
from faults import RAW, TRUTH, Score, Truth, compare, read_truth, write
from measure import finish, machine

import tramontane
from tramontane.config import Config, load_config
from tramontane.curation.config import CurateConfig
from tramontane.curation.pipeline import curate
from tramontane.run.folder import RunFolder
from tramontane.statistics import student_quantile

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "configs/quickstart.yaml"
FAULT_SEED = 0
LEVELS, LANGUAGES = (1, 6), ("en",)
UPDATES, TEACHER_UPDATES = 24, 60
TRAINING = (
    f"data.playground.levels={list(LEVELS)}",
    f"data.playground.languages={list(LANGUAGES)}",
)
RULES = ("deduplicate", "filter", "code")
FUNNEL = {
    "raw": RAW,
    "clean": "clean/kept.jsonl",
    "one pass": "first/kept.jsonl",
    "two passes": "second/kept.jsonl",
}
TRAINED_SETS = ("raw", "one pass", "two passes")
FATES = {"": "kept", "too_easy": "too easy", "unsolved": "unsolved", "label_disputed": "disputed"}
Row = dict[str, Any]


def lines(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


# ------------------------------------------------------------------------------------------ steps


class Steps:
    """The finished steps in a folder, and the time of each.

    Args:
        folder: holds `steps.json`.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "steps.json"
        self.seen: dict[str, Any] = {}
        if self.file.is_file():
            self.seen = json.loads(self.file.read_text(encoding="utf-8"))

    def do(self, name: str, work: Callable[[], object]) -> None:
        """Run a step, unless it is finished."""
        if self.seen.get(name, {}).get("finished"):
            return
        print(f"--- {name}", flush=True)
        stopped = name in self.seen
        self._write(name, {"finished": False})
        started, processors = time.monotonic(), used_so_far(os.getpid())
        work()
        taken = {
            "seconds": round(time.monotonic() - started, 1),
            "processor_seconds": round(used_so_far(os.getpid()) - processors, 1),
        }
        self._write(name, {"finished": True} | ({} if stopped else taken))

    def seconds(self, names: Sequence[str], key: str = "seconds") -> float | None:
        """Total time of several steps; None if one of them was stopped midway."""
        found = [self.seen[name].get(key) for name in names]
        return None if None in found else round(sum(found), 1)

    def _write(self, name: str, state: dict[str, Any]) -> None:
        self.seen[name] = state
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.seen, indent=1), encoding="utf-8")
        partial.replace(self.file)


def curated(source: Path, out: Path, stages: Sequence[str], **sections: Any) -> None:
    raw = {"inputs": [str(source)], "out": str(out), "stages": stages, **sections}
    curate(CurateConfig.model_validate(raw))


def measured(
    work: Path, samples: int, training: Config, stage: str, out: str, checkpoint: str
) -> None:
    """Run a pass over the rows that the rules kept, by a model that answers as in training."""
    model = {
        "checkpoint": {"path": checkpoint, "slots": training.pipeline.n_async},
        "max_tokens": training.pipeline.l_max,
        "temperature": training.generator.temperature,
    }
    section = {"model": model, "samples": samples}
    curated(work / "clean/kept.jsonl", work / out, (stage,), **{stage: section})


def config_of(*overrides: str) -> Config:
    """The training config. If a key is overridden twice, the last override counts."""
    return load_config(QUICKSTART, [*{text.partition("=")[0]: text for text in overrides}.values()])


def trained(folder: Path, data: Path, seed: int, settings: Sequence[str]) -> Path:
    """Train in a folder, or continue there; returns the folder."""
    if (folder / "config.yaml").is_file():
        if not (folder / "summary.json").is_file():
            tramontane.train(resume=folder, report=False)
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    run = [f"name={folder.name}", f"seed={seed}", f"run_dir={folder}", f"data.train={data}"]
    tramontane.train(config_of(*TRAINING, *run, *settings), report=False)
    return folder


# ---------------------------------------------------------------------------------------- results


def labels(raw: list[Row], clean: list[Row], truth: dict[str, Truth]) -> dict[str, int]:
    """Counts of labels, and of right ones, before and after, of programs with broken tests."""
    right = {
        (row["id"], case["input"]): output
        for row in raw
        if truth[row["id"]].fault == "broken_tests"
        for case, output in zip(row["tests"]["cases"], truth[row["id"]].right, strict=True)
    }
    counts = {}
    for when, rows in (("before", raw), ("after", clean)):
        correct = [
            case["output"].split() == right[row["id"], case["input"]].split()
            for row in rows
            for case in row.get("tests", {}).get("cases", [])
            if (row["id"], case["input"]) in right
        ]
        counts |= {f"labels {when}": len(correct), f"right {when}": sum(correct)}
    return counts


def disputes(raw: list[Row], truth: dict[str, Truth], second: list[Row]) -> Row:
    """Counts of disputed labels by level and fault, and of wrong labels with a right answer."""
    level = {row["id"]: row["difficulty"] for row in raw}
    disputed = [d for d in second if d["reason"] == "label_disputed" and d["id"] in truth]
    counts = Counter((level[d["id"]], truth[d["id"]].fault or "sound") for d in disputed)
    return {
        "by_level": {f"{n}: {fault}": count for (n, fault), count in sorted(counts.items())},
        "rightly_answered": sum(
            f" answer {truth[d['id']].right}; " in d["detail"]
            for d in disputed
            if truth[d["id"]].fault == "wrong_label"
        ),
    }


def argument(raw: list[Row], truth: dict[str, Truth], passes: Sequence[list[Row]]) -> Row:
    """The paper's argument in miniature: the decisions of both passes on sound problems."""
    weak, strong = ({d["id"]: FATES.get(d["reason"], "other") for d in rows} for rows in passes)
    level = {row["id"]: row["difficulty"] for row in raw}
    sound = [name for name in weak if name in truth and not truth[name].fault]
    fates = Counter((weak[name], strong[name]) for name in sound)
    unsolved = [name for name in sound if weak[name] == "unsolved"]
    solvable = [name for name in unsolved if strong[name] in ("kept", "too easy")]
    saved = [name for name in unsolved if strong[name] == "kept"]
    return {
        "sound": len(sound),
        "fates": {f"{a} / {b}": n for (a, b), n in sorted(fates.items())},
        "thrown_away": len(unsolved),
        "of_these_solvable": len(solvable),
        "of_these_kept_by_two": len(saved),
        "kept_by_two_by_level": dict(sorted(Counter(level[name] for name in saved).items())),
        "sound_by_level": dict(sorted(Counter(level[name] for name in sound).items())),
    }


def found(work: Path) -> Row:
    """The curations' decisions, compared with the truth."""
    truth, raw = read_truth(work / TRUTH), lines(work / RAW)
    clean, first, second = (
        lines(work / name / "decisions.jsonl") for name in ("clean", "first", "second")
    )
    scores = {
        "after the first pass": compare(truth, clean, first),
        "after both passes": compare(truth, clean, second),
    }
    return {
        "funnel": {name: len(lines(work / path)) for name, path in FUNNEL.items()},
        "scores": {
            when: {fault or "(sound: kept)": _score(score) for fault, score in by_fault.items()}
            for when, by_fault in scores.items()
        },
        "labels": labels(raw, lines(work / "clean/kept.jsonl"), truth),
        "disputes": disputes(raw, truth, second),
        "argument": argument(raw, truth, (first, second)),
    }


def learned(folder: Path) -> Row:
    """The results of a run, and the completions that it generated for them."""
    run, config = RunFolder.open(folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    metrics = run.metrics()
    groups = {key: sum(m[f"groups_{key}"] for m in metrics) for key in ("kept", "filtered")}
    completions = config.pipeline.group_size * sum(groups.values())
    evaluation = summary["evaluation"]
    return {
        "pass_at_1": summary["pass_at_1"],
        "by_level": {
            when: {k: part["pass_at_1"]["value"] for k, part in found["by_difficulty"].items()}
            for when, found in evaluation.items()
        },
        "updates": summary["updates"],
        "training_seconds": summary["training_seconds"],
        "staleness": summary["staleness"]["mean"],
        "completions_per_update": completions / summary["updates"],
        "groups_filtered": groups["filtered"],
        "groups_trained_on": groups["kept"],
    }


def student(values: Sequence[float]) -> Row:
    """The mean over seeds, and Student's 95 % interval if there are several."""
    mean, n = statistics.mean(values), len(values)
    if n == 1:
        return {"mean": mean, "low": None, "high": None}
    half = student_quantile(n - 1) * statistics.stdev(values) / n**0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def training(runs: dict[str, list[Row]]) -> Row:
    """Each set's figures over the seeds, and its difference from the raw set, seed by seed."""
    keys = ("training_seconds", "completions_per_update", "groups_filtered", "staleness")
    after = {
        name: [run["pass_at_1"]["after"]["value"] for run in found] for name, found in runs.items()
    }
    more = {
        name: [a - raw for a, raw in zip(values, after["raw"], strict=True)]
        for name, values in after.items()
    }
    return {
        name: {
            "pass_at_1": student(after[name]),
            "more_than_raw": student(more[name]),
            **{key: statistics.mean(run[key] for run in found) for key in keys},
            "runs": found,
        }
        for name, found in runs.items()
    }


# ------------------------------------------------------------------------------------- the report


def text(report: Row) -> str:
    """The report as Markdown."""
    found, funnel = report["argument"], report["funnel"]
    steps = [
        (name, _n(step.get("seconds"), ",.0f"), _n(step.get("processor_seconds"), ",.0f"))
        for name, step in report["steps"].items()
    ]
    total = (report["two_passes_seconds"], report["two_passes_processor_seconds"])
    steps.append(("both passes, to the second's end", *(_n(value, ",.0f") for value in total)))
    parts = [
        f"Rows: {', '.join(f'{name} {count:,}' for name, count in funnel.items())}.",
        _table(("step", "seconds", "of processors"), steps),
        *(
            f"{when.capitalize()}:\n\n"
            + _table(
                ("fault", "planted", "named", "rightly", "recall", "precision", "still kept"),
                [
                    (fault, s["planted"], s["flagged"], s["found"], _n(s["recall"]),
                     _n(s["precision"]), s["kept"])
                    for fault, s in scores.items()
                ],
            )
            for when, scores in report["scores"].items()
        ),
        f"Broken tests: {', '.join(f'{n:,} {what}' for what, n in report['labels'].items())}.",
        "The second pass's model, pass@1 on problems without faults: "
        + " → ".join(_n(value["value"]) for value in report["teacher"]["pass_at_1"].values())
        + ".",
        "Disputed labels by level: "
        + ", ".join(f"{key} {n}" for key, n in report["disputes"]["by_level"].items())
        + f". Of the wrong ones {report['disputes']['rightly_answered']} got the right answer.",
        f"Of {found['sound']:,} sound problems the first pass throws away {found['thrown_away']:,} "
        f"as never solved; the second pass's model solves {found['of_these_solvable']:,} of them, "
        f"and its pass keeps {found['of_these_kept_by_two']:,}.",
        _table(("sound problems: first / second pass", "count"), list(found["fates"].items())),
        _table(
            ("trained on", "pass@1", "95 %", "more than raw", "95 %", "completions an update",
             "seconds"),
            [
                (name, _n(row["pass_at_1"]["mean"]), _range(row["pass_at_1"]),
                 _n(row["more_than_raw"]["mean"], "+.3f"), _range(row["more_than_raw"], "+.3f"),
                 _n(row["completions_per_update"], ".0f"), _n(row["training_seconds"], ".0f"))
                for name, row in report["training"].items()
            ],
        ),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in cells)


def _n(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else f"{value:{form}}"


def _range(estimate: Row, form: str = ".3f") -> str:
    if estimate["low"] is None:
        return "–"  # one seed
    return f"{estimate['low']:{form}} to {estimate['high']:{form}}"


def _score(score: Score) -> Row:
    return score._asdict() | {"recall": score.recall, "precision": score.precision}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--samples", type=int, default=16, help="answers to each problem")
    parser.add_argument("--seeds", type=int, default=3, help="trainings on each set")
    parser.add_argument("--work", type=Path, default=Path("runs/curation_proof"))
    parser.add_argument("--out", type=Path, default=Path(__file__))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    work: Path = args.work
    work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the other core grades

    longer = [f"pipeline.updates={TEACHER_UPDATES}", *args.overrides]
    config = config_of(*TRAINING, *longer)
    teacher = work / "runs/teacher"
    checkpoint = teacher / f"checkpoints/update_{config.pipeline.updates}/weights"
    measure = partial(measured, work, args.samples, config)
    rules = {"code": {"verifier": {"workers": 2}}}
    main_steps: dict[str, Callable[[], object]] = {
        "plant": partial(write, work, args.rows, FAULT_SEED, levels=LEVELS, languages=LANGUAGES),
        "rules": partial(curated, work / RAW, work / "clean", RULES, **rules),
        "first pass": partial(measure, "difficulty", "first", "tiny"),
        "training between": partial(trained, teacher, work / FUNNEL["one pass"], 0, longer),
        "second pass": partial(measure, "regrade", "second", str(checkpoint)),
    }
    steps = Steps(work)
    for name, step in main_steps.items():
        steps.do(name, step)
    runs: dict[str, list[Row]] = {name: [] for name in TRAINED_SETS}
    settings = [f"pipeline.updates={UPDATES}", *args.overrides]
    for seed in range(args.seeds):
        for name in TRAINED_SETS:
            folder = work / "runs" / f"{name.replace(' ', '_')}_{seed}"
            runs[name].append(learned(trained(folder, work / FUNNEL[name], seed, settings)))
    report = {
        "rows": args.rows,
        "seed": FAULT_SEED,
        "levels": LEVELS,
        "samples": args.samples,
        "training_settings": [*TRAINING, *settings],
        "teacher": learned(teacher),
        "steps": steps.seen,
        "two_passes_seconds": steps.seconds(list(main_steps)),
        "two_passes_processor_seconds": steps.seconds(list(main_steps), "processor_seconds"),
        **found(work),
        "training": training(runs),
        "machine": machine(),
    }
    print(text(report))
    (work / "report.md").write_text(text(report), encoding="utf-8")
    finish(args.out, report)


if __name__ == "__main__":
    main()
