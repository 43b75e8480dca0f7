"""How a script has ended: from exit codes, exceptions and stacks of its ranks to the finding behind it.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpcheck.findings.errors import RankError, RankFailure
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Finding
from ddpcheck.judge.rank_failure import follows_from_another_rank, judge_failure
from ddpcheck.monitor.script.hang_watch import Hang
from ddpcheck.monitor.script.rank_log import ProgramEnded, RankRaised, WatchedRank
from ddpcheck.worlds import failures


@dataclass(frozen=True, slots=True)
class Ending:
    """How a script has ended.

    Attributes:
        exit_code: Of the whole.
        exit_codes: Of the ranks that failed, by rank; negative for a signal.
        hang: What was seen when the ranks waited for each other, if they did.
    """

    exit_code: int = 0
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    hang: Hang | None = None


def judge_ending(ranks: Sequence[WatchedRank], ending: Ending, known: Sequence[Finding]) -> list[Finding]:
    """DDP401 to 404: why ranks failed or waited for each other, where no finding that is `known` is the reason."""
    found = failures_of(ranks, ending)
    if not found or any(rank.started.rank != number for number, rank in enumerate(ranks)):
        return []  # of ranks on other machines there is no log here
    ordered = failures.in_order(found)
    if known and all(follows_from_another_rank(failure) for failure in ordered):
        return []
    error = RankError("", ordered)
    error.results = {rank.started.rank: None for rank in ranks if rank.started.rank not in {one.rank for one in found}}
    return judge_failure(error, comparable_logs(ranks), len(ranks))


def comparable_logs(ranks: Sequence[WatchedRank]) -> list[Sequence[Call]]:
    """The last collectives of each rank, from the first that is known of all of them."""
    first = max((rank.first_call for rank in ranks), default=0)
    return [rank.calls[first - rank.first_call :] for rank in ranks]


def failures_of(ranks: Sequence[WatchedRank], ending: Ending) -> list[RankFailure]:
    """How ranks have failed, but for those that torchrun has ended."""
    found = []
    for rank in ranks:
        number = rank.started.rank
        raised = [entry for entry in rank.entries if isinstance(entry, RankRaised)]
        code = ending.exit_codes.get(number)
        if raised:
            found.append(failures.raised(number, dict(raised[0].reply)))
        elif ending.hang is not None and number in ending.hang.stacks:
            found.append(failures.stuck(number, 0.0, ending.hang.stacks[number], "", ""))
        elif code is not None and not any(isinstance(entry, ProgramEnded) for entry in rank.entries):
            found.append(failures.died(number, code, 0.0))
    if ending.hang is None and all(one.kind == "died" and (one.exit_code or 0) > 0 for one in found):
        return []  # the script ends its processes itself
    return [one for one in found if not _was_ended(one, found)]


def _was_ended(failure: RankFailure, found: Sequence[RankFailure]) -> bool:
    """Whether a rank was ended by torchrun, after another one had failed."""
    return failure.exit_code in (-15, -9) and any(one.exit_code not in (-15, -9) for one in found)
