"""ddpcheck: correctness testing for PyTorch `DistributedDataParallel`.

Importing this package is free: a public name is loaded on first use, and torch with it where it is needed.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpcheck.anomalous import detect_anomalous_params
    from ddpcheck.assertions import assert_no_anomalous_params, assert_parity, assert_same_on_all_ranks
    from ddpcheck.check import check
    from ddpcheck.consistency import check_consistency
    from ddpcheck.errors import (
        ConfigError,
        DdpcheckError,
        FindingsError,
        HangError,
        RankError,
        RankFailure,
        TargetError,
        UsageError,
    )
    from ddpcheck.findings import Finding, Location, Report
    from ddpcheck.harness import World
    from ddpcheck.launchers import allreduce_grads, allreduce_params, get_dist_info, init_dist, master_only
    from ddpcheck.matrix import Matrix
    from ddpcheck.recipe import Recipe
    from ddpcheck.repro import write_reproduction
    from ddpcheck.severity import Severity
    from ddpcheck.sweep import check_matrix
    from ddpcheck.watching.telling import FindingWarning
    from ddpcheck.watching.watch import Watch, watch
    from ddpcheck.wrapper import CheckedDistributedDataParallel

__version__ = "0.1.0"

__all__ = [
    "Recipe",
    "check",
    "check_matrix",
    "World",
    "Report",
    "Matrix",
    "Finding",
    "Severity",
    "Location",
    "detect_anomalous_params",
    "check_consistency",
    "CheckedDistributedDataParallel",
    "watch",
    "Watch",
    "FindingWarning",
    "assert_parity",
    "assert_same_on_all_ranks",
    "assert_no_anomalous_params",
    "write_reproduction",
    "init_dist",
    "get_dist_info",
    "master_only",
    "allreduce_grads",
    "allreduce_params",
    "DdpcheckError",
    "UsageError",
    "ConfigError",
    "TargetError",
    "FindingsError",
    "RankError",
    "HangError",
    "RankFailure",
    "__version__",
]

_HOMES = {
    "Recipe": "recipe",
    "check": "check",
    "check_matrix": "sweep",
    "Matrix": "matrix",
    "World": "harness",
    "Report": "findings",
    "Finding": "findings",
    "Severity": "severity",
    "Location": "findings",
    "detect_anomalous_params": "anomalous",
    "check_consistency": "consistency",
    "CheckedDistributedDataParallel": "wrapper",
    "watch": "watching.watch",
    "Watch": "watching.watch",
    "FindingWarning": "watching.telling",
    "assert_parity": "assertions",
    "assert_same_on_all_ranks": "assertions",
    "assert_no_anomalous_params": "assertions",
    "write_reproduction": "repro",
    "init_dist": "launchers",
    "get_dist_info": "launchers",
    "master_only": "launchers",
    "allreduce_grads": "launchers",
    "allreduce_params": "launchers",
    "DdpcheckError": "errors",
    "UsageError": "errors",
    "ConfigError": "errors",
    "TargetError": "errors",
    "FindingsError": "errors",
    "RankError": "errors",
    "HangError": "errors",
    "RankFailure": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


class _Package(ModuleType):
    """This module's class: keeps `ddpcheck.check` the function.

    Importing the module `ddpcheck.check` would otherwise put that module into the function's place.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Functions that speak of this package travel to ranks by value, and it with them, by name."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
