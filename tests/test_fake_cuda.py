"""The stand-in for a GPU sees what would fail or wait on one."""

from __future__ import annotations

import pytest
import torch

from tests.fake_cuda import Launches, fake_cuda

WAITS = {
    "item": lambda x, i: x[0, 0].item(),
    "bool": lambda x, i: bool(x.any()),
    "tolist": lambda x, i: x[0].tolist(),
    "to the CPU": lambda x, i: x.cpu(),
    "from the CPU": lambda x, i: x.copy_(torch.zeros(4, 6)),
    "from pageable memory": lambda x, i: x.copy_(torch.zeros(4, 6), non_blocking=True),
    "int of a maximum": lambda x, i: int(i.max()),
    "a new tensor": lambda x, i: torch.tensor([1, 2], device="cuda"),
    "a new tensor like another": lambda x, i: x.new_tensor([1, 2]),
    "a new number": lambda x, i: x.new_tensor(1.0),
    "index on the CPU": lambda x, i: x[i.cpu()],
    "mask": lambda x, i: x[x > 0],
    "nonzero": lambda x, i: x.nonzero(),
}


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("name", WAITS)
def test_waits_are_noted(name, inference):
    with fake_cuda(), torch.inference_mode(inference):
        x, i = torch.zeros(4, 6, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
        with Launches() as launches:
            try:
                WAITS[name](x, i)
            except torch._subclasses.fake_tensor.DynamicOutputShapeException:
                assert name in ("mask", "nonzero")
        assert launches.waits


def test_kernels_are_counted():
    with fake_cuda(), torch.inference_mode():
        x, i = torch.zeros(4, 6, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
        with Launches() as launches:
            y = (x[1:, None, 2] * 2).flatten()[i]
            y.to("cpu", non_blocking=True)
            x.copy_(torch.empty(4, 6, pin_memory=True), non_blocking=True)
        assert launches.kernels == {"mul": 1, "index": 1, "_to_copy": 1, "copy_": 1}
        assert not launches.waits
        with pytest.raises(RuntimeError, match="cpu"):
            x + torch.zeros(6)
