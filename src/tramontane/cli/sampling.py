"""Commands that sample from a model: eval, compare and generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tramontane import api
from tramontane.cli.terminal import MEASURE, Overrides, app, console, progress_bar, say

Stops = Annotated[
    list[str] | None, typer.Option("--stop", help="A text that ends a completion; may be repeated.")
]
SamplingConfig = Annotated[
    Path | None,
    typer.Option(
        help="A YAML with prompts, verifier and generator, such as a training config; by default "
        "that of the run whose checkpoint the model is."
    ),
]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="The config's l_max by default, 512 without a config.")
]
Seed = Annotated[int | None, typer.Option(help="The config's by default, else 0.")]
DeviceName = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:N or mps")]
NumberType = Annotated[str | None, typer.Option("--dtype", help="float32 or bfloat16")]


@app.command(name="eval", rich_help_panel=MEASURE)
def evaluate(
    model: Annotated[str, typer.Argument(help="tiny, a checkpoint folder, or a model name")],
    data: Annotated[str, typer.Argument(help="playground:, a file, or a dataset name")],
    overrides: Overrides = None,
    problems: Annotated[
        int | None,
        typer.Option(min=1, help="At most; all of a file or dataset, 256 of a source without end."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Completions of each problem; 4 by default.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0.7 by default.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 by default.")] = None,
    top_k: int = 0,
    max_tokens: MaxTokens = None,
    slots: Annotated[int, typer.Option(min=1, help="Completions at once.")] = 128,
    seed: Seed = None,
    device: DeviceName = None,
    dtype: NumberType = None,
    workers: Annotated[int | None, typer.Option(min=1, help="verifier.workers")] = None,
    config: SamplingConfig = None,
    out: Annotated[
        Path,
        typer.Option(
            help="JSONL of every completion; an unfinished file of the same command is continued."
        ),
    ] = Path("eval.jsonl"),
    stop: Stops = None,
) -> None:
    """Measure pass@1, pass@k and maj@k with 95 % intervals, with the prompts of training."""
    texts = list(overrides or [])
    texts += [] if workers is None else [f"verifier.workers={workers}"]
    sampling = {
        "problems": problems,
        "samples": samples,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_tokens": max_tokens,
        "slots": slots,
        "seed": seed,
    }
    with progress_bar() as progress:
        bar = progress.add_task("evaluating", total=None)
        result = api.evaluate(
            model,
            data,
            config,
            [*_generator_keys(device, dtype, stop), *texts],
            write_to=out,
            on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
            **_given(sampling),
        )
    console.print(_evaluation_table(result))
    completions = result.n_problems * result.samples
    for line in result.malformed.explain(completions):
        say(line)
    _print_origin(model, config)
    say(f"{result.n_problems} problems × {result.samples}; every completion: {out}")


@app.command(rich_help_panel=MEASURE)
def compare(
    models: Annotated[
        list[str],
        typer.Argument(help="MODEL or LABEL=MODEL; the others are compared to the first."),
    ],
    on: Annotated[
        list[str],
        typer.Option(
            help="A suite (aime24), a source of problems, or NAME=SOURCE; may be repeated."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for completions, results and pages.")] = Path(
        "comparison"
    ),
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any config key as key.sub=value.")
    ] = None,
    problems: Annotated[
        int | None,
        typer.Option(min=1, help="At most; all of a file or dataset, 256 of a source without end."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Completions of each problem; the suite's by default.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="The suite's by default.")] = None,
    top_p: Annotated[float | None, typer.Option(help="The suite's by default.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The suite's by default.")] = None,
    slots: Annotated[int, typer.Option(min=1, help="Completions at once.")] = 128,
    seed: Seed = None,
    config: SamplingConfig = None,
) -> None:
    """Measure several models on several suites, and test differences problem by problem."""
    from rich.markdown import Markdown

    from tramontane.evaluation.comparison import markdown

    sampling = {
        "problems": problems,
        "samples": samples,
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_tokens,
        "slots": slots,
        "seed": seed,
    }
    with progress_bar() as progress:
        bar = progress.add_task("starting", total=None)
        found = api.compare(
            models,
            on,
            out,
            config,
            settings or [],
            on_progress=lambda suite, model, done, total: progress.update(
                bar, description=f"{suite}, {model}", completed=done, total=total
            ),
            **_given(sampling),
        )
    console.print(Markdown(markdown(found)))
    say(f"every completion, and the page comparison.html: {out}")


@app.command(rich_help_panel=MEASURE)
def generate(
    model: Annotated[str, typer.Argument(help="tiny, a checkpoint folder, or a model name")],
    prompt: Annotated[str, typer.Argument(help="The problem.")],
    overrides: Overrides = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Completions.")] = 1,
    temperature: Annotated[float | None, typer.Option(help="0.7 by default.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 by default.")] = None,
    top_k: int = 0,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    device: DeviceName = None,
    dtype: NumberType = None,
    config: SamplingConfig = None,
    system_prompt: Annotated[str | None, typer.Option(help="data.system_prompt")] = None,
    response_prefix: Annotated[str | None, typer.Option(help="data.response_prefix")] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(help="data.chat_template_kwargs, e.g. '{enable_thinking: false}'."),
    ] = None,
    stop: Stops = None,
) -> None:
    """Print completions of a prompt, formatted as in training."""
    prompts = {
        "data.system_prompt": system_prompt,
        "data.response_prefix": response_prefix,
        "data.chat_template_kwargs": chat_template_kwargs,
    }
    texts = [f"{key}={value}" for key, value in prompts.items() if value is not None]
    sampling = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    texts = [*_generator_keys(device, dtype, stop), *texts, *(overrides or [])]
    for text in api.generate(model, prompt, config, texts, n=n, **_given(sampling)):
        print(text)


def _evaluation_table(result: Any) -> Table:
    table = Table("", "value", "95 % interval")
    estimates = {"pass@1": result.pass_at_1}
    estimates |= {f"pass@{k}": e for k, e in result.pass_at_k.items() if k > 1}
    estimates |= {f"maj@{k}": e for k, e in result.maj_at_k.items() if k > 1}
    for name in ("by_language", "by_difficulty"):
        for key, part in getattr(result, name).items():
            label = key if name == "by_language" else f"level {key}"
            estimates[f"pass@1, {label} ({part.n_problems})"] = part.pass_at_1
    for label, e in estimates.items():
        table.add_row(label, f"{e.value:.3f}", f"{e.low:.3f}–{e.high:.3f}")
    for label in ("format_rate", "language_rate", "length_limited_rate", "unscorable_rate"):
        table.add_row(label.replace("_", " "), f"{getattr(result, label):.3f}", "")
    table.add_row("thinking tokens", f"{result.mean_thinking_tokens:.1f}", "")
    return table


def _given(options: dict[str, Any]) -> Any:
    """The options that were given; for the rest, the config's values apply."""
    return {name: value for name, value in options.items() if value is not None}


def _generator_keys(device: str | None, dtype: str | None, stop: list[str] | None) -> list[str]:
    """`key=value` texts of the options for the generator."""
    keys = {"device": device, "dtype": dtype, "stop": json.dumps(stop) if stop else None}
    return [f"generator.{key}={value}" for key, value in keys.items() if value is not None]


def _print_origin(model: str, config: Path | None) -> None:
    """Print the run whose config was used, unless it was given explicitly."""
    from tramontane.evaluation.checkpoint import run_of

    if config is None and (run := run_of(model)):
        say(f"prompts and grading: {run / 'config.yaml'}")
