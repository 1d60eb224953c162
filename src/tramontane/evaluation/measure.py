"""Measures, compares, samples and serves models: `tramontane.evaluate`, `compare`, `generate` and
`serve`."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tramontane import loopback
from tramontane.data.objects import as_source, override_texts, rows_of
from tramontane.errors import InputError
from tramontane.evaluation import comparison
from tramontane.evaluation.checkpoint import (
    encoder_of,
    evaluate_checkpoint,
    generators_of,
    note,
    sample_checkpoint,
    without_trainer,
)
from tramontane.evaluation.settings import SamplingOptions, alike, settings_for

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tramontane.config import Config
    from tramontane.data.objects import Rows, Settings
    from tramontane.evaluation import EvaluationResult
    from tramontane.evaluation.settings import Settings as ModelSettings
    from tramontane.placement.place import Placement
    from tramontane.types import Message


def evaluate(
    model: str | Path,
    data: str | Path | Rows | None = None,
    config: Config | str | Path | None = None,
    overrides: Settings | None = None,
    *,
    write_to: str | Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    **sampling: Unpack[SamplingOptions],
) -> EvaluationResult:
    """Measure pass@1, pass@k and maj@k of a model, with 95 % intervals; see `evaluation`.

    Prompts and grading are as in training: as the given config says or, for a checkpoint in a run's
    folder, the run's config.

    Args:
        model: `tiny`, a checkpoint folder, or a Hugging Face name.
        data: a source as in `data.eval`, or rows; None: the config's `data.eval`.
        config: a `Config` or the path of one.
        overrides: `key.sub=value` texts, or a dict of values by `key.sub`.
        write_to: JSONL file for every completion. A file from an earlier process with the same
            settings, problems and weights is continued.
        on_progress: called with (completions graded, completions in all).
        sampling: `problems`, `samples`, `temperature`, `top_p`, `top_k`, `max_tokens`, `slots`,
            `seed`, `device`, `dtype`, `effort`; see `evaluation.settings.SamplingOptions`.

    Raises:
        InputError: no such model or data, a prompt that does not fit, an invalid setting, or a file
            with completions of another evaluation.
    """
    texts = override_texts(overrides)
    with (
        nullcontext(data)
        if data is None or isinstance(data, str | Path)
        else as_source(rows_of(data)) as source
    ):
        settings = settings_for(
            model, None if source is None else str(source), config, texts, sampling
        )
        chosen = settings.sampling
        warning = alike(chosen.samples, chosen.temperature)
        if warning and not settings.config.converses:
            warnings.warn(warning, stacklevel=3)  # 2: `keywords.answering`
        return evaluate_checkpoint(settings, write_to=write_to, on_progress=on_progress)


def compare(
    models: Mapping[str, str | Path] | Sequence[str],
    on: Sequence[str],
    out: str | Path,
    config: Config | str | Path | None = None,
    overrides: Settings | None = None,
    *,
    on_progress: comparison.Progress | None = None,
    **sampling: Unpack[SamplingOptions],
) -> comparison.Comparison:
    """Measure several models on several suites, side by side; see docs/evaluation.md.

    Args:
        models: models by label, or texts as for the command (`MODEL` or `LABEL=MODEL`); the others
            are compared to the first.
        on: suites (`aime24`), or sources as in `data.eval`; `NAME=SOURCE` names one.
        out: folder for completions, results and pages; existing completions are kept.
        config: a `Config` or the path of one.
        overrides: `key.sub=value` texts, or a dict of values by `key.sub`.
        on_progress: called with (suite, model, completions graded, completions in all).
        sampling: replaces the suites' protocols; as in `evaluate`.

    Raises:
        InputError: no such model or data, an invalid setting, two suites with the same name, or a
            folder with completions for different settings, problems or weights.
    """
    texts = override_texts(overrides)
    named = comparison.labels(models)
    plan = {
        suite: {
            label: settings_for(model, source, config, texts, sampling)
            for label, model in named.items()
        }
        for suite, source in comparison.suites(on).items()
    }
    progress = on_progress or (lambda suite, model, done, total: None)
    return comparison.compare(plan, Path(out), on_progress=progress)


def generate(
    model: str | Path,
    prompt: str | list[Message],
    config: Config | str | Path | None = None,
    overrides: Settings | None = None,
    *,
    n: int = 1,
    images: Sequence[str | Path] = (),
    **sampling: Unpack[SamplingOptions],
) -> list[str]:
    """Complete a prompt (a text, or a list of chat messages) `n` times, with the model's template.

    The settings are those of the config, or, for a checkpoint in a run's folder, the run's. The
    texts are whole responses, as verifiers read them; with environments or tools, all messages of
    a conversation after the prompt, each below its role.

    Args:
        model: `tiny`, a checkpoint folder, or a Hugging Face name.
        prompt: the user's message.
        config: a `Config` or the path of one.
        overrides: as in `evaluate`, e.g. `{"data.system_prompt": "magistral"}`.
        n: number of completions.
        images: of the prompt, as paths or data URIs; `<image>` in the prompt is the place of one.
        sampling: as in `evaluate`.

    Raises:
        InputError: no such model, a broken image, a prompt that does not fit its context, or a size
            below 1.
    """
    settings = settings_for(model, None, config, override_texts(overrides), sampling)
    return sample_checkpoint(settings, prompt, n, [*map(str, images)])


def serve(
    model: str | Path,
    config: Config | str | Path | None = None,
    overrides: Settings | None = None,
    *,
    host: str = loopback.HOST,
    port: int = 0,
    max_len: int | None = None,
    on_address: Callable[[str], None] | None = None,
    **sampling: Unpack[SamplingOptions],
) -> None:
    """Serve a model until `Ctrl-C`, with the prompts of training; see docs/endpoint.md.

    Args:
        model: `tiny`, a checkpoint folder, a run, or a Hugging Face name.
        config: a `Config` or the path of one; None: that of the checkpoint's run.
        overrides: `key.sub=value` texts, or a dict of values by `key.sub`.
        host: address to listen on; the key in the address is all that protects the model.
        port: port to listen on; 0: any free one.
        max_len: longest prompt plus completion, in tokens; None: the model's context.
        on_address: called with the address, `http://HOST:PORT/KEY`, once it answers.
        sampling: `slots` of each generator, and `temperature`, `top_p`, `top_k` and `max_tokens` of
            requests that do not give them; see `evaluation.settings.Sampling`.

    Raises:
        InputError: the extra `serve` is not installed, no such model, an invalid setting, no
            memory, or the port is taken.
        WorkerLost: a generator cannot be replaced.
    """
    loopback.check_installed("the endpoint")
    settings = settings_for(model, None, config, override_texts(overrides), sampling)
    from tramontane.models import loading
    from tramontane.placement.place import place
    from tramontane.placement.thread import torch_threads

    shape = loading.load_config(settings.config.model)
    if max_len is None and (max_len := loading.context_length(shape)) is None:
        raise InputError(f"model {str(model)!r}: its config has no context length; give max_len")
    if settings.config.placement.kind != "ray":
        loading.check_device(settings.config.generator.device, "generator.device")
    n_async = settings.sampling.slots * settings.config.generator.workers
    sized = without_trainer(settings.config, max_len - 1, 1, n_async)
    settings = replace(settings, config=sized)
    vocab = int(shape.get_text_config().vocab_size)
    with (
        loopback.listening(port, host) as address,
        torch_threads(1),  # each generator has its own thread
        closing(place(sized, note)) as placement,
    ):
        asyncio.run(_serve(settings, placement, (max_len, vocab), address, on_address))


async def _serve(
    settings: ModelSettings,
    placement: Placement,
    sizes: tuple[int, int],
    address: loopback.Address,
    on_address: Callable[[str], None] | None,
) -> None:
    from tramontane.controller.pooled_generator import ASKED
    from tramontane.controller.sampling import Sampler
    from tramontane.environments.endpoint import ModelEndpoint, answering

    config, encoder = settings.config, encoder_of(settings.config)
    with closing(generators_of(config, encoder, placement, longest_prompt=1)) as generators:
        await generators.started()
        sampler = Sampler(generators, ASKED)
        defaults = settings.sampling.params
        model = ModelEndpoint(config.model, config, encoder, defaults, sampler.sample, *sizes)
        async with answering(model, address, ends_by_signal=True) as serving:
            if on_address:
                on_address(address.url)
            await asyncio.wait({serving, sampler.failed}, return_when=asyncio.FIRST_COMPLETED)
        if sampler.failed.done():
            sampler.failed.result()
