"""Compares several models on several suites: keeps every completion, and tabulates results and each
model's difference from the first, problem by problem.

The folder holds, for each suite and model, `SUITE/MODEL.jsonl` (completions) and `SUITE/MODEL.json`
(settings and results); `comparison.md` and `comparison.html`; and for each model `MODEL.card.yaml`,
its results as the front matter of a model card.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import yaml

from tramontane.data.files import ENDINGS
from tramontane.errors import InputError
from tramontane.evaluation.basis import basis_of, check_basis, write_basis
from tramontane.evaluation.checkpoint import Work, continue_evaluation, prepare, problems_of
from tramontane.evaluation.evaluate import EvaluationResult, Row, hub_results, summarize
from tramontane.evaluation.settings import Settings
from tramontane.journals import Journal
from tramontane.pages import render
from tramontane.statistics import Difference, counts_of, paired_difference
from tramontane.types import Problem
from tramontane.workplace import owned_folder, write_whole

Progress = Callable[[str, str, int, int], None]  # suite, model, completions graded, and in all


@dataclass(frozen=True)
class Measured:
    """One model on one suite.

    Args:
        result: the figures.
        difference: from the first model on the same problems; None for the first itself.
        left_out: problems of the suite that are excluded, since their prompts are too long for one
            of the models (`data.overlong_prompts: drop`).
        rates: the figures that are shown (`RewardConfig.rates`).
    """

    result: EvaluationResult
    difference: Difference | None
    left_out: int
    rates: Sequence[str]


Comparison = dict[str, dict[str, Measured]]  # by suite, then by model
Plan = Mapping[str, Mapping[str, Settings]]  # likewise


@dataclass(frozen=True)
class PreparedSuite:
    """One suite, with its problems loaded and checked.

    Args:
        works: by model, the problems whose prompts fit.
        common: ids of the problems whose prompts fit for every model.
        left_out: number of the other problems.
    """

    works: dict[str, Work]
    common: frozenset[str]
    left_out: int


def compare(
    plan: Plan,
    out: Path,
    *,
    on_progress: Progress = lambda suite, model, done, total: None,
) -> Comparison:
    """Evaluate every model on every suite, and write the folder.

    Results of an earlier process are kept: complete evaluations, and complete problems of an
    unfinished one. All input is loaded and checked before the first completion.

    Args:
        plan: the settings by suite, then by model; the others are compared to the first model.
        out: the folder, created if missing.
        on_progress: called as completions are graded.

    Raises:
        InputError: see `prepare_suites`; or the folder holds completions with a different basis.
    """
    with owned_folder(out, "compared"):
        prepared = prepare_suites(plan)
        bases = {
            out / suite / f"{model}.jsonl": basis_of(plan[suite][model], work.problems)
            for suite, found in prepared.items()
            for model, work in found.works.items()
        }
        for file, basis in bases.items():
            check_basis(basis, file)
        compared: Comparison = {}
        for suite, found in prepared.items():
            rows = {}
            for model, work in found.works.items():
                file, show = out / suite / f"{model}.jsonl", partial(on_progress, suite, model)
                file.parent.mkdir(parents=True, exist_ok=True)
                continue_evaluation(plan[suite][model], work, file, show)
                with Journal(file) as completions:
                    rows[model] = [r for r in completions if r["problem_id"] in found.common]
            rates = {
                name: settings.config.evaluated_rates for name, settings in plan[suite].items()
            }
            compared[suite] = _measured(rows, found.left_out, rates)
            for model, measured in compared[suite].items():
                file = out / suite / f"{model}.jsonl"
                write_basis(bases[file], file, asdict(measured))
        _write_pages(compared, plan, out)
        return compared


def prepare_suites(plan: Plan) -> dict[str, PreparedSuite]:
    """Load and check all input of a comparison; no weights are read.

    Raises:
        InputError: no such model, source or device, a prompt that does not fit, or models that
            would not be evaluated on the same problems.
    """
    found = {}
    problems_of_suites = {suite: _load(suite, models) for suite, models in plan.items()}
    for suite, loaded in problems_of_suites.items():
        models = plan[suite]
        works = {model: prepare(models[model], problems) for model, problems in loaded.items()}
        kept = [frozenset(problem.id for problem in work.problems) for work in works.values()]
        common = frozenset.intersection(*kept)
        if not common:
            raise InputError(
                f"{suite}: every problem is too long for one of the models ({', '.join(works)}); "
                f"allow fewer tokens a completion"
            )
        everything = len(next(iter(loaded.values())))
        found[suite] = PreparedSuite(works, common, everything - len(common))
    return found


def _load(suite: str, models: Mapping[str, Settings]) -> dict[str, list[Problem]]:
    """A suite's problems by model; a source that several models read with the same settings is
    loaded once."""
    by_settings: dict[str, list[Problem]] = {}
    found = {}
    for model, settings in models.items():
        read_by = settings.config.model_dump_json(include={"data", "verifier"})
        key = f"{read_by} {settings.sampling.problems} {settings.sampling.seed}"
        if key not in by_settings:
            by_settings[key] = problems_of(settings)
        found[model] = by_settings[key]
    first, *others = found
    texts = [(problem.id, problem.problem) for problem in found[first]]
    for model in others:
        if [(problem.id, problem.problem) for problem in found[model]] != texts:
            raise InputError(
                f"{suite}: {first} and {model} would be measured on different problems, since the "
                f"configs of their runs differ; give all models one config, or one seed and number "
                f"of problems"
            )
    return found


def labels(models: Mapping[str, str | Path] | Sequence[str]) -> dict[str, str]:
    """Models by label. `LABEL=MODEL` sets the label; the default is the end of the path or, for a
    run's checkpoint, the run and the update.

    Raises:
        InputError: two models with the same label, or a label that cannot be a file's name.
    """
    if isinstance(models, Mapping):
        models = [f"{label}={model}" for label, model in models.items()]
    return _by_label(models, _label, "LABEL", "model")


def suites(sources: Sequence[str]) -> dict[str, str]:
    """Suites, or sources of problems, by name. `NAME=SOURCE` sets the name; the default is the
    suite's name, or the end of the path.

    Raises:
        InputError: two with the same name.
    """
    return _by_label(sources, _suite_name, "NAME", "source of problems")


def _by_label(
    texts: Sequence[str], default: Callable[[str], str], key: str, kind: str
) -> dict[str, str]:
    named: dict[str, str] = {}
    for text in [texts] if isinstance(texts, str | Path) else texts:
        text = str(text)
        label, equals, value = text.partition("=")
        if not equals:
            value, label = text, default(text)
        if not re.fullmatch(r"[\w.+-]+", label) or label in (".", ".."):
            raise InputError(f"{text}: a {key.lower()} has letters, digits and . + - _ only")
        if label in named:
            raise InputError(
                f"{text}: another {kind}, {named[label]}, is called {label!r}; write {key}={value} "
                f"with another {key.lower()}"
            )
        named[label] = value
    return named


def _label(model: str) -> str:
    parts = [part for part in Path(model).parts if part not in ("/", "checkpoints", "weights")]
    kept = parts[-2:] if parts and re.fullmatch(r"(step|update)_\d+", parts[-1]) else parts[-1:]
    return re.sub(r"[^\w.+-]", "-", "-".join(kept))


def _suite_name(source: str) -> str:
    """The name of a suite or source: without its file, or the file's own name."""
    name = Path(source.partition("@")[0].rstrip(":")).name
    ending = next((e for e in sorted(ENDINGS, key=len, reverse=True) if name.endswith(e)), "")
    return re.sub(r"[^\w.+-]", "-", name.removesuffix(ending))


def _measured(
    rows: Mapping[str, Sequence[Row]], left_out: int, rates: Mapping[str, Sequence[str]]
) -> dict[str, Measured]:
    first, found = counts_of(next(iter(rows.values()))), {}
    for place, (model, of_model) in enumerate(rows.items()):
        difference = paired_difference(first, counts_of(of_model)) if place else None
        found[model] = Measured(summarize(of_model), difference, left_out, rates[model])
    return found


def markdown(found: Comparison) -> str:
    """The tables as Markdown."""
    return render("evaluation/comparison.md.j2", found=found)


def _write_pages(found: Comparison, plan: Plan, out: Path) -> None:
    write_whole(out / "comparison.md", markdown(found))
    page = render("evaluation/comparison.html.j2", title="Comparison", found=found)
    write_whole(out / "comparison.html", page)
    for model in {model: None for models in found.values() for model in models}:
        card = model_index(model, {suite: models[model] for suite, models in found.items()}, plan)
        write_whole(out / f"{model}.card.yaml", card)


def model_index(model: str, found: Mapping[str, Measured], plan: Plan) -> str:
    """A model's results as the `model-index` of a model card's front matter, in YAML."""
    from huggingface_hub.repocard_data import eval_results_to_model_index

    results = []
    for suite, measured in found.items():
        settings = plan[suite][model]
        source = str(settings.config.data.eval)
        results += hub_results(suite, source, measured.result, settings.sampling)
    index = eval_results_to_model_index(model, results)
    return yaml.safe_dump({"model-index": index}, sort_keys=False, allow_unicode=True)
