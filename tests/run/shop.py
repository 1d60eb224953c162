"""A reward, environments and a tool of a user's own. They import no torch, which each worker that
runs them would."""

from typing import Any


def polite(problem: Any, text: str, n_tokens: int) -> float:
    return float("please" in text)


class Shop:
    def step(self, message: Any) -> Any:
        return [], 1.0, True


class Market(Shop):
    def start(self, problem: Any, seed: int) -> Any:
        return [{"role": "user", "content": f"Sell: {problem.problem}"}]


class Closed(Shop):
    def start(self, problem: Any) -> Any:
        raise OSError("the market is closed")


def double(n: int) -> int:
    """Double a number.

    Args:
        n: The number.
    """
    return 2 * n
