"""Record calls that switch the reductions of `fully_shard` on and off, with lines."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from ddpcheck.findings.evidence.steps import LoopEvent
from ddpcheck.gather.ddp.sharding import note_settings
from ddpcheck.gather.patching import Patch

calls: deque[LoopEvent] = deque(maxlen=16)
"""Last calls; `synchronises` is the value set."""

_patches: list[Patch] = []
_kept: list[Patch] = []  # never undone


def follow(fsdp: Any = None, *, to_the_end: bool = False) -> None:
    """Patch methods of `FSDPModule` until `leave`, or for the whole process."""
    fsdp = fsdp or getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if not _patches and not _kept:
        (_kept if to_the_end else _patches).extend(note_settings(fsdp, calls.append))


def leave() -> None:
    """Undo the patches, unless kept for the whole process."""
    while _patches:
        _patches.pop().undo()
