"""Small real runs for tests."""

from pathlib import Path
from typing import Any

from tramontane.config import Config
from tramontane.run.folder import RunFolder

SMALL: dict[str, Any] = {
    "name": "test",
    "model": "tiny",
    "data": {
        "train": "playground:",
        "eval": None,
        "playground": {"levels": [1, 2], "languages": ["en", "fr"]},
    },
    "pipeline": {
        "updates": 2,
        "n_async": 16,
        "n_batch": 16,
        "group_size": 8,
        "max_staleness": 1,
        "l_max": 96,
        "l_cache": 32,
    },
    "trainer": {"learning_rate": 1e-4, "microbatch_tokens": 2048},
    "timeouts": {"batch": 600.0, "start": 600.0},
}


def small_config(run_dir: Path, **sections: Any) -> Config:
    """`SMALL` with some keys of some sections replaced."""
    raw = dict(SMALL, run_dir=str(run_dir))
    for name, value in sections.items():
        raw[name] = {**raw.get(name, {}), **value} if isinstance(value, dict) else value
    return Config.model_validate(raw)


def unheard(worker: str, **facts: object) -> None:
    """Ignore facts about workers; a stand-in for `RunFolder.log_worker`."""


def begun(config: Config) -> RunFolder:
    """The folder of a run that has just begun."""
    folder = RunFolder(str(config.run_dir))
    folder.begin(config)
    return folder
