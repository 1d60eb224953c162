"""The staleness bound: two rules limit the age of the weights that sampled a trained token.

Let v be the version that the next batch is trained at, n the groups in a batch, and S the bound. A
group handed out while the generator holds version g samples no token under older weights, so it
may be trained at any version up to its *deadline* g + S.

- Admission rule: a group may be handed out while fewer than n · (g + S − v + 1) are outstanding
  (handed out, neither batched nor filtered).
- Batch rule: for every d ≥ v, a batch may leave behind at most n · (d − v) outstanding groups with
  a deadline of d or less, since the batches at v + 1, …, d have room for no more. For d = v, a
  batch takes all groups that are due. It takes the rest in order of completion.

Example: n = 2 and S = 1. Groups get letters in the order in which they are handed out; `C¹` is
group C with deadline 1. Group A is very long and completes last. Each row shows the state after its
event.

    v  g  event                        outstanding  groups that may be handed out
    0  0  the run begins               -            2·(0+1−0+1) − 0 = 4
    0  0  A, B, C, D are handed out    A¹ B¹ C¹ D¹  2·(0+1−0+1) − 4 = 0
    1  0  D, B complete: batch 0       A¹ C¹        2·(0+1−1+1) − 2 = 0
    1  1  weights 1 arrive             A¹ C¹        2·(1+1−1+1) − 2 = 2
    1  1  E, F are handed out          A¹ C¹ E² F²  2·(1+1−1+1) − 4 = 0
    1  1  E, F, C complete: no batch   A¹ C¹ E² F²  2·(1+1−1+1) − 4 = 0
    2  1  A completes: batch 1 = C, A  E² F²        2·(1+1−2+1) − 2 = 0

At v = 0 any two groups form a batch: it leaves two groups with deadline 1, and 2·(1 − 0) = 2 are
allowed. At v = 1 a batch of E and F would leave two groups with deadline 1 where 2·(1 − 1) = 0 are
allowed, so the trainer waits for A. A and C are trained at 1 on tokens of version 0 or 1: at most
S = 1 version old.

Proof: both rules keep this invariant: for every d ≥ v, at most n · (d − v + 1) outstanding groups
have a deadline of d or less. Admission keeps it because no outstanding deadline exceeds the newest,
g + S; a batch keeps it because it leaves at most n · (d − v) = n · (d − (v + 1) + 1). Hence a batch
of n can always hold all groups that are due, and no token trained is more than S versions old.
Filtering a group only lowers the counts. The trainer waits for a long completion only when its
group is due, so length decides nothing about being trained on.

Versions count updates, whatever becomes of their optimizer steps. An update whose gradient is not
finite leaves the weights as they were, and still publishes them as the next version. The rules know
nothing but versions, so the proof holds; an age then overstates how far the weights have moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice


def room(
    outstanding: int,
    *,
    generator_version: int,
    next_version: int,
    per_batch: int,
    max_staleness: int,
) -> int:
    """Groups that may be handed out now (admission rule)."""
    return per_batch * (generator_version + max_staleness - next_version + 1) - outstanding


def choose(
    deadlines: Sequence[int], ready: Sequence[int], version: int, per_batch: int
) -> list[int] | None:
    """Pick the groups of the batch trained at `version`, or None if it cannot be formed yet.

    Args:
        deadlines: the deadline of every outstanding group.
        ready: indices into `deadlines` of the complete groups, in order of completion.
        version: the version that the batch will be trained at.
        per_batch: groups in a batch.

    Returns:
        `per_batch` indices out of `ready`, in order of completion: first the groups that the batch
        rule requires, the most urgent first; then the earliest complete, regardless of length.
    """
    unready = Counter(deadlines)
    unready.subtract(deadlines[group] for group in ready)
    if not can_choose(unready, len(ready), version, per_batch):
        return None
    outstanding, due = Counter(deadlines), 0
    chosen: set[int] = set()  # places in `ready`
    for deadline in sorted(outstanding):
        due += outstanding[deadline]
        needed = due - per_batch * (deadline - version) - len(chosen)
        if needed > 0:
            urgent = (
                i for i, g in enumerate(ready) if deadlines[g] <= deadline and i not in chosen
            )
            chosen.update(islice(urgent, needed))
    rest = (i for i in range(len(ready)) if i not in chosen)
    chosen.update(islice(rest, per_batch - len(chosen)))
    return [ready[i] for i in sorted(chosen)]


def can_choose(unready: Mapping[int, int], ready: int, version: int, per_batch: int) -> bool:
    """True if the batch trained at `version` can be formed: for every deadline d, the complete
    groups due by d that the batch must take are there.

    The batch may leave behind n · (d − v) groups that are due by d. So it can be formed if no more
    than these are incomplete: all others are there to be taken.

    Args:
        unready: number of outstanding groups that are not complete, by deadline.
        ready: number of complete groups.
        version: the version that the batch will be trained at.
        per_batch: groups in a batch.
    """
    if ready < per_batch:
        return False
    due = 0
    for deadline in sorted(unready):
        due += unready[deadline]
        if due > per_batch * (deadline - version):
            return False
    return True
