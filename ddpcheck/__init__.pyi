"""Public names of `ddpcheck` for type checkers; at run time, `__init__.py` loads each at its first use."""

from typing import Any

from ddpcheck import launch as launch
from ddpcheck import rank as rank
from ddpcheck.anomalous import detect_anomalous_params as detect_anomalous_params
from ddpcheck.consistency import check_consistency as check_consistency
from ddpcheck.extras.matrix.check_matrix import check_matrix as check_matrix
from ddpcheck.extras.repro import write_reproduction as write_reproduction
from ddpcheck.extras.schedule.check_schedule import check_schedule as check_schedule
from ddpcheck.findings.errors import ConfigError as ConfigError
from ddpcheck.findings.errors import DDPCheckError as DDPCheckError
from ddpcheck.findings.errors import FindingsError as FindingsError
from ddpcheck.findings.errors import HangError as HangError
from ddpcheck.findings.errors import RankError as RankError
from ddpcheck.findings.errors import RankFailure as RankFailure
from ddpcheck.findings.errors import TargetError as TargetError
from ddpcheck.findings.errors import UsageError as UsageError
from ddpcheck.findings.report import Finding as Finding
from ddpcheck.findings.report import Location as Location
from ddpcheck.findings.report import Report as Report
from ddpcheck.findings.rules import Severity as Severity
from ddpcheck.findings.selection import Suppression as Suppression
from ddpcheck.gather.collectives.allreduce import allreduce_grads as allreduce_grads
from ddpcheck.gather.collectives.allreduce import allreduce_params as allreduce_params
from ddpcheck.harness import World as World
from ddpcheck.monitor.reporting import FindingWarning as FindingWarning
from ddpcheck.monitor.watch import Watch as Watch
from ddpcheck.monitor.watch import watch as watch
from ddpcheck.monitor.wrapper import CheckedDistributedDataParallel as CheckedDistributedDataParallel
from ddpcheck.recipe.recipe import Recipe as Recipe
from ddpcheck.report.checking.check import check as check
from ddpcheck.report.matrix.matrix import Matrix as Matrix
from ddpcheck.run.checked_script import check_script as check_script
from ddpcheck.testing.assertions.assertions import assert_no_anomalous_params as assert_no_anomalous_params
from ddpcheck.testing.assertions.assertions import assert_parity as assert_parity
from ddpcheck.testing.assertions.assertions import assert_same_on_all_ranks as assert_same_on_all_ranks
from ddpcheck.worlds.launchers.init_dist import get_dist_info as get_dist_info
from ddpcheck.worlds.launchers.init_dist import init_dist as init_dist
from ddpcheck.worlds.launchers.init_dist import master_only as master_only

__all__: list[str]
__version__: str

def load_extra(module: str) -> Any: ...
