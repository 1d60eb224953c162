"""Images in calls of Ray's workers."""

from array import array
from dataclasses import replace

import pytest

from tests.placement.workers import Worker
from tramontane.batches import BatchSettings, TrainBatch, TrainSequence
from tramontane.types import Completion, SamplingParams

IMAGES = ["data:image/*;base64," + "A" * 10**6, "data:image/*;base64,BBBB"]


@pytest.mark.slow
def test_an_image_is_stored_once_for_all_workers_and_calls(ray_cluster, monkeypatch) -> None:
    import ray

    from tramontane.placement.actors import ActorHandle, ActorRanks
    from tramontane.placement.pictures import Pictures

    stored, put = [], ray.put
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or put(value))
    pictures, options = Pictures(), {"num_cpus": 0}
    handles = [
        ActorHandle(f"worker {n}", options, 60, pictures=pictures).start(Worker) for n in (0, 1)
    ]
    requests = [
        Completion.requested(0, n, [1, 2], n, SamplingParams(4), images=IMAGES) for n in range(3)
    ]
    sequence = TrainSequence(array("i", [1]), array("i", [2]), array("f", [0]), array("i", [0]))
    sequence.images = tuple(IMAGES)
    batch = TrainBatch(0, [[sequence]], BatchSettings("", 1.0, l_max=4, n_minibatch=1))
    expected = [("str", image) for image in IMAGES]
    ranks = None
    try:
        for handle in handles:
            assert handle.submit("images", requests, batch).result(60) == expected * 4
        assert stored == IMAGES
        assert requests[0].images is IMAGES  # the caller's are as they were
        monkeypatch.setattr("tramontane.placement.pictures.KEPT_BYTES", 0)
        one = replace(requests[0], images=[f"{IMAGES[1]}CC=="])
        assert handles[0].submit("images", [one]).result(60) == [("str", one.images[0])]
        # What was dropped meanwhile is stored again.
        assert handles[0].submit("images", requests[:1]).result(60) == expected
        assert stored == [*IMAGES, one.images[0], *IMAGES]
        monkeypatch.undo()
        ranks = ActorRanks("trainer", Worker, [
            ActorHandle("rank", options, 60, pictures=pictures)], "gloo")  # fmt: skip
        assert ranks.submit("images", batch).result(60) == expected
    finally:
        for handle in [*handles, *([ranks] if ranks else [])]:
            handle.close()
