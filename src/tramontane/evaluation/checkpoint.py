"""Evaluate or sample a checkpoint as training would: implements `tramontane eval` and `tramontane
generate`.

The settings are a config's; for a run's checkpoint, by default the run's, so that system prompt,
chat template variables, thinking tags, domains and rewards are the same.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from tramontane.config import Config, PromptConfig, parse_settings, read_settings
from tramontane.config.device import slow_dtype
from tramontane.data.files import PYTHON_ROWS, SCHEMES
from tramontane.data.load import Split, load_problems
from tramontane.errors import InputError
from tramontane.evaluation.basis import Basis
from tramontane.evaluation.completions import CompletionsFile
from tramontane.evaluation.evaluate import EvaluationResult, SamplingPlan, evaluate, summarize
from tramontane.evaluation.placed import Work, evaluate_placed, is_placed
from tramontane.evaluation.suites import source_of, suite_of
from tramontane.models.names import find_weights, with_tokenizer
from tramontane.temporary import temporary_folder
from tramontane.types import Completion, Problem, Prompt, Request, SamplingParams
from tramontane.workplace import owned_file

if TYPE_CHECKING:
    from tramontane.data.prompts import PromptEncoder

ENDLESS_PROBLEMS = 256  # default number of problems from an endless source


class SamplingOptions(TypedDict, total=False):
    """Keywords of `tramontane.evaluate` and `tramontane.generate`; see `Sampling`.

    `device` and `dtype` are the generator's: `cpu`, `cuda`, `cuda:N` or `mps`; `float32` or
    `bfloat16`.
    """

    problems: int | None
    samples: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    slots: int
    seed: int
    device: str
    dtype: str


@dataclass(frozen=True)
class Sampling:
    """How a checkpoint is sampled. A config's `evaluation` section, `seed` and last `l_max` replace
    the defaults.

    Args:
        problems: maximum number of problems; None: all of a finite source, 256 of an endless one.
        samples: completions of each problem.
        temperature: the paper evaluates at 0.7; 0 is greedy.
        top_p: the paper uses 1.0 for maths and 0.95 for code.
        top_k: 0 is off.
        max_tokens: maximum length of a completion, in tokens.
        slots: maximum number of completions generated at once.
        seed: for sampling and for generated sources.
    """

    problems: int | None = None
    samples: int = 4
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 512
    slots: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("problems", "samples", "max_tokens", "slots"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise InputError(f"{name} is {size}; it must be at least 1")

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of one completion."""
        return SamplingParams(self.max_tokens, self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True)
class Settings:
    """The settings under which a checkpoint is sampled.

    Args:
        config: prompts, generator and verifier; its `data.eval` is the source of problems.
        sampling: how it is sampled.
        origin: file of the config; None without one.
    """

    config: Config
    sampling: Sampling
    origin: Path | None


def run_of(model: str | Path) -> Path | None:
    """Folder of a checkpoint's run (`RUN/checkpoints/step_N/weights`), if any."""
    path = Path(find_weights(str(model))).expanduser().absolute()
    if len(path.parents) < 3 or path.parents[1].name != "checkpoints":
        return None
    run = path.parents[2]
    return run if (run / "config.yaml").is_file() else None


def settings_for(
    model: str | Path,
    source: str | None,
    config: Config | str | Path | None,
    overrides: list[str],
    options: SamplingOptions,
) -> Settings:
    """The settings for a checkpoint.

    Args:
        model: see a config's `model`.
        source: source of problems; None: the config's `data.eval`.
        config: a config or the path of one; None: that of the checkpoint's run.
        overrides: `key.sub=value` texts.
        options: keywords of the command.

    Raises:
        InputError: an invalid config, option or override.
    """
    run = run_of(model) if config is None else None
    path = config if isinstance(config, str | Path) else run and run / "config.yaml"
    raw = config.model_dump() if isinstance(config, Config) else read_settings(path) if path else {}
    data = raw.setdefault("data", {})
    if run and source not in (None, data.get("train"), data.get("eval")):
        # The run's columns and domain belong to its data, not to this source.
        kept = {*PromptConfig.model_fields, "sets"}
        raw["data"] = data = {k: v for k, v in data.items() if k in kept}
    if source is not None:
        data["eval"] = source_of(source)
    elif path or config:
        options = {"problems": raw.get("evaluation", {}).get("problems"), **options}
    named = find_weights(str(model))
    if find_weights(str(raw.get("model"))) != named:
        raw["tokenizer"] = None  # the config's model's; a run's checkpoints have their own
    raw["model"] = named
    device = [f"generator.{k}={options[k]}" for k in ("device", "dtype") if k in options]  # type: ignore[literal-required]
    parsed = parse_settings(Config, raw, [*device, *overrides], str(path) if path else "eval")
    generator = parsed.generator
    if warning := slow_dtype("generator.dtype", generator.dtype, generator.device):
        warnings.warn(warning, stacklevel=2)
    defaults = _sampling_of(parsed) if path or config else Sampling()
    if suite := suite_of(source or ""):
        defaults = replace(defaults, **suite.sampling)
    known = {field.name for field in fields(Sampling)}
    given: dict[str, Any] = {k: v for k, v in options.items() if k in known and v is not None}
    return Settings(parsed, replace(defaults, **given), Path(path) if path else None)


def _sampling_of(config: Config) -> Sampling:
    """The sampling of a run's evaluations."""
    asked = config.evaluation
    sampling = Sampling(
        samples=asked.samples, temperature=asked.temperature, top_p=asked.top_p, seed=config.seed
    )
    if "pipeline" not in config.model_fields_set:
        return sampling
    return replace(sampling, max_tokens=config.by_stage()[-1].pipeline.l_max)


def evaluate_checkpoint(
    settings: Settings,
    *,
    write_to: str | Path | None = None,
    resume: bool = False,
    split: Split = "test",
    on_progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Evaluate a checkpoint on the problems of `data.eval`.

    Args:
        settings: see `settings_for`.
        write_to: JSONL file for every completion.
        resume: continue the file of an earlier process with the same basis, which is recorded next
            to it; False: replace the file.
        split: problems to evaluate with, or to train on; no generated problem is in both.
        on_progress: called with (completions graded, completions in all).

    Raises:
        InputError: no such model or data, a prompt that does not fit, or completions with a
            different basis in the file; before any work is done.
    """
    with owned_file(write_to, "evaluated") if write_to is not None else nullcontext():
        work = prepare(settings, problems_of(settings, split))
        if write_to is None:
            return _measure(settings.config, work, None, on_progress)
        if resume:
            return continue_evaluation(settings, work, Path(write_to), on_progress)
        with CompletionsFile(write_to) as completions:
            return _measure(settings.config, work, completions, on_progress)


def problems_of(settings: Settings, split: Split = "test") -> list[Problem]:
    """The problems of `data.eval`.

    Raises:
        InputError: see `load_problems`.
    """
    config, sampling = settings.config, settings.sampling
    source = config.data.eval or config.data.train
    limit = sampling.problems or (ENDLESS_PROBLEMS if source.startswith(SCHEMES) else None)
    return load_problems(
        source,
        config.data,
        split=split,
        limit=limit,
        seed=sampling.seed,
        domains=config.verifier.domains,
    )


def prepare(settings: Settings, problems: Sequence[Problem]) -> Work:
    """Check that a checkpoint can be evaluated on problems, without reading its weights.

    Raises:
        InputError: no such model or device, or a prompt that does not fit.
    """
    from tramontane.data.lengths import PromptFilter, PromptLimit
    from tramontane.models import loading

    config, sampling = settings.config, settings.sampling
    if config.placement.kind == "thread":  # on a cluster, generators run on other machines
        loading.check_device(config.generator.device, "generator.device")
    encoder = _encoder(config)
    context = loading.context_length(loading.load_config(config.model))
    limit = PromptLimit.of(config.data.max_prompt_tokens, context, sampling.max_tokens)
    prompts = PromptFilter(encoder, limit, drop=config.data.overlong_prompts == "drop")
    kept = prompts.keep(problems)
    plan = SamplingPlan(sampling.samples, sampling.params, sampling.seed, encoder)
    return Work(kept, plan, encoder, prompts.longest, sampling.slots)


def continue_evaluation(
    settings: Settings,
    work: Work,
    file: Path,
    on_progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Evaluate a checkpoint, resuming a partial evaluation: complete problems in the file are kept.

    Args:
        settings: see `settings_for`.
        work: from `prepare` with the same settings.
        file: JSONL of completions, which the caller owns; basis and results are written next to it.
        on_progress: called with (completions graded, completions in all).

    Raises:
        InputError: the file has completions with a different basis.
    """
    basis, samples = Basis.of(settings, work.problems), work.plan.samples
    basis.check(file)
    basis.write(file, {})
    with CompletionsFile(file, resume=True, samples=samples) as completions:
        completions.check(work.problems, samples)
        if len(completions.rows) == len(work.problems) * samples:
            result = summarize(completions.rows)
        else:
            result = _measure(settings.config, work, completions, on_progress)
    basis.write(file, {"result": result.to_dict()})
    return result


def _measure(
    config: Config,
    work: Work,
    completions: CompletionsFile | None,
    on_progress: Callable[[int, int], None] | None,
) -> EvaluationResult:
    from tramontane.verifier import try_functions

    verifier = config.verifier.model_copy(update={"thinking_tags": work.encoder.tags})
    try_functions(verifier, work.problems)
    run = evaluate_placed if is_placed(config) else _evaluate_here
    return run(config, work, completions, on_progress)


def _evaluate_here(
    config: Config,
    work: Work,
    record: CompletionsFile | None,
    on_progress: Callable[[int, int], None] | None,
) -> EvaluationResult:
    """Evaluate with one generator in this process."""
    from tramontane.generator import load_generator
    from tramontane.verifier import VerifierPool

    sampling, samples = work.plan.sampling, work.plan.samples
    generator = load_generator(
        with_tokenizer(config.model, config.tokenizer),
        config.generator,
        min(work.slots, len(work.problems) * samples),
        work.longest_prompt + sampling.max_tokens,
        work.encoder.response,
    )
    verifier = config.verifier.model_copy(update={"thinking_tags": work.encoder.tags})
    with VerifierPool(verifier, sampling.max_tokens, 0) as pool:
        return evaluate(
            generator, pool, work.problems, work.plan, write_to=record, on_progress=on_progress
        )


def sample_checkpoint(settings: Settings, prompt: Prompt, n: int) -> list[str]:
    """Complete one prompt `n` times. The texts are whole responses, as verifiers read them.

    Raises:
        InputError: no such model, a prompt that does not fit its context, or `n` below 1.
    """
    from tramontane.generator import load_generator
    from tramontane.models import loading

    if n < 1:
        raise InputError(f"n is {n}; it must be at least 1")
    config, sampling = settings.config, settings.sampling
    loading.check_device(config.generator.device, "generator.device")
    encoder = _encoder(config)
    ids = encoder.encode(prompt)
    longest = len(ids) + sampling.max_tokens
    model = with_tokenizer(config.model, config.tokenizer)
    generator = load_generator(model, config.generator, n, longest, encoder.response)
    requests = [Request(0, i, ids, sampling.seed + i, sampling.params) for i in range(n)]
    generator.submit(requests)
    done: list[Completion] = []
    while len(done) < n:
        done += generator.step()
    return [completion.text for completion in sorted(done, key=lambda c: c.index)]


@contextmanager
def as_source(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A temporary file with these rows."""
    with temporary_folder("eval") as folder:
        file = Path(folder) / f"data{PYTHON_ROWS}"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        yield str(file)


def _encoder(config: Config) -> PromptEncoder:
    from tramontane.data.prompts import PromptEncoder
    from tramontane.models import loading

    tokenizer = loading.load_tokenizer(with_tokenizer(config.model, config.tokenizer))
    return PromptEncoder(tokenizer, config.data, config.verifier.thinking_tags)
