"""A judge whose scores rise while verdicts do not is told of at the end of a run."""

import pytest

from tests.asking.server import Server
from tests.runs import begun, small_config
from tramontane.config import Config
from tramontane.run.flattery import flattery_warning
from tramontane.run.folder import RunFolder
from tramontane.run.screen import QuietScreen
from tramontane.run.train import train
from tramontane.tokens import floats, ints
from tramontane.types import Completion, Group, Problem, Verdict

SETTINGS = {"rubric": ["It is good."], "workers": 1, "canaries": {"every": 0}}


def judged_config(run_dir, url: str = "http://x", **sections) -> Config:
    judge = {"endpoint": {"url": url, "model": "m"}, **SETTINGS}
    return small_config(run_dir, verifier={"judge": judge, "reward": {"judge": 0.5}}, **sections)


def write_update(folder: RunFolder, config: Config, update: int, score: float, right: int) -> None:
    """Eight groups of one completion each; the first `right` of them are right."""
    groups = []
    for number in range(8):
        problem = Problem(f"{update}/{number}", "math", "?", "1")
        completion = Completion(number, 0, [1], ints([1]), floats([0]), ints([0]), "stop", "x")
        parts = dict.fromkeys(config.verifier.reward.parts, 0.0) | {"judge": 0.5 * score}
        verdict = Verdict(score, parts, "right" if number < right else "wrong")
        groups.append((Group(number, problem, [completion], [verdict]), None))
    folder.write_rollouts(update, groups, config.verifier.reward.parts)


@pytest.mark.parametrize(
    ("scores", "rights", "liked"),
    [
        ((0.25, 0.5, 0.75), (2, 2, 2), 6),
        ((0.25, 0.5, 0.75), (0, 4, 8), 0),  # the model has learned
        ((0.5, 0.5, 0.5), (2, 2, 2), 0),
        ((0.1, 0.2, 0.3), (2, 2, 2), 0),  # it likes nothing
    ],
)
def test_a_rise_of_scores_alone_is_a_warning(tmp_path, scores, rights, liked):
    config = judged_config(tmp_path / "run")
    folder = begun(config)
    assert flattery_warning(folder.path, config.verifier) == ""  # no rollouts are recorded
    for update, (score, right) in enumerate(zip(scores, rights, strict=True), 1):
        write_update(folder, config, update, score, right)
    found = flattery_warning(folder.path, config.verifier)
    assert bool(found) == bool(liked)
    if liked:
        assert "judge 0.500 [0.500, 0.500], verdicts 0.000" in found
        assert f"it likes {liked} late completions that are wrong" in found
    # A damaged file does not keep a finished run from its end.
    next(folder.rollouts.iterdir()).write_bytes(b"")
    flattery_warning(folder.path, config.verifier)


@pytest.mark.slow
def test_a_run_warns_at_its_end(tmp_path, one_layer):
    """A judge that likes everything, once it has graded some."""

    def mind(asked, before):
        return f"1: {'yes' if len(server.requests) > 20 else 'no'}"

    with Server(mind) as server:
        config = judged_config(
            tmp_path / "run",
            server.url,
            model=one_layer,
            pipeline={"updates": 6, "diversity": "none"},
            trainer={"learning_rate": 1e-9},
        )
        train(config, QuietScreen())
    events = (tmp_path / "run" / "events.log").read_text()
    assert "verifier.judge: its scores rise in the run, and verdicts do not" in events
