"""Client of torch's debug server, which reads the pages of all ranks over HTTP.

`torch.distributed.debug.start_debug_server` (torch 2.13) starts a worker server on each rank, and on rank 0 a server
that queries all ranks: `/fr_trace_json` and `/fr_trace_nccl_json` show the Flight Recorder, `/stacks` the output of
`faulthandler`. The pages are HTML, with the answer of each rank in a `<pre>` that is not escaped. Nothing is unpickled.

Recorders are read at different moments, and a running rank may still reach the collective that others wait in. So a
rank counts as waiting only if its recorder and stack did not change between two queries and its main thread waits
for other ranks inside of torch; any other rank counts as running.
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
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from ddpcheck.findings.errors import TargetError, UsageError
from ddpcheck.findings.evidence.endings import RankDump, RecordedCall
from ddpcheck.findings.files import MOST_BYTES as _MOST_BYTES
from ddpcheck.findings.replace import replace
from ddpcheck.findings.stacks import (
    collective_of,
    has_no_python_frames,
    main_stack,
    main_thread_dump,
    program_lines,
    region_of,
    waits_for_ranks,
    waits_for_result,
)
from ddpcheck.findings.wording import plural
from ddpcheck.report.hang.flight_recorder import as_rank_dump, plain_dump
from ddpcheck.report.hang.hang_report import describe_missing_dump
from ddpcheck.trace.wait_graph import RanksSeen

PORT = 25999  # default of start_debug_server
_SECONDS = 75.0  # per request; the server itself waits 60 s for a rank
_PIECE = 1 << 20
_TITLE = "Torch Distributed Debug Server"
_ANSWER = re.compile(
    r"<h2>Rank (?P<rank>[0-9]{1,9}): [^<]*</h2>\s*(?:<p>Failed to fetch: status=(?P<status>[0-9]{1,9})</p>\s*)?<pre>"
)
_TIMED_OUT, _NOT_FOUND = 408, 404


class DebugServer:
    """Client of the debug server at `http://HOST:PORT`.

    Raises:
        UsageError: The address is invalid.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        message = f"{address} is no address of a debug server: give http://HOST:PORT"
        try:
            parts = urlsplit(self.address)
            host, port = parts.hostname, parts.port
            http.client.HTTPConnection(host or "", PORT if port is None else port)
        except (ValueError, http.client.InvalidURL):
            raise UsageError(message) from None
        if parts.scheme != "http" or not host or parts.path or parts.query or parts.fragment or parts.username:
            raise UsageError(message)
        self._host, self._port = host, PORT if port is None else port

    def flight_recorder(self, *, nccl: bool = False) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
        """Return two dicts by rank: Flight Recorder's JSON, and reasons for missing answers.

        Args:
            nccl: Query NCCL's recorder (calls that have not ended only), else gloo's.

        Raises:
            TargetError: The server is unreachable, or does not answer in time.
            UsageError: There is no debug server at the address.
        """
        path = "/fr_trace_nccl_json" if nccl else "/fr_trace_json"
        answers, problems = self._answers(path)
        return {rank: self._dump(path, rank, text) for rank, text in answers.items()}, problems

    def stacks(self) -> dict[int, str]:
        """Return the `faulthandler` stack of each answering rank's main thread.

        Raises:
            TargetError, UsageError: As in `flight_recorder`.
        """
        return {rank: main_thread_dump(text) for rank, text in self._answers("/stacks")[0].items()}

    def _dump(self, path: str, rank: int, text: str) -> dict[str, Any]:
        try:
            try:
                dump = json.loads(text)
            except ValueError:
                dump = json.loads(html.unescape(text))
        except (ValueError, RecursionError):
            raise self._wrong_server_error(f"{path} has no JSON of rank {rank}") from None
        try:
            return plain_dump({"entries": [], **dump} if isinstance(dump, dict) else dump)
        except ValueError as error:
            raise self._wrong_server_error(f"{path} {error} of rank {rank}") from None

    def _answers(self, path: str) -> tuple[dict[int, str], dict[int, str]]:
        """Return two dicts by rank: text of the page, and reasons for missing text."""
        page = self._page(path)
        if not page.rstrip().endswith("</section>"):  # the server sends no length
            raise self._wrong_server_error(f"its page {path} is not whole")
        answers, problems, end = dict[int, str](), dict[int, str](), 0
        while begin := _ANSWER.search(page, end):
            if (end := page.find("</pre>", begin.end())) < 0:
                raise self._wrong_server_error(f"its page {path} is not whole")
            rank, status = int(begin["rank"]), int(begin["status"] or 200)
            if status == 200:
                answers[rank] = page[begin.end() : end]
            else:
                problems[rank] = f"no answer{' in time' if status == _TIMED_OUT else ''} ({status})"
        ranks = sorted([*answers, *problems])
        if not ranks or ranks != list(range(len(ranks))):
            raise self._wrong_server_error(f"its page {path} has no answers of ranks")
        return answers, problems

    def _page(self, path: str) -> str:
        status, data = self._get(path)
        text = data.decode("utf-8", "replace")
        if status == _NOT_FOUND and f"Handler not found: {path}" in text:
            raise UsageError(f"the debug server at {self.address} has no page {path}")
        if status != 200 and (match := re.search(r"Exception: .*", text)):
            raise TargetError(f"the debug server at {self.address} fails at {path}: {html.unescape(match[0])[:200]}")
        if status != 200 or _TITLE not in text:
            raise self._wrong_server_error(f"{path} gives {'another page' if status == 200 else f'status {status}'}")
        return text

    def _wrong_server_error(self, why: str) -> UsageError:
        return UsageError(f"what answers at {self.address} is not a debug server of torch: {why}")

    def _get(self, path: str) -> tuple[int, bytearray]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_SECONDS)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise TargetError(f"there is no debug server at {self.address}: {reason}") from error
        with contextlib.closing(connection), _closed_in_time(connection) as is_late:
            try:
                connection.request("GET", path)
                response = connection.getresponse()
                data = bytearray()
                while chunk := response.read1(_PIECE):
                    data += chunk
                    if len(data) > _MOST_BYTES:
                        raise self._wrong_server_error(f"{path} gives more than {_MOST_BYTES >> 20} MB")
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, TimeoutError) or is_late.is_set():
                    is_late.set()
                elif isinstance(error, OSError):
                    raise TargetError(f"the debug server at {self.address} has closed the connection") from error
                else:
                    raise self._wrong_server_error("it does not speak HTTP") from error
        if is_late.is_set():
            raise TargetError(
                f"what listens at {self.address} has not given {path} within {plural(int(_SECONDS), 'second')}; "
                "a debug server does not answer before each rank has called start_debug_server"
            )
        return response.status, data


@contextlib.contextmanager
def _closed_in_time(connection: http.client.HTTPConnection) -> Iterator[threading.Event]:
    """Close a connection at a deadline, since a socket timeout restarts with each byte."""
    is_late = threading.Event()
    client_socket = connection.sock

    def close() -> None:
        is_late.set()
        with contextlib.suppress(OSError):
            client_socket.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_SECONDS, close)
    timer.daemon = True
    timer.start()
    try:
        yield is_late
    finally:
        timer.cancel()


_QUERY_PAUSE = 3.0  # seconds between the two queries
_RECORDED_AS = {"reduce_scatter": "all_reduce", "reduce_scatter_tensor": "all_reduce"}  # what gloo records


def fetch_rank_states(address: str) -> RanksSeen:
    """Return the state of the ranks at http://HOST:PORT, from two queries seconds apart.

    Raises:
        TargetError: The server or all ranks do not answer.
        UsageError: There is no debug server at the address.
    """
    server = DebugServer(address)
    earlier, _ = _flight_recorder_dumps(server)
    stacks_before = server.stacks()
    time.sleep(_QUERY_PAUSE)
    dumps, problems = _flight_recorder_dumps(server)
    stacks = server.stacks()
    if not dumps:
        raise TargetError(
            f"no rank has answered the debug server at {server.address} ({describe_missing_dump(problems)})"
        )
    at_work, doing, finished = set(), {}, set()
    for rank, dump in dumps.items():
        stack = stacks.get(rank, "")
        frames, lines = main_stack(stack), program_lines(stack)
        where = f" at {lines[0]}" if lines else " in code of a library"
        is_in_call = any(not entry.ended for entry in dump.entries)
        changed = rank in earlier and _call_states(earlier[rank]) != _call_states(dump)
        if changed or (stack and stacks_before.get(rank, stack) != stack):
            at_work.add(rank)
            doing[rank] = f"was{where}, and made progress" if frames else "has made progress"
        elif has_no_python_frames(stack):
            finished.add(rank)
            doing[rank] = "has run to its end"
        elif frames and not waits_for_ranks(frames) and not (is_in_call and waits_for_result(frames)):
            at_work.add(rank)
            doing[rank] = f"is{where}, and in no collective"
        elif not is_in_call and (collective := collective_of(frames)):  # e.g. the store, which is not recorded
            doing[rank] = f"waits in {collective}"
        dumps[rank] = _with_stack_lines(dump, stack)
    lines_of = {rank: program_lines(stack) for rank, stack in stacks.items()}
    return RanksSeen(dumps, frozenset(at_work), doing, lines_of, frozenset(finished), problems, "answer", is_live=True)


def _flight_recorder_dumps(server: DebugServer) -> tuple[dict[int, RankDump], dict[int, str]]:
    answers, problems = server.flight_recorder()
    active_only = False
    if not any(answer["entries"] for answer in answers.values()):
        nccl_answers, nccl_problems = server.flight_recorder(nccl=True)
        if any(answer["entries"] for answer in nccl_answers.values()):
            answers, problems, active_only = nccl_answers, nccl_problems, True
    size, dumps = len(answers) + len(problems), {}
    for rank, answer in answers.items():
        try:
            dump = as_rank_dump(answer, f"the answer of rank {rank}")
        except UsageError as error:
            raise UsageError(f"{error}, from {server.address}") from error
        dumps[rank] = replace(dump, world_size=size, active_only=active_only, wrapped=dump.wrapped and not active_only)
    return dumps, problems


def _call_states(dump: RankDump) -> list[tuple[str, int, bool]]:
    """Return (process group, sequence number, True if ended) of each collective in a dump."""
    return [(entry.group, entry.number, entry.ended) for entry in dump.entries]


def _with_stack_lines(dump: RankDump, stack: str) -> RankDump:
    """Return `dump` with source lines from `stack` added to its last unfinished collectives."""
    frames, lines = main_stack(stack), program_lines(stack)
    entries = list(dump.entries)
    last = next((index for index in range(len(entries) - 1, -1, -1) if not entries[index].ended), None)
    if last is None or not lines or not waits_for_ranks(frames):
        return dump
    operation = entries[last].call.operation
    name = collective_of(frames).partition(" ")[0]
    if name and operation in (_RECORDED_AS.get(name, name), name.removesuffix("_object"), name.partition("_object")[0]):
        entries[last] = _with_lines(entries[last], lines)
    elif not name and region_of(frames):
        for index in range(last, -1, -1):  # the buckets of a backward pass
            if entries[index].ended or entries[index].call.operation != operation:
                break
            entries[index] = _with_lines(entries[index], lines)
    return replace(dump, entries=entries)


def _with_lines(entry: RecordedCall, lines: Sequence[str]) -> RecordedCall:
    return replace(entry, call=replace(entry.call, location=lines[0], callers=tuple(lines)))
