"""Every way in which ranks can fail a test, on each rank, in both forms, alone and under pytest-xdist.

One inner session runs all cells; what pytest says of each is read from its JUnit report. It waits for a minute, so
`make test-exhaustive` has it; `make test` has the failures of a world and of a session (test_harness.py,
test_sessions.py).
"""

from __future__ import annotations

import itertools
import re

import psutil  # type: ignore[import-untyped]
import pytest

from tests import innerpytest
from tests.innerpytest import Said, Session
from tests.tiers import share

# What a rank does; `bad` is whether this one is meant.
KINDS = {
    "raises": "if bad: raise ValueError(f'broken on {rank}')",
    "asserts": "values = {'rank': rank}\nassert not bad or values == {'rank': -1}",
    "skips": "if bad: pytest.skip('no camera')",
    "exits": "if bad: os._exit(7)",
    "calls_exit": "if bad: sys.exit('had enough')",
    "killed": "if bad: os.kill(os.getpid(), signal.SIGKILL)",
    "crashes": "if bad: os.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": "if bad: time.sleep(60)",
    "unpicklable": "return threading.Lock() if bad else None",
    "unpicklable_error": "if bad: raise Stubborn(f'broken on {rank}')",
    "mismatch": "dist.all_gather([torch.zeros(2)] * 2, torch.ones(2)) if bad else dist.all_reduce(torch.ones(3))",
    "leaves_early": "if not bad: dist.all_reduce(torch.ones(3))",
    "slow": "if bad: time.sleep(0.8)",
}
WHO = {"0": "rank == 0", "1": "rank == 1", "all": "True"}
MODES = {"alone": (), "xdist": ("-n", "2")}
COLLECTIVE_AFTER = {"raises", "asserts", "exits", "killed", "crashes", "unpicklable_error"}

HEAD = """
import os, signal, sys, threading, time
import pytest

class Stubborn(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()
"""
BODY = """
def body_{name}(rank):
    import torch, torch.distributed as dist  # here: pytest itself can do without, and starts the sooner
    bad = {who}
{code}
"""
FIXTURE = """
def on_rank_{name}():
    import torch.distributed as dist
    return body_{name}(dist.get_rank())

def test_fixture_{name}(ddp_world):
    ddp_world.run(on_rank_{name}, timeout={timeout})
"""
MARKER = """
@pytest.mark.ddp(timeout={timeout})
def test_marker_{name}(rank):
    return body_{name}(rank)
"""


def source() -> str:
    parts = [HEAD]
    for kind, who in itertools.product(KINDS, WHO):
        code = KINDS[kind]
        if kind in COLLECTIVE_AFTER:  # the others wait for a rank that does not come
            code += "\ndist.barrier()"
        if who == "all":  # else a rank can end while another one still connects to it, which fails of that
            code = f"dist.barrier()\ntime.sleep(0.2)\n{code}"
        lines = "\n".join(f"    {line}" for line in code.splitlines())
        name = f"{kind}_{who}"
        timeout = 3 if kind == "hangs" else 30
        parts += [part.format(name=name, who=WHO[who], code=lines, timeout=timeout) for part in (BODY, FIXTURE, MARKER)]
    return "\n".join(parts)


@pytest.fixture(scope="module", params=share(MODES, [], pytest.mark.exhaustive))
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp(request.param)
    innerpytest.write(folder, test_matrix=source())
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    ended = innerpytest.run(folder, *MODES[request.param])
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert not left, "the session has left processes"
    assert ended.returncode == 1, ended.stdout
    return ended


def said(session: Session, form: str, kind: str, who: str) -> Said:
    return session[f"test_{form}_{kind}_{who}"]


FORMS = pytest.mark.parametrize("form", ["fixture", "marker"])
EACH = pytest.mark.parametrize("who", list(WHO))
ONE = pytest.mark.parametrize("who", ["0", "1"])


def test_every_cell_was_run(session: Session) -> None:
    assert len(session.tests) == len(KINDS) * len(WHO) * 2
    assert all(cell.outcome != "error" for cell in session.tests.values())


@FORMS
@EACH
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("raises", r"ValueError: broken on {first}"),
        ("asserts", r"\{{'rank': {first}\}} == \{{'rank': -1\}}"),
        ("exits", r"{ranks} ended with exit code 7 before (its|their) work was done"),
        ("calls_exit", r"{ranks} called exit\(.*had enough.*\) in the middle of a run|SystemExit: had enough"),
        ("killed", r"{ranks} (was|were) killed by SIGKILL \(not by ddpcheck"),
        ("crashes", r"{ranks} (was|were) killed by SIGSEGV"),
        ("unpicklable", r"returned a lock that cannot be pickled"),
        ("unpicklable_error", r"Stubborn: broken on {first}"),
    ],
)
def test_a_rank_that_fails_is_the_headline(session: Session, form: str, kind: str, words: str, who: str) -> None:
    cell = said(session, form, kind, who)
    ranks = {"0": "rank 0", "1": "rank 1", "all": "ranks 0 and 1"}[who]
    assert cell.outcome == "failed"
    assert re.search(words.format(ranks=ranks, first="[01]" if who == "all" else who), cell.text), cell.text
    if who != "all":
        assert f"rank {who}" in cell.text.splitlines()[0], "the headline names the rank"


@FORMS
@ONE
@pytest.mark.parametrize("kind", sorted(COLLECTIVE_AFTER))
def test_the_rank_that_waited_for_it_is_one_line(session: Session, form: str, kind: str, who: str) -> None:
    text = said(session, form, kind, who).text
    other = 1 - int(who)
    fell = re.search(rf"rank {other} .*(waits? in|waiting in|fell with it)", text)
    assert fell, text
    if "waits in" in fell[0]:
        assert re.search(r"barrier(\(\))? at test_matrix.py", text)


@FORMS
@EACH
def test_a_rank_that_hangs_shows_where(session: Session, form: str, who: str) -> None:
    cell = said(session, form, "hangs", who)
    assert cell.outcome == "failed" and "did not finish within 3 s" in cell.text
    assert "time.sleep" in cell.text or f"in body_hangs_{who}" in cell.text, cell.text


@FORMS
def test_a_skip_counts_when_all_ranks_skip(session: Session, form: str) -> None:
    cell = said(session, form, "skips", "all")
    assert cell.outcome == "skipped" and "no camera" in cell.text


@FORMS
@ONE
def test_ranks_that_disagree_on_a_skip_fail(session: Session, form: str, who: str) -> None:
    cell = said(session, form, "skips", who)
    assert cell.outcome == "failed"
    assert f"ranks disagree: rank {who} skipped (no camera), rank {1 - int(who)} passed" in cell.text, cell.text


@FORMS
@pytest.mark.parametrize(
    ("kind", "who"), [("mismatch", "0"), ("mismatch", "1"), ("leaves_early", "0"), ("leaves_early", "1")]
)
def test_collectives_that_do_not_match_fail_before_the_timeout(
    session: Session, form: str, kind: str, who: str
) -> None:
    cell = said(session, form, kind, who)
    assert cell.outcome == "failed" and "within 30 s" not in cell.text, cell.text
    assert re.search(r"all_reduce|all_gather|killed by SIGABRT|gloo", cell.text), cell.text


@FORMS
@pytest.mark.parametrize(
    ("kind", "who"), [("slow", "0"), ("slow", "1"), ("slow", "all"), ("mismatch", "all"), ("leaves_early", "all")]
)
def test_what_is_only_slow_or_the_same_on_all_ranks_passes(session: Session, form: str, kind: str, who: str) -> None:
    assert said(session, form, kind, who).outcome == "passed"
