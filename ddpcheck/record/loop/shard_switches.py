"""The calls by which a program switches the reductions of `fully_shard` on and off, with their lines."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from ddpcheck.findings.evidence.steps import LoopEvent
from ddpcheck.gather.ddp.sharding import note_settings
from ddpcheck.gather.patching import Patch

calls: deque[LoopEvent] = deque(maxlen=16)
"""The last ones; `synchronises` says what was set."""

_patches: list[Patch] = []
_kept: list[Patch] = []  # to the end of the process


def follow(fsdp: Any = None, *, to_the_end: bool = False) -> None:
    """Follow the methods of `FSDPModule` until `leave`, or to the end of the process."""
    fsdp = fsdp or getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if not _patches and not _kept:
        (_kept if to_the_end else _patches).extend(note_settings(fsdp, calls.append))


def leave() -> None:
    """Follow them no more, unless that is to the end."""
    while _patches:
        _patches.pop().undo()
