"""DDP223 optimizer-options: error, stops_run

The optimizer, its options or its parameter groups differ between ranks.

Why: DDP averages gradients and nothing else. The ranks stay equal only if every optimizer makes the same update from
    these gradients. With a different learning rate, momentum or order of groups, the ranks silently diverge from the
    first step. (PyTorch docs, DistributedDataParallel: all processes must make the same parameter updates.)
Fix: Construct the optimizer from the same options and the same order of parameters on every rank.
Detected: Before training and at the optimizer's steps, the ranks compare the class, the options and the parameter
    groups of the optimizer.
Ignore: If the optimizer holds parameters that only one rank trains.
Checks: report wrapping; run optimizers
Explains: DDP306
Example:
    SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank()))   # right: lr=0.1 on every rank
"""

from __future__ import annotations

from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.rules.replicas.comparisons import judge_options
from ddpcheck.trace.unwrapped_params import Steps, param_name


def judge_parts(first: Steps) -> list[Finding]:
    """DDP223: optimizers with different parameters on ranks, after the parameters have diverged.

    A manually sharded optimizer also holds different parameters, but sends the updated parameters to the other ranks.
    """
    params = [{"its parameters": ", ".join(sorted(map(param_name, step.held)))} for step in first]
    if not all(step.held for step in first):
        return []
    return [replace(finding, location=first[0].made) for finding in judge_options("DDP223", params, "The optimizer")]
