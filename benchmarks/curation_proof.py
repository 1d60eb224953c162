"""A curation in two passes against the truth, and what it is worth to training.

    python benchmarks/curation_proof.py [--rows 5000] [--samples 16] [--seeds 3] [--work FOLDER]
                                        [--out FILE] [a training's KEY=VALUE ...]

Plants faults in a playground set (`data/playground/faults.py`) and curates it as one would a real
one: duplicates, format and tests by rule; a first pass by the tiny base; training on what that
leaves (configs/quickstart.yaml, over levels 1 to 6, in English); a second pass, over the set that
the first was given, by the checkpoint that came of it. Then

- each fault's precision and recall, after the first pass alone and after both;
- what the first pass throws away that the second keeps;
- training for equal updates, from the same base, on the raw set, on what the first pass kept and
  on what the second kept, for each seed in turn: pass@1 on held-out problems without faults, and
  how many completions an update took, since groups without diversity are generated for nothing.

The interval of a difference between two sets is Student's, over the seeds (each with problems of
its own, which are the same for all sets).

Whatever is finished in FOLDER (runs/curation_proof) is not done again, so the same command goes on
where it was stopped; a step that was stopped midway has no time in the report. Prints tables and
writes curation_proof.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import finish, machine

import tramontane
from tramontane.config import load_config
from tramontane.data.curate.config import CurateConfig
from tramontane.data.curate.pipeline import curate
from tramontane.data.playground.faults import RAW, TRUTH, Score, Truth, compare, read_truth, write
from tramontane.evaluation.metrics import student_quantile
from tramontane.run import RunFolder

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "configs/quickstart.yaml"
SEED = 0  # of the faults
LEVELS, LANGUAGES = (1, 6), ("en",)
RULES = ("deduplicate", "filter", "code")
FUNNEL = {
    "raw": RAW,
    "clean": "clean/kept.jsonl",
    "one pass": "first/kept.jsonl",
    "two passes": "second/kept.jsonl",
}
SETS = ("raw", "one pass", "two passes")  # that are trained on
TEACHER = "one pass"  # the set whose training, with the first seed, gives the second pass's model
FATES = {"": "kept", "too_easy": "too easy", "unsolved": "unsolved", "label_disputed": "disputed"}
Row = dict[str, Any]


def lines(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


# ----------------------------------------------------------------------------------- what is done


class Steps:
    """What is finished in a folder, and how long each step took.

    Args:
        folder: of `steps.json`.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "steps.json"
        self.seen: dict[str, Any] = {}
        if self.file.is_file():
            self.seen = json.loads(self.file.read_text(encoding="utf-8"))

    def do(self, name: str, work: Callable[[], object]) -> None:
        """Do a step, unless it is done."""
        if self.seen.get(name, {}).get("finished"):
            return
        print(f"--- {name}", flush=True)
        stopped = name in self.seen
        self._write(name, {"finished": False})
        started, processors = time.monotonic(), processor_seconds()
        work()
        taken = {
            "seconds": round(time.monotonic() - started, 1),
            "processor_seconds": round(processor_seconds() - processors, 1),
        }
        self._write(name, {"finished": True} | ({} if stopped else taken))

    def seconds(self, names: Sequence[str], key: str = "seconds") -> float | None:
        """Of several steps together, if none was stopped midway."""
        found = [self.seen[name].get(key) for name in names]
        return None if None in found else round(sum(found), 1)

    def _write(self, name: str, state: dict[str, Any]) -> None:
        self.seen[name] = state
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.seen, indent=1), encoding="utf-8")
        partial.replace(self.file)


def processor_seconds() -> float:
    """Of this process and its children that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def curated(source: Path, out: Path, stages: Sequence[str], **sections: Any) -> None:
    raw = {"inputs": [str(source)], "out": str(out), "stages": stages, **sections}
    curate(CurateConfig.model_validate(raw))


def measured(work: Path, stage: str, out: str, checkpoint: str, args: argparse.Namespace) -> None:
    """A pass over what the rules left, by a model that answers as in training."""
    quickstart = load_config(QUICKSTART, args.overrides)
    model = {
        "checkpoint": {"path": checkpoint, "slots": quickstart.pipeline.n_async},
        "max_tokens": quickstart.pipeline.l_max,
        "temperature": quickstart.generator.temperature,
    }
    section = {"model": model, "samples": args.samples}
    curated(work / "clean/kept.jsonl", work / out, (stage,), **{stage: section})


def trained(work: Path, name: str, seed: int, overrides: Sequence[str]) -> Path:
    """Train on one of SETS, or go on; returns the run's folder."""
    folder = work / "runs" / f"{name.replace(' ', '_')}_{seed}"
    if (folder / "config.yaml").is_file():
        if not (folder / "summary.json").is_file():
            tramontane.train(resume=folder)
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    settings = [
        f"name={name}", f"seed={seed}", f"run_dir={folder}", f"data.train={work / FUNNEL[name]}",
        f"data.playground.levels={list(LEVELS)}", f"data.playground.languages={list(LANGUAGES)}",
    ]  # fmt: skip
    tramontane.train(load_config(QUICKSTART, [*settings, *overrides]))
    return folder


# ---------------------------------------------------------------------------- what comes out of it


def labels(raw: list[Row], clean: list[Row], truth: dict[str, Truth]) -> dict[str, int]:
    """Of programs with broken tests: the labels, and how many are right, before and after."""
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


def argument(raw: list[Row], truth: dict[str, Truth], passes: Sequence[list[Row]]) -> Row:
    """The paper's argument in miniature: what became, pass by pass, of the sound problems."""
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


def learnt(folder: Path) -> Row:
    """What a run came to, and what it generated for it."""
    run = RunFolder(folder)
    summary, metrics = json.loads((folder / "summary.json").read_text("utf-8")), run.metrics()
    groups = {key: sum(m[f"groups_{key}"] for m in metrics) for key in ("kept", "filtered")}
    size = RunFolder.open(folder)[1].pipeline.group_size
    evaluation = summary["evaluation"]
    return {
        "pass_at_1": summary["pass_at_1"],
        "by_level": {
            when: {k: part["pass_at_1"]["value"] for k, part in found["by_difficulty"].items()}
            for when, found in evaluation.items()
        },
        "updates": summary["updates"],
        "training_seconds": summary["training_seconds"],
        "completions_per_update": size * sum(groups.values()) / summary["updates"],
        "groups_filtered": groups["filtered"],
        "groups_trained_on": groups["kept"],
    }


def student(values: Sequence[float]) -> Row:
    """The mean over seeds, and Student's 95 % interval where there are several."""
    mean, n = statistics.mean(values), len(values)
    if n == 1:
        return {"mean": mean, "low": None, "high": None}
    half = student_quantile(n - 1) * statistics.stdev(values) / n**0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def training(runs: dict[str, list[Row]]) -> Row:
    """Each set's figures over the seeds, and its difference from the raw set, seed by seed."""
    keys = ("training_seconds", "completions_per_update", "groups_filtered")
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


def show(report: Row) -> None:
    print(f"\nrows: {' → '.join(f'{n:,} {name}' for name, n in report['funnel'].items())}")
    for name, step in report["steps"].items():
        print(f"{name:28}{_number(step.get('seconds'), ',.0f'):>8} s"
              f"{_number(step.get('processor_seconds'), ',.0f'):>8} s of processors")  # fmt: skip
    print(f"the two passes, with what comes before and between: "
          f"{_number(report['two_passes_seconds'], ',.0f')} s")  # fmt: skip
    for when, scores in report["scores"].items():
        print(f"\n{when:22} planted  named  found  recall  precision  kept")
        for fault, s in scores.items():
            shares = f"{_number(s['recall']):>8}{_number(s['precision']):>11}"
            counts = f"{s['planted']:8,}{s['flagged']:7,}{s['found']:7,}"
            print(f"{fault:22}{counts}{shares}{s['left']:6,}")
    print("\nbroken tests:", ", ".join(f"{n:,} {what}" for what, n in report["labels"].items()))
    found = report["argument"]
    print(
        f"\nof {found['sound']:,} sound problems the first pass throws away "
        f"{found['thrown_away']:,} as never solved; the second model solves "
        f"{found['of_these_solvable']:,} of them, and its pass keeps "
        f"{found['of_these_kept_by_two']:,}"
    )
    for fate, n in found["fates"].items():
        print(f"  {fate + ' (first / second pass)':44}{n:6,}")
    print(f"\n{'trained on':12}{'pass@1':>10}{'95 %':>16}{'more than raw':>15}{'95 %':>18}"
          f"{'completions':>13}{'s':>7}")  # fmt: skip
    for name, row in report["training"].items():
        a, b = row["pass_at_1"], row["more_than_raw"]
        print(f"{name:12}{a['mean']:10.3f}{_range(a):>16}{b['mean']:+15.3f}{_range(b, '+.3f'):>18}"
              f"{row['completions_per_update']:13,.0f}{row['training_seconds']:7,.0f}")  # fmt: skip


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else f"{value:{form}}"


def _range(estimate: Row, form: str = ".3f") -> str:
    if estimate["low"] is None:
        return "one seed"
    return f"{estimate['low']:{form}}…{estimate['high']:{form}}"


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

    steps = Steps(work)
    updates = load_config(QUICKSTART, args.overrides).pipeline.updates
    teacher = work / f"runs/{TEACHER.replace(' ', '_')}_0/checkpoints/step_{updates}/weights"
    main_steps: dict[str, Callable[[], object]] = {
        "plant": lambda: write(work, args.rows, SEED, levels=LEVELS, languages=LANGUAGES),
        "rules": lambda: curated(
            work / RAW, work / "clean", RULES, code={"verifier": {"workers": 2}}
        ),
        "first pass": lambda: measured(work, "difficulty", "first", "tiny", args),
        "training between": lambda: trained(work, TEACHER, 0, args.overrides),
        "second pass": lambda: measured(work, "regrade", "second", str(teacher), args),
    }  # fmt: skip
    for name, step in main_steps.items():
        steps.do(name, step)
    runs: dict[str, list[Row]] = {name: [] for name in SETS}
    for seed in range(args.seeds):
        for name in SETS:
            if (name, seed) != (TEACHER, 0):
                label = f"training on {name}, seed {seed}"
                steps.do(label, lambda n=name, s=seed: trained(work, n, s, args.overrides))  # type: ignore[misc]
            runs[name].append(learnt(trained(work, name, seed, args.overrides)))

    truth, raw = read_truth(work / TRUTH), lines(work / RAW)
    clean, first, second = (lines(work / out / "decisions.jsonl") for out in
                            ("clean", "first", "second"))  # fmt: skip
    report = {
        "rows": args.rows,
        "seed": SEED,
        "levels": LEVELS,
        "samples": args.samples,
        "overrides": args.overrides,
        "funnel": {name: len(lines(work / path)) for name, path in FUNNEL.items()},
        "steps": steps.seen,
        "two_passes_seconds": steps.seconds(list(main_steps)),
        "two_passes_processor_seconds": steps.seconds(list(main_steps), "processor_seconds"),
        "scores": {
            when: {fault or "(sound: kept)": _score(s) for fault, s in found.items()}
            for when, found in (
                ("after the first pass", compare(truth, clean, first)),
                ("after both passes", compare(truth, clean, second)),
            )
        },
        "labels": labels(raw, lines(work / "clean/kept.jsonl"), truth),
        "argument": argument(raw, truth, (first, second)),
        "training": training(runs),
        "machine": machine(),
    }  # fmt: skip
    show(report)
    finish(args.out, report)


if __name__ == "__main__":
    main()
