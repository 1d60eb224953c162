"""The page's requests and answers. Every path begins with the token; everything is read-only."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import pyarrow.compute as pc
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from tramontane.errors import InputError
from tramontane.pages import STYLE
from tramontane.view import answers, charts, details, search
from tramontane.view.report import STATIC, bundle
from tramontane.view.runs import Run, dumps, side_by_side
from tramontane.view.summary import summary
from tramontane.view.table import curve
from tramontane.view.timeline import timeline

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
# Only the page's own scripts and styles, no other source, and no text that becomes HTML.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MOST_ROWS = 200  # in one response
MAIN, SCRIPT = "app.js", "text/javascript"


class Json(Response):
    """A JSON response, with null for numbers that JSON lacks."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


def make_app(runs: list[Run], token: str) -> FastAPI:
    """The application that shows these runs under `/TOKEN/`.

    A request is rejected without the token (403), or with a `Host` that is not this machine's
    loopback name (400): a page on another site can provide neither.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, default_response_class=Json)

    @app.middleware("http")
    async def guard(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host")
        first = request.url.path.lstrip("/").partition("/")[0]
        if host not in LOOPBACK:
            response = Response("this page answers on the loopback address only", 400)
        elif not secrets.compare_digest(first.encode(), token.encode()):
            response = Response("the address lacks the token that `tramontane view` printed", 403)
        else:
            response = await call_next(request)
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(InputError)  # of a search, or of a damaged file (`errors.reading`)
    def unreadable(_: Request, error: InputError) -> Response:
        return Json({"detail": str(error)}, 422)

    app.state.runs = runs
    app.include_router(api, prefix=f"/{token}/api")
    app.add_api_route(f"/{token}/{STYLE.name}", lambda: FileResponse(STYLE))
    # With all that it imports: one request, not one for each module.
    app.add_api_route(f"/{token}/{MAIN}", lambda: Response(bundle(MAIN), media_type=SCRIPT))
    app.mount(f"/{token}", StaticFiles(directory=STATIC, html=True))
    return app


def chosen(request: Request, run: int) -> Run:
    """The run with this number."""
    runs: list[Run] = request.app.state.runs
    if not 0 <= run < len(runs):
        raise HTTPException(404, "no such run")
    return runs[run]


api = APIRouter()
Chosen = Annotated[Run, Depends(chosen)]


@api.get("/runs")
def list_runs(request: Request) -> Json:
    return Json([run.describe() for run in request.app.state.runs])


@api.get("/table")
def show_table(request: Request) -> Json:
    """The table of the runs."""
    runs: list[Run] = request.app.state.runs
    found = side_by_side(runs)
    for row, run in zip(found.rows, runs, strict=True):
        row |= {"run": run.number, "fault": row["fault"] or run.fault}
    return Json(vars(found))


@api.get("/curve")
def show_curve(request: Request, metric: str) -> Json:
    """A metric of every run over its updates: by the run's number."""
    runs: list[Run] = request.app.state.runs
    return Json({run.number: curve(run.path, metric) for run in runs})


@api.get("/charts")
def list_charts() -> Json:
    return Json(charts.sections())


@api.get("/summary")
def show_summary(run: Chosen) -> Json:
    return Json(summary(run))


@api.get("/metrics")
def metrics(run: Chosen, offset: Annotated[int, Query(ge=0)] = 0, mark: int = 0) -> Json:
    return Json(run.metrics(offset, mark) | {"finished": run.describe()["finished"]})


@api.get("/evaluations")
def list_evaluations(run: Chosen) -> Json:
    return Json(run.measured())


@api.get("/facets")
def facets(run: Chosen) -> Json:
    """The values that a search can filter by, with their counts."""
    table = run.rollouts.table()
    found: dict[str, Any] = {"total": len(table), "damaged": run.rollouts.damaged}
    for name in ("verdict", "language", "domain", "finish_reason", "filtered", "ending"):
        counted = pc.value_counts(table[name]).to_pylist()
        found[name] = dict(Counter({str(c["values"]): c["counts"] for c in counted}).most_common())
    called = Counter(table["tools"].drop_null().to_pylist())
    tools = Counter(tool for names in called.elements() for tool in names.strip(",").split(","))
    found["tool"] = dict(tools.most_common())
    found["updates"] = sorted({part.update for part in run.rollouts.refresh() if part.update})
    found["missing"] = sorted(run.rollouts.missing)
    for name in ("reward", "tokens", "newest", "oldest"):
        ends = pc.min_max(table[name]).as_py()
        found[f"{name}_range"] = [ends["min"], ends["max"]]
    return Json(found)


@api.get("/rollouts")
def find_rollouts(
    run: Chosen,
    query: Annotated[search.Query, Depends()],
    sort: str = "update",
    descending: bool = True,
    offset: int = 0,
    limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 50,
    by: Literal["completion", "group"] = "completion",
) -> Json:
    if sort not in search.SORTS:
        raise HTTPException(422, f"sort must be one of {', '.join(search.SORTS)}")
    found = run.searches.find(query)
    found.advance(search.SECONDS)
    page = found.groups if by == "group" else found.page
    return Json(page(sort, descending, max(0, offset), limit))


@api.get("/rollout")
def one_rollout(run: Chosen, update: int, row: int) -> Json:
    try:
        return Json(details.rollout(run, update, row))
    except KeyError:
        raise HTTPException(404, f"update {update} has no completion {row}") from None


@api.get("/groups")
def list_groups(run: Chosen, update: int) -> Json:
    return Json(details.groups(run, update))


@api.get("/problems")
def list_problems(
    request: Request,
    among: Annotated[str, Query(pattern="^[0-9]{1,6}(:[\\w-]*)?(,[0-9]{1,6}(:[\\w-]*)?)*$")],
    part: str = "",
    limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 100,
) -> Json:
    """`among` has the number of each run and, after a colon, the source of its answers."""
    sides = [side.partition(":") for side in among.split(",")]
    runs = [chosen(request, int(number)) for number, _, _ in sides]
    return Json(answers.problems(runs, [source for _, _, source in sides], part, limit))


@api.get("/answers")
def list_answers(run: Chosen, problem_id: str) -> Json:
    return Json(answers.answers(run, problem_id))


@api.get("/audit")
def audit(run: Chosen) -> Json:
    return Json(run.findings())


@api.get("/timeline")
def show_timeline(run: Chosen) -> Json:
    return Json(timeline(run.path))
