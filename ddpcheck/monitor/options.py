"""Options of a watch, shared by `ddpcheck.watch`, the wrapper and the callbacks.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.report import Finding
from ddpcheck.worlds.validation import check_seconds

OnFinding = Literal["raise", "warn"] | Callable[[Finding], object]
"""Action on a finding: raise an exception, warn, or call a function."""


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Options of a watch, documented in `ddpcheck.watch`; an invalid value raises `UsageError`."""

    detect_anomalous_params: bool = True
    check_consistency_every: int = 0
    check_parity_every: int = 0
    check_normalisation: bool = True
    on_finding: OnFinding = "raise"
    ignore: Sequence[str] = ()
    timeout: float = 60.0

    def __post_init__(self) -> None:
        for name in ("check_consistency_every", "check_parity_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"{name} is a number of steps, or 0 for never, not {value!r}")
        check_seconds("timeout", self.timeout)
        if isinstance(self.ignore, str) or not all(isinstance(pattern, str) for pattern in self.ignore):
            raise UsageError(f"ignore is a list of rules, such as ['DDP215'], not {self.ignore!r}")
        if self.on_finding not in ("raise", "warn") and not callable(self.on_finding):
            expected = "'raise', 'warn' or a function that takes a Finding"
            raise UsageError(f"on_finding is {expected}, not {self.on_finding!r}")
