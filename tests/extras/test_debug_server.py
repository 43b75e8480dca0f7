"""`ddpcheck hang http://HOST:PORT`: a job that runs, by torch's debug server, and what is none."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ddpcheck import cli
from ddpcheck.extras import debug_server
from ddpcheck.findings.report import Location, Report
from tests.launchers.slurm import free_ports
from tests.tiers import needs

# Pages, as torch's server writes them

IDLE = """Current thread 0x00007f6ec1ffb6c0 (most recent call first):
  <no Python frame>

Thread 0x00007f6ee8630000 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Thread 0x00007f6ee863bb80 (most recent call first):
"""
TORCH = "/opt/python/site-packages/torch/distributed/distributed_c10d.py"


def frame(file: str, line: int, name: str) -> str:
    return f'  File "{file}", line {line} in {name}\n'


def stack(*frames: str) -> str:
    return IDLE + "".join(frames)


IN_BARRIER = stack(frame(TORCH, 5151, "barrier"), frame("/job/train.py", 7, "main"))
AT_WORK = stack(frame("/job/train.py", 9, "tokenise"), frame("/job/train.py", 4, "main"))
EXITED = stack("  <no Python frame>\n")


def entry(number: int, name: str = "gloo:barrier", *, ended: bool = True) -> dict[str, Any]:
    of_call = {"collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False, "profiling_name": name}
    sizes = {"input_sizes": [[1]], "input_dtypes": ["Float"], "output_sizes": [[1]], "output_dtypes": ["Float"]}
    state = {"retired": ended, "state": "scheduled", "record_id": number - 1, "process_group": ["0", "default_pg"]}
    return of_call | sizes | state


TITLE = b"<h1>Torch Distributed Debug Server</h1>"


def page(answers: Sequence[str | int]) -> bytes:
    """Return a page with the text of each rank, or the status with which its worker server has failed."""
    parts = [TITLE.decode()]
    for rank, answer in enumerate(answers):
        failed = f"<p>Failed to fetch: status={answer}</p>\n" if isinstance(answer, int) else ""
        parts.append(f"<h2>Rank {rank}: http://node:1/handler/x?</h2>\n{failed}<pre>{answer}</pre>")
    return "\n".join([*parts, "</section>\n    "]).encode()


def recorder(*ranks: Sequence[dict[str, Any]] | int) -> bytes:
    return page([rank if isinstance(rank, int) else json.dumps({"entries": rank}, indent=2) for rank in ranks])


Pages = dict[str, bytes | list[bytes]]
Answer = Callable[[BaseHTTPRequestHandler], None]


@contextlib.contextmanager
def listening(answer: Answer | Pages) -> Iterator[str]:
    """Yield the address of a server in this process; pages in a list are answered one after the other."""

    def with_page(request: BaseHTTPRequestHandler) -> None:
        content = pages.get(request.path)
        if content is None:
            request.send_error(404, f"Handler not found: {request.path}")
            return
        request.send_response(200)
        request.end_headers()
        request.wfile.write(content.pop(0) if isinstance(content, list) else content)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(OSError):
                (with_page if isinstance(answer, dict) else answer)(self)

        def log_message(self, *_: object) -> None:
            pass

    source = answer if isinstance(answer, dict) else {}
    pages = {path: [*content] if isinstance(content, list) else content for path, content in source.items()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_server, "_QUERY_PAUSE", 0.0)


def hang(capsys: pytest.CaptureFixture[str], address: str, *more: str) -> tuple[int, Report]:
    code = cli.main(["hang", address, "--format", "json", *more])
    return code, Report.from_json(capsys.readouterr().out)


def assert_refused(capsys: pytest.CaptureFixture[str], answer: Answer | Pages | str, code: int, words: str) -> None:
    """Assert exit code and message for an address, or for a server that answers so."""
    with contextlib.nullcontext(answer) if isinstance(answer, str) else listening(answer) as address:
        assert cli.main(["hang", address]) == code
    out, err = capsys.readouterr()
    assert out == "" and words in err and err[:-1].isprintable(), (out, err)


OPEN = entry(2, ended=False)
WAITS = recorder([entry(1), OPEN], [entry(1)])  # rank 0 waits in number 2


def test_a_rank_waits_for_a_rank_that_has_exited(capsys: pytest.CaptureFixture[str]) -> None:
    with listening({"/fr_trace_json": WAITS, "/stacks": page([IN_BARRIER, EXITED])}) as address:
        code, report = hang(capsys, address)
        assert hang(capsys, address, "--fail-on", "never")[0] == 0
    (finding,) = report.findings
    assert (code, finding.code, finding.location) == (4, "DDP403", Location("train.py", 7))
    assert finding.ranks == (1,) and "rank 1: has run to its end" in finding.evidence
    assert [(line.rank, line.waiting) for line in report.timelines[0].ranks] == [(0, True), (1, False)]
    assert report.checks[2].status == "skipped"


NEXT = recorder([entry(1), entry(2), entry(3, ended=False)], [entry(1)])
ON_ANOTHER_LINE = AT_WORK.replace("line 9", "line 8")


@pytest.mark.parametrize(
    ("recorders", "stacks", "words"),
    [
        ([WAITS, WAITS], [AT_WORK, AT_WORK], "is at train.py:9, and in no"),
        ([WAITS, NEXT], [AT_WORK, AT_WORK], "rank 0 was at train.py:7, and made progress"),
        ([WAITS, WAITS], [AT_WORK, ON_ANOTHER_LINE], "rank 1 was at train.py:8, and made progress"),
    ],
    ids=["at work", "collectives", "another line"],
)
def test_a_rank_that_may_still_arrive_has_not_diverged(
    capsys: pytest.CaptureFixture[str], recorders: list[bytes], stacks: list[str], words: str
) -> None:
    pages = {"/fr_trace_json": recorders, "/stacks": [page([IN_BARRIER, stack]) for stack in stacks]}
    with listening(pages) as address:
        code, report = hang(capsys, address)
    assert (code, report.findings) == (0, ()) and words in report.checks[1].detail


@pytest.mark.parametrize(("entries", "code"), [([entry(61, "nccl:all_reduce", ended=False)], 0), ([], 4)])
def test_nccl_lists_only_open_calls(
    capsys: pytest.CaptureFixture[str], entries: list[dict[str, Any]], code: int
) -> None:
    active = recorder([entry(62, "nccl:all_reduce", ended=False)], entries)
    pages = {"/fr_trace_json": recorder([], []), "/fr_trace_nccl_json": active, "/stacks": page([IN_BARRIER] * 2)}
    with listening(pages) as address:
        assert hang(capsys, address)[0] == code  # a rank that is still in number 61 may arrive


def test_ranks_that_do_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with listening({"/fr_trace_json": recorder([OPEN], 408), "/stacks": page([IN_BARRIER, 408])}) as address:
        code, report = hang(capsys, address)
    assert code == 3 and report.error is not None and report.error.message.startswith("rank 1: no answer in time (408)")
    assert report.checks[0].detail == "1 of 2: no answer of rank 1 (rank 1: no answer in time (408))"
    mismatch = recorder([entry(1), entry(2)], [entry(1), entry(2, "gloo:all_reduce")], 503)
    with listening({"/fr_trace_json": mismatch, "/stacks": page([IN_BARRIER] * 3)}) as address:
        code, report = hang(capsys, address)
    assert code == 4 and report.error is None and report.findings[0].evidence[-1] == "rank 2: no answer"
    none = {"/fr_trace_json": recorder(408, 503), "/fr_trace_nccl_json": page([404] * 2), "/stacks": page([503] * 2)}
    assert_refused(capsys, none, 3, "(rank 0: no answer in time (408); rank 1: no answer (503))")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no page /fr_trace_json"),
        (b"<h1>Something else</h1>", "is not a debug server of torch: /fr_trace_json gives another"),
        (page([]), "has no answers of ranks"),
        (page(["{}", "{}"])[:-40], "is not whole"),
        (page(["no JSON"]), "has no JSON of rank 0"),
        (page(["[" * 100_000]), "has no JSON of rank 0"),
        (page(['{"entries": 3}']), "has no list of entries of rank 0"),
        (page(['{"entries": [{"a": 1}]}']), "can read (KeyError: 'profiling_name')"),
        (page(['{"entries": [1e999]}']), "a number that is infinite"),
        (TITLE + b"".join(b"<h2>Rank %d: h</h2><pre>" % n for n in range(3000)) + b"</section>", "is not whole"),
    ],
)
def test_a_page_of_no_debug_server(capsys: pytest.CaptureFixture[str], content: bytes | None, words: str) -> None:
    assert_refused(capsys, {} if content is None else {"/fr_trace_json": content}, 2, words)


def drips(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(b" ")
        time.sleep(0.01)


LATE = "has not given /fr_trace_json within"
HOSTILE = b"HTTP/1.0 500 x\r\n\r\nException: \x1b]2;owned\x07 \x9b1m"
FAILURE = "Exception: RuntimeError('the store is gone')"


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (drips, 3, LATE),
        (lambda request: time.sleep(0.6), 3, LATE),
        (lambda request: None, 3, "has closed the connection"),
        (lambda request: request.wfile.write(b"220 ready for mail\r\n"), 2, "does not speak HTTP"),
        (lambda request: request.send_error(500, FAILURE), 3, f"fails at /fr_trace_json: {FAILURE}"),
        (lambda request: request.wfile.write(HOSTILE), 3, r"Exception: \x1b]2;owned\x07"),
        ({"/fr_trace_json": b" " * (2 << 20)}, 2, "gives more than 1 MB"),
    ],
    ids=["drips", "silent", "closes", "another protocol", "fails", "escapes", "without end"],
)
def test_a_server_that_does_not_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: Answer | Pages, code: int, words: str
) -> None:
    monkeypatch.setattr(debug_server, "_MOST_BYTES", 1 << 20)
    if words == LATE:
        monkeypatch.setattr(debug_server, "_SECONDS", 0.3)
    assert_refused(capsys, answer, code, words)


def test_addresses(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("http://a b", "http://a\tb:80", "http://\x7f", "http://h:1/ x", "http://[::1"):
        assert cli.main(["hang", address]) in (2, 3)
        assert "bug in ddpcheck" not in (err := capsys.readouterr().err) and err[:-1].isprintable()
    for address in ("https://node:1", "http://", "http://node:x", "http://node:99999", "http://node:1/page"):
        assert_refused(capsys, address, 2, "give http://HOST:PORT")
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    assert_refused(capsys, f"{address}/", 3, f"there is no debug server at {address}: Connection refused")
    monkeypatch.setattr(debug_server, "_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which accepts no connection
        assert_refused(capsys, f"http://127.0.0.1:{silent.getsockname()[1]}", 3, LATE)


# torch's server, on ranks of torchrun

PROGRAM = """
import sys, time
import torch, torch.distributed as dist
from torch.distributed.debug import start_debug_server
from torch.nn.parallel import DistributedDataParallel
def main(port):
    dist.init_process_group("gloo")
    start_debug_server(port, start_method="spawn", fetch_timeout=2)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    rank = dist.get_rank()
    for step in range(3):
        model(torch.ones(2, 2)).sum().backward()
    if rank == 0:
        dist.broadcast(torch.ones(4), 0)
    gathered = [torch.ones(2) for _ in range(2)]
    dist.all_gather(gathered, torch.ones(2))
    time.sleep(600)
if __name__ == "__main__":
    main(int(sys.argv[1]))
"""


@contextlib.contextmanager
def job(folder: Path) -> Iterator[str]:
    program = folder / "train.py"
    program.write_text(PROGRAM)
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "1000", "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, str(port)], stdout=output, stderr=output, env=environment, cwd=folder, start_new_session=True
        )
    try:
        address = f"http://localhost:{port}"
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(address, timeout=5).close()
                break
            assert process.poll() is None, (folder / "output").read_text()
            time.sleep(0.1)
        time.sleep(2.0)  # in which ranks come to where they stay
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # torchrun
        for pid in ranks_of(program):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(pid), signal.SIGKILL)  # a rank is a session with its server, under torchrun
        process.wait()


def ranks_of(program: Path) -> list[int]:
    import psutil

    commands = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, words in commands.items() if str(program) in words and "torch.distributed.run" not in words]


@pytest.mark.launchers
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch has its debug server there")
@needs("tabulate", "aiohttp", "torch.distributed.debug")
def test_ranks_that_diverge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug_server, "_QUERY_PAUSE", 2.0)
    monkeypatch.chdir(tmp_path)
    with job(tmp_path) as address:
        code, report = hang(capsys, address)
    (finding,) = report.findings
    assert (code, finding.code, finding.subjects) == (4, "DDP403", ("broadcast",))
    at = {words: number for number, line in enumerate(PROGRAM.splitlines(), 1) for words in line.strip().split("(")}
    assert finding.location == Location("train.py", at["dist.broadcast"])
    assert f"at train.py:{at['dist.all_gather']}" in finding.message
