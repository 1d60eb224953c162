"""Participants of discussions: simulated, in one of the project's generators, or behind an
endpoint.

All implement `Agent`: calls go in at any time, and replies come out in any order, so that
concurrent discussions share each model's batches, like rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tramontane.oversight.config import ModelConfig
from tramontane.oversight.transcript import Call, Reply, Transcript
from tramontane.oversight.wording import Wording


class Agent(Protocol):
    """A participant that answers calls.

    Attributes:
        computes: True if `poll` computes replies, False if it only waits for them.
    """

    computes: bool

    @property
    def waiting(self) -> int:
        """Number of calls without a reply."""

    def submit(self, ticket: int, key: str, call: Call, examples: Sequence[Transcript]) -> None:
        """Take a call.

        Args:
            ticket: number that comes back with the reply.
            key: with the model's seed, determines the reply's randomness.
            call: what is asked.
            examples: worked examples for a judge.
        """

    def poll(self, seconds: float) -> list[tuple[int, Reply]]:
        """Work or wait for at most about `seconds`, and return (ticket, reply) of each finished
        call.

        Raises:
            InputError: the model cannot answer any call until the user corrects something.
        """


def open_agents(models: Mapping[str, ModelConfig], wording: Wording) -> dict[str, Agent]:
    """The participants by name. Models with equal checkpoint sections share one generator.

    Raises:
        InputError: no such checkpoint or device, or no key for an endpoint.
    """
    agents: dict[str, Agent] = {}
    local: dict[str, ModelConfig] = {}
    for name, model in models.items():
        # torch takes seconds to import, and is needed only for checkpoints.
        if model.simulated:
            from tramontane.oversight.agents.simulated import SimulatedAgent

            agents[name] = SimulatedAgent(model.simulated, model.seed)
        elif model.endpoint:
            from tramontane.oversight.agents.remote import RemoteAgent

            agents[name] = RemoteAgent(model, wording)
        else:
            local[name] = model
    if local:
        from tramontane.oversight.agents.local import open_local

        agents |= open_local(local, wording)
    return agents
