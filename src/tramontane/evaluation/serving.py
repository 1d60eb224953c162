"""Serves a checkpoint over HTTP: implements `tramontane serve`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from tramontane import loopback
from tramontane.errors import InputError
from tramontane.evaluation.checkpoint import encoder_of
from tramontane.evaluation.placed import generators_of, note, without_trainer
from tramontane.evaluation.settings import Settings, settings_for
from tramontane.run.task import override_texts

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tramontane.config import Config
    from tramontane.environments.endpoint import Served
    from tramontane.evaluation.settings import SamplingOptions
    from tramontane.placement.place import Placement
    from tramontane.run.task import Settings as Overrides


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
        loopback.listening(port, host) as listening,
        torch_threads(1),  # each generator has its own thread
        closing(place(sized, note)) as placement,
    ):
        asyncio.run(_serve(settings, placement, (max_len, vocab), listening, on_address))


async def _serve(
    settings: Settings,
    placement: Placement,
    sizes: tuple[int, int],
    listening: socket,
    on_address: Callable[[str], None] | None,
) -> None:
    from tramontane.controller.serving import PoolSampler
    from tramontane.environments.endpoint import Served

    config, encoder = settings.config, encoder_of(settings.config)
    generators = generators_of(config, encoder, placement, longest_prompt=1)
    try:
        await generators.started()
        sampler = PoolSampler(generators, *sizes)
        served = Served(config.model, config, encoder, settings.sampling.params, sampler)
        address = Address(listening)
        async with answering(served, address, ends_by_signal=True) as serving:
            if on_address:
                on_address(address.url)
            await asyncio.wait({serving, sampler.failed}, return_when=asyncio.FIRST_COMPLETED)
        if sampler.failed.done():
            sampler.failed.result()
    finally:
        generators.close()


class Address:
    """Where an endpoint answers: a socket, and the key in its paths."""

    def __init__(self, listening: socket) -> None:
        self.listening, self.key = listening, secrets.token_urlsafe(loopback.TOKEN_BYTES)

    @property
    def url(self) -> str:
        """`http://HOST:PORT/KEY`."""
        host, port = self.listening.getsockname()[:2]
        return f"http://{host}:{port}/{self.key}"


@asynccontextmanager
async def answering(
    served: Served, address: Address, *, ends_by_signal: bool
) -> AsyncIterator[asyncio.Task[None]]:
    """Context manager: an endpoint answers in this event loop, as the task that is returned."""
    from tramontane.environments.endpoint import Endpoint, key_is, make_app

    app = make_app(key_is(address.key, Endpoint(served)))
    server = loopback.server(app, ends_by_signal=ends_by_signal)
    serving = asyncio.create_task(server.serve(sockets=[address.listening]), name="endpoint")
    try:
        yield serving
    finally:
        server.should_exit = True
        await serving
