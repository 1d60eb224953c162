"""`data`: problem sources, which of their problems are used, and recorded completions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tramontane.config.domains import checked_path, import_path
from tramontane.config.images import ImagesConfig
from tramontane.config.prompt import EffortConfig, PromptConfig
from tramontane.config.section import Section, key_error
from tramontane.types import Problem

Language = Literal["en", "fr", "es", "it", "de", "zh", "ru"]
ProblemKind = Literal[
    "sums", "stories", "programs", "repairs", "long_sums", "lookups", "articles", "sessions",
    "guessing", "bars", "shapes", "clocks", "tables", "mazes", "drawn_sums", "drawn_bars",
    "drawn_shapes", "drawn_clocks", "drawn_tables", "drawn_mazes",
]  # fmt: skip
PLAYGROUND = "playground:"  # the source of generated problems
LANGUAGES: tuple[Language, ...] = ("en", "fr", "es", "it", "de", "zh", "ru")


SCHEMES: dict[str, str] = {
    "textarena": "tramontane.environments.adapters.textarena.TextArena",
    "gymnasium": "tramontane.environments.adapters.gymnasium.Gymnasium",
    "skyrl": "tramontane.environments.adapters.skyrl.SkyRL",
    "openenv": "tramontane.environments.adapters.openenv.OpenEnv",
    "mcp": "tramontane.environments.adapters.mcp.MCP",
}
"""Adapters of other packages' environments, which `data.environment` names as `textarena:NAME`, and
of servers of tools, which `data.tools` names as `mcp:COMMAND`."""


EffortName = Annotated[str, StringConstraints(pattern=r"^\w[\w-]*$")]
EffortNames = Annotated[
    tuple[str, ...],
    Field(min_length=1),
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
]
"""Levels of effort: a name, or a list of names, in `data.effort`."""


def check_efforts(
    levels: Mapping[str, EffortConfig], chosen: Mapping[str, Iterable[str] | None]
) -> None:
    """Raise the error of a config key if a name in `chosen`, by key, is not among the levels."""
    for key, names in chosen.items():
        if unknown := [name for name in names or () if name not in levels]:
            raise key_error(
                f"{', '.join(unknown)}: not in data.effort, which has "
                f"{', '.join(levels) or 'no levels'}",
                key,
                "data.effort",
            )


def checked_environment(path: str) -> str:
    """An environment's path unchanged: an import path that workers can import, a built-in name, or
    a name in another package.

    Raises:
        ValueError: none of them.
    """
    scheme, colon, name = path.partition(":")
    if colon and scheme in SCHEMES:
        if not name:
            raise ValueError(f"{path!r} names no environment: write {scheme}:NAME")
        return path
    return _checked(path)


def _checked(path: str) -> str:
    """An import path that workers can import, or a built-in name, unchanged."""
    if not re.fullmatch(r"\w+", path):
        checked_path(import_path(path))
    return path


def _in_order(levels: tuple[int, int]) -> tuple[int, int]:
    low, high = levels
    if not 1 <= low <= high <= 8:
        raise ValueError(f"levels {low}–{high} must lie within 1–8, the lower one first")
    return levels


Levels = Annotated[tuple[int, int], AfterValidator(_in_order)]


class PlaygroundConfig(Section):
    """Problems that `playground:` generates; see docs/playground.md."""

    levels: Levels = (1, 8)
    """Easiest and hardest level, inclusive, from 1 to 8."""
    languages: tuple[Language, ...] = LANGUAGES
    """Languages of the statements, drawn uniformly. The default is the paper's seven."""
    kinds: tuple[ProblemKind, ...] = ("sums", "stories")
    """Kinds of problems, drawn uniformly: arithmetic, word problems, small Python `programs`; for
    `data.tools`, `long_sums` (calculator), `lookups` and `articles` (notebook) and `sessions`
    (python); `guessing`, a game of several turns; `repairs`, programs with the environment
    `repair`; `bars`, `shapes`, `clocks`, `tables` and `mazes`; and for a model that takes images,
    `drawn_sums`, `drawn_bars` and so on, whose data are in a picture."""


def of_playground(raw: Any, *keys: str) -> Any:
    """A section as given, with the playground as its source if it says what to generate (one of
    `keys`) and names no source."""
    asked = isinstance(raw, dict) and not raw.keys().isdisjoint(keys)
    return {"train": PLAYGROUND, **raw} if asked else raw


class TooHard(Section):
    """When problems that are never solved rest, and for how long."""

    after: int = Field(ge=1)
    """Consecutive visits without a correct completion after which a problem rests. The paper gives
    no number."""
    return_after: Annotated[int, Field(ge=1)] | Literal["stage"] = "stage"
    """Updates that a problem rests, or `stage`: until the next stage begins. A problem that is
    again unsolved when it returns rests again immediately."""


class CurriculumConfig(Section):
    """Rules that remove a problem from training based on its results in this run; see
    docs/curriculum.md. The paper removes solved problems and adds harder ones, but gives no
    rule."""

    retire_after: int | None = Field(None, ge=1)
    """Consecutive visits solved by the whole group after which a problem is retired. null: problems
    are never retired."""
    too_hard: TooHard | None = None
    """Rest for problems that no completion solves. null: no problem rests."""


LayoutName = Literal[
    "verl",
    "numina",
    "big_math",
    "intellect3",
    "dolci",
    "gpqa",
    "mmmu",
    "mmmu_pro_vision",
    "mathvista",
    "livecodebench",
    "deepcoder_lcb",
    "olympiadbench",
    "humaneval",
    "mbpp",
    "ifeval",
    "ifeval_loose",
    "bfcl",
]


class NamedSetConfig(Section):
    """A dataset with a short name, for `data.train`, `data.eval` and `evaluation.also`; see
    docs/data.md."""

    source: str
    """A file, as for `data.train`, or a Hugging Face dataset (`NAME` or `NAME#SUBSET`)."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Names of a row's fields, like `data.fields`, which does not apply to named sets."""
    domain: str | None = None
    """Domain of all rows, like `data.domain`, which does not apply to named sets."""
    layout: LayoutName | None = None
    """Public layout that needs more than a renaming of fields, e.g. `verl`. null: the rows have the
    fields of docs/data.md, under the names in `fields`."""


class TrajectoriesConfig(Section):
    """Recorded completions to fill batches with: rollouts of earlier runs, responses of other
    models or of humans. See docs/trajectories.md."""

    removed: ClassVar[Any] = {
        "min_version": (None, "give a later run as the source, or a file of selected rows")
    }

    sources: Annotated[tuple[str, ...], Field(min_length=1)]
    """Folders of earlier runs, and JSONL (also gzip) or Parquet files with a prompt, a response and
    a reward in each row."""
    share: float = Field(1.0, gt=0, le=1)
    """Share of each batch's completions that are recorded, rounded to whole groups. The rest is
    sampled by the run. 1: nothing is sampled for training."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Names of a row's fields in files, if different, e.g. `{response: text, reward: thumbs}`."""
    behavior: Literal["recorded", "refreshed"] = "recorded"
    """Behavior log-probs log μ: as `recorded` with a trajectory, or `refreshed`: computed with the
    trained weights. A trajectory without recorded ones is always refreshed. None are computed for
    an objective that does not use μ."""
    refresh_every: int | None = Field(10, ge=1)
    """Updates after which refreshed log-probs are computed again. null: only once, when a
    trajectory is first used."""
    max_version: int | None = Field(None, ge=0)
    """Newest weights version of a run's rollouts to use, by a completion's newest token. 0: only
    samples of the run's initial weights. null: no bound."""
    min_reward: float | None = None
    """Lowest reward of trajectories to use, inclusive. null: no bound."""
    max_reward: float | None = None
    """Highest reward of trajectories to use, inclusive. null: no bound."""
    regrade: bool = False
    """Replace the recorded rewards by the verdicts of this run's verifiers, at the start."""
    standardize: bool = False
    """Shift and scale the rewards of all trajectories to mean 0 and standard deviation 1, as DRO
    does."""

    @model_validator(mode="after")
    def _bounds(self) -> TrajectoriesConfig:
        low, high = self.min_reward, self.max_reward
        if low is not None and high is not None and low > high:
            raise key_error(
                f"min_reward {low:g} is above max_reward {high:g}: swap them", "min_reward"
            )
        return self


class DataConfig(PromptConfig):
    """Problem sources for training and evaluation, the prompts made from the problems, and the
    selection of problems by pass rate. A text in place of the section is `train`."""

    of_text: ClassVar[str] = "train"

    train: str = ""
    """Source of training problems: `playground:`, `reasoning_gym:NAME`, `verifiers:NAME`, a file
    (JSON lines, a JSON array, CSV, each also gzip, or Parquet), a Hugging Face dataset (`NAME` or
    `NAME#SUBSET`), a short name (`polaris`) or a local file of a named set's layout
    (`polaris@FILE`). Without it, `playground` with any key stands for
    `playground:`."""
    environment: str | None = None
    """Import path of the environment that the model talks to, `my_module:Shop`, a built-in name, or
    one of another package: `textarena:GuessTheNumber-v0`, `gymnasium:NAME`, `skyrl:NAME`,
    `openenv:my_module:Shop` or `openenv:http://localhost:8000`. A row may name another in its field
    `environment`; `row`: only such rows have one. null: no environments. See
    docs/environments.md."""
    tools: tuple[str, ...] = ()
    """Tools that the model may call: import paths of functions or toolboxes, or built-in names
    (`calculator`, `python`, `notebook`), or servers, `mcp:COMMAND` or `mcp:http://ADDRESS`."""
    effort: dict[EffortName, EffortConfig] = Field(default_factory=dict)
    """Levels of effort by name, e.g. `low` and `high`. Each training group is drawn at one of them,
    and evaluations measure all. Empty: the model is not asked for any. See docs/effort.md."""
    train_effort: EffortNames | None = None
    """Levels that training draws from, by their shares. null: all."""
    eval: str | None = None
    """Source of evaluation problems, as for `train`. null: the run is not evaluated."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Names of a row's fields, where they differ from a Problem's, e.g. `{problem: question}`."""
    eval_fields: dict[str, str] | None = None
    """Names of a row's fields in `eval`. null: the same as `fields`."""
    sets: dict[str, NamedSetConfig] = Field(default_factory=dict)
    """More short names of datasets, e.g. `mine: {source: me/my-set, fields: {answer: a}}`."""
    domain: str | None = None
    """Domain of all rows of files and datasets, a name in `verifier.domains`. null: the domain
    named in the row; without one, `code` for a row with tests, else `math`."""
    split: str = "train"
    """Split of a Hugging Face dataset to train on. Files have no splits."""
    eval_split: str = "test"
    """Split of a Hugging Face dataset to evaluate on."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of training problems, evenly spaced over the source. A generated source with a
    limit is a fixed set of that many problems. null: no limit."""
    shuffle: bool = True
    """Shuffle a finite source anew each epoch, by the seed. false: keep the source's order."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest accepted prompt, in tokens; the model's context less `pipeline.l_max` is a further
    limit. null: 1,024 for a finite source; for an endless source 256, or the longest of its first
    256 prompts."""
    overlong_prompts: Literal["refuse", "drop"] = "refuse"
    """Problems whose prompt exceeds the limit: `refuse` to start, and report their number, or
    `drop` them from training and evaluation."""
    eval_overlap: Literal["warn", "refuse", "drop", "ignore"] = "warn"
    """Training problems with the same or nearly the same statement as an evaluation problem: `warn`
    about them, `refuse` to start, `drop` them from training, or `ignore` them without a search.
    Endless sources are not searched."""
    min_pass_rate: float | None = Field(None, ge=0, le=1)
    """Lowest pass rate of problems to use, inclusive. null: no lower bound. Requires a finite
    source. The paper does not give its thresholds."""
    max_pass_rate: float | None = Field(None, ge=0, le=1)
    """Highest pass rate of problems to use, inclusive. null: no upper bound. Requires a finite
    source. The paper does not give its thresholds."""
    pass_rate: Literal["recorded", "running"] = "recorded"
    """Pass rate used to select problems: `recorded` in the problem's row (`pass_rate`, as curation
    writes it), or `running`: measured in this run so far, or recorded for a problem not yet
    visited."""
    pass_rates: str | None = None
    """Another run's `problems.jsonl`, whose pass rates replace those in the rows, by problem id."""
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    """Rules that retire solved problems and rest problems that are too hard."""
    playground: PlaygroundConfig = Field(default_factory=PlaygroundConfig)
    """Problems that `playground:` generates."""
    images: ImagesConfig = Field(default_factory=ImagesConfig)
    """Limits of the images in rows; see docs/images.md."""
    trajectories: TrajectoriesConfig | None = None
    """Recorded completions that batches are partly filled with. null: the run samples all of its
    completions."""

    @field_validator("environment")
    @classmethod
    def _importable(cls, path: str | None) -> str | None:
        return path if path is None else checked_environment(path)

    @field_validator("tools")
    @classmethod
    def _all_importable(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(checked_environment, paths))

    @model_validator(mode="after")
    def _names_a_source(self, info: ValidationInfo) -> DataConfig:
        """A config that a command reads must name its source. A config made in Python, e.g. to try
        an environment, need not."""
        if not self.train and info.context:
            raise key_error("not given; set it in the file, or as key=value", "train")
        return self

    @classmethod
    def default(cls) -> DataConfig:
        """The playground, for training and evaluation: the data of a config without any."""
        return cls(train=PLAYGROUND, eval=PLAYGROUND)

    @property
    def effort_shares(self) -> dict[str, float]:
        """Levels of effort that training draws from, with their relative shares."""
        return {name: self.effort[name].share for name in self.train_effort or self.effort}

    def at_efforts(self, problems: Iterable[Problem], names: Iterable[str]) -> list[Problem]:
        """All problems at each level of effort, level after level, with its lengths; unchanged if
        there are no levels."""
        if not self.effort:
            return list(problems)
        problems = list(problems)
        return [
            replace(
                problem,
                effort=name,
                l_max=level.l_max,
                l_cache=level.l_cache,
                length_penalty=level.length,
            )
            for name in names
            for level in [self.effort[name]]
            for problem in problems
        ]

    @property
    def selects(self) -> bool:
        """True if problems are selected by pass rate."""
        return self.min_pass_rate is not None or self.max_pass_rate is not None

    @model_validator(mode="before")
    @classmethod
    def _only_recorded(cls, raw: Any) -> Any:
        """Where all completions are recorded, `train` is not used."""
        recorded = isinstance(raw, dict) and raw.get("trajectories")
        if isinstance(recorded, dict) and recorded.get("share", 1) == 1:
            return {"train": PLAYGROUND, **raw}
        return of_playground(raw, "playground")

    @model_validator(mode="after")
    def _range(self) -> DataConfig:
        low, high = self.min_pass_rate, self.max_pass_rate
        if low is not None and high is not None and low > high:
            raise key_error(
                f"min_pass_rate {low:g} is above max_pass_rate {high:g}: swap them",
                "min_pass_rate",
                "max_pass_rate",
            )
        return self
