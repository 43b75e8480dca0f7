"""Steps, state and schedules of optimizers, by rank."""

from __future__ import annotations

from collections.abc import Iterable

from ddpcheck.findings.report import Location
from ddpcheck.findings.wording import format_ranks
from ddpcheck.trace.unwrapped_params import Steps

LOAD_EVERYWHERE = "Load the optimizer's state on every rank, from the same file, or begin with the same one on each."


def restored_on_some(rank_steps: Steps) -> dict[int, Location]:
    """Return the line that loaded optimizer state, by rank; {} if on all ranks."""
    restored = {rank: step.restored_at for rank, step in enumerate(rank_steps) if step.restored_at is not None}
    return restored if len(restored) < len(rank_steps) else {}


def describe_loads(restored: Iterable[int]) -> str:
    return f"load_state_dict is called there, on {format_ranks(restored)} only"
