"""What torch's debug server says of the ranks of a job: its pages, over HTTP, each within a deadline; by two looks.

`torch.distributed.debug.start_debug_server` (as it is in torch 2.13) starts a worker server on each rank, and on rank 0
one that asks them all: `/fr_trace_json` and `/fr_trace_nccl_json` show what Flight Recorder holds, and
`/stacks` what `faulthandler` writes. These are pages for a person, with the answer of each rank in a `<pre>`, which is
not escaped. Nothing is unpickled.

The recorder of a rank is read at another moment than that of the next, and a rank that works may come to what others
wait in. So a rank counts as waiting only if nothing of it has changed between the looks and its main thread is in torch
where that waits for others; any other is at work, as far as can be seen.
"""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ddpcheck.findings.errors import TargetError, UsageError
from ddpcheck.findings.evidence.endings import RankDump, RecordedCall
from ddpcheck.findings.files import MOST_BYTES as _MOST_BYTES
from ddpcheck.findings.replace import replace
from ddpcheck.findings.stacks import (
    collective_of,
    has_no_python_left,
    of_main_thread,
    own_stack,
    program_lines,
    region_of,
    waits_for_others,
    waits_for_result,
)
from ddpcheck.findings.wording import counted, format_ranks, group_by
from ddpcheck.report.hang.flight_recorder import as_rank_dump, plain_dump

PORT = 25999  # unless start_debug_server is told another one
_SECONDS = 75.0  # of a request: the server itself waits 60 for a rank
_PIECE = 1 << 20
_TITLE = "Torch Distributed Debug Server"
_ANSWER = re.compile(
    r"<h2>Rank (?P<rank>[0-9]{1,9}): [^<]*</h2>\s*(?:<p>Failed to fetch: status=(?P<status>[0-9]{1,9})</p>\s*)?<pre>"
)
_TIMED_OUT, _NOT_FOUND = 408, 404


class DebugServer:
    """The debug server at an address, `http://HOST:PORT`.

    Raises:
        UsageError: The address is none.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        wrong = f"{address} is no address of a debug server: give http://HOST:PORT"
        try:
            parts = urlsplit(self.address)
            host, port = parts.hostname, parts.port
            http.client.HTTPConnection(host or "", PORT if port is None else port)
        except (ValueError, http.client.InvalidURL):
            raise UsageError(wrong) from None
        if parts.scheme != "http" or not host or parts.path or parts.query or parts.fragment or parts.username:
            raise UsageError(wrong)
        self._host, self._port = host, PORT if port is None else port

    def flight_recorder(self, *, nccl: bool = False) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
        """What the recorder of each rank holds, as its own JSON, and why other ranks have given nothing.

        Args:
            nccl: Ask nccl's recorder, of which the server gives only what has not ended; else that of gloo.

        Raises:
            TargetError: The server is not there, or does not answer in time.
            UsageError: What answers is no debug server.
        """
        path = "/fr_trace_nccl_json" if nccl else "/fr_trace_json"
        answers, problems = self._answers(path)
        return {rank: self._dump(path, rank, text) for rank, text in answers.items()}, problems

    def stacks(self) -> dict[int, str]:
        """What `faulthandler` writes of the main thread of each rank that answers.

        Raises:
            TargetError, UsageError: As those of `flight_recorder`.
        """
        return {rank: of_main_thread(text) for rank, text in self._answers("/stacks")[0].items()}

    def _dump(self, path: str, rank: int, text: str) -> dict[str, Any]:
        try:
            try:
                dump = json.loads(text)
            except ValueError:
                dump = json.loads(html.unescape(text))
        except (ValueError, RecursionError):
            raise self._something_else(f"{path} has no JSON of rank {rank}") from None
        try:
            return plain_dump({"entries": [], **dump} if isinstance(dump, dict) else dump)
        except ValueError as error:
            raise self._something_else(f"{path} {error} of rank {rank}") from None

    def _answers(self, path: str) -> tuple[dict[int, str], dict[int, str]]:
        """The texts of the ranks that have answered, and why others have not."""
        page = self._page(path)
        if not page.rstrip().endswith("</section>"):  # its length is not told
            raise self._something_else(f"its page {path} is not whole")
        answers, problems, end = dict[int, str](), dict[int, str](), 0
        while begin := _ANSWER.search(page, end):
            if (end := page.find("</pre>", begin.end())) < 0:
                raise self._something_else(f"its page {path} is not whole")
            rank, status = int(begin["rank"]), int(begin["status"] or 200)
            if status == 200:
                answers[rank] = page[begin.end() : end]
            else:
                problems[rank] = f"no answer{' in time' if status == _TIMED_OUT else ''} ({status})"
        ranks = sorted([*answers, *problems])
        if not ranks or ranks != list(range(len(ranks))):
            raise self._something_else(f"its page {path} has no answers of ranks")
        return answers, problems

    def _page(self, path: str) -> str:
        status, data = self._get(path)
        text = data.decode("utf-8", "replace")
        if status == _NOT_FOUND and f"Handler not found: {path}" in text:
            raise UsageError(f"the debug server at {self.address} has no page {path}")
        if status != 200 and (said := re.search(r"Exception: .*", text)):
            raise TargetError(f"the debug server at {self.address} fails at {path}: {html.unescape(said[0])[:200]}")
        if status != 200 or _TITLE not in text:
            raise self._something_else(f"{path} gives {'another page' if status == 200 else f'status {status}'}")
        return text

    def _something_else(self, why: str) -> UsageError:
        return UsageError(f"what answers at {self.address} is not a debug server of torch: {why}")

    def _get(self, path: str) -> tuple[int, bytearray]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_SECONDS)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:
            said = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise TargetError(f"there is no debug server at {self.address}: {said}") from error
        with contextlib.closing(connection), _closed_in_time(connection) as is_late:
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                data = bytearray()
                while piece := answer.read1(_PIECE):
                    data += piece
                    if len(data) > _MOST_BYTES:
                        raise self._something_else(f"{path} gives more than {_MOST_BYTES >> 20} MB")
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, TimeoutError) or is_late.is_set():
                    is_late.set()
                elif isinstance(error, OSError):
                    raise TargetError(f"the debug server at {self.address} has closed the connection") from error
                else:
                    raise self._something_else("it does not speak HTTP") from error
        if is_late.is_set():
            raise TargetError(
                f"what listens at {self.address} has not given {path} within {counted(int(_SECONDS), 'second')}; a "
                "debug server does not answer before each rank has called start_debug_server"
            )
        return answer.status, data


@contextlib.contextmanager
def _closed_in_time(connection: http.client.HTTPConnection) -> Iterator[threading.Event]:
    """Close a connection at its deadline: the timeout of a socket counts from each byte that comes."""
    is_late = threading.Event()
    held = connection.sock

    def close() -> None:
        is_late.set()
        with contextlib.suppress(OSError):
            held.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_SECONDS, close)
    timer.daemon = True
    timer.start()
    try:
        yield is_late
    finally:
        timer.cancel()


_BETWEEN = 3.0  # seconds between the two looks
_AS_ANOTHER = {"reduce_scatter": "all_reduce", "reduce_scatter_tensor": "all_reduce"}  # what gloo records


@dataclass(frozen=True, slots=True)
class RanksSeen:
    """What is known of the ranks of a job."""

    dumps: Mapping[int, RankDump]  # what the recorder of each held, of those that have one
    at_work: frozenset[int] = frozenset()  # those that may still come to what others wait in
    # what ranks do, in words that come after the rank's name, where more than the dump tells it
    doing: Mapping[int, str] = field(default_factory=dict)
    # of the program at which each stands, innermost first, where they are known
    lines: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    over: frozenset[int] = frozenset()  # ranks whose program has run to its end
    missing: Mapping[int, str] = field(default_factory=dict)  # why others have no dump, by rank
    source: str = "dump"  # what a dump is here, in words
    is_live: bool = False  # whether the job was there when it was asked


def look_at_ranks(server: DebugServer) -> RanksSeen:
    """What the ranks of a job do, by its debug server; takes some seconds more than four requests.

    Raises:
        TargetError: The server or all ranks do not answer.
        UsageError: What answers is no debug server.
    """
    before, _ = _recorders(server)
    stacks_before = server.stacks()
    time.sleep(_BETWEEN)
    dumps, problems = _recorders(server)
    stacks = server.stacks()
    if not dumps:
        raise TargetError(f"no rank has answered the debug server at {server.address} ({said_of_missing(problems)})")
    at_work, doing, over = set(), {}, set()
    for rank, dump in dumps.items():
        stack = stacks.get(rank, "")
        frames, lines = own_stack(stack), program_lines(stack)
        at = f" at {lines[0]}" if lines else " in code of a library"
        is_in_call = any(not entry.ended for entry in dump.entries)
        changed = rank in before and _states(before[rank]) != _states(dump)
        if changed or (stack and stacks_before.get(rank, stack) != stack):
            at_work.add(rank)
            doing[rank] = f"was{at}, and made progress" if frames else "has made progress"
        elif has_no_python_left(stack):
            over.add(rank)
            doing[rank] = "has run to its end"
        elif frames and not waits_for_others(frames) and not (is_in_call and waits_for_result(frames)):
            at_work.add(rank)
            doing[rank] = f"is{at}, and in no collective"
        elif not is_in_call and (collective := collective_of(frames)):  # the store, say: nothing is recorded of it
            doing[rank] = f"waits in {collective}"
        dumps[rank] = _with_line(dump, stack)
    lines_of = {rank: program_lines(stack) for rank, stack in stacks.items()}
    return RanksSeen(dumps, frozenset(at_work), doing, lines_of, frozenset(over), problems, "answer", is_live=True)


def _recorders(server: DebugServer) -> tuple[dict[int, RankDump], dict[int, str]]:
    """What each rank's recorder holds, and why others have given nothing."""
    answers, problems = server.flight_recorder()
    active_only = False
    if not any(answer["entries"] for answer in answers.values()):
        of_nccl, silent = server.flight_recorder(nccl=True)
        if any(answer["entries"] for answer in of_nccl.values()):
            answers, problems, active_only = of_nccl, silent, True
    size, dumps = len(answers) + len(problems), {}
    for rank, answer in answers.items():
        try:
            dump = as_rank_dump(answer, f"the answer of rank {rank}")
        except UsageError as error:
            raise UsageError(f"{error}, from {server.address}") from error
        dumps[rank] = replace(dump, world_size=size, active_only=active_only, wrapped=dump.wrapped and not active_only)
    return dumps, problems


def _states(dump: RankDump) -> list[tuple[str, int, bool]]:
    """What changes as long as a rank calls collectives, or one ends."""
    return [(entry.group, entry.number, entry.ended) for entry in dump.entries]


def _with_line(dump: RankDump, stack: str) -> RankDump:
    """A dump whose last calls, if the stack is in them, have the line; the server's JSON has none."""
    frames, lines = own_stack(stack), program_lines(stack)
    entries = list(dump.entries)
    last = next((at for at in range(len(entries) - 1, -1, -1) if not entries[at].ended), None)
    if last is None or not lines or not waits_for_others(frames):
        return dump
    operation = entries[last].call.operation
    name = collective_of(frames).partition(" ")[0]
    if name and operation in (_AS_ANOTHER.get(name, name), name.removesuffix("_object"), name.partition("_object")[0]):
        entries[last] = _at(entries[last], lines)
    elif not name and region_of(frames):
        for at in range(last, -1, -1):  # the buckets of a backward pass
            if entries[at].ended or entries[at].call.operation != operation:
                break
            entries[at] = _at(entries[at], lines)
    return replace(dump, entries=entries)


def _at(entry: RecordedCall, lines: Sequence[str]) -> RecordedCall:
    return replace(entry, call=replace(entry.call, location=lines[0], callers=tuple(lines)))


def said_of_missing(problems: Mapping[int, str]) -> str:
    """Why ranks have no dump, in words."""
    reasons = group_by(problems, lambda rank: problems[rank])
    return "; ".join(f"{format_ranks(ranks)}: {why}" for why, ranks in reasons.items())
