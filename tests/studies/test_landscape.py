"""The landscape of a real run on the tiny base."""

import json
import shutil

import numpy as np
import pytest

from tests.runs import small_config
from tests.studies.test_plane import SHAPES, write_run
from tramontane import train
from tramontane.errors import InputError
from tramontane.studies.landscape import study_landscape


def test_the_plane_of_checkpoints_that_were_since_replaced_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    size = sum(int(np.prod(shape)) for shape in SHAPES.values())
    run, out = tmp_path / "run", tmp_path / "landscape"

    def stop(done, total):
        raise KeyboardInterrupt

    write_run(run, rng.normal(size=(4, size)))
    for _ in range(2):  # the same checkpoints: the plane is kept
        with pytest.raises(KeyboardInterrupt):
            study_landscape(run, points=3, out=out, on_point=stop)
    shutil.rmtree(run)
    write_run(run, rng.normal(size=(4, size)))  # trained anew in the same folder
    with pytest.raises(InputError, match="of other checkpoints"):
        study_landscape(run, points=3, out=out, on_point=stop)


@pytest.mark.slow
def test_a_run_has_a_landscape_and_a_stopped_one_continues(tmp_path, one_layer):
    run = tmp_path / "run"
    train(
        small_config(
            run,
            model=one_layer,
            data={"eval": "playground:"},
            pipeline={"updates": 3, "n_batch": 8, "l_max": 64, "diversity": "none"},
            evaluation={"problems": 4, "samples": 2},
            checkpoint={"every": 1, "keep": 9, "weights_dtype": "float32"},
        ),
        quiet=True,
        report=False,
    )
    seen = []

    def stop_after_four(done, total):
        seen.append((done, total))
        if done == 4:
            raise KeyboardInterrupt

    sampling = {"problems": 4, "samples": 2}
    with pytest.raises(KeyboardInterrupt):
        study_landscape(run, points=3, sampling=sampling, on_point=stop_after_four)
    found = study_landscape(
        run, points=3, sampling=sampling, on_point=lambda done, total: seen.append((done, total))
    )
    assert seen == [(n, 9) for n in (0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9)]
    assert found.updates == (0, 1, 2, 3)  # the model at the start comes first
    assert found.plane.explained.sum() == pytest.approx(1)
    np.testing.assert_array_equal(found.plane.coordinates[-1], [0, 0])
    rows = [json.loads(line) for line in (run / "landscape/points.jsonl").open()]
    for row in rows:  # [α_2, α_1]
        assert found.reward[row["j"], row["i"]] == row["reward"]
        assert row["place"] == [found.axes[0][row["i"]], found.axes[1][row["j"]]]
    assert np.linalg.norm(found.direction) == pytest.approx(1)
    page = (run / "landscape/landscape.md").read_text()
    assert "| 0 |" in page and "landscape.svg" in page
    assert (run / "landscape/landscape.svg").stat().st_size > 1000
    assert not (run / "landscape/point").exists()
    with pytest.raises(InputError, match="points.jsonl was made with different"):
        study_landscape(run, points=4, sampling=sampling)
