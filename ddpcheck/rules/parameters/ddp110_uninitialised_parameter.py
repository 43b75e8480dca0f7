"""DDP110 uninitialised-parameter: error, stops_ddp, stops_run, keeps_results

A lazy parameter is wrapped before its shape is known.

Why: DDP broadcasts and buckets parameters when it is constructed, and needs their sizes. It refuses a module with
    uninitialised parameters. (PyTorch docs, LazyModuleMixin: initialise with dry runs.)
Fix: Run one forward pass with a batch of the right shape (under no_grad) on every rank before wrapping.
Detected: ddpcheck inspects the parameters of the module right before wrapping. A parameter without a known shape is
    reported.
Ignore: Never. DDP refuses such a module.
Line: The line that constructs the lazy module.
Checks: report consistency; repro missing
Color: #000000
Example:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU())
    DistributedDataParallel(model)           # right: model(torch.zeros(1, 16)) first
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import join_names, new_finding, plural_verb, ranks_or_all


def judge_uninitialised(names: Sequence[Sequence[str]]) -> list[Finding]:
    """DDP110: lazy parameters without a shape when the module is wrapped (names by rank)."""
    lazy = sorted({name for rank_names in names for name in rank_names})
    if not lazy:
        return []
    return new_finding(
        "DDP110",
        lazy,
        f"{join_names(lazy)} {plural_verb('is lazy and has', 'are lazy and have', lazy)} no shape yet, so DDP "
        "cannot wrap the model.",
        ranks=ranks_or_all([rank for rank, rank_names in enumerate(names) if rank_names], len(names)),
    )
