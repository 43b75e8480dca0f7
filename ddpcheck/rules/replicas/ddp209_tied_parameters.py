"""DDP209 tied-parameters: error, stops_ddp, stops_run

Parameters are one tensor under several names on one rank, and separate tensors on another.

Why: DDP counts a tied parameter once. If only some ranks tie, the lists of parameters have different lengths or pair
    up the wrong tensors (see DDP201 and DDP202).
Fix: Tie on every rank, before wrapping, and tie again after anything that replaces parameters (casting, loading).
Detected: Before DDP's first collective, the ranks compare which names share one tensor.
Ignore: Never.
Line: In `ddpcheck run`, the line that wraps the module. In `ddpcheck report`, the line that creates the first
    parameter.
Checks: report consistency; run replicas; repro layouts
Explains: DDP516 if only the loss; quietly DDP522 if of graphs
Example:
    if os.path.exists(checkpoint):           # true on one machine only
        model.head.weight = model.embedding.weight   # right: on every rank
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import group_by_value, minority_ranks, new_finding


def judge_ties(ties: Sequence[tuple[tuple[str, ...], ...]]) -> list[Finding]:
    findings = []
    for names in sorted(set(itertools.chain.from_iterable(ties))):
        tied = ["tied" if names in rank_ties else "not tied" for rank_ties in ties]
        if "not tied" in tied:
            findings += new_finding(
                "DDP209",
                names,
                f"{' and '.join(names)} are one parameter on some ranks and several on others.",
                ranks=minority_ranks(tied),
                evidence=group_by_value(tied),
            )
    return findings
