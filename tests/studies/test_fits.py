"""Compute curves and length laws: known parameters are found again, and intervals hold them."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from tramontane.cli import app
from tramontane.errors import InputError
from tramontane.studies.analyses import study_curve, study_length
from tramontane.studies.fits import (
    Series,
    Sigmoid,
    compute_series,
    fit_curve,
    fit_length,
    least_squares_curve,
)
from tramontane.studies.measures import FinishedRun

# ScaleRL's fits (C_mid, B, A), in GPU hours.
SCALE_RL = [(2542, 1.92, 0.610), (11272, 1.89, 0.645), (4242, 1.65, 0.710), (10909, 1.70, 0.645)]
HOURS = np.linspace(1_500, 50_000, 40)


def test_the_curve_by_hand():
    curve = Sigmoid(start=0.2, asymptote=0.6, midpoint=1000, exponent=2)
    # At C_mid half of the gain is reached; at twice of it 1 / (1 + 1/4).
    np.testing.assert_allclose(curve(np.array([1000, 2000])), [0.4, 0.2 + 0.4 * 0.8])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("midpoint", "exponent", "asymptote"), SCALE_RL)
def test_the_parameters_of_scale_rl_are_found_again(midpoint, exponent, asymptote, known):
    start = 0.3
    values = Sigmoid(start, asymptote, midpoint, exponent)(HOURS)
    found = least_squares_curve(HOURS, values, start if known else None)
    assert found.asymptote == pytest.approx(asymptote, abs=0.001)
    assert found.midpoint == pytest.approx(midpoint, rel=0.02)
    assert found.exponent == pytest.approx(exponent, rel=0.02)
    assert found.start == pytest.approx(start, abs=0.01)


def noisy(rng, midpoint=8_000.0, size=0.01, hours=HOURS):
    values = Sigmoid(0.3, 0.61, midpoint, 1.9)(hours)
    return Series(hours, values + rng.normal(scale=size, size=len(hours)))


def test_the_interval_holds_the_asymptote():
    rng = np.random.default_rng(1)
    # The performance before training is measured with the same error as the points.
    fits = [fit_curve([noisy(rng)], rng.normal(0.3, 0.01)) for _ in range(40)]
    assert coverage(fits, 0.61) >= 0.88
    assert all(fit.bounded for fit in fits)
    assert np.median([fit.high - fit.low for fit in fits]) < 0.06


def coverage(fits, truth):
    return np.mean([fit.low <= truth <= fit.high for fit in fits])


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 8])
def test_the_interval_holds_the_asymptote_of_runs_that_differ(count):
    rng = np.random.default_rng(5)

    def run():
        values = Sigmoid(0.3, rng.normal(0.61, 0.02), 8_000, 1.9)(HOURS)
        return Series(HOURS, values + rng.normal(scale=0.01, size=len(HOURS)))

    fits = [fit_curve([run() for _ in range(count)], 0.3) for _ in range(100)]
    assert coverage(fits, 0.61) >= 0.88 and all(fit.bounded for fit in fits)


def test_several_runs_narrow_the_interval():
    rng = np.random.default_rng(2)
    alone, together = (fit_curve([noisy(rng) for _ in range(runs)], 0.3) for runs in (1, 6))
    assert together.high - together.low < 0.7 * (alone.high - alone.low)
    assert (together.runs, together.points) == (6, 240)


def test_a_curve_that_still_rises_has_no_bounded_asymptote():
    rng = np.random.default_rng(3)
    hours = np.linspace(500, 12_000, 30)
    fits = [fit_curve([noisy(rng, midpoint=60_000, hours=hours)], 0.3) for _ in range(60)]
    assert np.mean([fit.bounded for fit in fits]) <= 0.12
    assert np.median([fit.high for fit in fits]) == 1


def test_the_length_law_by_hand():
    tokens = np.array([100.0, 200, 400, 800])
    law = fit_length([Series(tokens, 0.2 * np.log(tokens) - 0.5)])
    assert (law.slope, law.intercept) == (pytest.approx(0.2), pytest.approx(-0.5))
    assert (law.low, law.high) == (pytest.approx(0.2), pytest.approx(0.2))
    assert law.r_squared == pytest.approx(1)
    assert (law.shortest, law.longest) == (pytest.approx(100), pytest.approx(800))


def law_of(rng, runs, *, slope_spread=0.0, offset_spread=0.0, noise=0.02):
    """The law of runs of 18 updates, each with a slope and an offset of its own."""
    series = []
    for _ in range(runs):
        logs = np.linspace(4, 4.5, 18) + rng.normal(0, offset_spread) + rng.normal(0, 0.03, 18)
        slope, offset = rng.normal(0.2, slope_spread), rng.normal(0, offset_spread)
        values = slope * (logs - 4) + offset + rng.normal(0, noise, 18)
        series.append(Series(np.exp(logs), values))
    return fit_length(series)


@pytest.mark.parametrize("runs", [3, 8])
@pytest.mark.parametrize(
    "spread", [{"slope_spread": 0.05, "noise": 0.005}, {"offset_spread": 0.03}]
)
def test_the_interval_of_the_length_law_holds_the_mean_slope_of_runs(runs, spread):
    rng = np.random.default_rng(4)
    assert coverage([law_of(rng, runs, **spread) for _ in range(300)], 0.2) >= 0.9


def test_the_interval_of_one_run_holds_the_slope():
    rng = np.random.default_rng(4)
    assert coverage([law_of(rng, 1) for _ in range(300)], 0.2) >= 0.9

    def drifting():  # neighboring updates are alike
        logs, errors = np.linspace(4, 4.5, 18), rng.normal(0, 0.02, 18)
        for i in range(1, 18):
            errors[i] = 0.5 * errors[i - 1] + 0.75**0.5 * errors[i]
        return fit_length([Series(np.exp(logs), 0.2 * logs + errors)])

    assert coverage([drifting() for _ in range(300)], 0.2) >= 0.86


@pytest.fixture
def run(tmp_path):
    """A run's folder with the rows that a fit reads: a known curve, and a known length law."""
    folder = tmp_path / "arm/seed_0"
    folder.mkdir(parents=True)
    curve = Sigmoid(0.25, 0.8, 60, 2)
    rows = []
    for update in range(1, 41):
        tokens = 50 + 5 * update
        raw = 0.3 * np.log(tokens)
        rows.append(
            {
                "update": update,
                "wall_seconds": 10.0 * update,
                "computed_tokens": 1000.0,
                "pass_rate": float(curve(np.array([10.0 * update]))[0]),
                "completion_tokens": tokens,
                "reward": raw - 0.1,
                "reward_length": -0.1,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured = [
        {
            "when": f"update_{update}",
            "set": "held_out",
            "version": update,
            "pass_at_1": {"value": float(curve(np.array([10.0 * update or 1e-9]))[0])},
        }
        for update in range(0, 41, 4)
    ]
    # Another set, and the end of the run measured a second time.
    measured += [{"when": "after", "set": "maths", "version": 40, "pass_at_1": {"value": 0.0}}]
    measured += [measured[-2] | {"when": "after"}]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in measured))
    return folder


def test_a_run_gives_the_points_of_its_curve(run):
    series, start = compute_series(FinishedRun(run))
    assert start == pytest.approx(0.25)
    np.testing.assert_array_equal(series.x, np.arange(40.0, 401, 40))
    tokens, _ = compute_series(FinishedRun(run), over="tokens", skip=4)
    np.testing.assert_array_equal(tokens.x, np.arange(8000.0, 40001, 4000))
    _, start = compute_series(FinishedRun(run), of="pass_rate")
    assert start is None
    with pytest.raises(InputError, match=r"0 measurements .* evaluation.every"):
        compute_series(FinishedRun(run), skip=40)


def test_the_command_fits_runs_and_sets_of_runs(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fits = study_curve([run, run.parent], out=tmp_path / "curve")
    for fit in fits.values():
        assert fit.curve.asymptote == pytest.approx(0.8, abs=0.005)
        assert fit.curve.midpoint == pytest.approx(60, rel=0.05)
    page = (tmp_path / "curve/curve.md").read_text()
    assert f"| {run} | 0.800 |" in page
    assert (tmp_path / "curve/curve.svg").stat().st_size > 1000
    # Half of the run shows where it ends.
    early = study_curve([run], of="pass_rate", until=200, out=tmp_path / "early")
    assert early[str(run)].curve.asymptote == pytest.approx(0.8, abs=0.01)
    laws = study_length([run], out=tmp_path / "length")
    assert laws[str(run)].slope == pytest.approx(0.3)
    done = CliRunner().invoke(app, ["study", "curve", "arm", "--over", "updates"])
    assert done.exit_code == 0 and "0.80" in done.output
    done = CliRunner().invoke(app, ["study", "length", "arm/seed_0"])
    assert done.exit_code == 0 and "+0.300" in done.output
    assert (tmp_path / "studies/length/length.md").is_file()


def test_seconds_of_training_do_not_count_the_start(run):
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.open()]
    for row in rows:
        row["wall_seconds"] += 60
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    series, _ = compute_series(FinishedRun(run))
    np.testing.assert_allclose(series.x, np.arange(40.0, 401, 40))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["curve", "nowhere"], "neither a run nor a folder of runs"),
        (["curve", "arm", "--over", "hours"], "choose from seconds, tokens, updates"),
        (["curve", "arm", "--of", "reward"], "choose from held_out, pass_rate"),
        (["curve", "arm", "--until", "50"], "a curve takes 5"),
    ],
)
def test_mistakes_are_named(run, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        app(["study", *arguments], standalone_mode=False)
