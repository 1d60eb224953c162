"""Each rank computes on its own GPU, whatever `trainer.device` says; on a CPU that pretends."""

from __future__ import annotations

from functools import partial

import pytest

from tests.trainer.pretended_gpus import OnRank, Pretending, Ranked
from tests.trainer.rollouts import batch, trainer
from tramontane.placement import ranks

PATIENCE = 300.0


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("device", "first"), [("cuda", 0), ("cuda:4", 4)])
def test_microbatches_of_a_rank_are_on_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, first: int
) -> None:
    assert ranks.collective_backend(device) == "nccl"
    monkeypatch.setattr(ranks, "collective_backend", lambda device: "gloo")
    handle = ranks.ProcessRanks("trainer", Pretending(partial(OnRank, device)), 2, device)
    handle.started.result(PATIENCE)
    own = [f"cuda:{first}", f"cuda:{first + 1}"]
    assert handle.submit("devices").result(PATIENCE) == [([gpu], [gpu]) for gpu in own]
    # A tensor on any other device than the rank's would be refused: here there is no CUDA.
    metrics = handle.submit("step").result(PATIENCE)
    handle.close()
    alone = trainer(dtype="bfloat16").step(batch(groups=2))
    assert metrics["grad_norm"] == pytest.approx(alone["grad_norm"], rel=0.05)


@pytest.mark.usefixtures("forked_ranks")
def test_eight_ranks_have_eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "collective_backend", lambda device: "gloo")
    handle = ranks.ProcessRanks("trainer", Pretending(Ranked), 8, "cuda")
    handle.started.result(PATIENCE)
    expected = [([f"cuda:{rank}"], []) for rank in range(8)]
    assert handle.submit("devices").result(PATIENCE) == expected
    handle.close()
