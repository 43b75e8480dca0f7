"""What torch's debug server says of the ranks of a job: its pages, over HTTP, each within a deadline.

`torch.distributed.debug.start_debug_server` (as it is in torch 2.13) starts a worker server on each rank, and on rank 0
one that asks them all: `/fr_trace_json` and `/fr_trace_nccl_json` show what Flight Recorder holds, and
`/stacks` what `faulthandler` writes. These are pages for a person, with the answer of each rank in a `<pre>`, which is
not escaped. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from ddpcheck.findings.errors import TargetError, UsageError
from ddpcheck.findings.wording import counted

PORT = 25999  # unless start_debug_server is told another one
_SECONDS = 75.0  # of a request: the server itself waits 60 for a rank
_MOST_BYTES = 1 << 29
_PIECE = 1 << 20
_TITLE = "Torch Distributed Debug Server"
_ANSWER = re.compile(
    r"<h2>Rank (?P<rank>\d+): [^<]*</h2>\s*(?:<p>Failed to fetch: status=(?P<status>\d+)</p>\s*)?<pre>"
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
        except ValueError:
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
        """What `faulthandler` writes of all threads of each rank that answers.

        Raises:
            TargetError, UsageError: As those of `flight_recorder`.
        """
        return self._answers("/stacks")[0]

    def _dump(self, path: str, rank: int, text: str) -> dict[str, Any]:
        try:
            try:
                dump = json.loads(text)
            except ValueError:
                dump = json.loads(html.unescape(text))
        except (ValueError, RecursionError):
            raise self._something_else(f"{path} has no JSON of rank {rank}") from None
        entries = dump.setdefault("entries", []) if isinstance(dump, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise self._something_else(f"{path} has no list of entries of rank {rank}")
        return {str(key): value for key, value in dump.items()}

    def _answers(self, path: str) -> tuple[dict[int, str], dict[int, str]]:
        """The texts of the ranks that have answered, and why others have not."""
        page = self._page(path)
        if not page.rstrip().endswith("</section>"):  # its length is not told
            raise self._something_else(f"its page {path} is not whole")
        answers, problems = {}, {}
        for begin in _ANSWER.finditer(page):
            rank, status = int(begin["rank"]), int(begin["status"] or 200)
            if status == 200:
                answers[rank] = page[begin.end() : page.find("</pre>", begin.end())]
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
        return UsageError(f"what answers at {self.address} is no debug server of torch: {why}")

    def _get(self, path: str) -> tuple[int, bytes]:
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
                if isinstance(error, TimeoutError):
                    is_late.set()
                elif isinstance(error, OSError) and not is_late.is_set():
                    raise TargetError(f"the debug server at {self.address} has closed the connection") from error
                elif not is_late.is_set():
                    raise self._something_else("it does not speak HTTP") from error
        if is_late.is_set():
            raise TargetError(
                f"what listens at {self.address} has not given {path} within {counted(int(_SECONDS), 'second')}; a "
                "debug server does not answer before each rank has called start_debug_server"
            )
        return answer.status, bytes(data)


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
