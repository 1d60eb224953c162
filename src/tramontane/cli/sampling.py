"""Commands that sample from a model: eval, compare, generate and serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tramontane
from tramontane.cli.terminal import (
    CONTINUES,
    MEASURE,
    Overrides,
    app,
    console,
    if_stopped,
    loading,
    progress,
    progress_bar,
    say,
    show_table,
)

if TYPE_CHECKING:
    from tramontane.evaluation import EvaluationResult

Model = Annotated[str, typer.Argument(help="tiny, a checkpoint folder, or a model name")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        help="A YAML with prompts, verifier and generator, such as a training config; by default "
        "that of the run that the checkpoint belongs to."
    ),
]
Problems = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum; default: all of a finite source, 256 of an endless one."),
]
# Without the options below, a suite's protocol applies, else the config, else the number here.
Samples = Annotated[
    int | None,
    typer.Option(min=1, help="Completions per problem; default: the suite's or config's, or 4."),
]
Temperature = Annotated[
    float | None, typer.Option(help="Default: the suite's or config's, or 0.7.")
]
TopP = Annotated[float | None, typer.Option(help="Default: the suite's or config's, or 1.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Default: the suite's, or the config's l_max, or 512."),
]
Seed = Annotated[int | None, typer.Option(help="Default: the config's, or 0.")]
Slots = Annotated[int, typer.Option(min=1, help="Completions at once.")]
Effort = Annotated[
    list[str] | None,
    typer.Option(help="Level of data.effort; may be repeated. Default: evaluation.effort, or all."),
]


@app.command(name="eval", rich_help_panel=MEASURE)
def evaluate(
    model: Model,
    data: Annotated[str, typer.Argument(help="playground:, a file, or a dataset name")],
    overrides: Overrides = None,
    problems: Problems = None,
    samples: Samples = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: int = 0,
    max_tokens: MaxTokens = None,
    slots: Slots = 128,
    seed: Seed = None,
    effort: Effort = None,
    config: ConfigFile = None,
    out: Annotated[
        Path,
        typer.Option(
            help="JSONL of every completion; an unfinished file of the same command is continued."
        ),
    ] = Path("eval.jsonl"),
) -> None:
    """Measure pass@1, pass@k and maj@k with 95 % intervals, with the prompts of training."""
    from tramontane.evaluation.settings import run_of, settings_for

    loading()
    sampling = _given(
        problems=problems, samples=samples, temperature=temperature, top_p=top_p, top_k=top_k,
        max_tokens=max_tokens, slots=slots, seed=seed, effort=effort,
    )  # fmt: skip
    with if_stopped(f"{CONTINUES} ({out})"), progress("evaluating") as show:
        result = tramontane.evaluate(
            model, data, config, overrides, write_to=out, on_progress=show, **sampling
        )
    rates = settings_for(model, data, config, overrides or [], sampling).config.evaluated_rates
    _show_evaluation(result, rates)
    for line in result.malformed.explain(result.n_problems * result.samples):
        say(line)
    if config is None and (run := run_of(model)):
        say(f"prompts and grading: {run / 'config.yaml'}")
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
    problems: Problems = None,
    samples: Samples = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_tokens: MaxTokens = None,
    slots: Slots = 128,
    seed: Seed = None,
    effort: Effort = None,
    config: ConfigFile = None,
) -> None:
    """Measure several models on several suites, and test differences problem by problem."""
    loading()
    from rich.markdown import Markdown

    from tramontane.evaluation.comparison import markdown

    sampling = _given(
        problems=problems, samples=samples, temperature=temperature, top_p=top_p,
        max_tokens=max_tokens, slots=slots, seed=seed, effort=effort,
    )  # fmt: skip
    with if_stopped(f"{CONTINUES} ({out})"), progress_bar() as shown:
        bar = shown.add_task("starting", total=None)

        def show(suite: str, model: str, done: int, total: int) -> None:
            shown.update(bar, description=f"{suite}, {model}", completed=done, total=total)

        found = tramontane.compare(models, on, out, config, settings, on_progress=show, **sampling)
    console.print(Markdown(markdown(found)))
    say(f"every completion, and the page comparison.html: {out}")


@app.command(rich_help_panel=MEASURE)
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The problem.")],
    overrides: Overrides = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Completions.")] = 1,
    image: Annotated[
        list[str] | None, typer.Option(help="An image's file; may be given again.")
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: int = 0,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    effort: Annotated[str | None, typer.Option(help="Level of data.effort.")] = None,
    config: ConfigFile = None,
) -> None:
    """Print completions of a prompt, formatted as in training."""
    loading()
    sampling = _given(
        temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, seed=seed,
        effort=effort,
    )  # fmt: skip
    for text in tramontane.generate(
        model, prompt, config, overrides, n=n, images=image or (), **sampling
    ):
        print(text)


@app.command(rich_help_panel=MEASURE)
def serve(
    model: Model,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 0,
    max_len: Annotated[
        int | None,
        typer.Option(min=2, help="Longest prompt plus completion; else the model's context."),
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_tokens: MaxTokens = None,
    slots: Annotated[int, typer.Option(min=1, help="Completions at once.")] = 32,
    config: ConfigFile = None,
) -> None:
    """Serve a model to OpenAI clients and harnesses, each answer with its tokens."""
    loading()
    sampling = _given(temperature=temperature, top_p=top_p, max_tokens=max_tokens, slots=slots)

    def announce(address: str) -> None:
        say(f"{address}/v1")
        say("Ctrl-C ends it")

    tramontane.serve(
        model, config, overrides, host=host, port=port, max_len=max_len, on_address=announce,
        **sampling,
    )  # fmt: skip


def _show_evaluation(result: EvaluationResult, rates: Sequence[str]) -> None:
    estimates = {"pass@1": result.pass_at_1}
    estimates |= {f"pass@{k}": e for k, e in result.pass_at_k.items() if k > 1}
    estimates |= {f"maj@{k}": e for k, e in result.maj_at_k.items() if k > 1}
    languages, levels = (
        {} if list(parts) == ["unknown"] else parts  # one group: all problems
        for parts in (result.by_language, result.by_difficulty)
    )
    parts = languages | {f"level {level}": part for level, part in levels.items()}
    efforts = {f"{name} effort": part for name, part in result.by_effort.items()}
    for label, part in (parts | efforts).items():
        estimates[f"pass@1, {label} ({part.n_problems})"] = part.pass_at_1
    rows = [
        (label, f"{e.value:.3f}", f"{e.low:.3f}–{e.high:.3f}") for label, e in estimates.items()
    ]
    shares = [name for name in rates if name.endswith("_rate")]
    for name in (*shares, "length_limited_rate", "unscorable_rate"):
        rows.append((name.replace("_", " "), f"{getattr(result, name):.3f}", ""))
    if "mean_reward" in rates:
        rows.append(("reward", f"{result.mean_reward:.3f}", ""))
    rows += [(f"not judged: {kind}", f"{n:,}", "") for kind, n in result.failures.items()]
    rows.append(("thinking tokens", f"{result.mean_thinking_tokens:.1f}", ""))
    for label, part in efforts.items():
        rows.append((f"tokens, {label}", f"{part.mean_completion_tokens:.1f}", ""))
    if talked := result.conversations:
        for name in ("mean_turns", "mean_calls", "parsed_rate", "failed_rate"):
            rows.append((name.replace("_", " "), f"{getattr(talked, name):.3f}", ""))
        by_turn = enumerate(talked.right_by_turn, 1)
        rows += [(f"pass@1 within {n} turn{'s' * (n > 1)}", f"{x:.3f}", "") for n, x in by_turn]
        rows += [(f"ended: {e}", f"{share:.3f}", "") for e, share in talked.endings.items()]
    show_table(("", "value", "95 % interval"), rows)


def _given(**options: Any) -> Any:
    """The options that were given; for the rest, the config's values apply."""
    return {name: value for name, value in options.items() if value is not None}
