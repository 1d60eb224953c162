"""The settings under which a checkpoint is evaluated or sampled.

They are a config's; for a run's checkpoint, by default the run's, so that system prompt, chat
template variables, thinking tags, domains and rewards are the same.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from tramontane.config import PLAYGROUND, Config, PromptConfig, parse_settings, read_settings
from tramontane.config.device import dtype_warnings, idle_gpus
from tramontane.errors import InputError
from tramontane.models.names import find_weights
from tramontane.types import SamplingParams

CONVERSING = ("environment", "tools")  # keys of `data` that make completions conversations


class Suite(NamedTuple):
    """The protocol of one evaluation, as in `Sampling`. `data.catalog` has its problems under the
    suite's name."""

    samples: int
    max_tokens: int = 32_000
    top_p: float = 1.0
    temperature: float = 0.7


# Evaluations with a fixed protocol by name: `tramontane eval MODEL aime24`. The protocols are those
# of arXiv 2506.10910, section 5: temperature 0.7; top-p 1.0 for mathematics and GPQA, 0.95 for
# programs; 40,000 tokens for AIME and LiveCodeBench, 32,000 otherwise; 64 samples of AIME and 16 of
# LiveCodeBench. It does not give the samples of the other sets: here, sets of a few hundred
# problems get 4, larger ones 1. Options can replace every part.
SUITES: dict[str, Suite] = {
    "aime24": Suite(64, max_tokens=40_000),
    "aime25": Suite(64, max_tokens=40_000),
    "aime26": Suite(64, max_tokens=40_000),
    "math500": Suite(4),
    "gsm8k": Suite(1),
    "olympiadbench": Suite(4),
    "mmmu": Suite(4),
    "mmmu_pro": Suite(4),
    "mmmu_pro_vision": Suite(4),
    "mathvista": Suite(4),
    "gpqa": Suite(4),
    "livecodebench_v5": Suite(16, max_tokens=40_000, top_p=0.95),
    "livecodebench_v6": Suite(16, max_tokens=40_000, top_p=0.95),
    "humaneval": Suite(4, top_p=0.95),
    "mbpp": Suite(4, top_p=0.95),
    # Effects of training on other abilities.
    "ifeval": Suite(1),
    "ifeval_loose": Suite(1),
    "bfcl_simple": Suite(1),
    "bfcl_multiple": Suite(1),
    "bfcl_parallel": Suite(1),
    "bfcl_parallel_multiple": Suite(1),
    # The results list languages and levels, selected by `data.playground`.
    "playground": Suite(4, max_tokens=512),
}


class SamplingOptions(TypedDict, total=False):
    """Keywords of `tramontane.evaluate` and `tramontane.generate`; see `Sampling`.

    `device` and `dtype` are the generator's: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`; `auto`,
    `float32` or `bfloat16`. `effort` names levels of the config's `data.effort`, by default those
    of `evaluation.effort`.
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
    effort: Sequence[str]


@dataclass(frozen=True)
class Sampling:
    """How a checkpoint is sampled. A config's `evaluation` section, `seed` and last `l_max` replace
    the defaults.

    Args:
        problems: maximum number of problems; None: all of a finite source, 256 of an endless one.
        samples: completions of each problem.
        temperature: the paper evaluates at 0.7; 0 is greedy.
        top_p: the paper uses 1.0 for math and 0.95 for code.
        top_k: 0 is off.
        max_tokens: maximum length of a completion, in tokens.
        slots: maximum number of completions generated at once.
        seed: for sampling; `evaluation.problems_seed` is for generated sources.
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
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature is {self.temperature}; it must be at least 0")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (1 is off)")
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k}; it must be at least 0 (0 is off)")

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

    @property
    def efforts(self) -> list[str]:
        """The levels of effort to measure; empty if the config has none."""
        return [*(self.config.evaluation.effort or self.config.data.effort)]


def alike(samples: int, temperature: float, section: str = "") -> str | None:
    """A warning of samples that are all alike; `section` precedes the keys."""
    if temperature or samples == 1:
        return None
    return (
        f"{section}samples {samples}: at temperature 0 the answers to a problem are all alike: set "
        f"it to 1, or raise {section}temperature"
    )


def run_of(model: str | Path) -> Path | None:
    """Folder of a checkpoint's run (`RUN/checkpoints/update_N/weights`), if any."""
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
        InputError: an invalid config or override.
    """
    run = run_of(model) if config is None else None
    path = run and run / "config.yaml" if isinstance(config, Config | None) else config
    raw = {} if path is None else read_settings(path)
    if isinstance(config, Config):  # as if from a file: what was not set is left to the defaults
        raw = config.model_dump(exclude_unset=True)
    data = raw.get("data") or {}
    data = {"train": data} if isinstance(data, str) else data
    if run and source not in (None, data.get("train"), data.get("eval")):
        # The run's columns and domain belong to its data, not to this source.
        kept = {*PromptConfig.model_fields, *CONVERSING, "effort", "sets"}
        data = {k: v for k, v in data.items() if k in kept}
    if source is not None:
        data = data | {"eval": PLAYGROUND if source == "playground" else source}
    elif path or config:
        options = {"problems": raw.get("evaluation", {}).get("problems"), **options}
    raw["data"] = {"train": data.get("eval") or PLAYGROUND, **data}  # nothing is trained
    named = find_weights(str(model))
    if find_weights(str(raw.get("model"))) != named:
        raw["tokenizer"] = None  # it is for the config's model; a run's checkpoints have their own
    raw["model"] = named
    if effort := options.get("effort"):
        raw["evaluation"] = raw.get("evaluation", {}) | {"effort": effort}
    device = [f"generator.{k}={options[k]}" for k in ("device", "dtype") if k in options]  # type: ignore[literal-required]
    parsed = parse_settings(Config, raw, [*device, *overrides], str(path) if path else "eval")
    generator = parsed.generator
    slow = dtype_warnings(generator, "generator.")
    for warning in filter(None, (idle_gpus(generator.device), *slow)):
        warnings.warn(warning, stacklevel=2)
    defaults = _sampling_of(parsed) if path or config else Sampling()
    if suite := SUITES.get((source or "").partition("@")[0]):
        defaults = replace(defaults, **suite._asdict())
    known = {field.name for field in fields(Sampling)}
    given: dict[str, Any] = {k: v for k, v in options.items() if k in known and v is not None}
    return Settings(parsed, replace(defaults, **given), Path(path) if path else None)


def _sampling_of(config: Config) -> Sampling:
    asked = config.evaluation
    sampling = Sampling(
        samples=asked.samples, temperature=asked.temperature, top_p=asked.top_p, seed=config.seed
    )
    if "pipeline" not in config.model_fields_set:
        return sampling
    return replace(sampling, max_tokens=config.by_stage()[-1].pipeline.l_max)
