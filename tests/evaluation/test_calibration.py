"""Calibration: judges with planted faults are refused, each for its fault."""

import json

import pytest

from tests.asking.server import Server
from tests.verifier.test_judge import comparing, config, graded_part, literal_judge
from tramontane import InputError
from tramontane.config.judge import CalibrationConfig
from tramontane.evaluation.calibration import Calibration, calibrate
from tramontane.statistics import Estimate

GOOD, BAD = "It scatters.", "It is a mirror. Really."


def labeled(tmp_path, rows, server, **keys):
    file = tmp_path / "labeled.jsonl"
    names = ("problem", "response", "label")
    file.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    bounds = keys.pop("bounds", {})
    return config(server, calibration={"file": str(file), **bounds}, **keys)


ROWS = [(f"Why {n}?", text, text == GOOD) for n in range(10) for text in (GOOD, BAD)]


def test_a_judge_that_follows_its_labels_passes(tmp_path):
    seen = []
    with Server(literal_judge) as server:
        verifier = labeled(tmp_path, ROWS, server)
        found = calibrate(verifier, lambda *progress: seen.append(progress))
        requests = len(server.requests)
    assert (found.n, found.accuracy.value, found.agreement) == (20, 1, 1)
    assert found.accuracy.low == pytest.approx(10 / (10 + 1.96**2), abs=1e-3)
    assert (found.position_bias, found.length_bias) == (0, 0)
    assert found.fooled == {"empty": 0, "injection": 0, "flattery": 0}
    assert requests == 20 * 3 + 10 * 3 * 2 == len(seen)


def test_a_judge_fails_the_bounds_that_it_does_not_keep():
    judge = Calibration(50, Estimate(0.8, 0.7, 0.9), 0.85, 0.15, -0.25, {"empty": 0.05})
    bounds = {"min_accuracy": 0.7, "min_agreement": 0.85, "max_position_bias": 0.15,
              "max_length_bias": 0.25, "max_fooled": 0.05}  # fmt: skip
    assert judge.failings(CalibrationConfig(file="any", **bounds)) == []
    for key, bound in bounds.items():
        stricter = round(bound + (0.01 if key.startswith("min") else -0.01), 2)
        found = judge.failings(CalibrationConfig(file="any", **bounds | {key: stricter}))
        assert found == [f"{key} {stricter:g}"]


@pytest.mark.slow
def test_planted_faults_are_found(tmp_path):
    first = {}  # the seed of each prompt; with one worker, it is asked again later

    def mind(asked, before):
        prompt, answer = asked["messages"][-1]["content"], graded_part(asked)
        if "Why 0?" in prompt:
            return "?"  # no grade
        if "wonderful" in answer:
            return "1: yes\n2: yes"
        if "Why 1?" in prompt:
            return "1: yes\n2: no"  # whatever it is asked first
        if "Why 2?" in prompt and first.setdefault(prompt, asked["seed"]) != asked["seed"]:
            return "1: yes\n2: yes"  # when it is asked again
        if "Why 2?" in prompt:
            return "1: no\n2: no"
        return "1: yes\n2: yes" if len(answer) > 15 else "1: no\n2: no"  # the longer

    with Server(mind) as server:
        bounds = {"max_position_bias": 0.1}
        verifier = labeled(tmp_path, ROWS[:10], server, tries=1, bounds=bounds)
        with pytest.raises(InputError) as caught:
            calibrate(verifier)
    message = str(caught.value)
    names = ("accuracy 0.7", "agreement 0.8", "position_bias 0.1", "length_bias 0.3", "fooled 0.1")
    assert all(name in message.partition("): accuracy")[0] for name in names), message
    # Right: one of two answers to problems 1 and 2, and none to the others.
    assert "): accuracy 0.200 [" in message, message
    assert "agreement with itself 0.75, position bias 0.12" in message
    assert "flattery 0.80" in message
    assert "its answer cannot be read: '?'" in message


@pytest.mark.slow
def test_a_judge_that_compares_is_calibrated_on_pairs(tmp_path):
    rows = [(f"Why {n}?", text, len(text) / 10) for n in range(12) for text in ("aaa", "bb", "cc")]
    with Server(comparing) as server:
        bounds = {"max_position_bias": 1, "min_accuracy": 0.5}
        verifier = labeled(tmp_path, rows, server, method="pairwise", bounds=dict(bounds))
        with pytest.raises(InputError, match="max_fooled"):  # two canaries are longer
            calibrate(verifier)
        verifier = labeled(tmp_path, rows, server, method="pairwise", bounds=bounds,
                           canaries={"texts": {"empty": ""}})  # fmt: skip
        found = calibrate(verifier)
        equal = [(p, r[::-1] if r != "aaa" else "dd", label) for p, r, label in rows]
        with pytest.raises(InputError, match="max_position_bias 0.2"):
            calibrate(labeled(tmp_path, equal, server, method="pairwise"))
    assert (found.n, found.accuracy.value, found.length_bias) == (24, 1, 0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("Why?", "a", "yes"), "labeled.jsonl:1: label must be true, false"),
        (("Why?", None, True), "labeled.jsonl:1: response is missing"),
        (("Why?", "a", True), "needs answers with different labels"),
    ],
)
def test_rows_that_cannot_calibrate_are_refused(tmp_path, row, message):
    with Server(literal_judge) as server, pytest.raises(InputError, match=message):
        calibrate(labeled(tmp_path, [row], server))
