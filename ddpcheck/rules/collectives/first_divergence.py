"""First collectives that differ between ranks, live and in schedules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ddpcheck.findings.evidence.endings import ScheduledCall
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import group_by, plural
from ddpcheck.rules.collectives.ddp403_collective_mismatch import (
    judge_collectives,
    judge_schedule_waits,
    mismatch_finding,
)
from ddpcheck.trace.collectives import DIVERGES_AT, ROOTED, first_unequal_call


def ranks_in_complete_collective(logs: Sequence[Sequence[Call]], inside: Mapping[int, str]) -> set[int]:
    """Return the ranks inside a collective that all members have entered.

    Such a rank still transfers data or unpickles objects, while other ranks may have left the collective.
    """
    ranks = set()
    for rank, words in inside.items():
        if logs[rank] and words == str(last := logs[rank][-1]):
            counts = [sum(call.group == last.group for call in logs[peer]) for peer in last.members if peer < len(logs)]
            if sum(call.group == last.group for call in logs[rank]) == min(counts):
                ranks.add(rank)
    return ranks


def mismatch_number(finding: Finding) -> int | None:
    """Return the call number of the first mismatched collective, read from `finding.tags`, or None."""
    numbers = [tag.removeprefix(DIVERGES_AT) for tag in finding.tags if tag.startswith(DIVERGES_AT)]
    return int(numbers[0]) if numbers else None


_MAX_RUN = 64  # longest sequence of extra calls to try
_MAX_TRIES = 50  # mismatched call sites to examine


def judge_divergences(
    logs: Sequence[Sequence[Call]], at_work: Collection[int] = (), first: Mapping[str, int] | None = None
) -> list[Finding]:
    """DDP403: first mismatch of each process group, by call site or else by operation."""
    findings = []
    for group in sorted({call.group for log in logs for call in log}):
        group_logs = [[call for call in log if call.group == group] for log in logs]
        by_operation = judge_collectives(group_logs, at_work, first)
        findings += (by_operation and judge_call_sites(group_logs, (first or {}).get(group, 0))) or by_operation
    return findings


def judge_call_sites(logs: Sequence[Sequence[Call]], first: int = 0) -> list[Finding]:
    """DDP403: first collective that other ranks do not call, or call from another line."""
    members = next((call.members for log in logs for call in log), ())
    ranks = [rank for rank in members if rank < len(logs)]
    divergence = _find_extra_call(logs, ranks)
    if divergence is None:
        return []
    index, coded, *sides = divergence
    calls = {rank: logs[rank][index] for rank in ranks if index < len(logs[rank])}
    calling, missing = ([rank for rank in calls if coded[rank][index] == coded[side][index]] for side in sides)
    last_calls = [
        f"rank {rank}, its last one, after {plural(first + len(logs[rank]) - 1, 'other')}: {logs[rank][-1]}"
        for rank in ranks
        if logs[rank]
    ]
    return mismatch_finding(index + first, calls, calling, missing, last_calls)


def extra_call_index(logs: Sequence[Sequence[Call]]) -> int | None:
    """Return the index of the first call that only some ranks make, or None."""
    divergence = _find_extra_call(logs, range(len(logs)))
    return None if divergence is None else divergence[0]


def _find_extra_call(
    logs: Sequence[Sequence[Call]], ranks: Sequence[int]
) -> tuple[int, Mapping[int, Sequence[int]], int, int] | None:
    """Return (index of first extra call, encoded logs, calling rank, missing rank), or None."""
    mismatch = first_unequal_call([logs[rank] for rank in ranks])
    if mismatch is None:
        return None
    index, calls = mismatch
    end = None if None in calls else index + 1  # nothing pairs up after operations differ
    codes: dict[_CallSite, int] = {}  # integers, for fast comparison of long logs
    coded = {
        rank: tuple(
            codes.setdefault(_CallSite(call.operation, call.payload, call.location), len(codes))
            for call in logs[rank][:end]
        )
        for rank in ranks
    }
    sites = list(codes)
    classes = sorted(group_by(ranks, lambda rank: coded[rank]).values(), key=lambda group: (-len(group), group))
    candidates = []
    for group in classes[1:]:
        for calling, missing in ((classes[0], group), (group, classes[0])):
            extra, without = coded[calling[0]], coded[missing[0]]
            if len(extra) > len(without) or end is not None:  # the rank with more calls waits
                extra_at = _Comparison(sites, extra, without).first_extra_call(index)
                candidates += [] if extra_at is None else [(extra_at, calling[0], missing[0])]
    if not candidates:
        return None
    index, calling_rank, missing_rank = min(candidates)
    return index, coded, calling_rank, missing_rank


class _CallSite(NamedTuple):
    operation: str
    payload: str
    location: str


class _Comparison:
    """Search for extra calls in a log, compared with the log of another rank.

    Even without an error, ranks may call one collective from different lines, each rank in its own branch. Two lines
    are accepted as a pair if they paired up earlier, if each line occurs on one rank only, or if the root of a rooted
    collective is unknown (sender and receivers use different lines, and ranks may take turns).
    """

    def __init__(self, sites: Sequence[_CallSite], log: Sequence[int], peer_log: Sequence[int]) -> None:
        self._sites = sites
        self._log = log
        self._peer_log = peer_log
        self._locations = {sites[code].location for code in set(log)}
        self._peer_locations = {sites[code].location for code in set(peer_log)}
        self._pairs: set[tuple[int, int]] = set()  # accepted pairs of different lines so far
        self._matched: set[int] = set()  # calls that paired up with an equal call so far

    def first_extra_call(self, end: int) -> int | None:
        """Return the index of the first extra call before `end`, or None."""
        tries = 0
        for index, pair in enumerate(zip(self._log[:end], self._peer_log[:end], strict=False)):
            if pair[0] == pair[1]:
                self._matched.add(pair[0])
            elif pair not in self._pairs:
                if not self._are_pair(*pair):
                    tries += 1
                    if tries <= _MAX_TRIES and (self._has_extra_lines(index) or self._has_extra_run(index)):
                        return index
                self._pairs.add(pair)
        return None

    def _are_pair(self, code: int, other_code: int) -> bool:
        """Return True if two calls of different ranks may be the same collective."""
        if code == other_code or (code, other_code) in self._pairs:
            return True
        call, other_call = self._sites[code], self._sites[other_code]
        if call[:2] != other_call[:2]:
            return False
        is_rooted = call.operation in ROOTED and "root" not in call.payload
        if is_rooted or not (call.location and other_call.location):  # the lines are inconclusive
            return True
        return (
            call.location not in self._peer_locations
            and other_call.location not in self._locations
            and not any(code == known_code or other_code == known_other for known_code, known_other in self._pairs)
        )

    def _has_extra_lines(self, start: int) -> bool:
        """Return True if, from `start`, logs differ only in lines that one rank calls."""
        index, other_index, matched = start, start, 0
        waiting, confirmed = list[int](), list[int]()  # extra calls not yet / already followed by a match
        while index < len(self._log) and other_index < len(self._peer_log):
            code, other_code = self._log[index], self._peer_log[other_index]
            location = self._sites[code].location
            if index > start and self._are_pair(code, other_code):
                if location and code == other_code:
                    matched += 1
                    confirmed += waiting
                    waiting = []
                other_index += 1
            elif location and location not in self._peer_locations:
                waiting.append(code)
            else:
                return False
            index += 1
        return 0 < len(confirmed) <= matched and (other_index == len(self._peer_log) or set(waiting) <= set(confirmed))

    def _has_extra_run(self, start: int) -> bool:
        """Return True if logs match after removing one sequence of calls at `start`.

        False if ranks take turns: their logs also match after a shift, but no call has been paired with an equal call.
        """
        for length in range(1, _MAX_RUN + 1):
            later_pairs = zip(self._log[start + length :], self._peer_log[start:], strict=False)
            matched = []
            for code, other_code in later_pairs:
                if not self._are_pair(code, other_code):
                    break
                matched += [code] if code == other_code and self._sites[code].location else []
            else:
                to_the_end = len(self._log) - length == len(self._peer_log)
                if len(matched) >= (1 if to_the_end else length):
                    run = self._log[start : start + length]
                    has_own_lines = self._peer_locations.isdisjoint(self._sites[code].location for code in run)
                    return has_own_lines or bool({*run, *matched} & self._matched) or len(set(matched)) > 2
        return False


def judge_schedules(schedules: Mapping[str, Sequence[ScheduledCall]], names: Sequence[str]) -> list[Finding]:
    """Return findings on mismatched collectives; if all collectives match, on a circular wait."""
    calls = {name: [scheduled.call for scheduled in schedule] for name, schedule in schedules.items()}
    return judge_collectives([calls[n] for n in names]) or judge_schedule_waits([schedules[n] for n in names])
