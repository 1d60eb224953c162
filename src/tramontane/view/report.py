"""The report of a run: the page of `tramontane view` in one file, `report.html`, with its data.

It answers the page's requests from the file, so it needs neither a server nor a network. It holds
only a sample of the rollouts: some groups of three updates.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from tramontane.errors import InputError
from tramontane.pages import STYLE
from tramontane.view import charts, details
from tramontane.view.runs import Run, dumps
from tramontane.view.summary import summary
from tramontane.view.timeline import timeline
from tramontane.workplace import write_whole

Row = dict[str, Any]
STATIC = Path(str(resources.files("tramontane.view") / "static"))
MAX_TOKENS = 4_000  # of an update's completions that are shown with their tokens
MAX_COMPLETION = 2_000  # tokens shown of one of them
MAX_GROUPS = 6  # shown of an update
MAX_ACTIVITIES = 4_000  # of the timeline; the newest
POLICY = (  # like the server's, except for what is inside the page
    "default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; "
    "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into a run's folder, from everything written so far.

    Returns:
        The report's path.

    Raises:
        InputError: a file of the run is damaged.
    """
    run = Run(Path(run_dir), 0)
    path = run.path / "report.html"
    write_whole(path, page(answers(run)))
    return path


def answers(run: Run) -> Row:
    """What the page asks for, by path and parameters except the run."""
    shown = summary(run)
    found: Row = {
        "runs": [run.describe()],
        "charts": charts.sections(),
        "metrics": run.metrics(0, 0) | {"finished": run.describe()["finished"]},
        "evaluations": run.measured(),
        "summary": shown,
        "timeline": timeline(run.path, MAX_ACTIVITIES),
    }
    updates: dict[int, list[int]] = {}  # rows of the completions to show
    for trace in shown["traces"]:
        updates.setdefault(trace["update"], []).append(trace["row"])
    for update, shown_rows in [*updates.items()]:
        try:
            groups, rows = _groups(run, update, shown_rows)
        except InputError:  # texts are damaged, which `tramontane audit` names
            del updates[update]
            continue
        found[f"groups?update={update}"] = groups
        for place, completion in _completions(run, update, [*shown_rows, *rows]):
            found[f"rollout?row={place}&update={update}"] = completion
    shown["traces"] = [t for t in shown["traces"] if t["update"] in updates]
    return found | {"facets": {"updates": [*updates]}}


def _groups(run: Run, update: int, shown: list[int]) -> tuple[Row, list[int]]:
    """Some groups of an update, those of the rows `shown` first, and the other rows in them."""
    found = details.groups(run, update)

    def without(group: Row) -> bool:
        return all(completion["row"] not in shown for completion in group["completions"])

    groups = sorted(found["groups"], key=without)[:MAX_GROUPS]
    rows = [c["row"] for group in groups for c in group["completions"] if c["row"] not in shown]
    return found | {"groups": groups, "left_out": len(found["groups"]) - len(groups)}, rows


def _completions(run: Run, update: int, rows: list[int]) -> Iterator[tuple[int, Row]]:
    """The completions of these rows with their tokens, up to `MAX_TOKENS`."""
    left = MAX_TOKENS
    for row, found in zip(rows, details.rollouts(run, update, rows), strict=True):
        pieces = found["turns"] or [found]
        count = sum(len(piece["token_ids"]) for piece in pieces)
        shown = min(count, MAX_COMPLETION)
        if (left := left - shown) < 0:
            return
        for name in ("group_rows", "text", "version_spans"):  # those of its group are in `groups`
            found.pop(name, None)
        for piece in pieces:
            length = len(piece["token_ids"])
            for name in details.TOKENWISE:
                piece[name] = piece[name] and piece[name][:shown]
            for name in ("logprobs", "log_ratios"):
                piece[name] = piece[name] and [round(x, 4) for x in piece[name]]
            piece["left_out"] = length - len(piece["token_ids"])
            shown -= len(piece["token_ids"])
        yield row, found


# --------------------------------------------------------------------------------- the file


def page(found: Row) -> str:
    """The page with its styles, scripts and answers inside.

    The answers cannot close their element, since they contain no `<`, and the page's policy lets no
    script but its own run.
    """
    html = (STATIC / "index.html").read_text("utf-8")
    styles, scripts = list[str](), list[str]()

    def style(match: re.Match[str]) -> str:
        styles.append(_read(match[1]))
        return f"<style>{styles[-1]}</style>"

    def script(match: re.Match[str]) -> str:
        scripts.append(bundle(match[2]) if match[1] else _read(match[2]))
        return f"<script{match[1] or ''}>{scripts[-1]}</script>"

    icon = base64.b64encode((STATIC / "icon.svg").read_bytes()).decode()
    html = html.replace('="icon.svg"', f'="data:image/svg+xml;base64,{icon}"')
    html = re.sub(r'<link rel="stylesheet" href="(.+)">', style, html)
    html = re.sub(r'<script( type="module")? src="(.+)"></script>', script, html)
    policy = POLICY.format(scripts=_hashes(scripts), styles=_hashes(styles))
    head = f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    data = dumps(_rounded(found)).decode().replace("<", "\\u003c")
    inside = f'<script type="application/json" id="answers">{data}</script>\n</body>'
    return html.replace("<head>", head).replace("</body>", inside)


def _read(name: str) -> str:
    return (STYLE if name == STYLE.name else STATIC / name).read_text("utf-8")


def _hashes(texts: list[str]) -> str:
    """Sources of a Content-Security-Policy that allow these texts."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in texts)
    return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)


def bundle(name: str, modules: dict[str, str] | None = None) -> str:
    """A module and those that it imports as one script, each in its own function."""
    modules = {} if modules is None else modules
    text = _read(name)
    for imported in re.findall(r'^import .+ from "\./(.+)";$', text, re.MULTILINE):
        if imported not in modules:
            bundle(imported, modules)
    exported = re.findall(
        r"^export (?:async )?(?:const|let|class|function) (\w+)", text, re.MULTILINE
    )
    text = re.sub(r'^import \* as (\w+) from "\./(.+)";$', r'const \1 = modules["\2"];', text,
                  flags=re.MULTILINE)  # fmt: skip
    text = re.sub(r'^import (\{.+\}) from "\./(.+)";$', r'const \1 = modules["\2"];', text,
                  flags=re.MULTILINE)  # fmt: skip
    text = re.sub(r"^export ", "", text, flags=re.MULTILINE)
    names = ", ".join(f"get {word}() {{ return {word}; }}" for word in exported)
    modules[name] = f'modules["{name}"] = (() => {{\n{text}\nreturn {{ {names} }};\n}})();\n'
    return "const modules = {};\n" + "".join(modules.values())


def _rounded(value: Any) -> Any:
    """Numbers with six digits, since no chart shows more; times since the epoch are unchanged."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) and abs(value) < 1e6 else value
