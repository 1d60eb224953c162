"""Commands before and after a run: plan, config, doctor, view and look."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

import tramontane
from tramontane import plugins
from tramontane.cli.terminal import LOOK, app, console, say, show_table
from tramontane.errors import InputError, install
from tramontane.workplace import check_file, write_whole


@app.command(rich_help_panel=LOOK)
def plan(
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            help="model=MODEL gpus=NUMBER, and any printed assumption, as key=value.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the config to this file.")] = None,
) -> None:
    """Split GPUs between generators and trainers by calculation, and print a config."""
    from tramontane.config import parse_settings
    from tramontane.planning.config import PlanConfig

    config = parse_settings(PlanConfig, {}, keys or [], "plan")
    if out is not None:
        check_file(out)
    found = tramontane.plan(config)
    assumed = ", ".join(f"{key}={value}" for key, value in found.assumptions.items())
    say(f"assumed: {assumed}")
    show_table(("", "asynchronous", "synchronous, together"), found.rows())
    for line in found.memory.verdicts():
        say(line)
    typer.echo(f"\n{found.config_file}", nl=False)
    if out is not None:
        write_whole(out, found.config_file)


@app.command(name="config", rich_help_panel=LOOK)
def show_config(
    section: Annotated[
        str | None,
        typer.Argument(
            help="A section or key, e.g. pipeline or pipeline.l_max; or the config of another "
            "command: sft, curate, harvest, medium, small, plan, study, or one of an installed "
            "package; e.g. curate.code."
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print all keys of all configs as Markdown.")
    ] = False,
) -> None:
    """Describe the keys of a config: type, range, default and meaning."""
    from tramontane.config import Config, Section, reference
    from tramontane.config.sft import SFTConfig
    from tramontane.curation.config import CurateConfig
    from tramontane.planning.config import PlanConfig
    from tramontane.recipes.config import HarvestConfig, MediumRecipe, SmallRecipe
    from tramontane.studies.study import Study

    roots: dict[str, type[Section]] = {
        "": Config,
        "sft": SFTConfig,
        "curate": CurateConfig,
        "harvest": HarvestConfig,
        "medium": MediumRecipe,
        "small": SmallRecipe,
        "plan": PlanConfig,
        "study": Study,
    }
    roots |= {name: plugins.load(found) for name, found in plugins.offered(plugins.CONFIGS).items()}
    if markdown:
        print(reference.markdown(roots), end="")
        return
    name = (section or "").partition(".")[0]
    if name not in roots and (remedy := plugins.remedy(plugins.CONFIGS, name)):
        raise InputError(remedy)
    entry = reference.find(roots, section or "")
    console.print(Text(entry.description))
    asked = [key for key in entry.keys if f".{section}".endswith(f".{key.path}")]
    for key in asked or entry.keys:
        console.print(f"\n[bold]{key.path}[/]  {escape(key.summary)}", highlight=False)
        console.print(Padding(Text(key.description), (0, 0, 0, 4), expand=False))
    if entry.subsections and not asked:
        path = next(iter(entry.subsections.values())).title
        say(f"\nKeys of a section: tramontane config {path}")
    if not entry.title:
        say(f"Other configs: tramontane config {', '.join(filter(None, roots))}")


@app.command(rich_help_panel=LOOK)
def doctor(
    chat: Annotated[
        str | None,
        typer.Option(help="Try a model's chat template on conversations instead.", metavar="MODEL"),
    ] = None,
) -> None:
    """Report what works on this machine and how to fix the rest; exit code 1 if a required part is
    missing."""
    marks = {"ok": "[green]ok[/]", "missing": "[bold red]missing[/]", "optional": "[dim]absent[/]"}
    findings = tramontane.doctor(chat)
    show_table(("", "", "found"), ((f.name, marks[f.state], escape(f.found)) for f in findings))
    for finding in findings:
        if finding.remedy:
            say(f"{finding.name}: {finding.remedy}")
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


@app.command(rich_help_panel=LOOK)
def view(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or a folder of run folders, such as runs.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = False,
) -> None:
    """Show runs on a local page: curves, rollouts, groups, comparisons, audits, timeline."""
    from tramontane.view.server import view as serve

    def announce(address: str) -> None:
        say(address)
        say("Ctrl-C ends it")
        if browser:
            typer.launch(address)

    serve(runs, port, announce)


@app.command(rich_help_panel=LOOK)
def look(run: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Show a run in the terminal: progress, curves, rollouts; live while it trains."""
    if find_spec("textual") is None:
        raise InputError(f"the terminal's view is not installed: {install('look')}")
    from tramontane.view.terminal import look as show

    show(run)
