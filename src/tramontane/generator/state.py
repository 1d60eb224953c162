"""The state of an engine's slots as tensors, which stay on the device while decoding."""

from __future__ import annotations

import numpy as np
import torch

from tramontane.generator.sampling import streams
from tramontane.types import Request


class SlotState:
    """One entry per slot: [slots], or [slots, max_len] for generated tokens. Integers are int64,
    `top_p`, `temperature` and `logprobs` float32."""

    def __init__(self, slots: int, max_len: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_len = max_len
        self.last = zeros(slots)  # the newest token, not cached yet
        self.offset = zeros(slots)  # positions cached before the first token was generated
        self.start = zeros(slots)  # positions cached at admission
        self.count = zeros(slots)  # tokens generated
        self.limit = zeros(slots)  # maximum of tokens to generate; 0 for an empty slot
        self.stream = zeros(slots)  # start of the random stream
        self.top_k = zeros(slots)
        self.top_p = zeros(slots, dtype=torch.float32) + 1
        self.temperature = zeros(slots, dtype=torch.float32) + 1
        self.tokens = zeros(slots, max_len)
        self.versions = zeros(slots, max_len)
        self.logprobs = zeros(slots, max_len, dtype=torch.float32)

    def clear(self, slots: torch.Tensor) -> None:
        """Mark slots [N] int64 as empty for steps of fixed shapes: nothing cached, no token to
        draw."""
        for column in (self.limit, self.count, self.offset):
            column.index_fill_(0, slots, 0)

    def write(self, slots: list[int], requests: list[Request]) -> None:
        """Write N requests, with the tokens they have so far, into N slots.

        Sets the slots' entries of each [slots] tensor, and the first tokens of their rows in each
        [slots, max_len] tensor.
        """
        index = torch.tensor(slots, device=self.last.device)
        columns: list[tuple[torch.Tensor, list]] = [
            (self.last, [(r.token_ids or r.prompt_ids)[-1] for r in requests]),
            (self.offset, [len(r.prompt_ids) - 1 for r in requests]),
            (self.start, [len(r.prompt_ids) + len(r.token_ids) - 1 for r in requests]),
            (self.count, [len(r.token_ids) for r in requests]),
            (self.limit, [r.sampling.max_tokens for r in requests]),
            (self.top_k, [r.sampling.top_k for r in requests]),
            (self.top_p, [r.sampling.top_p for r in requests]),
            (self.temperature, [r.sampling.temperature for r in requests]),
        ]
        for column, values in columns:
            column[index] = torch.tensor(values, dtype=column.dtype, device=index.device)
        self.stream[index] = streams([r.seed for r in requests]).to(index.device)
        for slot, r in zip(slots, requests, strict=True):
            if n := len(r.token_ids):
                self.tokens[slot, :n] = torch.from_numpy(np.array(r.token_ids))
                self.logprobs[slot, :n] = torch.from_numpy(np.array(r.logprobs))
                self.versions[slot, :n] = torch.from_numpy(np.array(r.versions))
