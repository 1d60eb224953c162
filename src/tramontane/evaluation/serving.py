"""Serves a checkpoint over HTTP: implements `tramontane serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tramontane import loopback
from tramontane.data.objects import override_texts
from tramontane.errors import InputError
from tramontane.evaluation.checkpoint import encoder_of, generators_of, note, without_trainer
from tramontane.evaluation.settings import Settings, settings_for

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tramontane.config import Config
    from tramontane.data.objects import Settings as Overrides
    from tramontane.evaluation.settings import SamplingOptions
    from tramontane.placement.place import Placement


def serve(
    model: str | Path,
    config: Config | str | Path | None = None,
    overrides: Overrides | None = None,
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
        InputError: the extra `view` is not installed, no such model, an invalid setting, no memory,
            or the port is taken.
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
    settings: Settings,
    placement: Placement,
    sizes: tuple[int, int],
    address: loopback.Address,
    on_address: Callable[[str], None] | None,
) -> None:
    from tramontane.controller.sampling import EndpointSampler
    from tramontane.environments.endpoint import Served, answering

    config, encoder = settings.config, encoder_of(settings.config)
    with closing(generators_of(config, encoder, placement, longest_prompt=1)) as generators:
        await generators.started()
        sampler = EndpointSampler(generators, *sizes)
        served = Served(config.model, config, encoder, settings.sampling.params, sampler)
        async with answering(served, address, ends_by_signal=True) as serving:
            if on_address:
                on_address(address.url)
            await asyncio.wait({serving, sampler.failed}, return_when=asyncio.FIRST_COMPLETED)
        if sampler.failed.done():
            sampler.failed.result()
