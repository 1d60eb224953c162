"""A model to ask outside the loop: a checkpoint or an endpoint, and the sampling of its answers."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from tramontane.config.device import Device, Dtype, Model
from tramontane.config.generator import Stop
from tramontane.config.prompt import PromptConfig, TagPair
from tramontane.config.resume import MayChange
from tramontane.config.section import Section, key_error
from tramontane.models.names import with_tokenizer


class CheckpointModel(Section):
    """A model that runs in the embedded generator."""

    path: Model
    """The model, named as in a training run's `model`."""
    tokenizer: Model | None = None
    """Tokenizer, named like a model. null: the model's own."""
    slots: int = Field(128, ge=1)
    """Maximum number of answers decoded at once."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt, in tokens. Longer prompts get no answer."""
    device: Device = "auto"
    """Device: auto, cpu, cuda, cuda:N or mps. auto: as in a training run's `trainer.device`."""
    dtype: Dtype = "auto"
    """Number type of weights, keys and values. auto: as in a training run's `trainer.dtype`."""
    stop: tuple[Stop, ...] = ()
    """Texts and token ids that end an answer, as in a training run's `generator.stop`."""

    @property
    def files(self) -> str:
        """The checkpoint to load: `path`, with the tokenizer of `tokenizer`."""
        return with_tokenizer(self.path, self.tokenizer)


# Names of secrets, which no config may hold.
_SECRETS = {"key", "api_key", "apikey", "authorization", "token", "access_token", "password"}


class EndpointModel(Section):
    """A server that speaks OpenAI's chat completions API."""

    url: MayChange[str] = Field(pattern=r"^https?://\S+$")
    """Base URL of the API; usually ends in /v1."""
    model: str
    """The server's name for the model."""
    key_variable: MayChange[str | None] = None
    """Environment variable that holds the API key. null: no key is sent."""
    concurrency: MayChange[int] = Field(32, ge=1)
    """Requests in flight at once."""
    timeout_s: MayChange[float] = Field(600.0, gt=0)
    """Time limit of one request, in seconds."""
    retries: MayChange[int] = Field(6, ge=0)
    """Number of retries of a failed or late request."""
    backoff_s: MayChange[float] = Field(1.0, gt=0)
    """Pause before the first retry, in seconds; doubles with each retry."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Additional keys of the request body. A null value removes a key."""

    @field_validator("url")
    @classmethod
    def _without_key(cls, url: str) -> str:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError(
                "an address with a user, a key or a query would be written to configs, logs and "
                "reports; put the key into an environment variable, and name that in key_variable"
            )
        return url

    @field_validator("extra")
    @classmethod
    def _no_key(cls, extra: dict[str, Any]) -> dict[str, Any]:
        if found := [name for name in extra if name.lower().replace("-", "_") in _SECRETS]:
            raise ValueError(
                f"{found[0]}: would be written to configs and reports; put it into an environment "
                f"variable, and name that in key_variable"
            )
        return extra


class ModelConfig(PromptConfig):
    """The model that a stage asks, exactly one of `checkpoint` and `endpoint`, and its sampling."""

    checkpoint: CheckpointModel | None = None
    """A model that runs in the embedded generator."""
    endpoint: EndpointModel | None = None
    """A model behind an HTTP server."""
    thinking_tags: TagPair | None = None
    """Thinking tags of the model, as in a training run's `verifier.thinking_tags`. null for an
    endpoint: `<think>` and `</think>`."""
    temperature: float = Field(0.7, ge=0)
    """Sampling temperature; 0 is greedy. The paper: 0.7 in evaluation."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Probability mass to sample from."""
    max_tokens: int = Field(4096, ge=1)
    """Maximum length of an answer, in tokens."""
    seed: int = 0
    """Seed of sampling."""

    @model_validator(mode="after")
    def _prefix(self) -> ModelConfig:
        for name in ("response_prefix", "chat_template"):
            if self.endpoint and getattr(self, name):
                raise key_error(
                    "an endpoint writes its prompts itself; leave it out, or take a checkpoint",
                    name,
                )
        return self

    @property
    def name(self) -> str:
        """Name of the model, as recorded in the rows that it answered."""
        if self.endpoint:
            return self.endpoint.model
        return self.checkpoint.path if self.checkpoint else ""
