"""ddpcheck: correctness testing for PyTorch `DistributedDataParallel`.

Imports are lazy: public names, and torch, are loaded on first use.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpcheck import launch as launch
    from ddpcheck import rank as rank
    from ddpcheck.anomalous import detect_anomalous_params
    from ddpcheck.consistency import check_consistency
    from ddpcheck.findings.errors import (
        ConfigError,
        DDPCheckError,
        FindingsError,
        HangError,
        RankError,
        RankFailure,
        TargetError,
        UsageError,
    )
    from ddpcheck.findings.report import Finding, Location, Report
    from ddpcheck.findings.rules import Severity
    from ddpcheck.findings.selection import Suppression
    from ddpcheck.gather.collectives.allreduce import allreduce_grads, allreduce_params
    from ddpcheck.harness import World
    from ddpcheck.monitor.reporting import FindingWarning
    from ddpcheck.monitor.watch import Watch, watch
    from ddpcheck.monitor.wrapper import CheckedDistributedDataParallel
    from ddpcheck.recipe.recipe import Recipe
    from ddpcheck.report.checking.check import check
    from ddpcheck.report.matrix.check_matrix import check_matrix
    from ddpcheck.report.matrix.matrix import Matrix
    from ddpcheck.report.repro import write_reproduction
    from ddpcheck.report.schedule.check_schedule import check_schedule
    from ddpcheck.run.checked_script import check_script
    from ddpcheck.testing.assertions.assertions import (
        assert_no_anomalous_params,
        assert_parity,
        assert_same_on_all_ranks,
    )
    from ddpcheck.worlds.launchers.init_dist import get_dist_info, init_dist, master_only

__version__ = "0.1.0"

__all__ = [
    "Recipe",
    "check",
    "check_matrix",
    "check_schedule",
    "check_script",
    "World",
    "Report",
    "Matrix",
    "Finding",
    "Severity",
    "Location",
    "Suppression",
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
    "DDPCheckError",
    "UsageError",
    "ConfigError",
    "TargetError",
    "FindingsError",
    "RankError",
    "HangError",
    "RankFailure",
    "__version__",
]

_NAMES = {
    "recipe.recipe": "Recipe",
    "report.checking.check": "check",
    "report.matrix.check_matrix": "check_matrix",
    "report.schedule.check_schedule": "check_schedule",
    "run.checked_script": "check_script",
    "report.matrix.matrix": "Matrix",
    "harness": "World",
    "findings.report": "Report Finding Location",
    "findings.rules": "Severity",
    "findings.selection": "Suppression",
    "anomalous": "detect_anomalous_params",
    "consistency": "check_consistency",
    "monitor.wrapper": "CheckedDistributedDataParallel",
    "monitor.watch": "watch Watch",
    "monitor.reporting": "FindingWarning",
    "testing.assertions.assertions": "assert_parity assert_same_on_all_ranks assert_no_anomalous_params",
    "report.repro": "write_reproduction",
    "worlds.launchers.init_dist": "init_dist get_dist_info master_only",
    "gather.collectives.allreduce": "allreduce_grads allreduce_params",
    "findings.errors": "DDPCheckError UsageError ConfigError TargetError FindingsError RankError HangError RankFailure",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
_RENAMED = {"DdpcheckError": "DDPCheckError"}  # deprecated names
_MODULES = ("rank", "launch")  # public submodules, loaded on attribute access


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if new := _RENAMED.get(name):
        warnings.warn(f"ddpcheck.{name} is deprecated: use {new}", DeprecationWarning, stacklevel=2)
        name = new
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})


class _Package(ModuleType):
    """Module that is pickled by name, in functions sent to ranks by value."""

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
