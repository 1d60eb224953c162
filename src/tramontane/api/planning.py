"""What a run will need, and what this machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# torch takes seconds to import, and the config's classes 0.2 s: functions import what they need.
if TYPE_CHECKING:
    from tramontane.doctor import Finding
    from tramontane.planning.plan import Plan


def doctor() -> list[Finding]:
    """Check which parts of this machine tramontane can use; see `doctor.examine`."""
    from tramontane.doctor import examine

    return examine()


def plan(settings: dict[str, Any], assumptions: list[str] | None = None) -> Plan:
    """Split GPUs between generators and trainers; see `planning.plan`.

    Args:
        settings: keys of `planning.config.PlanConfig`; `model` and `gpus` are needed.
        assumptions: `key=value` texts laid over them.

    Raises:
        InputError: sizes that make no sense, or a model that does not fit.
    """
    from tramontane.config import parse_settings
    from tramontane.planning.config import PlanConfig

    config = parse_settings(PlanConfig, {**settings}, assumptions or [], "plan")
    from tramontane.planning.plan import plan as run

    return run(config)
