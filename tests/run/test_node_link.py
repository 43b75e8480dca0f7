"""How the launching processes of several nodes talk: what is sent, who decides, and what is not taken."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed import PrefixStore, TCPStore

from ddpcheck.cli.run import merge_endings
from ddpcheck.run import node_link
from ddpcheck.run.ending import Ending
from ddpcheck.run.hang_watch import Hang, NotExited
from ddpcheck.run.node_link import NodeLink, Standing
from ddpcheck.stream import rank_log
from ddpcheck.stream.entries import RankStarted
from ddpcheck.stream.rank_log import FilePart, RankLog, ReceivedFolder, file_parts, read_logs
from ddpcheck.worlds.wire import put_value

LOG = "0-2-4-77.log"


class Job:
    """The launching processes of a job, in this one; each has a connection of its own to the store."""

    def __init__(self, folder: Path) -> None:
        self.server: TCPStore | None = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self.server.port
        self.folder = folder
        self.links: list[NodeLink] = []

    def start(self, size: int, without: int = -1) -> list[NodeLink]:
        """All of its nodes, but for one of which nothing comes."""
        for number in range(size):
            (folder := self.folder / str(number)).mkdir()
            self.links.append(NodeLink(folder))
            if number != without:
                self.links[-1].reconnect(PrefixStore("rendezvous", self.store()), number, size)
        return self.links

    def store(self) -> TCPStore:
        return TCPStore("127.0.0.1", self.port, is_master=False)

    def own(self, number: int) -> Any:
        """The store, as a node writes into it."""
        meeting = PrefixStore("rendezvous/ddpcheck", self.store())
        return PrefixStore(f"ddpcheck/{meeting.get('run').decode().partition(' ')[0]}", self.store())


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for link in made.links:
        link.close()


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def handing_over(*links: NodeLink) -> Iterator[dict[int, int | None]]:
    """Hand the logs of some nodes over while the block runs; the exit codes that they are told, by node."""
    codes: dict[int, int | None] = {}

    def hand_over(link: NodeLink) -> None:
        codes[link.number] = link.hand_over(f"end of {link.number}".encode())

    threads = [threading.Thread(target=hand_over, args=[link]) for link in links]
    for thread in threads:
        thread.start()
    yield codes
    for thread in threads:
        thread.join(20)


# The logs of other nodes


def test_the_first_node_gets_the_logs_of_all_and_tells_the_exit_code(job: Job) -> None:
    links = job.start(3)
    large = os.urandom(9 * rank_log.LARGEST_PART + 5)
    for number, rank in enumerate((0, 2, 4)):
        RankLog(job.folder / str(number), RankStarted(rank, 6, "gloo", restart=number))  # agents count apart
    (job.folder / "1" / "0-3-6-5.calls").write_bytes(large)
    (job.folder / "1" / "notes.txt").write_text("not a log")
    with handing_over(*links[1:]) as codes:
        assert links[0].collect(interrupted=False) == {1: b"end of 1", 2: b"end of 2"}
        assert links[0].refused == {}
        assert [rank.started.rank for rank in read_logs(job.folder / "0")] == [0, 2, 4]
        assert (job.folder / "0" / "node1" / "0-3-6-5.calls").read_bytes() == large
        assert not (job.folder / "0" / "node1" / "notes.txt").exists()
        links[0].finish(7)
    assert codes == {1: 7, 2: 7}


def test_who_does_not_come_is_named_and_the_others_are_not_lost(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    links = job.start(3, without=2)
    (job.folder / "1" / LOG).write_bytes(b"x")
    with handing_over(links[1]) as codes:
        assert until(lambda: links[0]._nodes[1].is_done)
        monkeypatch.setattr(node_link, "WAIT", 0.5)
        assert links[0].collect(interrupted=False) == {1: b"end of 1"}
        assert links[0].refused == {2: "they have not come within 0.5 s"}
        links[0].finish(0)
    assert codes == {1: 0}


def test_a_node_that_dies_while_it_sends_leaves_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    links = job.start(2)
    until(lambda: links[1].host)
    monkeypatch.setattr(node_link, "WAIT", 0.5)
    put_value(job.own(1).set, "part/1/0", msgspec.msgpack.encode(FilePart(LOG, b"half of it")))
    assert until(lambda: (job.folder / "0" / "node1" / LOG).exists())
    assert links[0].collect(interrupted=False) == {}
    assert not (job.folder / "0" / "node1").exists()


def test_a_start_anew_forgets_what_came_of_the_one_before(job: Job) -> None:
    """Agents that start their ranks again meet on another store."""
    links = job.start(2)
    until(lambda: links[1].host)
    put_value(job.own(1).set, "part/1/0", msgspec.msgpack.encode(FilePart(LOG, b"of the first start")))
    assert until(lambda: (job.folder / "0" / "node1" / LOG).exists())
    for number, link in enumerate(links):
        link.reconnect(PrefixStore("again", job.store()), number, 2)
    assert not (job.folder / "0" / "node1").exists()
    (job.folder / "1" / LOG).write_bytes(b"of the second")
    with handing_over(links[1]) as codes:
        assert links[0].collect(interrupted=False) == {1: b"end of 1"}
        assert (job.folder / "0" / "node1" / LOG).read_bytes() == b"of the second"
        links[0].finish(0)
    assert codes == {1: 0}


@pytest.mark.parametrize("without", [0, None])
def test_without_the_first_node_another_one_keeps_its_logs(
    without: int | None, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_link, "_STALE_AFTER", 0.5)
    _, other = job.start(2, without=-1 if without is None else without)
    if without is None:
        assert until(lambda: other.host)
        job.links[0].close()
        job.server = None  # with which the store has ended
    assert other.hand_over(b"end") is None


# What is not taken


def test_a_name_that_is_not_that_of_a_log_is_not_taken(tmp_path: Path) -> None:
    received = ReceivedFolder(tmp_path / "node1")
    for name in ("../x.log", "/tmp/x.log", f"{LOG}/../../x", "0-2-4-77.py", f"{LOG}\n", "0-2-4.log", "٣-2-4-77.log"):
        with pytest.raises(ValueError, match="is not the name of a log"):
            received.append_part(FilePart(name, b"x"))
    assert [path.name for path in tmp_path.rglob("*")] == ["node1"]


def test_there_is_a_limit_to_what_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_log, "_LARGEST_FOLDER", 10)
    monkeypatch.setattr(rank_log, "_MOST_FILES", 2)
    received = ReceivedFolder(tmp_path / "node1")
    for taken in ("0-2-4-7.log", "0-3-4-8.log", "0-3-4-8.log"):
        received.append_part(FilePart(taken, b"xx"))
    for part in (FilePart("0-2-4-9.log", b"x"), FilePart("0-2-4-7.log", b"12345")):
        with pytest.raises(ValueError, match="the logs are more than"):
            received.append_part(part)
    assert list(file_parts(tmp_path / "node1")) == [FilePart("0-2-4-7.log", b"xx"), FilePart("0-3-4-8.log", b"xxxx")]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (msgspec.msgpack.encode(FilePart("../x.log", b"x")), "'../x.log' is not the name of a log"),
        (b"\x80\x04\x95cos\nsystem\n", "missing required field"),  # of a pickle
        (b"x" * 6_000_000, "it has sent a value of 6000000 bytes"),
        (b"", "truncated"),
        (msgspec.msgpack.encode({"type": "NodeEnd", "ending": 5}), "Expected `bytes`"),
    ],
)
def test_what_is_no_log_is_not_taken_and_the_first_node_goes_on(data: bytes, why: str, job: Job) -> None:
    links = job.start(2)
    assert until(lambda: links[1].host)
    links[1].close()
    put_value(job.own(1).set, "part/1/0", data)
    assert links[0].collect(interrupted=False) == {}
    assert why in links[0].refused[1]
    assert not (job.folder / "x.log").exists() and not (job.folder / "0" / "x.log").exists()


def test_no_port_is_opened(job: Job) -> None:
    before = listening()
    links = job.start(2)
    assert until(lambda: links[1].host) and before
    assert listening() == before


def listening() -> set[str]:
    """The sockets on which this process listens."""
    own = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(path))
        except OSError:  # the descriptor of the folder itself
            continue
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}


# Who decides that no rank gets on


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "others", "ranks", "ends"),
    [
        ("stuck", ("stuck", "stuck"), 6, True),
        ("stuck", ("on", "stuck"), 6, False),
        ("stuck", ("ended", "ended"), 6, True),
        ("stuck", ("stuck", "stuck"), 7, False),  # a rank has not joined yet
    ],
)
def test_the_first_node_ends_the_ranks_where_none_gets_on(
    own: Standing, others: tuple[Standing, Standing], ranks: int, ends: bool, job: Job
) -> None:
    links = job.start(3)
    for link, standing in zip(links, (own, *others), strict=True):
        link.publish_state(standing, (2 * link.number, 2 * link.number + 1), ranks)
    assert until(lambda: all(one.state and one.state.world_size for one in links[0]._nodes.values()))
    assert not any(link.must_end() for link in links[1:])  # before the first one has decided
    assert links[0].must_end() == ends
    if ends:
        assert until(lambda: all(link.must_end() for link in links[1:]))
    else:
        time.sleep(0.6)
        assert not any(link.must_end() for link in links)


def test_a_node_that_was_not_heard_for_a_while_may_have_got_on(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    links = job.start(2)
    for link in links:
        link.publish_state("stuck", (link.number,), 2)
    assert until(lambda: links[0].must_end())
    links[1].close()
    links[0]._first.ends = False
    monkeypatch.setattr(node_link, "_STALE_AFTER", 0.1)
    time.sleep(0.5)
    assert not links[0].must_end()
    monkeypatch.setattr(node_link, "WAIT", 0.2)
    assert links[0].must_end()  # it is lost, and nobody waits for it in vain


@pytest.mark.parametrize(("size", "ends"), [(2, True), (3, False)])
def test_without_the_first_node_a_node_ends_its_ranks_only_where_nobody_else_is(
    size: int, ends: bool, job: Job
) -> None:
    links = job.start(size)
    links[1].publish_state("stuck", (1,), size)
    assert until(lambda: links[1]._first.beat) and not links[1].must_end()
    links[0].finish(1)
    assert until(lambda: links[1]._first.exit_code == 1)
    assert links[1].must_end() == ends


# How a script has ended on all nodes


def test_the_endings_of_nodes_are_one() -> None:
    first, unended = Ending(0, hang=Hang(8.0, {0: "a"})), NotExited(60.0, (2,))
    second = Ending(7, {2: 7}, hang=Hang(9.0, {3: "b"}), not_exited=unended)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(second), type=Ending)
    assert sent == second
    assert merge_endings([first, sent]) == Ending(7, {2: 7}, hang=Hang(9.0, {0: "a", 3: "b"}), not_exited=unended)
    assert merge_endings([Ending(1, {0: 1}), Ending(130, interrupted=True)]) == Ending(1, {0: 1}, interrupted=True)
