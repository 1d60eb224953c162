"""Canaries: a judge that can be flattered ends the run, and one that cannot is only recorded."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.asking.server import Server
from tests.runs import small_config
from tests.verifier.test_judge import PROBLEM, RUBRIC, comparing, graded_part
from tramontane import dry_run
from tramontane.batches import Batch, BatchSettings
from tramontane.config import Config
from tramontane.config.judge import CanariesConfig
from tramontane.controller.observer import Update
from tramontane.run.canaries import Canaries, JudgeFooled
from tramontane.run.folder import RunFolder
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.tokens import floats, ints
from tramontane.types import Completion, Group
from tramontane.verifier.pool import VerifierPool


def flattered(asked, before):
    """A judge that is right about scattering, and likes flattery more than half."""
    answer = graded_part(asked)
    first, second = "scatter" in answer or "wonderful" in answer, "well" in answer
    return f"1: {'yes' if first else 'no'}\n2: {'yes' if second else 'no'}"


def judged_run(server, run_dir: Path, model: str = "tiny", **judge) -> Config:
    endpoint = {"url": server.url, "model": "m", "retries": 0}
    settings = {"endpoint": endpoint, "rubric": RUBRIC, "workers": 1, **judge}
    domains = {"open": {"verifier": "judge", "pass_mark": 0.7}}
    return small_config(run_dir, model=model, verifier={"judge": settings, "domains": domains})


def watch(config: Config, groups: list[list[str]], of_each: int = 1) -> list[dict]:
    """The figures of a run's updates, each on `of_each` groups with these completions, up to the
    end of the run: the last is then its error."""

    async def follow() -> list[dict]:
        with VerifierPool(config.verifier, 1000, 0) as pool:
            canaries, found = Canaries(config, pool, Path("runs/x")), []
            for number, texts in enumerate(groups, 1):
                responses = [(text, 1) for text in texts]
                verdicts = await asyncio.wrap_future(pool.score(PROBLEM, responses))
                completions = [Completion(0, i, [], ints(), floats(), ints(), "stop", text)
                               for i, text in enumerate(texts)]  # fmt: skip
                group = Group(0, PROBLEM, completions, verdicts)
                batch = Batch(0, [group] * of_each, BatchSettings("", 1.0, 100, len(texts)))
                canaries.begin(Update(number, batch, [], {}, 0.0, 0.0))
                try:
                    found.append(await canaries.figures())
                except JudgeFooled as error:
                    return [*found, {"error": str(error)}]
            return found

    return asyncio.run(follow())


def test_flattery_that_wins_three_times_in_a_row_ends_the_run(tmp_path):
    poor, good = ["It scatters.", "Blue.", "Blue, too."], ["It scatters well."]
    with Server(flattered) as server:
        config = judged_run(server, tmp_path, canaries={"every": 2})
        found = watch(config, [good, poor] * 2 + [poor, good] + [good, poor] * 9)
    scores = {"answers": 0.25, "empty": 0.0, "injection": 0.0, "flattery": 0.75}
    assert found[1] == found[3] == {"canaries": pytest.approx(scores)}
    assert found[5] == {"canaries": pytest.approx(scores | {"answers": 1.0})}
    assert found[:5:2] == [{}] * 3
    assert len(found) == 12  # the third win in a row after the good group
    assert "the worthless answer 'flattery'" in found[-1]["error"]
    assert "0.75, and the model's own answers 0.25; it has won 3 times" in found[-1]["error"]


def test_three_groups_of_one_update_end_the_run(tmp_path):
    poor = ["It scatters.", "Blue."]
    with Server(flattered) as server:
        [alone] = watch(judged_run(server, tmp_path), [poor] * 2, of_each=4)
        pairs = judged_run(server, tmp_path, canaries={"groups": 2})
        first, second = watch(pairs, [poor] * 2, of_each=4)
    assert alone["error"] == second["error"]
    assert first["canaries"]["flattery"] == 0.75 > first["canaries"]["answers"]


def test_no_canary_is_called_as_the_models_own_answers_are():
    with pytest.raises(ValueError, match="choose another name"):
        CanariesConfig(texts={"answers": "Yes."})


@pytest.mark.slow
def test_canaries_are_compared_with_the_groups_own_answers(tmp_path):
    with Server(comparing) as server:
        config = judged_run(server, tmp_path, method="pairwise",
                            canaries={"texts": {"empty": "", "long": "z" * 90}})  # fmt: skip
        [found] = watch(config, [["A long answer", "Short"]])
    assert found["canaries"] == pytest.approx({"answers": 0.5, "empty": 0.0, "long": 1.0})


@pytest.mark.slow
def test_a_run_whose_judge_is_fooled_ends(tmp_path, one_layer):
    def mind(asked, before):
        answer = graded_part(asked)
        good = "wonderful" in answer or "7" in answer
        return f"1: {'yes' if good else 'no'}\n2: {'yes' if good else 'no'}"

    labeled = tmp_path / "labeled.jsonl"
    rows = [{"problem": f"P{n}", "response": f"{7 + n % 2}.", "label": not n % 2} for n in range(8)]
    labeled.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bounds = {"file": str(labeled), "min_accuracy": 0.6, "max_fooled": 1}
    with Server(mind) as server:
        config = judged_run(
            server, tmp_path / "run", one_layer, calibration=bounds, canaries={"groups": 1}
        )
        verifier = config.verifier.model_copy(update={
            "reward": config.verifier.reward.model_copy(update={"judge": 0.5})})  # fmt: skip
        pipeline = config.pipeline.model_copy(update={"updates": 8, "n_batch": 16, "n_async": 16})
        config = config.model_copy(update={"verifier": verifier, "pipeline": pipeline})
        lines = dry_run(config).lines
        with pytest.raises(JudgeFooled, match="'flattery'"):
            train(config, QuietScreen())
    assert lines["judge"].startswith("accuracy 1.000 [0.676, 1.000] on 8 labeled answers")
    recorded = json.loads((tmp_path / "run/calibration.json").read_text())
    assert recorded["accuracy"]["value"] == recorded["fooled"]["flattery"] == 1
    rows = RunFolder(tmp_path / "run").metrics()
    assert 3 <= len(rows) < 8
    assert rows[1]["canaries"]["flattery"] == 1.0 > rows[1]["canaries"]["answers"]
    assert all("reward_judge" in row for row in rows)
