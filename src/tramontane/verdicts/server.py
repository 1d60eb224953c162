"""Verdicts over HTTP, for trainers in another environment or language: `tramontane verify --serve`.

`POST ADDRESS/verify` takes `{"kind": "math", "rows": [{"text": …, "answer": …}, …]}` and gives
`{"verdicts": [{"reward": 1.0, "verdict": "right", …}, …]}`, one for each row in order. `POST
ADDRESS/openrlhf` takes and gives what OpenRLHF sends to a remote reward model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from secrets import compare_digest
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from tramontane import loopback
from tramontane.errors import InputError
from tramontane.verdicts import openrlhf
from tramontane.verdicts.grader import Grader, Kind, Sample
from tramontane.verdicts.reasons import as_json

MOST_ROWS = 4096  # of one request


class Row(BaseModel):
    """One completion; see `grader.Sample`."""

    model_config = ConfigDict(extra="forbid")
    text: str
    answer: str | None = None
    tests: Any = None
    problem: str = ""
    language: str | None = None
    n_tokens: int = Field(0, ge=0)


class Request(BaseModel):
    """Completions to grade; see `grader.Grader`."""

    model_config = ConfigDict(extra="forbid")
    kind: Kind = "math"
    l_max: int | None = Field(None, ge=1)
    l_cache: int = Field(0, ge=0)
    rows: list[Row] = Field(max_length=MOST_ROWS)


class RemoteReward(BaseModel):
    """What OpenRLHF sends."""

    query: list[str] = Field(max_length=MOST_ROWS)
    prompts: list[str]
    labels: list[Any]


def make_app(key: str, settings: Mapping[str, Any]) -> FastAPI:
    """The application; `key` stands in its paths, and `settings` are keys of `verifier`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    def check(given: str) -> None:
        if not compare_digest(given.encode(), key.encode()):
            raise HTTPException(401, "the address lacks the key: http://HOST:PORT/KEY/verify")

    @app.post("/{given}/verify")
    async def verify(given: str, body: Request) -> dict[str, Any]:
        check(given)
        grader = Grader(body.kind, body.l_max, body.l_cache, settings)
        verdicts = await grader.grade_async([Sample(**dict(row)) for row in body.rows])
        return {"verdicts": [as_json(verdict) for verdict in verdicts]}

    @app.post("/{given}/openrlhf")
    async def remote_reward(given: str, body: RemoteReward) -> dict[str, Any]:
        check(given)
        if not len(body.query) == len(body.prompts) == len(body.labels):
            raise HTTPException(400, "query, prompts and labels differ in length")
        samples = openrlhf.samples(body.query, body.prompts, body.labels)
        return openrlhf.scores(await Grader("math", settings=settings).grade_async(samples))

    @app.exception_handler(InputError)
    def refused(_: Any, error: InputError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 400)

    return app


def serve(
    settings: Mapping[str, Any],
    host: str = loopback.HOST,
    port: int = 0,
    on_address: Callable[[str], None] | None = None,
) -> None:
    """Answer requests until `Ctrl-C`.

    Args:
        settings: keys of `verifier`, for all requests.
        host: address to listen on; the key in the address is all that protects the workers.
        port: port to listen on; 0: any free one.
        on_address: called with the address, `http://HOST:PORT/KEY`.

    Raises:
        InputError: an invalid setting, or the port is taken.
    """
    Grader("math", settings=settings)
    with loopback.listening(port, host) as address:
        if on_address:
            on_address(address.url)
        loopback.server(make_app(address.key, settings)).run(sockets=[address.socket])
