"""The collectives of the ranks, in groups of ranks that have called the same, with the point where they part.

This module is light: it never imports torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpcheck.findings.figures import CalledCollective, CollectiveTimeline, RankCollectives
from ddpcheck.findings.wording import counted, format_ranks, group_by, join_names
from ddpcheck.render.page.frame import Content, Markup, code, folded, tag
from ddpcheck.render.page.pictures import wait_picture

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


def collectives(timelines: Sequence[CollectiveTimeline]) -> Content:
    """A table for each process group, and who waits for whom."""
    return [_timeline(timeline, named=len(timelines) > 1) for timeline in timelines]


def _timeline(timeline: CollectiveTimeline, *, named: bool) -> Content:
    groups = _groups(timeline)
    shown = groups[:MOST_GROUPS]
    heading = tag("h3", "Process group ", code(timeline.group)) if named else None
    said = f"{' | '.join(format_ranks(group.ranks) for group in shown)}: ranks that called the same share a column."
    if len(groups) > len(shown):
        others = sorted(rank for group in groups[MOST_GROUPS:] for rank in group.ranks)
        said += f" {format_ranks(others)} did otherwise still, and are left off."
    at_end = group_by((log for log in timeline.ranks if log.at_end), lambda log: log.at_end)
    endings = [
        [tag("dt", format_ranks(log.rank for log in logs)), tag("dd", text)]
        for text, logs in itertools.islice(at_end.items(), _MOST_ENDS)
    ]
    return [
        heading,
        tag("p", said, class_="muted"),
        _table(timeline, shown),
        [tag("h4", "At the end"), tag("dl", endings, class_="facts")] if endings else None,
        _waits(timeline, shown),
    ]


def _groups(timeline: CollectiveTimeline) -> list[_Group]:
    """Groups of ranks, the one with the lowest rank first."""
    alike = group_by(timeline.ranks, lambda log: (log.first, log.calls, log.waiting, log.waits_for))
    groups = []
    for logs in alike.values():
        doing = tuple(dict.fromkeys(log.at_end for log in logs if log.at_end))
        groups.append(_Group(tuple(log.rank for log in logs), logs[0], doing))
    return groups


def _doing(group: _Group) -> str:
    return join_names(group.doing, most=_MOST_DOING)


def _table(timeline: CollectiveTimeline, groups: Sequence[_Group]) -> Content:
    last = max((group.end for group in groups), default=0)
    start = max(min((group.log.first for group in groups), default=0), last - _MOST, 0)
    if timeline.parts_at is not None:
        start = min(start, timeline.parts_at) if timeline.parts_at < start else start
        start = max(start, timeline.parts_at - _BEFORE)
    end = min(last + any(group.end < last or group.log.waiting for group in groups), start + _MOST)
    rows = list(_rows(timeline, groups, start, end))
    if not rows:
        return tag("p", "No collective was called.")
    head = tag("tr", tag("th", "no."), [tag("th", format_ranks(group.ranks), scope="col") for group in groups])
    before = f"the {counted(start, 'collective')} before these are not shown" if start else "from the first one on"
    after = f", nor the {last - end} after them" if last > end else ""
    caption = f"Collectives in the order in which each group of ranks has called them ({before}{after})"
    made = tag("table", tag("thead", head), tag("tbody", rows), class_="steps")
    box = tag("div", made, class_="scrolls", tabindex=0, role="region", aria_label=caption)
    return [tag("p", caption, class_="muted"), box]


def _rows(timeline: CollectiveTimeline, groups: Sequence[_Group], start: int, end: int) -> Iterator[Markup]:
    for number in range(start, end):
        found = [group.at(number) for group in groups]
        if not any(call is not None for call in found):
            continue
        parts = number == timeline.parts_at
        mark: Content = [str(number), tag("div", "part here", class_="wait") if parts else None]
        class_ = "parts" if parts else None
        waits = [group.log.waiting and not group.log.later and number == group.end - 1 for group in groups]
        if len(set(zip(found, waits, strict=True))) == 1 and found[0] is not None:
            call = _call(timeline.calls[found[0]], waits=waits[0])
            yield tag("tr", tag("td", mark), tag("td", call, colspan=len(groups), class_="alike"), class_=class_)
            continue
        cells = []
        for group, at, waiting in zip(groups, found, waits, strict=True):
            if at is not None:
                cells.append(tag("td", _call(timeline.calls[at], waits=waiting)))
            else:
                cells.append(tag("td", "not known" if number < group.log.first else "never came here", class_="none"))
        yield tag("tr", tag("td", mark), cells, class_=class_)


def _call(call: CalledCollective, *, waits: bool) -> Content:
    return [
        tag("strong", call.operation),
        f" {call.payload}" if call.payload else "",
        [" ", code(call.location)] if call.location else None,
        tag("div", "did not end", class_="wait") if waits else None,
    ]


def _waits(timeline: CollectiveTimeline, groups: Sequence[_Group]) -> Content:
    number_of = {rank: number for number, group in enumerate(groups) for rank in group.ranks}
    waits = {
        number: sorted({number_of[rank] for rank in group.log.waits_for if rank in number_of} - {number})
        for number, group in enumerate(groups)
    }
    waits = {number: others for number, others in waits.items() if others}
    if not waits:
        return None
    names = [format_ranks(group.ranks) for group in groups]
    words = [f"{names[one]} for {', '.join(names[other] for other in others)}" for one, others in waits.items()]
    picture = wait_picture(names, [_doing(group) or _last(timeline, group) for group in groups], waits)
    return [picture, folded("The same in words", tag("ul", [tag("li", one) for one in words]))]


def _last(timeline: CollectiveTimeline, group: _Group) -> str:
    if not group.log.calls:
        return "no collective"
    return f"{'waits in' if group.log.waiting else 'last'} {timeline.calls[group.log.calls[-1]].operation}"
