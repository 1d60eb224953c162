"""Every command as one Python call, for notebooks and scripts: `import tramontane`.

A function takes one keyword for each flag of its command, so that a command and a call read alike;
this is why some have more than six parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from tramontane.config import (
    Config,
    DataConfig,
    GeneratorConfig,
    PromptConfig,
    VerifierConfig,
    load_config,
    parse,
    parse_settings,
)
from tramontane.config import load_section as _load_section
from tramontane.errors import InputError

# torch and transformers take seconds to import: each function imports what it needs.
if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tramontane.audit.findings import Audit
    from tramontane.doctor import Finding
    from tramontane.evaluation import EvaluationResult
    from tramontane.evaluation.score import ScoreSummary
    from tramontane.models.fetch import Fetched
    from tramontane.planning.plan import Plan
    from tramontane.run.folder import RunFolder
    from tramontane.run.prepare import DryRunResult
    from tramontane.run.screen import Screen
    from tramontane.run.session import OnUpdate
    from tramontane.run.summary import TrainResult
    from tramontane.run.task import Data, Function, Reward, Settings
    from tramontane.types import Problem


@dataclass(frozen=True)
class CurateResult:
    """A finished curation.

    Args:
        out: folder of the result.
        problems: the curated set, as JSONL that `data.train` reads.
        kept: problems in the set that no stage changed.
        rewritten: problems in the set that a stage changed.
        dropped: problems left out of the set.
        report: path of `report.html`.
        summary: the content of `summary.json`.
    """

    out: Path
    problems: Path
    kept: int
    rewritten: int
    dropped: int
    report: Path
    summary: dict[str, Any]


class Display(TypedDict, total=False):
    """Keywords of `train` that say what is shown, and to whom.

    Args:
        screen: shows progress; by default a `LiveDisplay`.
        quiet: show nothing.
        report: draw `report.html` at the end, which takes a few seconds; True by default.
        on_update: called with the metrics of each update (its line of `metrics.jsonl`).
    """

    screen: Screen | None
    quiet: bool
    report: bool
    on_update: OnUpdate | None


def train(
    config: Config | str | Path | None = None,
    overrides: Settings | None = None,
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    rewards: Sequence[Function | str | Reward] = (),
    resume: str | Path | None = None,
    **display: Unpack[Display],
) -> TrainResult:
    """Run the whole loop, from a config or Python objects to a finished run folder.

    `train("configs/quickstart.yaml")` is `tramontane train`; `train(model="tiny", data=rows,
    rewards=[function])` is a task of one's own; both can be combined. See docs/rewards.md.

    Args:
        config: a `Config` or the path of one; None: the defaults.
        overrides: `key.sub=value` texts, or a dict of values by `key.sub`; a value may be a
            function, such as a domain's verifier.
        model: `tiny`, a checkpoint folder, or a Hugging Face name.
        data: rows to train on: a list of dicts, a `datasets.Dataset`, or the name of a source; or a
            dict (`DatasetDict`) of these with the splits `train` and `eval` (or `test`). A row's
            `problem` (`prompt`, `question`) is a text or a list of chat messages.
        rewards: functions of (problem, text, n_tokens) that return a number from 0 to 1, import
            paths of these, or `Reward` objects with a weight. Rows without a domain, an answer and
            tests are graded by the rewards alone.
        resume: a run folder to continue, in place of all the others.
        display: see `Display`.

    Raises:
        InputError: before any work is done, except for a full disk, a run in which nothing can be
            learnt, or a curriculum that leaves no problem to learn from.
    """
    from tramontane.run.task import kept_rows

    folder, settings, rows = _open(config, overrides, model, data, rewards, resume)
    with kept_rows(settings, rows) as settings:
        return _train(settings, folder, **display)


def _train(
    settings: Config,
    folder: RunFolder | None,
    *,
    screen: Screen | None = None,
    quiet: bool = False,
    report: bool = True,
    on_update: OnUpdate | None = None,
) -> TrainResult:
    from tramontane.run.display import LiveDisplay
    from tramontane.run.screen import QuietScreen
    from tramontane.run.train import train as run

    screen = screen or (QuietScreen() if quiet else LiveDisplay())
    try:
        return run(settings, screen, folder, report=report, on_update=on_update)
    finally:
        screen.close()


def dry_run(
    config: Config | str | Path | None = None,
    overrides: Settings | None = None,
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    rewards: Sequence[Function | str | Reward] = (),
    resume: str | Path | None = None,
) -> DryRunResult:
    """Check everything that `train` checks before it starts, and return the run's sizes.

    The parameters are those of `train`.

    Raises:
        InputError: for the same reasons as `train`.
    """
    from tramontane.run.task import kept_rows

    _, settings, rows = _open(config, overrides, model, data, rewards, resume)
    with kept_rows(settings, rows) as settings:
        from tramontane.run.prepare import prepare, sizes

        return sizes(prepare(settings))


def doctor() -> list[Finding]:
    """Check which parts of this machine tramontane can use; see `doctor.examine`."""
    from tramontane.doctor import examine

    return examine()


def _open(
    config: Config | str | Path | None,
    overrides: Settings | None,
    model: str | Path | None,
    data: Data | None,
    rewards: Sequence[Function | str | Reward],
    resume: str | Path | None,
) -> tuple[RunFolder | None, Config, Mapping[str, Any]]:
    """The folder of a run that is resumed, the config, and rows to be kept in a new run's folder.

    Errors in the config are reported without torch, whose import takes seconds.
    """
    given = model is not None or data is not None or bool(rewards)
    if resume is None:
        if config is None and not given:
            raise InputError("give a config to start a run, or --resume RUN to continue one")
        from tramontane.run.task import config_of

        settings, rows = config_of(config, overrides, model=model, data=data, rewards=rewards)
        return None, settings, rows
    if config is not None or overrides or given:
        raise InputError(
            f"a resumed run keeps its config: give --resume {resume} alone, without a config or "
            f"key=value; to change anything, start a new run"
        )
    from tramontane.run.session import open_run

    return *open_run(resume), {}


def plan(settings: dict[str, Any], assumptions: list[str] | None = None) -> Plan:
    """Split GPUs between generators and trainers; see `planning.plan`.

    Args:
        settings: keys of `planning.machine.PlanConfig`; `model_size` and `gpus` are needed.
        assumptions: `key=value` texts laid over them.

    Raises:
        InputError: sizes that make no sense, or a model that does not fit.
    """
    from tramontane.planning.machine import PlanConfig
    from tramontane.planning.plan import plan as run

    return run(parse_settings(PlanConfig, {**settings}, assumptions or [], "plan"))


def fetch(name: str, out: str | Path | None = None) -> Fetched:
    """Download a small pre-trained checkpoint; see `models.fetch.fetch`.

    Args:
        name: `smollm2`.
        out: folder of the checkpoint; by default `models/NAME`.
    """
    from tramontane.models.fetch import fetch as run

    return run(name, Path("models") / name if out is None else Path(out))


def sft(
    config: Any,
    overrides: list[str] | None = None,
    *,
    resume: bool = False,
    on_log: Callable[[Any], None] | None = None,
) -> Path:
    """Supervised fine-tuning; returns the folder of the result. See `tramontane.sft.sft`."""
    from tramontane.config.sft import SFTConfig
    from tramontane.models import loading
    from tramontane.sft.sft import sft as run
    from tramontane.trainer import compiling

    if not isinstance(config, SFTConfig):
        config = _load_section(SFTConfig, config, overrides)
    loading.check_device(config.device)
    if config.compile:
        compiling.check(config.device)
    return run(config, resume, on_log)


def evaluate(
    model: str | Path,
    data: str | DataConfig = "playground:",
    *,
    problems: int | None = None,
    samples: int = 4,
    temperature: float = 0.7,
    top_p: float = 1.0,
    top_k: int = 0,
    max_tokens: int = 512,
    slots: int = 128,
    seed: int = 0,
    generator: GeneratorConfig | None = None,
    verifier: VerifierConfig | None = None,
    write_to: str | Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Measure pass@1, pass@k and maj@k of a model, with 95 % intervals; see `evaluation`.

    Args:
        model: `tiny`, a checkpoint folder, or a Hugging Face name.
        data: a source as in `data.train`, or a `DataConfig` whose `eval` names it.
        problems: maximum number of problems; generated sources default to 256.
        samples: completions of each problem.
        temperature: the paper evaluates at 0.7; 0 is greedy.
        top_p: the paper uses 1.0 for maths and 0.95 for code.
        top_k: 0 is off.
        max_tokens: maximum length of a completion, in tokens.
        slots: completions generated at once.
        seed: for sampling and for generated sources.
        generator: dtype, device and prefill of the generator.
        verifier: limits and reward weights of grading.
        write_to: JSONL file for every completion.
        on_progress: called with (completions graded, completions in all).

    Raises:
        InputError: no such model or data, a prompt that does not fit, or a size below 1.
    """
    from tramontane.data.lengths import PromptFilter, PromptLimit
    from tramontane.data.prompts import PromptEncoder
    from tramontane.evaluation import SamplingPlan
    from tramontane.evaluation import evaluate as run
    from tramontane.generator import Generator
    from tramontane.models import loading
    from tramontane.types import SamplingParams
    from tramontane.verifier import VerifierPool

    model = str(model)
    _check_sizes(problems=problems, samples=samples, max_tokens=max_tokens, slots=slots)
    _check_output(write_to)
    generator = generator or GeneratorConfig()
    loading.check_device(generator.device)
    config = data if isinstance(data, DataConfig) else DataConfig(eval=data)
    verifier = verifier or VerifierConfig()
    encoder = PromptEncoder(loading.load_tokenizer(model), config, verifier.thinking_tags)
    verifier = verifier.model_copy(update={"thinking_tags": encoder.tags})
    context = loading.context_length(loading.load_config(model))
    limit = PromptLimit.of(config.max_prompt_tokens, context, max_tokens)
    prompts = PromptFilter(encoder, limit, drop=config.overlong_prompts == "drop")
    found = prompts.keep(_evaluation_problems(config, problems, seed))
    worker = Generator.load(
        model,
        generator,
        min(slots, len(found) * samples),
        prompts.longest + max_tokens,
        encoder.response,
    )
    sampling = SamplingParams(max_tokens, temperature, top_p, top_k)
    plan = SamplingPlan(samples, sampling, seed, encoder)
    with VerifierPool(verifier, max_tokens, 0) as pool:
        return run(worker, pool, found, plan, write_to=write_to, on_progress=on_progress)


def _evaluation_problems(config: DataConfig, limit: int | None, seed: int) -> list[Problem]:
    from tramontane.data.load import load_problems

    source = config.eval or config.train
    endless = source.startswith(("playground:", "reasoning_gym:"))
    return load_problems(
        source, config, split="test", limit=limit or (256 if endless else None), seed=seed
    )


def _check_output(path: str | Path | None) -> None:
    if path is None:
        return
    if not Path(path).parent.is_dir():
        raise InputError(f"{path}: there is no folder {Path(path).parent}; make it first")
    if Path(path).is_dir():
        raise InputError(f"{path}: a folder; name a file")


def generate(
    model: str | Path,
    prompt: str,
    *,
    n: int = 1,
    temperature: float = 0.7,
    top_p: float = 1.0,
    top_k: int = 0,
    max_tokens: int = 512,
    seed: int = 0,
    system_prompt: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    response_prefix: str = "",
    config: GeneratorConfig | None = None,
) -> list[str]:
    """Complete a problem statement under the model's chat template, `n` times.

    `system_prompt`, `chat_template_kwargs` and `response_prefix` are those of a training run's
    `data`. The texts are whole responses, as verifiers read them.

    Raises:
        InputError: no such model, a prompt that does not fit its context, or a size below 1.
    """
    from tramontane.data.prompts import PromptEncoder
    from tramontane.generator import Generator
    from tramontane.models import loading
    from tramontane.types import Completion, Request, SamplingParams

    model, config = str(model), config or GeneratorConfig()
    _check_sizes(n=n, max_tokens=max_tokens)
    loading.check_device(config.device)
    settings = {
        "system_prompt": system_prompt,
        "chat_template_kwargs": chat_template_kwargs or {},
        "response_prefix": response_prefix,
    }
    prompts = parse(PromptConfig, settings, "generate")
    encoder = PromptEncoder(loading.load_tokenizer(model), prompts)
    ids = encoder.encode(prompt)
    worker = Generator.load(model, config, n, len(ids) + max_tokens, encoder.response)
    sampling = SamplingParams(max_tokens, temperature, top_p, top_k)
    worker.submit([Request(0, i, ids, seed + i, sampling) for i in range(n)])
    done: list[Completion] = []
    while len(done) < n:
        done += worker.step()
    return [c.text for c in sorted(done, key=lambda c: c.index)]


def score(
    path: str | Path,
    out: str | Path | None = None,
    config: Config | str | Path | None = None,
    overrides: list[str] | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> ScoreSummary:
    """Grade recorded responses with the code that training uses; see `evaluation.score`.

    Args:
        path: rows as JSONL (also gzip).
        out: JSONL file for the verdicts; without it there is only the summary.
        config: a `Config` or the path of one. Its section `verifier` is used, and if it has a
            section `pipeline`, the length reward's `l_max` and `l_cache`.
        overrides: `verifier.key=value`, `pipeline.l_max=value` or `pipeline.l_cache=value` texts.
        progress: called with (rows done, rows in all).

    Raises:
        InputError: before anything is graded.
    """
    from tramontane.evaluation.score import score_file

    keys = ("verifier.*", "pipeline.l_max", "pipeline.l_cache")
    settings = config if isinstance(config, Config) else grading(config, overrides, keys)
    lengths = {}
    if "pipeline" in settings.model_fields_set:
        lengths = {"l_max": settings.pipeline.l_max, "l_cache": settings.pipeline.l_cache}
    return score_file(path, out, settings.verifier, progress=progress, **lengths)


def grading(
    config: str | Path | None, overrides: list[str] | None, keys: Sequence[str] = ("verifier.*",)
) -> Config:
    """The config of a grading command, from a YAML file and overrides.

    Args:
        config: a YAML file; a whole training config is accepted.
        overrides: `key.sub=value` texts.
        keys: the keys that the command reads; `section.*` stands for all keys of a section.

    Raises:
        InputError: the errors of `config.load_section`, or an override that the command does not
            read.
    """
    for override in overrides or []:
        key = override.partition("=")[0]
        if key not in keys and f"{key.partition('.')[0]}.*" not in keys:
            raise InputError(f"override {override!r}: only {', '.join(keys)} can be set here")
    if config is None:
        return parse_settings(Config, {}, overrides or [], "key=value")
    return load_config(config, overrides)


def audit(
    path: str | Path,
    out: str | Path | None = None,
    *,
    rows: str | Path | None = None,
    sample: int = 1000,
    config: VerifierConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Find signs of reward hacking and verifier error; see `audit.audit`."""
    from tramontane.audit.audit import audit as run

    return run(path, out, rows=rows, sample=sample, config=config, progress=progress)


def curate(
    config: Any = None,
    overrides: list[str] | None = None,
    *,
    inputs: Sequence[str] = (),
    stages: Sequence[str] = (),
    against: Sequence[str] = (),
    out: str | Path | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> CurateResult:
    """Turn raw problem sets into a set worth training on; see `curation.pipeline.curate`.

    Args:
        config: a `CurateConfig` or the path of one; None means the defaults.
        overrides: `key.sub=value` texts laid over it.
        inputs: files or datasets that replace the config's.
        stages: stages that replace the config's.
        against: evaluation sets that no problem may come from.
        out: folder of the result; a curation that was stopped in this folder is continued.
        progress: called with (stage, chunks done).

    Raises:
        InputError: before any work is done, except for an evaluation set that cannot be read.
    """
    from tramontane.config import parse_settings
    from tramontane.curation.config import CurateConfig
    from tramontane.curation.pipeline import curate as run

    if against and not stages and config is None:
        stages = ("deduplicate", "decontaminate", "filter")
    asked = {"inputs": list(inputs), "stages": list(stages), "decontaminate.against": list(against)}
    texts = [f"{key}={json.dumps(value)}" for key, value in asked.items() if value]
    texts = [*(overrides or []), *texts, *([] if out is None else [f"out={out}"])]
    if config is None:
        config = parse_settings(CurateConfig, {}, texts, "curate")
    elif not isinstance(config, CurateConfig):
        config = _load_section(CurateConfig, config, texts)
    summary = run(config, progress)
    folder = Path(summary.pop("out"))
    return CurateResult(
        out=folder,
        problems=folder / "kept.jsonl",
        kept=summary["kept"],
        rewritten=summary["rewritten"],
        dropped=summary["dropped"],
        report=folder / "report.html",
        summary=summary,
    )


def _check_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise InputError(f"{name} is {size}; it must be at least 1")
