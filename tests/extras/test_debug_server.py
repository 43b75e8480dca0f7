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
from tests.tiers import needs, one_of

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
OVER = stack("  <no Python frame>\n")


def entry(number: int, name: str = "gloo:barrier", *, ended: bool = True) -> dict[str, Any]:
    of_call = {"collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False, "profiling_name": name}
    sizes = {"input_sizes": [[1]], "input_dtypes": ["Float"], "output_sizes": [[1]], "output_dtypes": ["Float"]}
    state = {"retired": ended, "state": "scheduled", "record_id": number - 1, "process_group": ["0", "default_pg"]}
    return of_call | sizes | state


def page(answers: Sequence[str | int]) -> bytes:
    """Of each rank its text, or the status with which its worker server has failed."""
    parts = ["<h1>Torch Distributed Debug Server</h1>"]
    for rank, answer in enumerate(answers):
        failed = f"<p>Failed to fetch: status={answer}</p>\n" if isinstance(answer, int) else ""
        parts.append(f"<h2>Rank {rank}: http://node:1/handler/x?</h2>\n{failed}<pre>{answer}</pre>")
    return "\n".join([*parts, "</section>\n    "]).encode()


def recorder(*ranks: Sequence[dict[str, Any]] | int) -> bytes:
    return page([one if isinstance(one, int) else json.dumps({"entries": one}, indent=2) for one in ranks])


NO_NCCL = page([404, 404])
Answer = Callable[[BaseHTTPRequestHandler], None]


@contextlib.contextmanager
def listening(answer: Answer) -> Iterator[str]:
    """The address of a server in this process, which answers GET so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(OSError):
                answer(self)

        def log_message(self, *_: object) -> None:
            pass

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


def gives(pages: dict[str, bytes | list[bytes]]) -> Answer:
    """Each page, or those of a list one after the other."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        given = pages.get(request.path)
        if given is None:
            request.send_error(404, f"Handler not found: {request.path}")
            return
        request.send_response(200)
        request.end_headers()
        request.wfile.write(given.pop(0) if isinstance(given, list) else given)

    return answer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_server, "_BETWEEN", 0.0)


def hang(capsys: pytest.CaptureFixture[str], address: str, *more: str) -> tuple[int, Report]:
    code = cli.main(["hang", address, "--format", "json", *more])
    return code, Report.from_json(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], address: str) -> tuple[int, str]:
    code = cli.main(["hang", address])
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1, (out, err)
    return code, err


OPEN = entry(2, ended=False)


def test_a_rank_that_waits_and_one_that_has_run_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    pages = {"/fr_trace_json": recorder([entry(1), OPEN], [entry(1)]), "/stacks": page([IN_BARRIER, OVER])}
    with listening(gives(dict(pages))) as address:
        code, report = hang(capsys, address)
        assert hang(capsys, address, "--fail-on", "never")[0] == 0
    (finding,) = report.findings
    assert (code, finding.code, finding.location) == (4, "DDP403", Location("train.py", 7))
    assert finding.ranks == (1,) and "rank 1: has run to its end" in finding.evidence
    assert [(one.rank, one.waiting) for one in report.timelines[0].ranks] == [(0, True), (1, False)]
    assert report.checks[2].status == "skipped"


@pytest.mark.parametrize(
    ("recorders", "stacks", "words"),
    [
        (
            [recorder([entry(1), OPEN], [entry(1)])] * 2,
            [page([IN_BARRIER, AT_WORK])] * 2,
            "is at train.py:9, and in no",
        ),
        (
            [recorder([entry(1), OPEN], [entry(1)]), recorder([entry(1), entry(2), entry(3, ended=False)], [entry(1)])],
            [page([IN_BARRIER, IN_BARRIER])] * 2,
            "rank 0 was at train.py:7, and made progress",
        ),
        (
            [recorder([entry(1), OPEN], [entry(1)])] * 2,
            [page([IN_BARRIER, AT_WORK]), page([IN_BARRIER, AT_WORK.replace("line 9", "line 8")])],
            "rank 1 was at train.py:8, and made progress",
        ),
    ],
    ids=["at work", "collectives", "another line"],
)
def test_a_rank_that_may_still_come_has_not_parted(
    capsys: pytest.CaptureFixture[str], recorders: list[bytes], stacks: list[bytes], words: str
) -> None:
    if words.startswith("rank 0"):  # who gets on is rank 0, and rank 1 may come as well
        stacks = [page([IN_BARRIER, AT_WORK])] * 2
    with listening(gives({"/fr_trace_json": list(recorders), "/stacks": list(stacks)})) as address:
        code, report = hang(capsys, address)
    assert (code, report.findings) == (0, ()) and words in report.checks[1].detail


def test_what_does_not_match_is_told_though_a_rank_is_at_work(capsys: pytest.CaptureFixture[str]) -> None:
    other = [entry(1), entry(2, "gloo:all_reduce"), entry(3)]
    pages = {"/fr_trace_json": recorder([entry(1), OPEN], other), "/stacks": page([IN_BARRIER, AT_WORK])}
    with listening(gives(dict(pages))) as address:
        code, report = hang(capsys, address)
    assert code == 4 and "rank 1: is at train.py:9, and in no collective" in report.findings[0].evidence


@pytest.mark.parametrize(("entries", "code"), [([entry(61, "nccl:all_reduce", ended=False)], 0), ([], 4)])
def test_of_nccl_only_what_has_not_ended_is_known(
    capsys: pytest.CaptureFixture[str], entries: list[dict[str, Any]], code: int
) -> None:
    active = recorder([entry(62, "nccl:all_reduce", ended=False)], entries)
    pages = {"/fr_trace_json": recorder([], []), "/fr_trace_nccl_json": active, "/stacks": page([IN_BARRIER] * 2)}
    with listening(gives(dict(pages))) as address:
        assert hang(capsys, address)[0] == code  # a rank is in number 61 still, and may come


def test_ranks_that_do_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    stacks = page([IN_BARRIER, 408])
    with listening(gives({"/fr_trace_json": recorder([OPEN], 408), "/stacks": stacks})) as address:
        code, report = hang(capsys, address)
    assert code == 3 and report.error is not None and report.error.message.startswith("rank 1: no answer in time (408)")
    assert report.checks[0].detail == "1 of 2: no answer of rank 1 (rank 1: no answer in time (408))"
    parted = recorder([entry(1), entry(2)], [entry(1), entry(2, "gloo:all_reduce")], 503)
    with listening(gives({"/fr_trace_json": parted, "/stacks": page([IN_BARRIER] * 3)})) as address:
        code, report = hang(capsys, address)
    assert code == 4 and report.error is None and report.findings[0].evidence[-1] == "rank 2: no answer"
    nobody = {"/fr_trace_json": recorder(408, 503), "/fr_trace_nccl_json": NO_NCCL, "/stacks": page([503, 503])}
    with listening(gives(dict(nobody))) as address:
        code, said = refused(capsys, address)
    assert code == 3 and "(rank 0: no answer in time (408); rank 1: no answer (503))" in said


@pytest.mark.parametrize(
    ("pages", "code", "words"),
    [
        ({}, 2, "has no page /fr_trace_json"),
        (
            {"/fr_trace_json": b"<h1>Something else</h1>"},
            2,
            "is not a debug server of torch: /fr_trace_json gives another",
        ),
        ({"/fr_trace_json": page([])}, 2, "has no answers of ranks"),
        ({"/fr_trace_json": page(["{}", "{}"])[:-40]}, 2, "is not whole"),
        ({"/fr_trace_json": page(["no JSON"])}, 2, "has no JSON of rank 0"),
        ({"/fr_trace_json": page(["[" * 100_000])}, 2, "has no JSON of rank 0"),
        ({"/fr_trace_json": page(['{"entries": 3}'])}, 2, "has no list of entries of rank 0"),
        ({"/fr_trace_json": page(['{"entries": [{"a": 1}]}'])}, 2, "can read (KeyError: 'profiling_name')"),
    ],
)
def test_what_is_no_debug_server(
    capsys: pytest.CaptureFixture[str], pages: dict[str, bytes | list[bytes]], code: int, words: str
) -> None:
    with listening(gives(pages)) as address:
        said = refused(capsys, address)
    assert said[0] == code and words in said[1]


def drips(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(b" ")
        time.sleep(0.01)


def fails(request: BaseHTTPRequestHandler) -> None:
    request.send_error(500, "Exception: RuntimeError('the store is gone')")


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (drips, 3, "has not given /fr_trace_json within"),
        (lambda request: time.sleep(0.6), 3, "has not given /fr_trace_json within"),
        (lambda request: None, 3, "has closed the connection"),
        (lambda request: request.wfile.write(b"220 ready for mail\r\n"), 2, "does not speak HTTP"),
        (fails, 3, "fails at /fr_trace_json: Exception: RuntimeError('the store is gone')"),
    ],
    ids=["drips", "silent", "closes", "another protocol", "fails"],
)
def test_a_server_that_does_not_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: Answer, code: int, words: str
) -> None:
    if "within" in words:
        monkeypatch.setattr(debug_server, "_SECONDS", 0.3)
    with listening(answer) as address:
        said = refused(capsys, address)
    assert said[0] == code and words in said[1]


def test_an_answer_without_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_server, "_MOST_BYTES", 1 << 20)
    with listening(gives({"/fr_trace_json": b" " * (2 << 20)})) as address:
        assert "gives more than 1 MB" in refused(capsys, address)[1]


def test_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    for address in ("https://node:1", "http://", "http://node:x", "http://node:99999", "http://node:1/page"):
        code, said = refused(capsys, address)
        assert code == 2 and "give http://HOST:PORT" in said
    (port,) = free_ports(1)
    code, said = refused(capsys, f"http://127.0.0.1:{port}/")
    assert code == 3 and f"there is no debug server at http://127.0.0.1:{port}: Connection refused" in said


# torch's server, on ranks of torchrun

PROGRAM = """
import sys, time
import torch, torch.distributed as dist
from torch.distributed.debug import start_debug_server
from torch.nn.parallel import DistributedDataParallel

def main(port, what):
    dist.init_process_group("gloo")
    start_debug_server(port, start_method="spawn", fetch_timeout=2)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    rank = dist.get_rank()
    for step in range(3):
        model(torch.ones(2, 2)).sum().backward()
    if what == "collectives" and rank == 0:
        dist.broadcast(torch.ones(4), 0)  # of rank 0
    if what == "backward" and rank == 0:
        model(torch.ones(2, 2)).sum().backward()  # of rank 0
    if what == "wait" and rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()
    while what == "steps":
        model(torch.ones(2, 2)).sum().backward()
        time.sleep(0.05)
    while what == "tokenises" and rank == 0:
        time.sleep(0.05)
    gathered = [torch.ones(2) for _ in range(2)]
    dist.all_gather(gathered, torch.ones(2))  # of both
    time.sleep(600)

if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
"""


@contextlib.contextmanager
def job(folder: Path, what: str) -> Iterator[str]:
    """The address of the debug server of a job of two ranks."""
    program = folder / "train.py"
    program.write_text(PROGRAM)
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "1000", "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, str(port), what],
            stdout=output,
            stderr=output,
            env=environment,
            cwd=folder,
            start_new_session=True,
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
    """The processes that run a program, but for torchrun's."""
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if str(program) in command and "torch.distributed.run" not in command:
            found.append(process.pid)
    return sorted(found)


needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch has its debug server there")
live = [pytest.mark.launchers, needs("tabulate", "aiohttp", "torch.distributed.debug"), needs_linux]


def line_with(words: str) -> int:
    return next(number for number, line in enumerate(PROGRAM.splitlines(), 1) if words in line)


class TestOnTorchsServer:
    pytestmark = live

    @pytest.fixture(autouse=True)
    def as_it_is(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(debug_server, "_BETWEEN", 2.0)
        monkeypatch.chdir(tmp_path)

    @pytest.mark.parametrize(
        ("what", "words", "operation"),
        one_of(
            2, [("collectives", "dist.broadcast", "broadcast"), ("backward", ".backward()  # of rank 0", "all_reduce")]
        ),
    )
    def test_ranks_that_part(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, words: str, operation: str
    ) -> None:
        with job(tmp_path, what) as address:
            code, report = hang(capsys, address)
        (finding,) = report.findings
        assert (code, finding.code, finding.subjects) == (4, "DDP403", (operation,))
        assert finding.location == Location("train.py", line_with(words))
        assert f"at train.py:{line_with('# of both')}" in finding.message

    @pytest.mark.exhaustive
    def test_a_wait_for_what_was_begun_before(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with job(tmp_path, "wait") as address:
            code, report = hang(capsys, address)
        assert code == 4 and "all_reduce" in report.findings[0].message

    @pytest.mark.parametrize(
        ("what", "words"), one_of(2, [("tokenises", "and in no collective"), ("steps", "made progress")])
    )
    def test_a_job_that_works(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, words: str) -> None:
        with job(tmp_path, what) as address:
            code, report = hang(capsys, address)
        assert (code, report.findings) == (0, ()) and words in report.checks[1].detail
        assert report.checks[0].detail.startswith("answers of 2 ranks")

    @pytest.mark.exhaustive
    def test_a_rank_that_is_stopped(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with job(tmp_path, "tokenises") as address:
            stopped = next(
                pid
                for pid in ranks_of(tmp_path / "train.py")
                if b"RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes().replace(b"LOCAL_RANK", b"L")
            )
            os.kill(stopped, signal.SIGSTOP)
            code, report = hang(capsys, address)
        assert code == 3 and report.error is not None and "rank 1: no answer in time (408)" in report.error.message


def test_nobody_listens_for_longer_than_the_deadline(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug_server, "_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which accepts nothing
        code, said = refused(capsys, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert code == 3 and "has not given /fr_trace_json within" in said
