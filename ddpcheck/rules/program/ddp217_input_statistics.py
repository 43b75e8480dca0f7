"""DDP217 input-statistics: warning, stops_run

Each rank normalises its inputs with a running mean or variance of only its own samples.

Why: DDP synchronises only the parameters and buffers of the wrapped module. A script may keep a running mean or
    variance outside the module (an observation normaliser, a scaler that is updated in the loop). These statistics
    come from the samples of one rank. The same sample then has a different value on each rank, and a checkpoint keeps
    the statistics of rank 0. (PyTorch docs, DistributedDataParallel.)
Fix: Reduce the sums and the count of each batch over all ranks (dist.all_reduce) before adding them to the
    statistics; or keep the statistics in buffers of the wrapped module, as nn.SyncBatchNorm does.
Detected: In some calls of forward, `ddpcheck run` compares the tensors and arrays that the script holds. A tensor is
    reported under three conditions. The tensor differs between ranks. The tensor has moved towards the mean of the
    module's input since the previous call. The tensor is subtracted from this input. Nothing is reported if a
    collective is given the statistics, or if they are equal on all ranks at one of these calls. Nothing is reported
    if the statistics scale only the targets of the loss. Nothing is reported if the script updates the statistics
    more than once between two calls.
Ignore: If each rank trains on a different kind of input, and each kind has to be normalised separately.
Line: The line that updates the statistic.
Checks: run replicas
Example:
    mean += (x.mean(0) - mean) * len(x) / count    # right: sum, squares and count of x through dist.all_reduce first
    loss = criterion(ddp((x - mean) / std), y)
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.replicas import RunningStatistic
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import group_by, new_finding, plural
from ddpcheck.rules.registry import rule
from ddpcheck.trace.program import Statistics
from ddpcheck.trace.replicas import aligned

MIN_CALLS = 2  # forward calls per rank before which the statistic moved towards the mean of the samples
MIN_EQUATIONS = 3  # over all these calls
MAX_UNEXPLAINED = 0.5  # share of the changes between two calls of forward that were not towards that mean
ROUNDING = 1e-5  # relative to the divisor of the inputs


@rule
def judge_statistics(statistics: Statistics) -> list[Finding]:
    """DDP217: inputs normalised by running statistics that each rank estimates from its own samples.

    Statistics equal on all ranks at a forward call, or passed to a collective, are ignored: they normalise equally.
    """
    by_name = [group_by(map(_drop_weak, stats), lambda stat: (stat.wrapper, stat.name)) for stats in statistics.by_rank]
    for name in by_name[0] if len(by_name) > 1 else ():
        by_forward = [{stat.forward: stat for stat in groups.get(name, ())} for groups in by_name]
        calls = aligned(by_forward)
        if not calls or not all(map(_follows_samples, by_forward)) or any(stat.collectives for stat in calls[-1]):
            continue
        distances = [_largest_difference(stats) for stats in calls]
        if min(distances) > ROUNDING:
            return _statistics_finding(calls, max(distances[-MIN_CALLS:]))
    return []


def _drop_weak(stat: RunningStatistic) -> RunningStatistic:
    """Return `stat` without evidence (`equations=0`) if samples do not explain enough of its changes."""
    return stat if stat.unexplained_moves <= MAX_UNEXPLAINED * stat.moves else replace(stat, equations=0)


def _follows_samples(stats: dict[int, RunningStatistic]) -> bool:
    """Return True if the samples explain most changes of the running statistic."""
    fitting = [stat for stat in stats.values() if stat.equations]
    moves = [stat for number, stat in stats.items() if number - 1 in stats and stats[number - 1].values != stat.values]
    return (
        len(fitting) >= MIN_CALLS
        and sum(stat.equations for stat in fitting) >= MIN_EQUATIONS
        and 2 * sum(stat.equations > 0 for stat in moves) >= len(moves)
    )


def _largest_difference(stats: Sequence[RunningStatistic]) -> float:
    """Return the largest difference from the first rank's statistic, relative to the normalisation's divisor."""
    first = stats[0]
    rows = [row for stat in stats[1:] for row in zip(stat.values, first.values, first.scale, strict=False)]
    return max((abs(value - base) / scale for value, base, scale in rows if scale > 0), default=0.0)


def _statistics_finding(calls: Sequence[Sequence[RunningStatistic]], distance: float) -> list[Finding]:
    stat = calls[-1][0]
    fitting = [stats[0] for stats in calls if stats[0].equations]
    return new_finding(
        "DDP217",
        (stat.name,),
        f"{stat.name} is a running statistic of each rank's own samples, and the inputs of the wrapped module are "
        "normalised by it: the ranks train one model on differently scaled inputs.",
        location=stat.location,
        evidence=[
            f"it differs between ranks by {distance:.2g} times the divisor of the inputs, after "
            f"{plural(stat.forward, 'call')} of forward",
            f"before {plural(len(fitting), 'call')} of forward it moved towards the mean of the given samples, "
            "and it is subtracted from them",
        ],
        severity=Severity.WARNING,
        fix="Reduce the sums and the count of each batch over all ranks (dist.all_reduce) before they are added to the "
        "statistics; or keep these in buffers of the wrapped module, as nn.SyncBatchNorm does.",
    )
