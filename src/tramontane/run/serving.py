"""The endpoint of a run (`generator.serve`): clients ask the model while it is trained."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from tramontane import loopback
from tramontane.controller.generators import GeneratorPool
from tramontane.controller.pooled_generator import ASKED
from tramontane.controller.sampling import Sampler
from tramontane.evaluation.checkpoint import encoder_of
from tramontane.loopback import Address
from tramontane.models.loading import context_length, load_config
from tramontane.run.session import Session
from tramontane.types import SamplingParams

FILE = "endpoint.json"  # in the run's folder while the run is served


@contextmanager
def address_of(session: Session) -> Iterator[Address | None]:
    """Context manager: opens a session's endpoint, announces its address, and keeps it in the run's
    folder until the session ends. Yields the address; None if the config has no endpoint. Requests
    wait until it is `answered`.

    Raises:
        InputError: the extra `serve` is not installed, or the port is taken.
    """
    if (serve := session.config.generator.serve) is None:
        yield None
        return
    loopback.check_installed("generator.serve")
    with loopback.listening(serve.port, serve.host) as address:
        file = session.folder.path / FILE
        private = file.with_suffix(".tmp")
        private.unlink(missing_ok=True)  # of a killed session
        private.touch(0o600)  # before the key is in it
        private.write_text(json.dumps({"base_url": f"{address.url}/v1"}, indent=2) + "\n")
        private.replace(file)
        session.announce(f"clients reach the model at {address.url}/v1", logging.INFO)
        try:
            yield address
        finally:
            file.unlink(missing_ok=True)


@asynccontextmanager
async def answered(
    session: Session, generators: GeneratorPool, address: Address | None
) -> AsyncIterator[None]:
    """Context manager: requests to the address, if there is one, are answered by the generators."""
    config, serve = session.config, session.config.generator.serve
    if address is None or serve is None:
        yield
        return
    from tramontane.environments.endpoint import ModelEndpoint, answering  # needs an extra

    shape = load_config(config.model)
    vocab, context = int(shape.get_text_config().vocab_size), context_length(shape)
    max_len = min(generators.max_len, context or generators.max_len)
    sampler = Sampler(generators, ASKED, serve.completions)
    settings = config.generator.sampling | {"record_allowed": False}
    defaults = SamplingParams(config.pipeline.l_max, **settings)
    encoder, sample, log = encoder_of(config), sampler.sample, session.folder.log_event
    model = ModelEndpoint(config.name, config, encoder, defaults, sample, max_len, vocab, log)
    async with answering(model, address, ends_by_signal=False):
        yield
