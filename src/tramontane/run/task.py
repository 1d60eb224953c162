"""A task given as Python objects, e.g. in a notebook: rows, reward functions and settings.

They are converted to what a config file can hold: rows are written into the run's folder, and
functions become import paths (`verifier.functions.path_of`).
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from tramontane.config import AXES, Config, parse_settings, read_settings
from tramontane.config.domains import import_path
from tramontane.data.files import PYTHON_ROWS
from tramontane.data.load import columns_of
from tramontane.data.objects import Rows, Settings, override_texts, rows_of
from tramontane.errors import InputError
from tramontane.run.folder import RunFolder
from tramontane.types import Reward
from tramontane.verifier import custom, functions
from tramontane.workplace import write_whole

Function: TypeAlias = Callable[..., Any]
Source: TypeAlias = "str | Path | Rows"
Data: TypeAlias = "Source | Mapping[str, Source]"

TRAIN_SPLITS, EVAL_SPLITS = ("train",), ("eval", "test", "validation")
NOT_OPENED = "not-opened"  # model or data in a check that reads neither
DOMAIN = "task"  # the domain of rows graded by rewards alone
_GRADED_BY = ("domain", "answer", "tests")  # fields that a domain's verifier needs to grade a row


def config_of(
    config: Config | str | Path | None,
    settings: Settings | None,
    *,
    model: str | Path | None,
    data: Data | None,
    rewards: Sequence[Function | str | Reward],
) -> tuple[Config, dict[str, list[dict[str, Any]]]]:
    """The config of a run, and its data given as objects, as rows by file name.

    Args:
        config: a config or the path of one; None: the defaults, without evaluation.
        settings: `key.sub=value` texts, or values by `key.sub`; a value may be a function.
        model: replaces `model`.
        data: replaces `data.train`; a mapping of splits also replaces `data.eval`.
        rewards: added to `verifier.reward.custom`. If all have TRL's signature and there is no
            config, they alone grade the rows, as in TRL.

    Raises:
        InputError: data of an unknown type, a function that cannot be sent to workers, or an
            invalid key.
    """
    if isinstance(config, Config) and not (settings or model or data or rewards):
        return config, {}
    raw = _raw(config)
    rows: dict[str, list[dict[str, Any]]] = {}
    for key, (name, source) in _sources(data).items():
        if isinstance(source, str | Path):
            raw.setdefault("data", {})[key] = str(source)
        else:
            rows[name] = rows_of(source, name)
            raw.setdefault("data", {})[key] = name
    if not isinstance(model, str | Path | None):
        raise InputError(
            f"model: an object of type {type(model).__name__}; give a folder or a name (an object "
            f"is written to a folder by save_pretrained)"
        )
    if model is not None:
        raw["model"] = str(model)
    if rewards:
        entries = [_entry(r if isinstance(r, Reward) else Reward(r)) for r in rewards]
        reward = raw.setdefault("verifier", {}).setdefault("reward", {})
        reward["custom"] = [*reward.get("custom", ()), *entries]
    texts = override_texts(settings)
    where = str(config) if isinstance(config, str | Path) else "tramontane.train"
    parsed = parse_settings(Config, copy.deepcopy(raw), texts, where)
    if (
        (rewards or parsed.conversation.reward != "verifier")
        and data is not None
        and parsed.data.domain is None
        and (_only_rewards_grade(rows, parsed) or (config is None and _of_trl(parsed)))
    ):
        raw.setdefault("verifier", {}).setdefault("domains", {}).setdefault(DOMAIN, {})
        raw["data"]["domain"] = DOMAIN
        parsed = parse_settings(Config, raw, texts, where)
    return parsed, rows


def one_or_more(given: Any) -> list[Any]:
    """Rewards or tools; a single one may be given without a list, and None means none."""
    if given is None:
        return []
    alone = callable(given) or isinstance(given, str | Reward | Mapping)
    return [given] if alone else list(given)


def settings_without_sources(
    config: Config | str | Path | None, settings: Settings | None, on_gpus: bool
) -> list[str]:
    """The settings, preceded by values for what a config file leaves to the user: the model, the
    data and, if `on_gpus`, CUDA devices. For a check that reads neither model nor data, even on a
    machine without a GPU."""
    texts = override_texts(settings)
    if config is None or isinstance(config, Config):
        return texts
    raw = read_settings(config)
    missing = {"model": raw.get("model", ""), "data.train": raw.get("data", {}).get("train", "")}
    given = {text.partition("=")[0] for text in texts}
    filled = [f"{k}={NOT_OPENED}" for k, v in missing.items() if v is None and k not in given]
    sections = ("generator", "trainer") if on_gpus else ()
    filled += [
        f"{section}.device=cuda"
        for section in sections
        if raw.get(section, {}).get("device") is None and f"{section}.device" not in given
    ]
    return filled + texts


def _of_trl(config: Config) -> bool:
    rewards = config.verifier.reward.custom
    for reward in rewards:
        custom.check(reward)
    return bool(rewards) and all(custom.kind(r.function) == "TRL" for r in rewards)


def _only_rewards_grade(rows: Mapping[str, list[dict[str, Any]]], config: Config) -> bool:
    if not rows:  # only a file's name is known
        return False
    mapped = (config.data.fields, config.data.eval_fields or {})
    columns = {c for fields in mapped for name in _GRADED_BY for c in columns_of(name, fields)}
    return not any(columns & row.keys() for part in rows.values() for row in part)


@contextmanager
def new_run(
    config: Config, rows: Mapping[str, list[dict[str, Any]]]
) -> Iterator[tuple[RunFolder, Config]]:
    """Own the folder of a new run, and write `rows` into it, where a resumed run finds them; yields
    the folder, and a config that names them.

    If the run does not start, nothing is left behind.

    Raises:
        InputError: see `RunFolder.new`.
    """
    with RunFolder.new(config) as run:
        folder = run.path / "data"
        try:
            if rows:
                with run.writing(folder):
                    folder.mkdir()
            for name, part in rows.items():
                lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
                write_whole(folder / name, lines)
            sources = {"train": config.data.train, "eval": config.data.eval}
            named = {k: str((folder / v).absolute()) for k, v in sources.items() if v and v in rows}
            data = config.data.model_copy(update=named)
            yield run, config.model_copy(update={"data": data})
        finally:
            if rows and not run.begun:
                shutil.rmtree(folder, ignore_errors=True)


def _raw(config: Config | str | Path | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Config):
        raw = config.model_dump(exclude=None if "data" in config.model_fields_set else {"data"})
        unset = {*AXES} - config.verifier.reward.model_fields_set
        raw["verifier"]["reward"] = {
            key: value for key, value in raw["verifier"]["reward"].items() if key not in unset
        }
        return raw
    return read_settings(config)


def _sources(data: Data | None) -> dict[str, tuple[str, Source]]:
    """(file name, source) by key of `data`."""
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        return {"train": (f"data{PYTHON_ROWS}", data)}
    sources: dict[str, tuple[str, Source]] = {}
    for key, names in (("train", TRAIN_SPLITS), ("eval", EVAL_SPLITS)):
        if name := next((n for n in names if n in data), None):
            sources[key] = (f"{name}{PYTHON_ROWS}", data[name])
    if "train" not in sources:
        raise InputError(
            f"data: a mapping must have the split train, and may have one of "
            f"{', '.join(EVAL_SPLITS)}; this one has {', '.join(map(str, data))}"
        )
    return sources


def _entry(reward: Reward) -> dict[str, Any]:
    path = reward.function
    if not (callable(path) or isinstance(path, str)):
        raise InputError(
            f"rewards: {path!r:.80} is of type {type(path).__name__}; give a function, its import "
            f"path, or tramontane.Reward(function, weight=…)"
        )
    if callable(path) and (fault := custom.fault(path)):
        raise InputError(f"reward {fault}")  # before its name, which is the lesser fault
    path = import_path(path) if isinstance(path, str) else path
    name = reward.name or (path.rpartition(".")[2] if isinstance(path, str) else _name(path))
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise InputError(
            f"reward {name!r}: the name must be lower-case letters, digits and underscores; "
            f"give one with tramontane.Reward(function, name=…)"
        )
    return {
        "name": name,
        "function": path if isinstance(path, str) else functions.path_of(path),
        "weight": reward.weight,
        "malformed": reward.malformed,
    }


def _name(function: Function) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
