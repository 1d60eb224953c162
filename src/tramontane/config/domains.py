"""`verifier.domains`: the table of task kinds, and the response format that each requires."""

from __future__ import annotations

import os
import re
import sys
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tramontane.config.section import Section, key_error

IMPORT_PATH = r"^(?:\w+(?:\.\w+)+|pickle:[\w+/=-]+)$"
CONSENT = "TRAMONTANE_ALLOW_PICKLE"  # environment variable, set to 1 to load pickled functions
pickled_here: set[str] = set()  # paths of functions that this process has pickled itself
Column = Literal["answer", "tests"]
JUDGE = "judge"  # the verifier that is a model, `verifier.judge`
# The built-in verifiers.
VERIFIERS = ("math", "code", "instructions", "calls", "reasoning_gym", "verifiers", JUDGE)


class FormatConfig(Section):
    r"""The format that a response must have. A single word is `answer`: `format: boxed`. A pattern
    or a schema replaces it: `format: {regex: "Move: (\\w+)"}`."""

    answer: Literal["boxed", "fenced", "none"] = "none"
    r"""Condition on the answer part, the text after the thoughts: a balanced `\boxed{}` (`boxed`,
    the paper's for math), a fenced block with a language tag (`fenced`, the paper's for code), or
    `none`. The verifier receives the content of the last box, the first fenced block, or all of
    the answer part."""
    regex: str | None = None
    """Regular expression that must be found in the answer part. The verifier receives the last
    match: its group named `answer`, else its first group, else the whole match."""
    json_schema: dict[str, Any] | None = None
    """JSON schema that the answer part must satisfy, as a whole or as its last fenced block. The
    verifier receives the parsed value."""
    thinking: Literal["required", "optional"] | None = None
    """Thoughts between thinking tags before the answer part: `required`, or `optional`: a response
    without tags is all answer. null: required with `boxed` and `fenced`, as in the paper, else
    optional."""

    @property
    def needs_thoughts(self) -> bool:
        """True if a response without thinking tags is malformed."""
        default = "optional" if self.answer == "none" else "required"
        return (self.thinking or default) == "required"

    @property
    def has_conditions(self) -> bool:
        """True if a response can be malformed in other ways than an open thinking tag."""
        forms = self.regex, self.json_schema
        return self.needs_thoughts or self.answer != "none" or any(f is not None for f in forms)

    @field_validator("regex")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern

    @field_validator("json_schema")
    @classmethod
    def _is_schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is None:
            return None
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for

        try:
            validator_for(schema).check_schema(schema)
        except SchemaError as error:
            raise ValueError(f"not a JSON schema: {error.json_path}: {error.message}") from None
        return schema

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return {"answer": value or "none"}
        return value

    @model_validator(mode="after")
    def _one_condition(self) -> FormatConfig:
        forms = {"regex": self.regex, "json_schema": self.json_schema}
        named = [name for name, form in forms.items() if form is not None]
        if self.answer != "none":
            named.insert(0, "answer")
        if len(named) > 1:
            raise key_error(f"{' and '.join(named)} exclude each other; keep one", *named)
        return self


class DomainConfig(Section):
    """A kind of task: the verifier of its answers, and the format of its responses."""

    verifier: str | None = None
    """What decides correctness: one of the built-in verifiers `math`, `code`, `instructions`
    (IFEval's), `calls` (function calls), `reasoning_gym` (its scorers), `verifiers` (a task's
    rewards) and `judge` (the model in `verifier.judge`), or the import path of a function of
    (problem, answer), e.g. `my_task.check`. null: only the custom rewards
    (`verifier.reward.custom`) decide; see `pass_mark`."""
    format: FormatConfig = Field(default_factory=FormatConfig)
    """Format of the responses: `boxed`, `fenced`, `none`, `{regex: …}` or `{json_schema: …}`."""
    needs: tuple[Column, ...] = ()
    """Columns that every row must have, of `answer` and `tests`."""
    pass_mark: float = Field(1.0, gt=0, le=1)
    """Lowest result, from 0 to 1, that counts as right; 0.5 by default with the verifier `judge`,
    whose scores seldom reach 1. The result is the verifier's; without a verifier, it is the sum of
    the custom rewards as a share of the possible maximum."""
    timeout_s: float | None = Field(None, gt=0)
    """Time limit of one verdict, in seconds. null: `verifier.timeout_s`; for the verifier `code`,
    the time that the tests may take."""

    @model_validator(mode="before")
    @classmethod
    def _mark_of_a_judge(cls, raw: Any) -> Any:
        judged = isinstance(raw, dict) and raw.get("verifier") == JUDGE
        return {"pass_mark": 0.5} | raw if judged else raw

    @field_validator("verifier")
    @classmethod
    def _importable(cls, path: str | None) -> str | None:
        return path if path is None or path in VERIFIERS else checked_path(import_path(path))


def checked_path(path: str) -> str:
    """Return an import path unchanged, if a worker process can import it.

    Raises:
        ValueError: not an import path, or one in `__main__`, which other processes cannot import; a
            function of the standard library; or one pickled by another process, without consent.
    """
    if path.startswith("pickle:") and path not in pickled_here and os.environ.get(CONSENT) != "1":
        raise ValueError(
            f"a pickled function, and loading it runs whatever its author put there; if you trust "
            f"whoever made this config, allow it with the environment variable {CONSENT}=1; "
            f"otherwise name the function as module.function (docs/trust.md)"
        )
    if file := re.fullmatch(r"(.+)\.py\.(\w+)", path):
        module = file[1].strip("./").replace("/", ".")
        raise ValueError(f"{path!r} names a file; name the function as {module}.{file[2]}")
    if not re.fullmatch(IMPORT_PATH, path):
        raise ValueError(f"{path!r} is not an import path; name the function as module.function")
    if path.startswith("__main__."):
        raise ValueError(
            f"{path!r}: other processes cannot import __main__; move the function to a module, or "
            f"pass the function itself to tramontane.train(rewards=[…])"
        )
    if path.partition(".")[0] in sys.stdlib_module_names:
        raise ValueError(
            f"{path!r}: a function of Python itself, which would be called with the texts of rows "
            f"and responses; name a function of a module of your own"
        )
    return path


def import_path(path: str) -> str:
    """An import path in the form `module.Name`, from that form or from `module:Name`."""
    return path if path.startswith("pickle:") else path.replace(":", ".", 1)


BUILT_IN: dict[str, DomainConfig] = {
    "math": DomainConfig(verifier="math", format=FormatConfig(answer="boxed"), needs=("answer",)),
    "code": DomainConfig(verifier="code", format=FormatConfig(answer="fenced"), needs=("tests",)),
    "instructions": DomainConfig(verifier="instructions"),
    "calls": DomainConfig(verifier="calls"),
    # The first verdict of a worker imports the package.
    "reasoning_gym": DomainConfig(
        verifier="reasoning_gym", format=FormatConfig(answer="boxed"), timeout_s=30.0
    ),
    # The first verdict of a worker imports the package and loads the set; a rubric may ask a judge.
    "verifiers": DomainConfig(verifier="verifiers", timeout_s=60.0),
}


def with_built_in(value: Any) -> Any:
    """A table of domains as given, with the built-in entries added."""
    if not isinstance(value, dict):
        return value
    table: dict[Any, Any] = dict(BUILT_IN)
    for name, entry in value.items():
        if name in BUILT_IN and isinstance(entry, dict):
            entry = BUILT_IN[name].model_dump(exclude_unset=True) | entry
        table[name] = entry
    return table
