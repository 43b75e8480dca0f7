"""Base class of the framework callbacks: options, comparisons and findings."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.report import Finding
from ddpcheck.monitor.reporting import OnFinding, WatchOptions
from ddpcheck.monitor.watch import Watch


class WatchCallback:
    """Base class of the callbacks for Lightning and transformers; subclasses document the options."""

    def __init__(
        self,
        *,
        detect_anomalous_params: bool = True,
        check_consistency: bool = True,
        check_consistency_every: int = 0,
        check_parity_every: int = 0,
        check_normalisation: bool = True,
        on_finding: OnFinding = "raise",
        ignore: Sequence[str] = (),
        timeout: float = 60.0,
    ) -> None:
        self._compares = check_consistency
        self._options = WatchOptions(
            detect_anomalous_params=detect_anomalous_params,
            check_consistency_every=check_consistency_every,
            check_parity_every=check_parity_every,
            check_normalisation=check_normalisation,
            on_finding=on_finding,
            ignore=ignore,
            timeout=timeout,
        )
        self._watch: Watch | None = None
        self._findings: Sequence[Finding] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return the findings of the last training run, identical on every rank."""
        return tuple(self._findings if self._watch is None else self._watch.findings)

    def _compare(self) -> None:
        if self._watch is not None and self._compares:
            self._watch.compare()

    def _detach(self, *, failing: bool = False) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            try:
                watch.close(failing=failing)
            finally:
                self._findings = watch.findings
