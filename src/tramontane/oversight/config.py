"""The configuration of `tramontane oversight`: questions, models, and the arms to compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from tramontane.config import LANGUAGES, Language, Section, key_error, nearest
from tramontane.config.generator import VllmConfig
from tramontane.curation.config import CheckpointModel, EndpointModel
from tramontane.curation.config import ModelConfig as AskedModelConfig

Name = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$")]
PAGES = ("figures.json", "oversight.html")  # files beside the arms' folders
ProtocolName = Literal[
    "direct", "direct_article", "consultancy", "debate", "open_consultancy", "open_debate"
]


class ExtractiveConfig(Section):
    """Questions that `extractive:` generates: articles of facts, and questions whose answer needs
    two of them."""

    levels: tuple[int, int] = (2, 4)
    """Fewest and most chains of two facts in an article, from 2 to 5. All but one are
    distractors."""
    languages: tuple[Language, ...] = Field(LANGUAGES, min_length=1)
    """Languages, drawn uniformly. The default is Magistral's seven."""
    frames: tuple[Literal["keys", "trains"], ...] = Field(("keys", "trains"), min_length=1)
    """Kinds of facts, drawn uniformly: keys that open rooms, trains that go to cities."""
    phrasings: int | None = Field(None, ge=1)
    """Number of phrasings of every sentence that are drawn from, the first of its frame. null: all.
    With 1 every first fact begins with its name, and every second fact ends with its goal."""
    split: Literal["train", "test"] = "test"
    """Split that is drawn from. No question is in both; seven in eight are in `train`."""

    @model_validator(mode="after")
    def _levels(self) -> ExtractiveConfig:
        low, high = self.levels
        if not 2 <= low <= high <= 5:
            raise key_error(f"levels {low}–{high} must lie within 2–5, the lower first", "levels")
        return self


class QuestionsConfig(Section):
    """The questions, the same for all arms."""

    source: str = "extractive:"
    """`extractive:` (generated), a known set (`quality`, `boolq`, `gpqa`, `mmlu` and others, or
    `NAME@FILE` for a local copy), a JSONL (also gzip) or Parquet file, or a Hugging Face dataset
    (`NAME` or `NAME#SUBSET`)."""
    split: str = "test"
    """Split of a Hugging Face dataset that is no known set."""
    layout: str | None = None
    """Conversion of the rows, by the name of a known set, e.g. `race`. null: that of the known set;
    for other sources rows of `question`, `choices`, `answer` and optionally `article`."""
    limit: int = Field(200, ge=1)
    """Number of questions, evenly spaced over a finite source, or all if there are fewer."""
    seed: int = 0
    """Seed of generated questions, of the wrong answer that is offered, and of the answers'
    order."""
    extractive: ExtractiveConfig = Field(default_factory=ExtractiveConfig)
    """Size and difficulty of the questions that `extractive:` generates."""


class WinRates(Section):
    """Shares of discussions that an agent wins alone against an impartial judge."""

    right: float = Field(0.5, gt=0, lt=1)
    """When it argues for the right answer."""
    wrong: float = Field(0.5, gt=0, lt=1)
    """When it argues for the wrong answer."""


class SimulatedModel(Section):
    """An agent without a model, whose figures are known in closed form; see docs/oversight.md."""

    accuracy: float = Field(1.0, ge=0, le=1)
    """Share of questions that it answers right by itself, if it sees the article or there is
    none."""
    blind_accuracy: float = Field(0.5, ge=0, le=1)
    """The same without an article that others see."""
    persuasiveness: WinRates = Field(default_factory=WinRates)
    """Strength of its arguments, as shares of wins in consultancy."""
    spread: float = Field(0.0, ge=0)
    """Standard deviation of the strength of its arguments, in Elo points."""
    susceptibility: float = Field(1.0, ge=0)
    """Weight of arguments in its judgement. 0: it judges by its own accuracy alone."""


class LocalModel(CheckpointModel):
    """A checkpoint in a generator of the project."""

    kind: Literal["slots", "vllm"] = "slots"
    """Engine: the embedded slot engine, or vLLM."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """vLLM's environment and arguments."""


class ModelConfig(AskedModelConfig):
    """A participant, exactly one of `simulated`, `checkpoint` and `endpoint`, and its sampling.
    Models with equal `checkpoint` sections share one generator."""

    simulated: SimulatedModel | None = None
    """An agent without a model."""
    checkpoint: LocalModel | None = None
    """A model in the embedded generator or in vLLM."""
    endpoint: EndpointModel | None = None
    """A model behind an OpenAI-compatible HTTP server."""
    max_tokens: int = Field(512, ge=1)
    """Maximum length of a response, in tokens."""

    @model_validator(mode="after")
    def _exactly_one(self) -> ModelConfig:
        given = [name for name in ("simulated", "checkpoint", "endpoint") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise key_error(
                f"give one of simulated, checkpoint and endpoint, not {found}", "checkpoint"
            )
        return self


class WorkedExamples(Section):
    """Discussions that the judge reads before its own, with the right verdicts."""

    file: str
    """`transcripts.jsonl` of an earlier arm, preferably of the same protocol and other
    questions."""
    count: int = Field(3, ge=1)
    """Number of examples, from the beginning of the file. Examples of the question that is being
    judged are left out."""


class ArmConfig(Section):
    """A protocol with its participants."""

    protocol: ProtocolName
    """`direct`, `direct_article`, `consultancy`, `debate`, `open_consultancy` or `open_debate`."""
    judge: str = "judge"
    """Name of the judge's model."""
    agent: str = "agent"
    """Name of the model of the consultant or the first debater. Not used by `direct`."""
    opponent: str | None = None
    """Name of the second debater's model. null: the agent's."""
    preference: str | None = None
    """Name of the model that chooses among `best_of` candidates. null: the judge's."""
    rounds: int = Field(3, ge=1)
    """Rounds of arguments. The paper: 3."""
    best_of: int = Field(1, ge=1)
    """Candidates for each turn, of which the preference model chooses one. The paper: 4 in its
    best-of-n."""
    judge_samples: int = Field(1, ge=1)
    """Verdicts of the judge; the majority counts."""
    examples: WorkedExamples | None = None
    """Few-shot examples for the judge. null: zero-shot, as in the paper."""


class OversightConfig(Section):
    """A comparison of oversight protocols, as `tramontane oversight` reads it."""

    name: str = "oversight"
    """Name of the comparison, for display."""
    out: str
    """Folder of the transcripts, figures and page. A comparison that was stopped continues
    there."""
    seed: int = 0
    """Seed of sampling and of assigned sides."""
    questions: QuestionsConfig = Field(default_factory=QuestionsConfig)
    """The questions."""
    models: dict[Name, ModelConfig]
    """The participants by name."""
    arms: dict[Name, ArmConfig]
    """Protocols with their participants, by name. All pairs are compared."""
    wording: str = "default"
    """Prompts: `default`, `brief` (for models fine-tuned on it), or a YAML file of templates."""
    concurrent: int = Field(512, ge=1)
    """Discussions under way at once."""
    permutations: int = Field(10_000, ge=1)
    """Permutations of a paired test. The paper: 10,000."""

    @model_validator(mode="after")
    def _names(self) -> OversightConfig:
        if not self.arms:
            raise key_error("name at least one arm", "arms")
        for name, arm in self.arms.items():
            if name in PAGES:
                raise key_error(f"{name!r} is a file of the comparison; rename the arm", "arms")
            for role in ("judge", "agent", "opponent", "preference"):
                model = getattr(arm, role)
                if model is not None and role in arm.model_fields_set | cast_of(arm).keys():
                    self._check_model(model, f"arms.{name}.{role}")
            check_variety(self.models, cast_of(arm), arm, f"arms.{name}.")
        return self

    def _check_model(self, model: str, key: str) -> None:
        if model not in self.models:
            near = nearest(model, self.models)
            hint = f"did you mean {near!r}?" if near else f"there are {list(self.models)}"
            raise key_error(f"no model {model!r} in `models`; {hint}", key)


def check_variety(
    models: Mapping[str, ModelConfig], cast: Mapping[str, str], numbers: Any, place: str = ""
) -> None:
    """Several samples of a model that always answers the same would be one.

    Args:
        models: the participants by name.
        cast: names of models by role.
        numbers: section with `best_of` and `judge_samples`.
        place: beginning of its keys.

    Raises:
        ValidationError: several candidates or verdicts of a model at temperature 0.
    """
    keys = {"judge": "judge_samples", "agent": "best_of", "opponent": "best_of"}
    for role in sorted(keys.keys() & cast.keys()):
        key, model = keys[role], models[cast[role]]
        number = getattr(numbers, key)
        if number > 1 and not model.simulated and model.temperature == 0:
            raise key_error(
                f"{number} samples of {cast[role]!r} are equal at temperature 0; raise "
                f"models.{cast[role]}.temperature, or set {key} to 1",
                f"{place}{key}",
            )


def cast_of(arm: ArmConfig) -> dict[str, str]:
    """Names of the models by the roles that an arm has."""
    cast = {"judge": arm.judge}
    if arm.protocol in ("direct", "direct_article"):
        return cast
    cast["agent"] = arm.agent
    if arm.protocol.endswith("debate"):
        cast["opponent"] = arm.opponent or arm.agent
    if arm.best_of > 1:
        cast["preference"] = arm.preference or arm.judge
    return cast
