"""Experiment trackers: a copy of a run's metrics in TensorBoard, W&B, trackio or MLflow.

The key `trackers` names them. `metrics.jsonl` stays authoritative: a tracker that fails or hangs
gets nothing more in this session, which is noted in `events.log`, and the run continues. Servers
and credentials are set by each tracker's environment variables; the project is `tramontane` unless
they name another.

A tracker is a class with `log`, `log_table` and `close`, in `TRACKERS` under its name.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from tramontane.config import Config
from tramontane.errors import InputError, install
from tramontane.run.folder import flat
from tramontane.types import Group
from tramontane.workplace import write_whole

Row = dict[str, Any]
PROJECT = "tramontane"
TABLE = "completions"
TABLE_ROWS = 64  # in a table of completions
# Time limits for a tracker to start (W&B itself allows 90 s), to take values, and to send pending
# values at the end of a run.
START_SECONDS, CALL_SECONDS, END_SECONDS = 120.0, 300.0, 60.0
LEFT_OUT = "gets nothing more in this session (metrics.jsonl has everything)"

_UNNAMABLE = re.compile(r"[^\w\-./ ]+")  # in names of metrics, for MLflow
# Prefixes of metrics' names other than `train/`.
_GROUPS = {
    "perf/": ("generator_", "trainer_", "verifier_", "padding_fraction", "computed_tokens"),
    "async/": (
        "staleness_",
        "mismatch_",
        "effective_sample_size",
        "masked_tokens",
        "weight_update_pause_ms",
    ),
}


def update_values(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in a line of `metrics.jsonl`, by the names that trackers show: `train/KEY`,
    `perf/KEY` (throughput) or `async/KEY` (staleness and mismatch)."""
    return {
        f"{_group(key)}{_UNNAMABLE.sub('_', key)}": float(value)
        for key, value in flat(metrics).items()
        if isinstance(value, int | float) and key != "update"
    }


def evaluation_values(figures: Mapping[str, Any]) -> dict[str, float]:
    """The results of one evaluation: `eval/pass_at_1` for the held-out problems, `eval/SET/…` for a
    further set, with the ends of their intervals as `_low` and `_high`."""
    name = figures.get("set", "held_out")
    prefix = "eval/" if name == "held_out" else f"eval/{name}/"
    values = {
        f"{prefix}{key}": float(value) for key, value in figures.items() if isinstance(value, float)
    }
    estimates = {"pass_at_1": figures.get("pass_at_1")}
    for kind in ("pass_at", "maj_at"):
        by_k = figures.get(f"{kind}_k") or {}
        estimates |= {f"{kind}_{k}": estimate for k, estimate in by_k.items() if str(k) != "1"}
    for key, estimate in estimates.items():
        if estimate:
            values[f"{prefix}{key}"] = float(estimate["value"])
            values[f"{prefix}{key}_low"] = float(estimate["low"])
            values[f"{prefix}{key}_high"] = float(estimate["high"])
    return values


def completion_rows(groups: Iterable[Group], step: int) -> list[Row]:
    """The first `TABLE_ROWS` completions of some groups, with the columns that trackers show: step,
    problem, completion, the reward and its parts, advantage and verdict."""
    rows: list[Row] = []
    for group in groups:
        advantages: Sequence[float | None] = [None] * len(group.completions)
        if group.learned:
            advantages = [*group.learned.advantages]
        members = zip(group.completions, group.verdicts, advantages, strict=True)
        for completion, verdict, advantage in members:
            rows.append(
                {"step": step, "problem": group.problem.problem, "completion": completion.text}
                | {"reward": verdict.reward}
                | {f"reward_{name}": value for name, value in verdict.parts.items()}
                | {"advantage": advantage, "verdict": verdict.verdict, "reason": verdict.reason}
            )
    # Rows of trajectories may have other parts of the reward.
    columns = dict.fromkeys(name for row in rows[:TABLE_ROWS] for name in row)
    return [{name: row.get(name) for name in columns} for row in rows[:TABLE_ROWS]]


def _group(key: str) -> str:
    matching = (group for group, names in _GROUPS.items() if key.startswith(names))
    return next(matching, "train/")


def check_trackers(config: Config) -> None:
    """Check that the trackers of a config are installed.

    Raises:
        InputError: one is not; the message has the command that installs it.
    """
    for name in config.trackers:
        if find_spec(name) is None:  # its module has its name, as has its extra
            raise InputError(f"trackers: {name} is not installed; install: {install(name)}")


class Tracker(Protocol):
    """One tracker's part of a run. Its constructor takes the run's folder and config, the tracker's
    id of the run (None without an earlier session) and the number of updates done; it raises
    whatever the library raises."""

    run_id: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of one update."""

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        """Record a table of completions of one update."""

    def close(self, finished: bool) -> None:
        """Send pending values; `finished`: the run is complete."""


class TensorBoard:
    """Event files in the run's folder, `tensorboard/`. A resumed run's file hides later steps of
    earlier files."""

    def __init__(self, folder: Path, config: Config, run_id: str | None, version: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run_id is None else version + 1
        self.run_id = "tensorboard"
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        if run_id is None:
            self._writer.add_text("config", f"```\n{json.dumps(_settings(config), indent=1)}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        # It has texts, which may be Markdown, and no tables.
        lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
        cells = [[str(c).replace("|", "\\|").replace("\n", " ") for c in line] for line in lines]
        self._writer.add_text(TABLE, "\n".join(f"| {' | '.join(line)} |" for line in cells), step)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases; configured by WANDB_MODE, WANDB_PROJECT etc."""

    def __init__(self, folder: Path, config: Config, run_id: str | None, version: int) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=config.name,
            id=run_id or secrets.token_hex(4),
            resume="allow",
            dir=str(folder),
            config=_settings(config),
            reinit="create_new",
        )
        self.run_id = str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # A resumed run starts after its last step, and W&B drops earlier values, such as an
        # evaluation of the last update.
        self._run.log(dict(values), step=max(step, self._run.step))

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        import wandb

        table: Any = wandb.Table(columns=[*rows[0]], data=[[*row.values()] for row in rows])
        self._run.log({TABLE: table}, step=max(step, self._run.step))

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class Trackio:
    """A run of trackio: a local database (TRACKIO_DIR), or a Space (TRACKIO_SPACE_ID)."""

    def __init__(self, folder: Path, config: Config, run_id: str | None, version: int) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        # Runs are found by name, and two folders may hold runs of the same name.
        self.run_id = run_id or f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self._run: Any = trackio.init(
            project=project, name=self.run_id, config=_settings(config), resume="allow", embed=False
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        import trackio

        self._run.log({TABLE: trackio.Table(data=list[Any](rows))}, step=step)

    def close(self, finished: bool) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, folder: Path, config: Config, run_id: str | None, version: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client: Any = MlflowClient()
        if run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self._client.get_experiment_by_name(name)
            number = (
                experiment.experiment_id if experiment else self._client.create_experiment(name)
            )
            run = self._client.create_run(number, run_name=config.name)
            params = [Param(key, str(value)[:500]) for key, value in _flat(_settings(config))]
            for first in range(0, len(params), 100):  # maximum in one request
                self._client.log_batch(run.info.run_id, params=params[first : first + 100])
            run_id = run.info.run_id
        else:
            self._client.update_run(run_id, status="RUNNING")
        self.run_id = run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        # A file for each update: MLflow would read and write a growing one.
        file = f"{TABLE}/update_{step:06d}.json"
        self._client.log_table(self.run_id, columns, artifact_file=file)

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self.run_id, "FINISHED" if finished else "KILLED")


TRACKERS: dict[str, Callable[[Path, Config, str | None, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
}


class _Caller(threading.Thread):
    """Makes a tracker and calls it in its own thread, so that a slow server delays neither updates
    nor other trackers. A daemon thread, so it does not delay the end of the process either.

    Attributes:
        run_id: the tracker's id of the run, once it has `started`.
        failure: the tracker's error; it is not called again.
        busy_since: `time.monotonic()` at the start of the current call.
    """

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self.started = threading.Event()
        self.run_id = ""
        self.failure: Exception | None = None
        self.busy_since: float | None = None
        self._make = make
        self._calls: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        self.start()

    def call(self, action: Callable[[Tracker], None]) -> None:
        self._calls.put(action)

    def end(self) -> None:
        """End the thread after the calls so far."""
        self._calls.put(None)

    def run(self) -> None:
        try:
            tracker = self._make()
            self.run_id = tracker.run_id
            self.started.set()
            while (action := self._calls.get()) is not None:
                self.busy_since = time.monotonic()
                action(tracker)
                self.busy_since = None
        except Exception as error:  # of any library: a copy of the metrics must not end a run
            self.failure = error
            self.started.set()


class Trackers:
    """The trackers of a run.

    Args:
        folder: the run's folder; `trackers.json` in it keeps the trackers' ids of the run, and
            which evaluations they have received.
        config: names the trackers.
        warn: called with the failure of a tracker, as text.
        version: updates done, from which the run continues.
        reached: updates recorded before. Those after `version` are repeated, as are their
            evaluations; only TensorBoard takes the new values, since the others cannot replace
            theirs.

    Raises:
        InputError: a tracker without values of this run cannot be started. One that has some is
            skipped for this session instead, since the run may be resumed unattended.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        warn: Callable[[str], None],
        version: int = 0,
        reached: int = 0,
    ) -> None:
        self.reached, self._warn = reached, warn
        self._file = folder / "trackers.json"
        known = json.loads(self._file.read_text("utf-8")) if self._file.is_file() else {}
        self._evaluated: list[str] = known.setdefault("evaluations", [])
        self._known = known
        self._open = {
            name: _Caller(name, partial(TRACKERS[name], folder, config, known.get(name), version))
            for name in config.trackers
        }
        deadline = time.monotonic() + START_SECONDS
        for name, caller in [*self._open.items()]:
            if not caller.started.wait(deadline - time.monotonic()):
                fault = f"no answer within {START_SECONDS:g} s"
            elif caller.failure is not None:
                fault = str(caller.failure) or type(caller.failure).__name__
            else:
                known[name] = caller.run_id
                continue
            del self._open[name]
            if name not in known:
                self.close(finished=False)
                raise InputError(
                    f"trackers: {name} could not be started: {fault}; fix this, or remove {name}"
                ) from caller.failure
            warn(f"tracker {name} could not be started, and {LEFT_OUT}: {fault}")
        if config.trackers:
            self._keep()

    def log_update(self, metrics: Mapping[str, Any]) -> None:
        """Send a line of `metrics.jsonl`."""
        step, values = int(metrics["update"]), update_values(metrics)
        self._call(lambda tracker: tracker.log(step, values), again=step <= self.reached)

    def log_completions(self, update: int, groups: Iterable[Group]) -> None:
        """Send a table of completions of an update."""
        if self._open and (rows := completion_rows(groups, update)):
            again = update <= self.reached
            self._call(lambda tracker: tracker.log_table(update, rows), again)

    def log_evaluation(self, figures: Mapping[str, Any]) -> None:
        """Send a line of `evaluations.jsonl`."""
        name = f"{figures['when']} {figures['set']} {figures['version']}"
        again = name in self._evaluated
        if self._open and not again:
            self._evaluated.append(name)
            self._keep()
        step, values = int(figures["version"]), evaluation_values(figures)
        self._call(lambda tracker: tracker.log(step, values), again)

    def close(self, finished: bool) -> None:
        """Have all trackers send their pending values and end, within `END_SECONDS`; `finished`:
        the run is complete."""
        for caller in self._open.values():
            caller.call(lambda tracker: tracker.close(finished))
            caller.end()
        deadline = time.monotonic() + END_SECONDS
        for caller in self._open.values():
            caller.join(max(0.0, deadline - time.monotonic()))
        self._check(at_end=True)
        self._open = {}

    def _keep(self) -> None:
        write_whole(self._file, json.dumps(self._known) + "\n")

    def _call(self, action: Callable[[Tracker], None], again: bool) -> None:
        self._check()
        for name, caller in self._open.items():
            if name == "tensorboard" or not again:
                caller.call(action)

    def _check(self, at_end: bool = False) -> None:
        for name, caller in [*self._open.items()]:
            since = caller.busy_since
            if caller.failure is not None:
                fault = f"failed, and {LEFT_OUT}: {type(caller.failure).__name__}: {caller.failure}"
            elif at_end and caller.is_alive():
                fault = (
                    f"had not sent everything after {END_SECONDS:g} s, and is left behind "
                    f"(metrics.jsonl has everything)"
                )
            elif since is not None and time.monotonic() - since > CALL_SECONDS:
                fault = f"has not taken an update for {CALL_SECONDS:g} s, and {LEFT_OUT}"
            else:
                continue
            self._warn(f"tracker {name} {fault}")
            del self._open[name]


def _settings(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _flat(settings: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in settings.items():
        inner = value if isinstance(value, dict) else None
        leaves += _flat(inner, f"{path}{key}.") if inner else [(f"{path}{key}", value)]
    return leaves
