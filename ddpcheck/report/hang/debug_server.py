"""What torch's debug server says of the ranks of a job: its pages, over HTTP, each within a deadline.

`torch.distributed.debug.start_debug_server` (as it is in torch 2.13) starts a worker server on each rank, and on rank 0
one that asks them all: `/fr_trace_json` and `/fr_trace_nccl_json` show what Flight Recorder holds, and
`/stacks` what `faulthandler` writes. These are pages for a person, with the answer of each rank in a `<pre>`, which is
not escaped. Nothing is unpickled.

This module is light: it never imports torch.
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
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """What a rank has answered.

    Attributes:
        text: Of the answer; of an error, what is wrong.
        status: Of HTTP; 200 where all is well.
    """

    text: str
    status: int = 200

    @property
    def problem(self) -> str:
        """Why there is no answer; empty where there is one."""
        if self.status == 200:
            return ""
        return f"no answer in time ({self.status})" if self.status == _TIMED_OUT else f"no answer ({self.status})"

    @property
    def has_no_handler(self) -> bool:
        """Whether the torch of the rank does not know what was asked, as one without nccl does."""
        return self.status == _NOT_FOUND


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

    def flight_recorder(self, *, nccl: bool = False) -> dict[int, RankAnswer | dict[str, Any]]:
        """What the recorder of each rank holds, as its own JSON; the answer itself where that is an error.

        Args:
            nccl: Ask nccl's recorder, of which the server gives only what has not ended; else that of gloo.

        Raises:
            TargetError: The server is not there, or does not answer in time.
            UsageError: What answers is no debug server.
        """
        path = "/fr_trace_nccl_json" if nccl else "/fr_trace_json"
        return {
            rank: answer if answer.status != 200 else self._dump(path, rank, answer.text)
            for rank, answer in self._answers(path).items()
        }

    def stacks(self) -> dict[int, RankAnswer]:
        """What `faulthandler` writes of all threads of each rank.

        Raises:
            TargetError, UsageError: As those of `flight_recorder`.
        """
        return self._answers("/stacks")

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

    def _answers(self, path: str) -> dict[int, RankAnswer]:
        page = self._page(path)
        if not page.rstrip().endswith("</section>"):  # its length is not told
            raise self._something_else(f"its page {path} is not whole")
        found = {}
        for begin in _ANSWER.finditer(page):
            text = page[begin.end() : page.find("</pre>", begin.end())]
            found[int(begin["rank"])] = RankAnswer(text, int(begin["status"] or 200))
        if not found or sorted(found) != list(range(len(found))):
            raise self._something_else(f"its page {path} has no answers of ranks")
        return found

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
                self._raise_if_late(path, late=is_late.is_set() or isinstance(error, TimeoutError))
                if isinstance(error, OSError):
                    raise TargetError(f"the debug server at {self.address} has closed the connection") from error
                raise self._something_else("it does not speak HTTP") from error
            self._raise_if_late(path, late=is_late.is_set())
            return answer.status, bytes(data)

    def _raise_if_late(self, path: str, *, late: bool) -> None:
        if late:
            raise TargetError(
                f"what listens at {self.address} has not given {path} within {counted(int(_SECONDS), 'second')}; a "
                "debug server does not answer before each rank has called start_debug_server"
            )


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
