"""The end of a run that failed: ends the ranks, and turns their state into the exception for the caller.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path

from ddpcheck.findings.errors import RankError, UsageError
from ddpcheck.findings.wording import format_ranks
from ddpcheck.worlds import failures, wire
from ddpcheck.worlds.rank import read_slots
from ddpcheck.worlds.rank_processes import RankProcesses


def end_of(processes: RankProcesses, directory: Path, headline: str | None) -> BaseException:
    """End every rank and return the exception that says what happened; a hang when there is a headline."""
    error = _described(processes, directory, headline)
    if isinstance(error, RankError):
        for rank in processes.ranks:
            if rank.answer is not None and rank.answer[0] == "result":
                with contextlib.suppress(Exception):  # what cannot be read back is no reason to lose the error
                    error.results[rank.number] = wire.loads(rank.answer[1])
    return error


def _described(processes: RankProcesses, directory: Path, headline: str | None) -> BaseException:
    if processes.refused:
        processes.kill()
        return UsageError(processes.error)
    dumps = processes.dump_stacks()
    now = time.monotonic()
    open_ranks = [rank for rank in processes.ranks if rank.answer is None]
    failing = {rank.number: rank.failing for rank in open_ranks if rank.failing is not None}
    processes.kill()
    found = []
    for rank in processes.ranks:
        place, collective = read_slots(directory, rank.number)
        output = failures.tail(processes.path(rank.number, "out"))
        # What a stuck rank says once others are being killed is about that: they are not all killed at once.
        if rank.answer is not None and rank.number not in dumps:
            kind, reply = rank.answer
            if kind == "result":
                continue
            if reply["usage"] and headline is None and reply["place"] == "starting up":
                return UsageError(reply["text"])
            failure = replace(failures.raised(rank.number, reply), place=reply["place"], collective=reply["collective"])
        elif rank.ended is not None and rank.number not in dumps:
            last_words = failures.died(rank.number, *rank.ended, output, processes.read(rank.number, "stack"))
            failure = replace(last_words, place=place, collective=collective)
        elif (reply := failing.get(rank.number)) is not None:
            failure = replace(failures.raised(rank.number, reply), place=reply["place"], collective=reply["collective"])
        else:
            failure = failures.stuck(rank.number, now, dumps.get(rank.number, ""), place, collective)
        found.append(replace(failure, output=output))
    if headline is not None:
        late = [one.rank for one in found if one.kind == "stuck"] or [rank.number for rank in processes.ranks]
        return failures.hang(found, headline.replace("{ranks}", format_ranks(late)))
    if not found or (processes.error and all(one.kind == "stuck" for one in found)):
        return RankError(
            f"The ranks could not go on: {processes.error or 'they ended while they were being asked'}.", found
        )
    return failures.error(found)
