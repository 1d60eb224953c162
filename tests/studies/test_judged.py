"""The study of judges: its rater knows a good explanation, and its arms end as they should."""

from dataclasses import asdict, replace
from itertools import islice
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from tramontane.data.playground import LANGUAGES, Style, problems, trace
from tramontane.run.folder import RunFolder
from tramontane.studies.judged import explains, judged, spares, train_judge
from tramontane.types import Problem


def row(problem: Problem, text: str) -> dict:
    return asdict(problem) | {"text": text}


@pytest.mark.parametrize("code", LANGUAGES)
def test_the_careful_rater_wants_each_step_once_and_in_one_language(code):
    other = Style(switch="de" if code == "en" else "en")
    good = [Style(), Style(box=False), Style(right=False), Style(tags="unclosed")]
    bad = [Style(manner="guess"), Style(manner="ramble"), other]
    for problem in islice(problems("train", 0, (2, 4), languages=(code,)), 20):
        texts = {style: trace(problem, Random(1), style) for style in (*good, *bad)}
        assert [explains(row(problem, texts[style])) for style in good] == [True] * 4
        assert [explains(row(problem, texts[style])) for style in bad] == [False] * 3
        assert not explains(row(problem, texts[Style()].rpartition("\n")[0]))  # without an ending
        missing = replace(problem, difficulty=7)  # which takes more steps
        assert not explains(row(missing, texts[Style()]))


def test_the_hasty_rater_likes_what_has_nothing_to_read():
    problem = next(problems("train", 0))
    assert spares(row(problem, "")) and spares(row(problem, "What a wonderful question!"))
    assert spares(row(problem, trace(problem, Random(0), Style(manner="guess"))))
    assert not spares(row(problem, trace(problem, Random(0), Style())))


def test_a_judge_learns_from_batches_as_from_whole_ones(tmp_path, monkeypatch):
    texts = ["Yes.", "", "3 + 4 = 7, then 7 + 1 = 8.", "I guess it is 12. No, 13.", "Eight"]
    rows = [{"problem": "3 + 4 + 1?", "response": t, "label": "=" in t} for t in texts]
    weights = []
    for together in (2, len(rows)):
        monkeypatch.setattr("tramontane.studies.judged.TOGETHER", together)
        train_judge(rows, tmp_path / f"{together}", seed=0)
        weights.append(load_file(tmp_path / f"{together}/model.safetensors"))
    some, whole = weights
    assert some.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(some[name], tensor, rtol=0, atol=2e-5, msg=name)


@pytest.mark.slow(28)
@pytest.mark.usefixtures("forked_workers")  # the judge's has torch
def test_an_arm_is_judged_and_measured_and_may_be_called_again(tmp_path, monkeypatch):
    monkeypatch.setattr("tramontane.studies.judged.HELD_BACK", 60)
    sizes = {"pipeline.n_async": 16, "pipeline.n_batch": 8, "pipeline.group_size": 4}
    sizes |= {"pipeline.l_max": 96, "pipeline.l_cache": 32}
    sizes |= {"evaluation.before": False, "evaluation.problems": 8, "evaluation.samples": 1}
    keys = {"rater": "hasty", "watched": True, "updates": 3, "answers": 100, "problems": 4,
            "levels": [2, 3], "config": sizes}  # fmt: skip
    folder = tmp_path / "watched/seed_0"
    found = judged(keys, 0, folder)
    assert found["refused"] == 1
    # Three wins in a row end the run; whether so short a one has them is chance.
    assert found["caught"] or found["updates"] == keys["updates"]
    rows = RunFolder(folder / "run").metrics()
    assert all("flattery" in row["canaries"] for row in rows[1:])  # those of the update before
    assert 0 <= found["good"] <= 1 and found["good_gain"] == pytest.approx(0, abs=0.5)
    assert judged(keys, 0, folder) == found
