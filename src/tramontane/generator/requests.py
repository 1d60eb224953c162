"""Rules that every request must meet, whichever engine runs it."""

from __future__ import annotations

from tramontane.errors import InputError
from tramontane.types import Request


def check_request(request: Request, vocab: int, limit: int, holder: str) -> None:
    """Reject a request that can never run.

    Args:
        request: with the tokens it has so far.
        vocab: number of tokens in the model's vocabulary.
        limit: longest prompt plus `max_tokens`, in tokens.
        holder: what sets the limit, for the error message.

    Raises:
        InputError: an empty prompt, unknown tokens, more than `limit` tokens, nothing left to
            generate, tokens without log-probs or versions, or sampling parameters out of range.
    """
    s = request.sampling
    name = f"request {request.index} of group {request.group}"
    if not request.prompt_ids:
        raise InputError(f"{name}: an empty prompt; give at least a BOS token")
    if not all(0 <= t < vocab for t in request.prompt_ids):
        raise InputError(f"{name}: prompt tokens outside the model's vocabulary of {vocab}")
    if len(request.prompt_ids) + s.max_tokens > limit:
        raise InputError(
            f"{name}: {len(request.prompt_ids)} prompt tokens and max_tokens {s.max_tokens} "
            f"do not fit {holder} of {limit} tokens; shorten either"
        )
    if len(request.token_ids) >= s.max_tokens:
        raise InputError(f"{name}: max_tokens {s.max_tokens} leaves nothing to generate")
    if not len(request.token_ids) == len(request.logprobs) == len(request.versions):
        raise InputError(f"{name}: needs a log-prob and a version for each of its tokens")
    if s.temperature < 0 or not 0 < s.top_p <= 1 or s.top_k < 0:
        raise InputError(f"{name}: needs temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0, not {s}")
