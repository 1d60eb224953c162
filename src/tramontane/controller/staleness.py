"""How old the weights behind a trained token may be: an admission rule and a batch rule.

Let v be the version that the next batch is trained at, n the groups in a batch, and S the bound. A
group handed out while the generator holds version g samples no token under older weights, so it
may be trained at any version up to its *deadline* g + S.

- Batch rule: of the groups outstanding (handed out, neither batched nor filtered), a batch may
  leave behind at most n · (d − v) with a deadline of d or less, for every d ≥ v. So what is left
  always fits into the batches before its deadline; for d = v, all that is due is taken.
- Admission rule: a group may be handed out while fewer than n · (g + S − v + 1) are outstanding.

Both keep this true: for every d ≥ v, at most n · (d − v + 1) outstanding groups have a deadline of
d or less. Admission keeps it because no outstanding deadline exceeds the newest, g + S; a batch
keeps it because what it leaves is bounded by n · (d − v) = n · (d − (v + 1) + 1). Hence a batch of
n can always hold what is due, and no token trained is more than S versions old. Filtering a group
only lowers the counts. A trainer waits for a long completion only when that is due: length decides
nothing about being trained on.
"""

from __future__ import annotations

from collections.abc import Sequence


def room(
    outstanding: int, generator_version: int, next_version: int, per_batch: int, max_staleness: int
) -> int:
    """Groups that may be handed out now (admission rule)."""
    return per_batch * (generator_version + max_staleness - next_version + 1) - outstanding


def choose(
    deadlines: Sequence[int], ready: Sequence[int], version: int, per_batch: int
) -> list[int] | None:
    """Pick the groups of the batch trained at `version`, or None if it cannot be formed yet.

    Args:
        deadlines: of every outstanding group.
        ready: indices into `deadlines` of the complete ones, in the order in which they completed.
        version: the version that the batch will be trained at.
        per_batch: groups in a batch.

    Returns:
        `per_batch` indices out of `ready`. The most urgent that the batch rule asks for come
        first; the rest are taken in the order of completion, whatever their length.
    """
    if len(ready) < per_batch:
        return None
    arrival = {group: i for i, group in enumerate(ready)}
    chosen: list[int] = []
    for deadline in sorted(set(deadlines)):
        due = sum(d <= deadline for d in deadlines)
        needed = due - per_batch * (deadline - version)
        needed -= sum(deadlines[group] <= deadline for group in chosen)
        urgent = [g for g in ready if deadlines[g] <= deadline and g not in chosen]
        if needed > len(urgent):
            return None
        chosen += urgent[: max(0, needed)]
    rest = [group for group in ready if group not in chosen]
    chosen += rest[: per_batch - len(chosen)]
    return sorted(chosen, key=arrival.__getitem__)
