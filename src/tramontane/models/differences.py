"""What one version of a tensor changes of the one before, exactly and in few bytes.

An update of reinforcement learning moves most weights by less than bfloat16 resolves: a few percent
of the values differ from one version to the next. A difference is where they are and what they are,
three bytes for each value that changed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_FAR = 255  # a gap's byte that adds 255 places and stands for no value


class Difference(NamedTuple):
    """The values of a tensor that a version changed.

    Attributes:
        gaps: unchanged values before each changed one, uint8; 255 or more are several bytes.
        values: the changed values, in order, as the bits of a two-byte number, int16.
    """

    gaps: npt.NDArray[np.uint8]
    values: npt.NDArray[np.int16]

    @property
    def nbytes(self) -> int:
        return self.gaps.nbytes + self.values.nbytes

    @classmethod
    def between(cls, old: torch.Tensor, new: torch.Tensor) -> Difference:
        """The difference from `old` to `new`, bit by bit: NaNs and signs of zero are kept.

        Args:
            old: any shape, on the CPU, of a two-byte dtype.
            new: the same shape and dtype, on the CPU.
        """
        before, after = _bits(old), _bits(new)
        places = np.flatnonzero(before != after)
        gaps = np.diff(places, prepend=-1) - 1
        ends = np.cumsum(gaps // _FAR + 1)  # one past the last byte of each gap
        coded = np.full(ends[-1] if len(ends) else 0, _FAR, np.uint8)
        coded[ends - 1] = gaps % _FAR
        return cls(coded, after[places])

    def apply(self, tensor: torch.Tensor) -> None:
        """Make a contiguous tensor with the old values, on any device, one with the new."""
        moves = np.where(self.gaps == _FAR, _FAR, self.gaps.astype(np.int64) + 1)
        places = np.cumsum(moves)[self.gaps != _FAR] - 1
        bits = tensor.view(-1).view(torch.int16)
        bits[torch.from_numpy(places).to(bits.device)] = torch.from_numpy(np.array(self.values)).to(
            bits.device
        )


def _bits(tensor: torch.Tensor) -> npt.NDArray[np.int16]:
    bits: npt.NDArray[np.int16] = tensor.reshape(-1).view(torch.int16).numpy()
    return bits
