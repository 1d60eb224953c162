"""What was settled before a study's runs, and the seals of their figures.

A claim's registration is a hash of everything that decides it: its arms' keys, the config that they
change, measure, expectation, margin, and the looks. It is written before the first run. If it is
different when the claim is judged, the claim was changed after its data could be seen.

A run's seal is a hash of its arm's keys, its seed and its figures, so that figures which are edited
or moved to another arm no longer match.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tramontane.studies.study import LOOKS, Claim, Study, look
from tramontane.sweeps.settings import function_name
from tramontane.workplace import write_whole

FILE = "registered.json"  # in a study's folder
Values = Mapping[str, Mapping[str, Sequence[float | None]]]  # by measure and arm, seed by seed


def registration(study: Study, claim: Claim, config: Mapping[str, Any] | None) -> str:
    """The registration of a claim.

    Args:
        study: the claim's.
        claim: its wording does not count.
        config: the keys of the config that the arms change; None for a study with a `runner`.
    """
    arms = [name for name in (claim.arm, claim.against) if isinstance(name, str)]
    return _hash(
        [
            claim.model_dump(exclude={"text"}),
            {arm: _keys(study, arm) for arm in arms},
            config,
            {str(seeds): error for seeds, error in LOOKS.items()},
        ]
    )


def register(folder: Path, study: Study, config: Mapping[str, Any] | None) -> None:
    """Write the registrations of a study's claims into its folder, once."""
    file = folder / FILE
    if not file.exists():
        registrations = [registration(study, claim, config) for claim in study.claims]
        write_whole(file, json.dumps(registrations) + "\n")


def registered(folder: Path) -> list[str] | None:
    """Registrations in a study's folder; None if its runs are older than registrations."""
    file = folder / FILE
    return json.loads(file.read_text("utf-8")) if file.is_file() else None


def seals(study: Study, values: Values, seeds: int) -> dict[str, list[str]]:
    """The seal of each run, by arm, seed by seed."""
    return {
        arm: [
            _hash([_keys(study, arm), seed, {name: v[arm][seed] for name, v in values.items()}])
            for seed in range(seeds)
        ]
        for arm in study.arms
    }


def rule_of(claim: Mapping[str, Any]) -> str:
    """What a claim says, apart from its wording: the same text for the same rule."""
    return json.dumps({key: claim[key] for key in sorted(claim) if key != "text"})


def edited(study: Study, data: Mapping[str, Any]) -> list[str]:
    """The runs in a study's recorded data whose seals do not match; see `faults`."""
    wrong = []
    expected = seals(study, data["values"], data["seeds"])
    for arm, marks in expected.items():
        for seed, mark in enumerate(marks):
            recorded = data["seals"].get(arm, [])
            if seed >= len(recorded) or recorded[seed] != mark:
                wrong.append(
                    f"arm {arm!r}, seed {seed}: the figures or the arm's keys are not those of the "
                    f"run that was recorded; restore the file, or delete it and run the study again"
                )
    return wrong


def faults(study: Study, data: Mapping[str, Any]) -> list[str]:
    """What is wrong with a study's recorded data; empty if nothing is.

    Args:
        study: as it is today.
        data: a file of docs/reproduction, as parsed.
    """
    wrong = edited(study, data)
    if data["seeds"] != look(data["seeds"]):
        wrong.append(
            f"{data['seeds']} seeds: studies are judged at {', '.join(map(str, LOOKS))}, and seeds "
            f"beyond a look do not count before the next; run the rest of them"
        )
    for claim in study.claims:
        if registration(study, claim, data["config"]) not in data["registered"]:
            wrong.append(
                f"claim {claim.text.strip()!r}: it was changed after its data had been seen; run "
                f"the study in another folder (--out)"
            )
    today = {rule_of(claim.model_dump()) for claim in study.claims}
    for claim in data["study"]["claims"]:
        if rule_of(claim) not in today:
            wrong.append(
                f"claim {claim['text'].strip()!r}: it was judged, and the study no longer has it; "
                f"put it back, or run the study in another folder (--out)"
            )
    return wrong


def _keys(study: Study, arm: str) -> list[Any]:
    """Everything that determines an arm's runs, except the config that it changes and the seed."""
    return [study.base, study.arms[arm], study.trajectories, function_name(study.runner)]


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
