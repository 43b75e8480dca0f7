"""Every way in which ranks can fail a test, on each rank, in both forms, alone and under pytest-xdist.

One inner session runs all cells; the outcome of each is read from its JUnit report. It waits for a minute, so
`make test-exhaustive` has it; `make test` has the failures of a world and of a session (test_harness.py,
test_sessions.py), and test_attached.py some of the cells on the ranks of a launcher.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

import psutil  # type: ignore[import-untyped]
import pytest

from tests import innerpytest
from tests.innerpytest import Session

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


def source(
    kinds: Iterable[str] = KINDS, who: Iterable[str] = WHO, forms: Sequence[str] = (FIXTURE, MARKER), timeout: int = 30
) -> str:
    parts = [HEAD]
    for kind, bad in itertools.product(kinds, who):
        code = KINDS[kind]
        if kind in COLLECTIVE_AFTER:  # the others wait for a rank that does not come
            code += "\ndist.barrier()"
        if bad == "all":  # else a rank can end while another one still connects to it, which fails of that
            code = f"dist.barrier()\ntime.sleep(0.2)\n{code}"
        words = {
            "name": f"{kind}_{bad}",
            "who": WHO[bad],
            "code": "\n".join(f"    {line}" for line in code.splitlines()),
            "timeout": min(timeout, 3) if kind == "hangs" else timeout,
        }
        parts += [part.format(**words) for part in (BODY, *forms)]
    return "\n".join(parts)


@pytest.fixture(
    scope="module",
    params=[pytest.param(arguments, marks=pytest.mark.exhaustive) for arguments in ((), ("-n", "2"))],
    ids=["alone", "xdist"],
)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("matrix")
    innerpytest.write(folder, test_matrix=source())
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    session = innerpytest.run(folder, *request.param)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before, "processes are left"
    assert session.returncode == 1, session.stdout
    assert len(session.tests) == len(KINDS) * len(WHO) * 2
    assert all(cell.outcome != "error" for cell in session.tests.values())
    return session


FORMS = pytest.mark.parametrize("form", ["fixture", "marker"])
EACH = pytest.mark.parametrize("who", list(WHO))
ONE = pytest.mark.parametrize("who", ["0", "1"])


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
    cell = session[f"test_{form}_{kind}_{who}"]
    ranks = {"0": "rank 0", "1": "rank 1", "all": "ranks 0 and 1"}[who]
    assert cell.outcome == "failed"
    assert re.search(words.format(ranks=ranks, first="[01]" if who == "all" else who), cell.text), cell.text
    if who != "all":
        assert f"rank {who}" in cell.text.splitlines()[0], "the headline names the rank"


@FORMS
@ONE
@pytest.mark.parametrize("kind", sorted(COLLECTIVE_AFTER))
def test_the_rank_that_waited_for_it_is_one_line(session: Session, form: str, kind: str, who: str) -> None:
    text = session[f"test_{form}_{kind}_{who}"].text
    fell = re.search(rf"rank {1 - int(who)} .*(waits? in|waiting in|fell with it)", text)
    assert fell, text
    if "waits in" in fell[0]:
        assert re.search(r"barrier(\(\))? at test_matrix.py", text)


@FORMS
@EACH
def test_a_rank_that_hangs_shows_where(session: Session, form: str, who: str) -> None:
    cell = session[f"test_{form}_hangs_{who}"]
    assert cell.outcome == "failed" and "did not finish within 3 s" in cell.text
    assert "time.sleep" in cell.text or f"in body_hangs_{who}" in cell.text, cell.text


@FORMS
@EACH
def test_a_skip_counts_when_all_ranks_skip_and_ranks_that_disagree_fail(session: Session, form: str, who: str) -> None:
    cell = session[f"test_{form}_skips_{who}"]
    if who == "all":
        assert cell.outcome == "skipped" and "no camera" in cell.text
    else:
        assert cell.outcome == "failed"
        assert f"ranks disagree: rank {who} skipped (no camera), rank {1 - int(who)} passed" in cell.text, cell.text


@FORMS
@ONE
@pytest.mark.parametrize("kind", ["mismatch", "leaves_early"])
def test_collectives_that_do_not_match_fail_before_the_timeout(
    session: Session, form: str, kind: str, who: str
) -> None:
    cell = session[f"test_{form}_{kind}_{who}"]
    assert cell.outcome == "failed" and "within 30 s" not in cell.text, cell.text
    assert re.search(r"all_reduce|all_gather|killed by SIGABRT|gloo", cell.text), cell.text


@FORMS
@pytest.mark.parametrize("cell", ["slow_0", "slow_1", "slow_all", "mismatch_all", "leaves_early_all"])
def test_what_is_only_slow_or_the_same_on_all_ranks_passes(session: Session, form: str, cell: str) -> None:
    assert session[f"test_{form}_{cell}"].outcome == "passed"
