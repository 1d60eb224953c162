"""A run that is resumed with another config: which keys may change, and what a change begins again.

Each key declares whether it may change (`config.resume`). Until the first update, nothing is
trained: every key may change, and the run starts over.
"""

from __future__ import annotations

from pathlib import Path

from tramontane.config import Change, Config, PromptConfig, differences
from tramontane.errors import InputError
from tramontane.run.folder import RunFolder

FOLDER_KEYS = ("name", "run_dir")  # never change: the run already has its folder
COLD_START_KEYS = (
    *("model", "tokenizer", "seed", "cold_start", "verifier.thinking_tags"),
    *(f"data.{name}" for name in (*PromptConfig.model_fields, "effort")),
)


def open_run(path: str | Path, overrides: list[str] | None = None) -> tuple[RunFolder, Config]:
    """Open the folder of a run to resume, with `key.sub=value` changes to its config.

    Raises:
        InputError: not a run folder, a change that is not allowed on resume, or a finished run
            without more updates.
    """
    folder, config = RunFolder.open(path)
    changed = folder.config(overrides)
    check_changes(folder, changed)
    updates = config.pipeline.updates
    if folder.finished and changed.pipeline.updates <= updates:
        raise InputError(
            f"{path}: this run is finished; see its report.html, or give it more updates: "
            f"{folder.resume_command} pipeline.updates={2 * updates}"
        )
    return folder, changed


def check_changes(folder: RunFolder, config: Config) -> list[Change]:
    """The keys whose values differ between `config` and the folder's config.

    Raises:
        InputError: a key that cannot change, or fewer updates than are already done.
    """
    changes, done = differences(folder.config(), config), folder.newest_version
    refused = [c for c in changes if not c.mark.may_change and (done or c.key in FOLDER_KEYS)]
    if refused:
        reasons = "\n".join(f"  {c.key}: {c.mark.fixed_because}" for c in refused)
        keys = " ".join(f"{c.key}={c.after}" for c in refused if c.key not in FOLDER_KEYS)
        remedy = (
            f"start a new run from the newest weights, "
            f"{folder.checkpoint(done)}/weights, as its model, with {keys}"
            if keys
            else "leave it out"
        )
        raise InputError(
            f"{folder.path}: cannot change when a run is resumed:\n{reasons}\n{remedy} "
            f"(`tramontane config SECTION` shows which keys may change on resume)"
        )
    if config.pipeline.updates < done:
        raise InputError(
            f"{folder.path}: pipeline.updates {config.pipeline.updates} is below the {done} "
            f"updates that are done; give {done} to end the run as it stands"
        )
    return changes


def begins_again(folder: RunFolder, changes: list[Change]) -> bool:
    """True if a run must start over, since keys change that may only change before the first
    update."""
    return not folder.newest_version and any(not c.mark.may_change for c in changes)


def changes_cold_start(changes: list[Change]) -> bool:
    """True if a changed key affects the result of the cold start."""
    return any(c.key in COLD_START_KEYS or c.key.startswith("cold_start.") for c in changes)


def record_changes(folder: RunFolder, config: Config, changes: list[Change], version: int) -> None:
    """Write the changed config, and record which keys changed from update `version` + 1 on.

    A change recorded for a later update now starts here, since the folder has been rewound.
    """
    first = version + 1
    rows = [row | {"update": min(row["update"], first)} for row in folder.changes()]
    rows += [{"update": first, "key": c.key, "before": c.before, "after": c.after} for c in changes]
    if rows:
        folder.write_changes(rows)
    if changes:
        folder.write_config(config)
