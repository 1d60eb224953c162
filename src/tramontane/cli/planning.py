"""Commands for what comes before a run: plan, config and doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tramontane import api
from tramontane.cli.terminal import LOOK, app, console, say
from tramontane.workplace import check_file, write_whole


@app.command(rich_help_panel=LOOK)
def plan(
    model: Annotated[
        str, typer.Option(help="A known shape, e.g. llama-3.1-8b, a config.json, or a model.")
    ] = "mistral-small-24b",
    gpus: Annotated[
        int, typer.Option(help="Number of GPUs for generators and trainer together.")
    ] = 64,
    assumptions: Annotated[
        list[str] | None, typer.Argument(help="Any printed assumption as key=value.")
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="a100, b200, h100, h200, l40s, or a report of benchmarks.bounds.")
    ] = "h100",
    n_batch: Annotated[int, typer.Option(help="Completions an update.")] = 2048,
    length_mean: Annotated[int, typer.Option(help="Mean tokens per completion.")] = 6000,
    length_max: Annotated[int, typer.Option(help="Tokens of the longest completion.")] = 32000,
    out: Annotated[Path | None, typer.Option(help="Also write the config to this file.")] = None,
) -> None:
    """Split GPUs between generators and trainers by calculation, and print a config."""
    sizes = {"gpu": gpu, "n_batch": n_batch, "length_mean": length_mean, "length_max": length_max}
    if out is not None:
        check_file(out)
    found = api.plan(sizes | {"model": model, "gpus": gpus}, assumptions)
    assumed = ", ".join(f"{key}={value}" for key, value in found.assumptions.items())
    say(f"assumed: {assumed}")
    shown = Table("", "asynchronous", "synchronous, together")
    for name, *values in found.rows():
        shown.add_row(name, *values)
    console.print(shown)
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
            help="A section, e.g. pipeline or trainer.objective; or the config of another command: "
            "sft, curate, harvest, medium, small, plan, study, oversight or judged; e.g. "
            "curate.code."
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
    from tramontane.oversight.config import OversightConfig
    from tramontane.oversight.reward import JudgedConfig
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
        "oversight": OversightConfig,
        "judged": JudgedConfig,
    }
    if markdown:
        print(reference.markdown(roots), end="")
        return
    entry = reference.find(roots, section or "")
    console.print(Text(entry.description))
    for key in entry.keys:
        console.print(f"\n[bold]{key.path}[/]  {escape(key.summary)}", highlight=False)
        console.print(Padding(Text(key.description), (0, 0, 0, 4), expand=False))
    if entry.subsections:
        path = next(iter(entry.subsections.values())).title
        say(f"\nKeys of a section: tramontane config {path}")
    if not entry.title:
        say(
            "Other configs: tramontane config sft, curate, harvest, medium, small, plan, study, "
            "oversight or judged",
        )


@app.command(rich_help_panel=LOOK)
def doctor() -> None:
    """Report what works on this machine and how to fix the rest; exit code 1 if a required part is
    missing."""
    marks = {"ok": "[green]ok[/]", "missing": "[bold red]missing[/]", "optional": "[dim]absent[/]"}
    findings = api.doctor()
    table = Table("", "", "found")
    for finding in findings:
        table.add_row(finding.name, marks[finding.state], escape(finding.found))
    console.print(table)
    for finding in findings:
        if finding.mend:
            say(f"{finding.name}: {finding.mend}")
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)
