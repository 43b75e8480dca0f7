"""DDP309: features of all ranks that a loss takes as constants, the rank's own too."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.gathers import GatheredConstant
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import one_finding

_FEWEST = 2  # steps


def judge_gathers(uses: Sequence[Sequence[GatheredConstant]]) -> list[Finding]:
    """At most one finding; `uses` by rank. Every rank has to do it, in several steps."""
    steps = [{one.step for one in of_rank} for of_rank in uses]
    if len(uses) < 2 or len(set.intersection(*steps)) < _FEWEST:
        return []
    one = uses[0][0]
    return one_finding(
        "DDP309",
        (one.operation,),
        f"The loss takes the {one.rows} rows that {one.operation} has gathered as constants, and those of the own rank "
        "too: a feature gets a gradient where it is compared with the others, and none where the others are compared "
        "with it.",
        location=one.location,
        evidence=["its input carries a gradient, and what it has gathered is in the loss and carries none"],
        severity=Severity.WARNING,
        fix="Use torch.distributed.nn.functional.all_gather, which autograd differentiates; or put the rank's own "
        "features back (parts[rank] = features), and have every rank compute the loss of all rows.",
    )
