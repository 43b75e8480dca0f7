"""Parameters that are each rank's own (`rank-parameters` in `[tool.ddpcheck]`), and left out of comparisons."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from msgspec import Struct, structs

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.script import LocalModel, OptimizerStep
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.wording import join_names
from ddpcheck.stream.entries import BuffersKept, LocalSgdEnd, ReplicaCaptured, StepsReported
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.stream.rank_report import RankReport, ReplicaState

_Facts = TypeVar("_Facts", bound=Struct)
_KEY = re.compile(r"(?:\d+/|optimizer )?([^\s:]+)")  # "0/fc.weight", "0/fc.weight: exp_avg", "optimizer fc.weight step"
_COMPARED = (BuffersKept, OptimizerStep, ReplicaCaptured, LocalModel, StepsReported, LocalSgdEnd)  # have values by name
_NOT_VALUES = ("options", "ddp_params")  # `OptimizerStep.ddp_params`: optimizers are matched between ranks by all names


class RankParams:
    """Parameters and buffers that patterns of the user (`rank-parameters`) exclude from comparisons."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self.patterns = patterns
        self.names: dict[str, list[str]] = {}  # patterns by name of a parameter or buffer that was left out
        self._has_compared = False

    def without_matches(self, ranks: Sequence[RankTrace]) -> Sequence[RankTrace]:
        """Return copies of logs without values, gradients and optimizer state of matching parameters."""
        if not self.patterns:
            return ranks
        return [
            replace(rank, entries=[self.without(e) if isinstance(e, _COMPARED) else e for e in rank.entries])
            for rank in ranks
        ]

    def without(self, facts: _Facts) -> _Facts:
        """Return a copy of `facts` without the values of matching parameters and buffers."""
        fields = {name: value for name, value in structs.asdict(facts).items() if name not in _NOT_VALUES}
        has_class = isinstance(facts, OptimizerStep)
        untyped: Any = facts
        kept: _Facts = replace(untyped, **{name: self._without(value, has_class) for name, value in fields.items()})
        return kept

    def _without(self, value: Any, has_class: bool) -> Any:
        if isinstance(value, Mapping):
            return {key: item for key, item in value.items() if not self.has(str(key), has_class=has_class)}
        if isinstance(value, tuple):
            return tuple(item for item in value if not (isinstance(item, Difference) and self.has(item.name)))
        if isinstance(value, RankReport):  # its other fields say which parameters contribute
            return replace(value, changes=self._without(value.changes, False))
        return self.without(value) if isinstance(value, ReplicaState | DdpStepEvidence) else value

    def has(self, key: str, *, has_class: bool = False) -> bool:
        """Return True if a key ("fc.weight", or with `has_class` "Net.fc.weight") matches a pattern."""
        self._has_compared = True
        name = key if (match := _KEY.match(key)) is None else match[1]
        names = [name, *([name.partition(".")[2]] if has_class and "/" not in key else [])]
        matched = [pattern for pattern in self.patterns if any(fnmatchcase(name, pattern) for name in names)]
        if matched:
            self.names[name] = matched
        return bool(matched)

    @property
    def left_out(self) -> str:
        """Text for a check line that names the parameters left out, or ""."""
        return f"; left out by rank-parameters: {join_names([*self.names])}" if self.names else ""

    @property
    def unmatched(self) -> list[str]:
        """Notes on patterns that match no parameter."""
        matched = {pattern for patterns in self.names.values() for pattern in patterns}
        idle = [pattern for pattern in self.patterns if pattern not in matched and self._has_compared]
        return [f"rank-parameters: no parameter has a name like {pattern!r}" for pattern in idle]
