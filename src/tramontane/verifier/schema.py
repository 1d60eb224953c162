"""JSON answers: parsed strictly, and checked against a domain's JSON schema (by `jsonschema`)."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def read_json(text: str, schema: dict[str, Any]) -> tuple[str, Any]:
    """The failed condition on a JSON text (empty if none), and the parsed value.

    The reason names the place and the schema's keyword, not the value, so that equal errors of
    different completions can be counted together.

    Raises:
        Exception: the schema refers to another document, which is never fetched.
    """
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return "no JSON in the answer part", None
    registry: Registry[Any] = Registry()  # the default one reads from the network
    errors = validator_for(schema)(schema, registry=registry).iter_errors(value)
    if (error := best_match(errors)) is not None:
        return f"JSON does not fit the schema at {error.json_path} ({error.validator})", None
    return "", value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
