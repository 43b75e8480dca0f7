"""The collectives of the ranks, in groups of ranks that have called the same, with the point where they part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddpcheck.findings.figures import CalledCollective, CollectiveTimeline, RankCollectives
from ddpcheck.findings.wording import counted, format_ranks, group_by, join_names

MOST_GROUPS = 6
_BEFORE = 4  # collectives before the point where the ranks part
_MOST = 24  # in one table
_MOST_DOING = 2  # different words on what the ranks of a group did at the end
_MOST_ENDS = 12


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that have called the same collectives, and wait alike."""

    logs: Sequence[RankCollectives]
    listed: Sequence[CalledCollective]

    @property
    def log(self) -> RankCollectives:
        """The log of any of them."""
        return self.logs[0]

    @property
    def name(self) -> str:
        """The ranks, in words."""
        return format_ranks(log.rank for log in self.logs)

    @property
    def end(self) -> int:
        """The number of the call that it has not made."""
        return self.log.first + len(self.log.calls)

    def at(self, number: int) -> CalledCollective | None:
        """The call with a number; None where there is none, or it is lost."""
        place = number - self.log.first
        return self.listed[self.log.calls[place]] if 0 <= place < len(self.log.calls) else None

    def waits_in(self, number: int) -> bool:
        """The call with that number did not end."""
        return self.log.waiting and not self.log.later and number == self.end - 1

    @property
    def did(self) -> str:
        """What it did at the end."""
        last = self.at(self.end - 1)
        call = f"{'waits in' if self.log.waiting else 'last'} {last.operation}" if last else "no collective"
        said = list(dict.fromkeys(log.at_end for log in self.logs if log.at_end))
        return join_names(said, most=_MOST_DOING) or call


def timeline_view(timeline: CollectiveTimeline) -> dict[str, Any]:
    """What the template of a process group shows, by name."""
    alike = group_by(timeline.ranks, lambda log: (log.first, log.calls, log.waiting, log.waits_for))
    groups = [Group(logs, timeline.calls) for logs in alike.values()]
    shown = groups[:MOST_GROUPS]
    others = [log.rank for group in groups[MOST_GROUPS:] for log in group.logs]
    said = f"{' | '.join(group.name for group in shown)}: ranks that called the same share a column."
    said += f" {format_ranks(others)} did otherwise still, and are left off." if others else ""
    at_end = group_by((log for log in timeline.ranks if log.at_end), lambda log: log.at_end)
    last = max((group.end for group in shown), default=0)
    start = max(min((group.log.first for group in shown), default=0), last - _MOST, 0)
    if timeline.parts_at is not None:
        start = max(min(start, timeline.parts_at), timeline.parts_at - _BEFORE)
    end = min(last + any(group.end < last or group.log.waiting for group in shown), start + _MOST)
    before = f"the {counted(start, 'collective')} before these are not shown" if start else "from the first one on"
    after = f", nor the {last - end} after them" if last > end else ""
    numbers = [number for number in range(start, end) if any(group.at(number) for group in shown)]
    waits = _waits(shown)
    return {
        "timeline": timeline,
        "said": said,
        "groups": shown,
        "numbers": numbers,
        "alike": {n for n in numbers if len({(group.at(n), group.waits_in(n)) for group in shown}) == 1},
        "caption": f"Collectives in the order in which each group of ranks has called them ({before}{after})",
        "endings": [
            (format_ranks(log.rank for log in logs), text)
            for text, logs in itertools.islice(at_end.items(), _MOST_ENDS)
        ],
        "waits": waits,
        "waiting": [(shown[one].name, ", ".join(shown[i].name for i in others)) for one, others in waits.items()],
    }


def _waits(groups: Sequence[Group]) -> dict[int, list[int]]:
    """By number of a group, the numbers of the others that it waits for."""
    number_of = {log.rank: number for number, group in enumerate(groups) for log in group.logs}
    waits = {
        number: sorted({number_of[rank] for rank in group.log.waits_for if rank in number_of} - {number})
        for number, group in enumerate(groups)
    }
    return {number: others for number, others in waits.items() if others}
