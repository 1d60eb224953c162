"""A study's YAML file: question, arms, and claims with the measures that decide them."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from tramontane import plugins
from tramontane.config import Section, key_error, load_section, nearest, read_settings
from tramontane.errors import InputError
from tramontane.studies.measures import MEASURES, Measure, returned

_CATALOG = resources.files("tramontane.studies") / "catalog"  # with those of installed packages
LOOKS = {3: 0.02, 6: 0.01, 12: 0.01, 24: 0.01}  # by number of seeds: the error that a look spends
Expectation = Literal["higher", "lower", "equal"]
StudySet = Literal["magistral", "siblings", "checkpoints"]


class Claim(Section):
    """A comparison of two arms that decides a claim."""

    text: str
    """The claim, in one sentence."""
    measure: str = "pass_at_1"
    """Measure to compare: a name in `studies.measures`, or in the study's `measures` if it has a
    `runner`."""
    arm: str
    """Arm whose measure is compared."""
    against: str | float
    """Arm to compare it with, or a number."""
    expect: Expectation
    """Expected figure of `arm`: `higher` or `lower` than that of `against`, or `equal`."""
    margin: float = Field(0.03, gt=0)
    """Smallest difference of interest, in the measure's unit. Arms that differ by less count as
    equal; a difference that is significantly smaller refutes `higher` and `lower`."""


class ReturnedMeasure(Section):
    """A figure that the function of a study with `runner` returns."""

    title: str
    """Name on the study's page, with the unit."""
    format: str = ".3f"
    """Number format on the page, as in Python's format specification."""
    samples: int = Field(0, ge=0)
    """Samples behind a figure that is a share of them, 1 for yes or no: its interval is never
    narrower than their error. 0: not a share."""


class Study(Section):
    """A question about training, the arms that answer it, and the claims that they decide."""

    title: str
    """Heading of the study's page."""
    question: str
    """The question, in a sentence or two."""
    paper: str
    """The paper's statement, with its figures and section."""
    set: StudySet = "magistral"
    """The study's set: the paper that this project implements, its sibling papers, or studies on a
    checkpoint that is fetched first, which `--all` skips."""
    base: dict[str, Any] = Field(default_factory=dict)
    """Keys of the base config that all arms change, as `key.sub: value`."""
    arms: dict[str, dict[str, Any]]
    """Keys that each arm changes, by the arm's name."""
    trajectories: dict[str, Any] = Field(default_factory=dict)
    """Keys of the base config for a run before the arms. The arms learn from its rollouts if their
    `data.trajectories.sources` names `trajectories`."""
    shared: str = ""
    """What all seeds share, e.g. a model that is trained once: intervals do not include its
    randomness."""
    runner: str | None = None
    """Function that runs an arm, as `package.module:function`; by default, an arm is a run of
    `tramontane train`. The function takes the arm's keys (`base` with the arm's changes), the seed
    and a folder, and returns the run's measures by name. Called again with the folder of an
    interrupted call, it may resume."""
    measures: dict[str, ReturnedMeasure] = Field(default_factory=dict)
    """Measures that the function of `runner` returns, by name; the page shows them all."""
    scaled: list[str] = Field(default_factory=list)
    """With `runner`: integer keys, e.g. a number of steps, that `--budget` multiplies."""
    minutes: float = Field(2.0, gt=0)
    """Minutes of one run with the default budget on two cores, with as many in parallel as
    possible."""
    fixed_minutes: float = Field(0.0, ge=0)
    """With `runner` and `scaled`: the part of `minutes` that does not depend on the budget."""
    cores: int = Field(1, ge=1)
    """Cores per run. Generator and trainer take turns on one core, and runs run in parallel; a
    study of speed needs a core for each."""
    claims: list[Claim] = Field(min_length=1)
    """Claims that the runs decide."""
    also: list[str] = Field(default_factory=list)
    """Additional measures on the page, names in `studies.measures`."""
    plots: list[str] = Field(default_factory=lambda: ["reward", "entropy", "completion_tokens"])
    """Metrics to plot over `over`, as in a run's `metrics.jsonl`. The function of `runner` may
    write such a file too, a line of JSON for each step; with `runner`, the default is none."""
    over: str = "update"
    """Metric on the horizontal axis of the plots."""
    large: str = ""
    """What only a large model could show."""

    @model_validator(mode="after")
    def _known_names(self) -> Study:
        if self.runner and not self.measures:
            raise key_error("name the measures that the function of runner returns", "measures")
        for name in self.also:
            if self.runner or name not in MEASURES:
                raise key_error(
                    f"{name!r} is not a measure of a run; choose from {', '.join(MEASURES)}", "also"
                )
        if self.runner and self.trajectories:
            raise key_error("trajectories belong to a study without a runner", "trajectories")
        for key in ("measures", "scaled", "fixed_minutes"):
            if getattr(self, key) and not self.runner:
                raise key_error(f"{key} belongs to a study with a runner", key)
        if self.fixed_minutes >= self.minutes:
            raise key_error(f"at least as much as minutes, {self.minutes:g}", "fixed_minutes")
        if self.runner and "plots" not in self.model_fields_set:
            self.plots = []
        for i, claim in enumerate(self.claims):
            for key in ("arm", "against"):
                name = getattr(claim, key)
                if isinstance(name, str) and name not in self.arms:
                    raise key_error(
                        f"{name!r} is not an arm of the study; choose from {', '.join(self.arms)}",
                        f"claims.{i}.{key}",
                    )
            if claim.measure not in (known := self.measures or MEASURES):
                near = nearest(claim.measure, known)
                hint = f"did you mean {near!r}?" if near else f"choose from {', '.join(known)}"
                raise key_error(
                    f"{claim.measure!r} is not a measure of a run; {hint}", f"claims.{i}.measure"
                )
        return self

    @property
    def source(self) -> str:
        """The paper: the first arXiv number in `paper`; empty without one."""
        match = re.search(r"arXiv (\d+\.\d+)", self.paper)
        return match[1] if match else ""

    @property
    def shared_by_seeds(self) -> str:
        """What all seeds share; empty if nothing but the base."""
        rollouts = "the recorded rollouts that the arms learn from" if self.trajectories else ""
        return self.shared or rollouts

    @property
    def shown(self) -> dict[str, Measure]:
        """Measures on the page: all that `runner` returns, or those that the claims compare and
        those in `also`."""
        if self.runner:
            return {
                name: returned(name, m.title, m.format, m.samples)
                for name, m in self.measures.items()
            }
        measured = [*(claim.measure for claim in self.claims), *self.also]
        return {name: MEASURES[name] for name in measured}


def names() -> list[str]:
    """Names of the studies of this package and of installed ones, in order."""
    return sorted({*_own(), *plugins.offered(plugins.STUDIES)})


def _own() -> list[str]:
    return [file.name.removesuffix(".yaml") for file in _CATALOG.iterdir()]


def names_in(*sets: StudySet) -> list[str]:
    """Names of the studies of some sets, one set after the other; without one, of all sets."""
    set_of = {name: load_study(name).set for name in names()}
    groups = sets or get_args(StudySet)
    return [name for group in groups for name, of in set_of.items() if of == group]


def base_config() -> Path:
    """The default config that arms change: the tiny base on the playground."""
    return Path(str(resources.files("tramontane.studies") / "base.yaml"))


def config_of(study: Study, base: Path | None = None) -> dict[str, Any] | None:
    """The keys of the config that the study's arms change, by default that of `base_config`; None
    for a study with a `runner`."""
    return None if study.runner else read_settings(base or base_config())


def load_study(name: str) -> Study:
    """A study by name, of this package or an installed one, or by the path of its YAML file.

    Raises:
        InputError: no such study, or an invalid file.
    """
    if name.endswith((".yaml", ".yml")):
        return load_section(Study, name)
    folder = _CATALOG
    if name not in _own():
        if (entry := plugins.offered(plugins.STUDIES).get(name)) is None:
            near = nearest(name, names())
            hint = f"did you mean {near!r}?" if near else f"choose from {', '.join(names())}"
            other = f"study {name!r}: no such study; {hint}, or give the path of a .yaml file"
            raise InputError(plugins.remedy(plugins.STUDIES, name) or other)
        folder = resources.files(plugins.load(entry))
    return load_section(Study, Path(str(folder / f"{name}.yaml")))


def look(seeds: int) -> int:
    """Number of seeds that count, of those finished: up to the last look, and all before the first,
    where nothing is decided."""
    return max((n for n in LOOKS if n <= seeds), default=seeds)
