"""Changes of modules after wrapping."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.loop import ModuleChanged

VALUE_CHANGES = ("values", "written")


Changes = Sequence[Sequence[ModuleChanged]]  # changes of one wrapper, by rank
