"""The collectives of the ranks, in groups of ranks that have called the same, with the point where they part.

This module is light: it never imports torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddpcheck.findings.figures import CalledCollective, CollectiveTimeline, RankCollectives
from ddpcheck.findings.wording import counted, format_ranks, group_by, join_names

MOST_GROUPS = 6
_BEFORE = 4  # collectives before the point where the ranks part
_MOST = 24  # in one table
_MOST_DOING = 2  # different words on what the ranks of a group did at the end
_MOST_ENDS = 12


@dataclass(frozen=True, slots=True)
class _Group:
    """Ranks that have called the same collectives, and wait alike."""

    ranks: tuple[int, ...]
    log: RankCollectives
    doing: tuple[str, ...]

    def at(self, number: int) -> int | None:
        """The call with a number, as a place in the list of the timeline; None where there is none, or it is lost."""
        place = number - self.log.first
        return self.log.calls[place] if 0 <= place < len(self.log.calls) else None

    @property
    def end(self) -> int:
        """The number of the call that it has not made."""
        return self.log.first + len(self.log.calls)


class Cell(NamedTuple):
    """What a group of ranks has called; without a call, why there is none."""

    call: CalledCollective | None
    waits: bool
    why: str


class Row(NamedTuple):
    """The collectives with one number: a cell a group, or one for all where they are alike."""

    number: int
    parts: bool
    cells: list[Cell]


def timeline_view(timeline: CollectiveTimeline) -> dict[str, Any]:
    """What the template of a process group shows, by name."""
    groups = _groups(timeline)
    shown = groups[:MOST_GROUPS]
    names, waits = [format_ranks(group.ranks) for group in shown], _waits(shown)
    others = sorted(rank for group in groups[MOST_GROUPS:] for rank in group.ranks)
    said = f"{' | '.join(names)}: ranks that called the same share a column."
    said += f" {format_ranks(others)} did otherwise still, and are left off." if others else ""
    at_end = group_by((log for log in timeline.ranks if log.at_end), lambda log: log.at_end)
    last = max((group.end for group in shown), default=0)
    start = max(min((group.log.first for group in shown), default=0), last - _MOST, 0)
    if timeline.parts_at is not None:
        start = max(min(start, timeline.parts_at), timeline.parts_at - _BEFORE)
    end = min(last + any(group.end < last or group.log.waiting for group in shown), start + _MOST)
    before = f"the {counted(start, 'collective')} before these are not shown" if start else "from the first one on"
    after = f", nor the {last - end} after them" if last > end else ""
    return {
        "group": timeline.group,
        "said": said,
        "ranks": names,
        "rows": list(_rows(timeline, shown, start, end)),
        "caption": f"Collectives in the order in which each group of ranks has called them ({before}{after})",
        "endings": [
            (format_ranks(log.rank for log in logs), text)
            for text, logs in itertools.islice(at_end.items(), _MOST_ENDS)
        ],
        "doing": [join_names(group.doing, most=_MOST_DOING) or _last(timeline, group) for group in shown],
        "waits": waits,
        "waiting": [(names[one], ", ".join(names[other] for other in others)) for one, others in waits.items()],
    }


def _groups(timeline: CollectiveTimeline) -> list[_Group]:
    """Groups of ranks, the one with the lowest rank first."""
    alike = group_by(timeline.ranks, lambda log: (log.first, log.calls, log.waiting, log.waits_for))
    return [
        _Group(tuple(log.rank for log in logs), logs[0], tuple(dict.fromkeys(log.at_end for log in logs if log.at_end)))
        for logs in alike.values()
    ]


def _rows(timeline: CollectiveTimeline, groups: Sequence[_Group], start: int, end: int) -> Iterator[Row]:
    for number in range(start, end):
        cells = []
        for group in groups:
            place = group.at(number)
            waits = group.log.waiting and not group.log.later and number == group.end - 1
            why = "not known" if number < group.log.first else "never came here"
            cells.append(Cell(None if place is None else timeline.calls[place], waits, why))
        if any(cell.call for cell in cells):
            alike = len({(cell.call, cell.waits) for cell in cells}) == 1
            yield Row(number, number == timeline.parts_at, cells[:1] if alike else cells)


def _waits(groups: Sequence[_Group]) -> dict[int, list[int]]:
    """By number of a group, the numbers of the others that it waits for."""
    number_of = {rank: number for number, group in enumerate(groups) for rank in group.ranks}
    waits = {
        number: sorted({number_of[rank] for rank in group.log.waits_for if rank in number_of} - {number})
        for number, group in enumerate(groups)
    }
    return {number: others for number, others in waits.items() if others}


def _last(timeline: CollectiveTimeline, group: _Group) -> str:
    if not group.log.calls:
        return "no collective"
    return f"{'waits in' if group.log.waiting else 'last'} {timeline.calls[group.log.calls[-1]].operation}"
