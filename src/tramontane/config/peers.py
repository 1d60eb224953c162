"""The keys of other projects (TRL, verl, OpenRLHF, prime-rl) and what they are here, for messages
about unknown keys. The table is `peers.yaml`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from tramontane.config.yaml_text import read_own


class PeerKey(NamedTuple):
    """A key of another project. `key` and `sft` are what it is in a run's config and in that of
    `tramontane sft`; empty if there is none."""

    peer: str
    name: str
    key: str
    sft: str
    note: str


@cache
def peer_keys() -> tuple[PeerKey, ...]:
    """All entries of the table, in its order."""
    table = read_own(files("tramontane.config").joinpath("peers.yaml").read_bytes())
    return tuple(
        PeerKey(peer, name, entry.get("key", ""), entry.get("sft", ""), entry.get("note", ""))
        for peer, entries in table.items()
        for entry in entries
        for name in entry["names"]
    )


class Counterpart(NamedTuple):
    """What a key of another project, or a key without its section, is here; `key` may be empty."""

    peer: str
    key: str
    note: str


def counterpart(path: str, known: Collection[str]) -> Counterpart | None:
    """The counterpart of a key that is not among `known`, the dotted paths of a config's keys."""
    name = path.rpartition(".")[2]
    whole = [k for k in peer_keys() if path == k.name or path.endswith(f".{k.name}")]
    own = [key for key in known if key.rpartition(".")[2] == path]
    if len(own) == 1 and not whole:
        return Counterpart("", own[0], "")

    def elsewhere(k: PeerKey) -> bool:
        """Its counterparts are all in another kind of config."""
        return bool(k.key or k.sft) and not {k.key, k.sft} & {*known}

    same = [k for k in peer_keys() if name == k.name or k.name.endswith(f".{path}")]
    # The longest name is the most specific.
    entries = sorted(whole or same, key=lambda k: (elsewhere(k), -len(k.name)))
    if "model" not in known:  # not a config of training
        return None
    above = path.rpartition(".")[0]
    if not entries:  # a key of a section that has an answer
        return counterpart(above, known) if "." in above else None
    here = next((key for key in (entries[0].key, entries[0].sft) if key in known), "")
    return Counterpart(entries[0].peer, here, entries[0].note)


def explain(path: str, value: Any, known: Collection[str]) -> list[str]:
    """What the keys of other projects under an unknown key are here, a sentence for each.

    Args:
        path: dotted path of the unknown key.
        value: its value, which may be a section with further keys.
        known: dotted paths of all keys of the config.
    """
    found = []
    for leaf in _leaves(path, value):
        if here := counterpart(leaf, known):
            peer = f"a key of {here.peer}; " if here.peer else ""
            target = f"here it is {here.key}" if here.key else "there is no such key here"
            note = f" ({here.note})" if here.note else ""
            name = "" if leaf == path else f"{leaf.removeprefix(path + '.')}: "
            found.append(f"{name}{peer}{target}{note}")
    return found


def _leaves(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _leaves(f"{path}.{name}", below)
    else:
        yield path
