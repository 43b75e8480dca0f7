"""A hang as its story: which rank did what, and at which line of the program, from evidence made by hand."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.findings.evidence.endings import PeerWait, RankAtEnd
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.program_blocks import Block, blocks_around
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.rules.collectives.diagnose import judge_positions
from ddpcheck.stream.entries import (
    DDP_BACKWARD,
    DDP_FORWARD,
    JOINED,
    JOINING,
    SHARD_FORWARD,
    place_of_backward,
    place_of_handling,
)
from ddpcheck.stream.held_file import CallRing, read_calls, read_wait
from ddpcheck.trace.positions import EndingFacts

PROGRAM = """\
def main():
    for epoch in range(2):
        for x in loader:
            if not usable(x):
                continue
            loss = model(x)
            if bad(loss):
                continue
            loss.backward()
            if loss < 0.1:
                break
        if rank == 0:
            save(model)
        else:
            dist.broadcast(x, 0)
    dist.barrier()

def save(model):
    if quick:
        return
    dist.barrier()

def steps():
    for _ in range(9):
        loss = model(x)
        if bad(loss):
            continue
        loss.backward()
    dist.barrier()

def guarded():
    try:
        while True:
            model(next(data)).backward()
    except StopIteration:
        pass
    dist.barrier()

def adversaries():
    for step in range(6):
        fake = G(z)
        if fooled(step):
            D(fake).backward()
        if weak(step):
            G_loss(fake).backward()
        H(fake).backward()

def keeps_best():
    for epoch in range(epochs):
        for x in data:
            model(x).backward()
        score = evaluate(x)
        if score < best:
            best = score
            dist.barrier()
        if score > 9:
            break
    dist.barrier()

def by_tokens():
    while tokens < limit:
        model(x).backward()
    dist.barrier()

def players():
    for step in range(9):
        D(x).backward()
        if strong(x):
            continue
        G(z).backward()

def generated():
    for x in batches():
        loss = model(x)
        if bad(loss):
            continue
        loss.backward()
    dist.barrier()

def until_told():
    while not told:
        for x in loader:
            model(x).backward()
    dist.barrier()

def finishes():
    for x in stream():
        model(x).backward()
    if dist.is_available():
        dist.barrier()

def keeps_copies():
    for step in range(40):
        if enough(step):
            break
        model(x).backward()
        if good(x):
            break
        if step % 4 == 0:
            dist.barrier()
    dist.all_reduce(x)

def asks_first():
    for step in range(40):
        if enough(step):
            break
        dist.all_reduce(x)
        if noisy(x):
            dist.barrier()
    dist.broadcast(x)

def patient():
    while patience < 2:
        for x in data:
            model(x).backward()
        patience += worse(x)
    dist.barrier()

def folds():
    for fold in parts:
        for x in fold:
            model(x).backward()
        dist.all_reduce(x)
    dist.barrier()

def streams():
    for x in numbered():
        model(x).backward()
        if tired():
            break
    dist.barrier()

def rounds():
    for client in range(3):
        for x in clients[client]:
            dist.all_reduce(x)
        for p in parameters:
            dist.broadcast(p)

def numbered():
    for part in parts:
        dist.broadcast(part)
        yield from part

def scores():
    for task in tasks:
        try:
            score()
        except ValueError:
            print(task)
    dist.barrier()

def score():
    rows = read()
    dist.gather(rows)

def tidies():
    for task in tasks:
        with contextlib.suppress(ValueError):
            dist.all_reduce(task)
        dist.broadcast(task)
    dist.barrier()

main()
"""
MAIN = len(PROGRAM.splitlines())  # the line that calls what the test is about
FILE = Path(tempfile.mkdtemp(), "train.py")
FILE.write_text(PROGRAM)
CODES = {"b": DDP_BACKWARD, "f": DDP_FORWARD, "|": "barrier", "r": "all_reduce", "c": "broadcast", "v": "recv"}
CODES |= {"s": SHARD_FORWARD, "g": "gather"}


def call(code: str, *lines: int, group: str = "0", members: Sequence[int] = (0, 1), **more: Any) -> Call:
    where = tuple(f"train.py:{line}" for line in lines)
    return Call(CODES[code], group, tuple(members), location=where[0], callers=(*where, f"train.py:{MAIN}"), **more)


def backward(number: int, batch: int = 0, *, line: int = 9, at: int = 6, unsynced: int = 0, epoch: int = 0) -> Call:
    taken = f"batch {batch} of pass {epoch} over loader 0" if batch else ""
    place = place_of_backward(number, Location("train.py", at), unsynced, taken)
    return call("b", line, place=place)


def judge(*ranks: Sequence[Call] | RankAtEnd, passes: Any = None) -> list[Finding]:
    everyone = [
        one
        if isinstance(one, RankAtEnd)
        else RankAtEnd(rank, one, doing=f"waits in {one[-1]}", passes=(passes or {}).get(rank, ()))
        for rank, one in enumerate(ranks)
    ]
    numbers = range(1, len(PROGRAM.splitlines()) + 1)
    blocks: dict[str, Sequence[Block]] = {f"train.py:{n}": blocks_around(str(FILE), "train.py", n) for n in numbers}
    return judge_positions(EndingFacts(everyone, blocks))


def only(found: Sequence[Finding]) -> Finding:
    (finding,) = found
    assert "ollective number" not in finding.message
    return finding


def test_a_loader_that_ended_earlier() -> None:
    def passes(batches: int, *, exhausted: bool) -> list[LoaderPass]:
        return [
            LoaderPass(0, 0, Location("train.py", 3), "Samples", batches=batches, exhausted=exhausted, indices=range(5))
        ]

    rank_0 = [backward(n, n) for n in (1, 2, 3)]
    rank_1 = [*(backward(n, n) for n in (1, 2)), call("|", 16)]
    both = {0: passes(3, exhausted=False), 1: passes(2, exhausted=True)}
    finding = only(judge(rank_0, rank_1, passes=both))
    assert (finding.code, finding.subjects, finding.ranks) == ("DDP405", ("Samples",), (1,))
    assert finding.location == Location("train.py", 3) and "2 batches on rank 1" in finding.message
    assert "Join" in finding.fix and "rank 1: 2 batches, 5 samples" in finding.evidence


def under_join(collective: str = "r") -> tuple[list[Call], list[Call]]:
    """What two ranks call under `Join` until one has no further batch; a call with each batch is not DDP's."""
    a_pass = [call("r", 6, place=JOINING), backward(1), *([call(collective, 11)] if collective else [])]
    return [*a_pass, call("r", 3, place=JOINED), call("r", 3, place=JOINED)], [*a_pass, *a_pass]


def test_a_collective_inside_of_join() -> None:
    both = {n: [LoaderPass(0, 0, Location("train.py", 3), batches=1 + n, exhausted=n == 0)] for n in (0, 1)}
    finding = only(judge(*under_join(), passes=both))
    assert (finding.code, finding.ranks, finding.location) == ("DDP403", (1,), Location("train.py", 11))
    assert "inside of `Join`" in finding.message and "with Join" in finding.fix
    assert "DDP405" not in str(judge(*under_join(""), passes=both))


def test_a_loader_that_is_gone_through_again_explains_nothing() -> None:
    """Rank 1 has begun its shorter shard anew, as rank 0 will; it waits for a call that rank 0 alone makes."""
    where = Location("train.py", MAIN)  # iter(loader), and next(...) where it is needed
    short = [LoaderPass(0, 0, where, batches=2, exhausted=True), LoaderPass(0, 1, where, batches=1)]
    both = {0: [LoaderPass(0, 0, where, batches=3)], 1: short}
    same = [backward(n) for n in (1, 2, 3)]
    finding = only(judge([*same, call("|", 21, 13)], [*same, backward(4)], passes=both))
    assert (finding.code, finding.ranks, finding.location) == ("DDP403", (0,), Location("train.py", 21))


def test_a_rank_that_has_left_the_loop_around_a_loader_of_which_another_begins_a_new_pass() -> None:
    loop = PROGRAM.splitlines().index("    while not told:") + 1
    where = Location("train.py", loop + 1)
    whole = LoaderPass(0, 0, where, batches=2, exhausted=True)
    both = {0: [whole, LoaderPass(0, 1, where, batches=1)], 1: [whole]}
    same = [backward(n, line=loop + 2, at=loop + 2) for n in (1, 2)]
    goes_on = [*same, backward(3, line=loop + 2, at=loop + 2)]
    finding = only(judge(goes_on, [*same, call("|", loop + 3)], passes=both))
    assert (finding.code, finding.ranks, finding.location) == ("DDP405", (1,), Location("train.py", loop))
    assert "the loop runs while not told" in finding.evidence and "condition" in finding.fix


def test_a_rank_that_has_left_the_loop_by_its_break() -> None:
    finding = only(judge([backward(n) for n in (1, 2, 3)], [backward(1), backward(2), call("|", 16)]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP405", (1,), Location("train.py", 11))
    assert "after 2 backward passes and waits in barrier" in finding.message


def line_of(text: str, after: str) -> int:
    """The number of the first line with a text after the one that defines a function."""
    start = PROGRAM.splitlines().index(f"def {after}():")
    return next(n for n, line in enumerate(PROGRAM.splitlines()[start:], start + 1) if text in line)


def test_a_branch_behind_the_loop_that_a_rank_alone_has_left_is_not_the_place() -> None:
    passed = backward(1, line=(line := line_of("model", "finishes")), at=line)
    finding = only(judge([passed] * 4, [*[passed] * 3, call("|", line + 2)]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP405", (1,), Location("train.py", line - 1))
    alone = call("|", line + 2)  # both are behind the loop, and rank 0 alone has taken the branch
    finding = only(judge([passed] * 3, [*[passed] * 3, alone], passes=None))
    assert (finding.code, finding.location) == ("DDP403", Location("train.py", line + 2))


def test_a_branch_below_the_break_by_which_a_rank_has_left_is_not_the_place() -> None:
    line = line_of("model", "keeps_copies")
    same = [backward(1, line=line, at=line), call("|", line + 4), *[backward(1, line=line, at=line)] * 4]
    finding = only(judge([*same, call("|", line + 4)], [*same, call("r", line + 5)]))
    assert finding.location == Location("train.py", line + 2) and "`break`" in finding.message


def test_a_break_above_the_last_common_call_is_left_by_in_the_next_pass() -> None:
    line = line_of("dist.barrier", "asks_first")
    same = [call("r", line - 2), call("|", line), *[call("r", line - 2)] * 4]
    finding = only(judge([*same, call("|", line)], [*same, call("c", line + 1)]))
    assert (finding.code, finding.location) == ("DDP403", Location("train.py", line - 1))


def test_the_outermost_loop_that_a_rank_alone_has_left_is_the_place() -> None:
    line = line_of("model", "patient")
    passed = backward(1, line=line, at=line)
    finding = only(judge([passed] * 7, [*[passed] * 6, call("|", line + 2)]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP405", (1,), Location("train.py", line - 2))


@pytest.mark.parametrize("in_last", [True, False])
def test_how_often_an_inner_loop_has_run_tells_which_one_a_rank_has_left(in_last: bool) -> None:
    line = line_of("model", "folds")
    passed, end = backward(1, line=line, at=line), call("r", line + 1)
    same = [*[passed] * 3, end, *[passed] * 3]
    gone = [call("|", line + 2)]
    ranks = ([*same, passed], [*same, *gone]) if in_last else ([*same, end, passed], [*same, end, *gone])
    finding = only(judge(*ranks))
    assert (finding.code, finding.ranks) == ("DDP405", (1,))
    assert finding.location == Location("train.py", line - (1 if in_last else 2))


def test_a_loop_that_is_begun_anew_is_not_one_that_the_other_rank_has_left() -> None:
    line = line_of("all_reduce", "rounds")
    first, second = call("r", line), call("c", line + 2)
    finding = only(judge([first, second, first, first], [first, second, first, second]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP405", (1,), Location("train.py", line - 1))


def test_the_loop_of_a_generator_is_not_the_place_if_its_consumer_has_stopped() -> None:
    line, inner = line_of("model", "streams"), line_of("dist", "numbered")
    passed, sent = backward(1, line=line, at=line), call("c", inner, line - 1)
    same = [sent, *[passed] * 4, sent, *[passed] * 4]
    finding = only(judge([*same, sent], [*same, call("|", line + 3)]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP405", (1,), Location("train.py", line + 2))


def test_an_exception_that_is_caught_ends_a_loop() -> None:
    calls = [backward(n, line=34, at=34) for n in (1, 2, 3)]
    finding = only(judge(calls, [*calls[:2], call("|", 37)]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP405", (1,), Location("train.py", 35))
    assert "by the `except` at train.py:35" in finding.message


def test_a_call_that_an_exception_may_have_left_out() -> None:
    inner, line = line_of("gather", "score"), line_of("except", "scores")
    made = call("g", inner, line - 1)
    finding = only(judge([made] * 3, [made, made, call("|", line + 2)]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP403", (1,), Location("train.py", line))
    assert "not known" in finding.evidence[0] and "torchrun" in finding.fix and "batches" not in finding.fix
    line = line_of("suppress", "tidies")
    same = [call("r", line + 1), call("c", line + 2)]
    finding = only(judge([*same, call("r", line + 1)], [*same, call("c", line + 2)]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP403", (1,), Location("train.py", line))


def test_a_loop_that_runs_so_often_and_has_made_fewer_passes() -> None:
    calls = [call("b", 28) for _ in range(9)]
    ended = RankAtEnd(1, calls[:8], doing="has run to its end", ended=True)
    caught = RankAtEnd(0, calls, doing="has run to its end", ended=True)  # the failure of its last call
    for one, other in ((calls, [*calls[:8], call("|", 29)]), (calls, ended), (caught, ended)):
        finding = only(judge(one, other))
        assert (finding.code, finding.ranks, finding.location) == ("DDP508", (1,), Location("train.py", 27))


def test_a_forward_pass_more_on_a_rank_skips_nothing() -> None:
    rank_0, rank_1 = [backward(1), backward(2), call("|", 16)], [backward(1), backward(3), call("c", 15)]
    assert only(judge(rank_0, rank_1)).code == "DDP403"


def test_a_pass_under_no_sync_on_one_rank() -> None:
    rank_0 = [backward(1), backward(3, unsynced=1), call("|", 16)]
    finding = only(judge(rank_0, [backward(1), backward(2), backward(3)]))
    assert (finding.code, finding.ranks) == ("DDP502", (0,)) and "under no_sync" in finding.message


@pytest.mark.parametrize("several", [False, True])
def test_a_call_that_one_rank_alone_comes_to(several: bool) -> None:
    steps = [backward(1), backward(2)]
    members = (0, 1, 2, 3) if several else (0, 1)
    rank_0 = [*steps, call("|", 21, 13, members=members), call("|", 16, members=members)]
    others = [[*steps, call("|", 16, members=members)]] * (len(members) - 1)
    finding = only(judge(rank_0, *others))
    assert (finding.code, finding.ranks, finding.location) == ("DDP403", (0,), Location("train.py", 21))
    assert "in the branch at train.py:12" in finding.message and "take it out of the branch" in finding.fix


def test_a_forward_pass_of_one_rank_has_advice_of_its_own() -> None:
    steps = [call("f", 6), backward(1)]
    finding = only(judge([*steps, call("f", 13), call("|", 16)], [*steps, call("|", 16)]))
    assert finding.location == Location("train.py", 13) and "model.module(x)" in finding.fix


def test_a_generator_expression_is_in_the_branch_of_its_line_once() -> None:
    finding = only(judge([backward(1), call("f", 13, 13), call("|", 16)], [backward(1), call("|", 16)]))
    assert "in the branch at train.py:12" in finding.message
    assert not [line for line in finding.evidence if "branch" in line]


def test_a_rank_that_has_returned_before_the_call() -> None:
    steps = [backward(1)]
    finding = only(judge([*steps, call("|", 21, MAIN)], [*steps, call("r", 16)]))
    assert (finding.code, finding.location) == ("DDP403", Location("train.py", 21))
    assert "past the `return` at train.py:20" in finding.message


def test_branches_of_one_if() -> None:
    finding = only(judge([backward(1), call("r", 13)], [backward(1), call("c", 15)]))
    assert finding.code == "DDP403" and "in the other branch of the `if` at train.py:12" in finding.message


def test_a_collective_of_a_group_that_a_member_misses() -> None:
    of_group = call("r", 13, group="1")
    finding = only(judge([backward(1), of_group, call("|", 16)], [backward(1), call("|", 16)]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP403", (0,), Location("train.py", 13))


def test_a_receive_that_nobody_sends() -> None:
    steps = (backward(1),)
    waits = RankAtEnd(0, steps, doing="waits in recv at train.py:13", lines=("train.py:13", f"train.py:{MAIN}"))
    finding = only(judge(waits, [*steps, call("|", 16)]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP403", (0,), Location("train.py", 13))
    assert finding.subjects == ("recv",)


def test_a_rank_that_has_ended_before_the_others() -> None:
    gone = RankAtEnd(1, (backward(1),), doing="has run to its end", ended=True)
    finding = only(judge([backward(1), backward(2)], gone))
    assert (finding.code, finding.ranks) == ("DDP405", (1,)) and "has run to its end" in finding.message


def test_a_rank_that_calls_exit_where_the_others_go_on() -> None:
    def gone(line: int) -> RankAtEnd:
        return RankAtEnd(1, (backward(1),), doing="has ended", ended=True, exit_at=f"sys.exit at train.py:{line}")

    finding = only(judge([backward(1), backward(2)], gone(13)))
    assert (finding.code, finding.ranks, finding.location) == ("DDP404", (1,), Location("train.py", 13))
    finding = only(judge([backward(1), backward(2)], gone(MAIN)))  # sys.exit(main())
    assert finding.code == "DDP405"


def test_a_rank_that_raises_system_exit_has_not_run_to_its_end() -> None:
    gone = RankAtEnd(1, (backward(1),), doing="has raised SystemExit", ended=True, exit_at="SystemExit")
    finding = only(judge([backward(1), backward(2)], gone))
    assert (finding.code, finding.ranks) == ("DDP404", (1,)) and "raises SystemExit while rank 0" in finding.message


def test_a_rank_that_exits_is_the_cause_where_the_other_loses_it_in_what_is_in_no_log() -> None:
    gone = RankAtEnd(1, (backward(1),), doing="has ended", ended=True, exit_at="os._exit at train.py:13")
    lost = RankAtEnd(0, (backward(1),), doing="raised RuntimeError", lines=("train.py:6",), ended=True)
    finding = only(judge(lost, gone))
    assert (finding.code, finding.ranks, finding.location) == ("DDP404", (1,), Location("train.py", 13))
    assert "calls os._exit at train.py:13 while rank 0 continues" in finding.message


def test_a_rank_that_has_ended_before_a_wrapper_that_another_one_constructs() -> None:
    gone = RankAtEnd(1, (backward(1),), doing="has run to its end", ended=True)
    lost = RankAtEnd(0, (backward(1),), doing="raised RuntimeError", lines=("train.py:6",), constructs=True)
    finding = only(judge(lost, gone))
    assert (finding.code, finding.ranks, finding.location) == ("DDP403", (1,), Location("train.py", 6))
    assert "rank 1 has run to the end of the script" in finding.message
    assert not judge(replace(lost, constructs=False), gone)
    assert not judge(lost, replace(lost, rank=1))  # both are in it


def test_collectives_of_two_groups_in_another_order_are_told_with_their_groups() -> None:
    one, other = (replace(call("|", 16), group=name, group_words=f"the group {name}") for name in ("eval", "train"))
    finding = only(judge([one, other], [other, one]))
    assert finding.code == "DDP403" and "in the same order" in finding.what_to_do
    assert "in the group eval, and rank 1" in finding.message and finding.message.endswith("in the group train.")


def test_a_branch_in_which_a_rank_comes_to_another_group_is_told_with_both() -> None:
    own = call("r", 21, 13, group="4", group_words="the process group of train.py:2")
    same, next_one = backward(1), replace(backward(2), group_words="the default process group")
    finding = only(judge([same, own], [same, next_one]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP403", (0,), Location("train.py", 13))
    assert "in the process group of train.py:2, in the branch at" in finding.message
    assert finding.message.endswith(", in the default process group.") and "in the same order" in finding.fix
    (finding,) = judge([same, call("r", 21, 13)], [same, next_one])
    assert finding.location == Location("train.py", 21) and "process groups" not in finding.fix


def test_a_rank_that_waits_for_a_peer_which_is_in_a_collective() -> None:
    wait = PeerWait("irecv", 1, 0, "train.py:13")
    gone = RankAtEnd(0, (backward(1),), doing=f"waits in {wait}", lines=("train.py:13",), waits_for=wait)
    finding = only(judge(gone, [backward(1), call("|", 16)]))
    assert (finding.code, finding.subjects, finding.location) == ("DDP402", ("irecv",), Location("train.py", 13))


def test_a_pass_over_a_loader_that_a_rank_has_dropped() -> None:
    def taken(batches: int) -> LoaderPass:
        return LoaderPass(0, 0, Location("train.py", 3), "Samples", batches=batches, exhausted=batches == 4)

    rank_0 = [*(backward(n, n) for n in (1, 2, 3, 4)), backward(5, 1, epoch=1)]
    rank_1 = [*(backward(n, n) for n in (1, 2)), backward(3, 1, epoch=1), call("|", 16)]
    finding = only(judge(rank_0, rank_1, passes={0: [taken(4)], 1: [taken(2)]}))
    assert (finding.code, finding.ranks, finding.location) == ("DDP405", (1,), Location("train.py", 11))
    assert "in batch 2" in finding.message


def test_a_batch_that_one_rank_alone_looks_at_is_not_skipped() -> None:
    """Rank 0 has shown itself a batch before, so its passes have other numbers; then it calls what others do not."""
    passes = {0: [LoaderPass(0, 0, Location("train.py", MAIN), batches=1)]}
    rank_0 = [*(backward(n, n, epoch=1) for n in (1, 2)), call("r", 13)]
    rank_1 = [backward(n, n) for n in (1, 2, 3)]
    assert only(judge(rank_0, rank_1, passes=passes)).code == "DDP403"


def test_a_loader_without_a_collective_explains_no_hang() -> None:
    """Each rank has evaluated its own part, which is uneven; rank 0 alone calls a barrier after that."""
    both = {n: [LoaderPass(1, 0, Location("train.py", MAIN), batches=5 + n, exhausted=True)] for n in (0, 1)}
    steps = [backward(1), backward(2)]
    assert only(judge([*steps, call("|", 13), call("|", 16)], [*steps, call("|", 16)], passes=both)).code == "DDP403"


def test_a_rank_at_work_for_which_the_others_wait() -> None:
    works = RankAtEnd(0, (backward(1),), doing="was at work at data.py:7", lines=("data.py:7",), waits=False)
    finding = only(judge(works, [backward(1), call("|", 16)]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP402", (0,), Location("data.py", 7))
    assert "Rank 0 was at work at data.py:7, and rank 1 waits for it" in finding.message


def test_ranks_that_have_called_the_same_have_no_story() -> None:
    assert judge([backward(1), call("|", 16)], [backward(1), call("|", 16)]) == []


def test_another_order_of_the_same_lines() -> None:
    one, other = call("r", 13), call("c", 13)
    finding = only(judge([one, other, one, other], [one, other, other, one]))
    assert finding.code == "DDP403" and "reaches" in finding.message


def test_the_blocks_around_a_line() -> None:
    around = blocks_around(str(FILE), "train.py", 9)
    assert [(one.kind, one.line) for one in around] == [
        ("function", 1),
        ("loop", 2),
        ("loop", 3),
        ("rest", 5),
        ("rest", 8),
    ]
    assert around[1].exits == () and around[2].exits == ((11, "break"),) and around[1].times == 2
    assert blocks_around(str(FILE.with_name("none.py")), "none.py", 1) == ()


WRAPPER_2 = {"payload": "wrapper 2"}


def test_backward_passes_of_two_wrappers_that_meet() -> None:
    """Both ranks have run both lines before; one of them leaves out the pass of a branch."""
    step = [call("b", 43, **WRAPPER_2), call("b", 46)]
    finding = only(judge([*step, call("b", 43, **WRAPPER_2)], [*step, call("b", 46)]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP403", (0,), Location("train.py", 42))
    assert "in the branch at train.py:42, and rank 1 does not in the same pass" in finding.message
    assert "all_reduce its input" in finding.fix


@pytest.mark.parametrize(("last", "rank", "line"), [(46, 0, 42), (43, 1, 44)], ids=["the first", "the second"])
def test_the_branch_that_comes_first_after_the_last_common_call(last: int, rank: int, line: int) -> None:
    """One rank is in the one branch and the other in another: which was left out, the call before tells."""
    steps = [call("b", 43, **WRAPPER_2), call("b", 45), call("b", 46)]
    steps += steps[:1] if last == 43 else []
    finding = only(judge([*steps, call("b", 43, **WRAPPER_2)], [*steps, call("b", 45)]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP403", (rank,), Location("train.py", line))


def test_a_barrier_that_a_metric_of_each_rank_decides() -> None:
    epoch = [call("b", 51)] * 3
    finding = only(judge([*epoch, call("|", 55), *epoch, call("|", 55)], [*epoch, call("|", 55), *epoch, *epoch[:1]]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP403", (0,), Location("train.py", 53))
    assert "the metric" in finding.fix and "take barrier out of the branch" in finding.fix


def test_a_rank_that_has_left_an_inner_loop_before_the_others() -> None:
    """It stands at a barrier in a branch, as it did after each epoch; this time one pass early."""
    epoch = [call("b", 51)] * 3
    finding = only(judge([*epoch, call("|", 55), *epoch[1:], call("|", 55)], [*epoch, call("|", 55), *epoch]))
    assert (finding.code, finding.ranks) == ("DDP405", (0,)) and "left the loop at train.py:50" in finding.message


def test_the_batches_tell_whether_a_loop_has_begun_again() -> None:
    def epoch(number: int, batches: int) -> list[Call]:
        return [backward(9, n, line=51, at=51, epoch=number) for n in range(1, batches + 1)]

    both = [*epoch(0, 3), call("|", 55), *epoch(1, 2)]
    assert only(judge([*both, call("|", 55)], [*both, *epoch(2, 1)])).code == "DDP403"
    assert only(judge([*both, call("|", 55)], [*both, *epoch(1, 3)[2:]])).code == "DDP405"


def test_a_barrier_in_a_branch_of_the_last_pass() -> None:
    """The rank that has not come to it has run all passes: it did not leave the loop."""
    both = [call("b", 51), call("|", 55), call("b", 51)]
    gone = RankAtEnd(1, both, doing="has run to its end", ended=True)
    assert only(judge([*both, call("|", 55)], gone)).location == Location("train.py", 53)
    finding = only(judge([*both, call("|", 55), call("|", 58)], [*both, call("|", 58)]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP403", (0,), Location("train.py", 53))


def test_an_exception_that_waits_for_a_collective_in_finally() -> None:
    place = place_of_handling("ValueError", Location("train.py", 6), "odd: 3")
    finding = only(judge([backward(1), backward(2)], [backward(1), call("|", 16, place=place)]))
    assert (finding.code, finding.ranks, finding.location) == ("DDP401", (1,), Location("train.py", 6))
    assert "Rank 1 raised ValueError: odd: 3, at train.py:6, and reaches barrier at train.py:16" in finding.message
    rank_0, rank_1 = [call("r", 13, place=place)], [call("c", 15, place=place)]
    assert only(judge(rank_0, rank_1)).code == "DDP403"  # both handle it


def test_a_forward_pass_that_waits_for_a_rank_behind_the_loop() -> None:
    """Without buffers no forward pass is in the log but the last, in which DDP asks for the order of its buckets."""
    finding = only(judge([backward(1), call("f", 6)], [backward(1), call("|", 16)]))
    assert (finding.code, finding.ranks) == ("DDP405", (1,)) and "after 1 backward pass and waits" in finding.message


def test_a_loop_that_each_rank_ends_by_a_count_of_its_own() -> None:
    passes = [call("b", 62)] * 3
    finding = only(judge([*passes, call("|", 63)], [*passes, call("b", 62)]))
    assert (finding.code, finding.location) == ("DDP405", Location("train.py", 61))
    assert "while tokens < limit" in finding.evidence[0] and "the values that its condition reads" in finding.fix


@pytest.mark.parametrize("odd", [0, 1])
def test_who_takes_the_continue_is_the_odd_one_of_two(odd: int) -> None:
    of_d, of_g = call("b", 67, payload="wrapper 2"), call("b", 70, payload="wrapper 1")
    ranks = [[of_d, of_g, of_d, of_g], [of_d, of_g, of_d, of_d]]
    finding = only(judge(*(ranks if odd else ranks[::-1])))
    assert (finding.code, finding.ranks, finding.location) == ("DDP403", (odd,), Location("train.py", 69))


# Point-to-point calls


def waiting(rank: int, operation: str, peer: int, line: int, **more: Any) -> RankAtEnd:
    wait = PeerWait(operation, peer, more.pop("tag", 0), f"a.py:{line}")
    return RankAtEnd(rank, [], doing=f"waits in {wait}", waits_for=wait)


ENDED = RankAtEnd(1, [], doing="has run to its end", waits=False, ended=True)


@pytest.mark.parametrize(
    ("ranks", "message", "fix"),
    [
        (
            [waiting(0, "send", 1, 10), waiting(1, "send", 0, 20)],
            "Rank 0 waits in send to rank 1 at a.py:10 and rank 1 waits in send to rank 0 at a.py:20: each waits for "
            "the next one.",
            "receive first",
        ),
        (
            [waiting(0, "isend", 1, 10), waiting(1, "irecv", 0, 20, tag=4)],
            "Rank 0 waits in isend to rank 1 at a.py:10 and rank 1 waits in irecv from rank 0 with tag 4 at a.py:20: "
            "each waits for the next one.",
            "group and tag",
        ),
        ([waiting(0, "recv", 1, 10), ENDED], "Rank 0 waits in recv from rank 1 at a.py:10 and rank 1 has run", "send"),
    ],
)
def test_ranks_that_wait_for_each_other_in_point_to_point_calls(ranks: list[RankAtEnd], message: str, fix: str) -> None:
    (found,) = judge_positions(EndingFacts(ranks, {}))
    assert (found.code, found.location) == ("DDP402", Location("a.py", 10))
    assert found.message.startswith(message) and fix in found.fix


def test_a_circle_of_some_ranks_is_told_and_who_waits_for_one_of_them_is_not() -> None:
    ring = [waiting(rank, "send", peer, 10) for rank, peer in ((0, 1), (1, 2), (2, 3), (3, 1))]
    (found,) = judge_positions(EndingFacts(ring, {}))
    assert found.ranks == (1, 2, 3)
    assert not judge_positions(
        EndingFacts([waiting(0, "recv", -1, 10), waiting(1, "recv", -1, 10)], {})
    )  # from any rank


def test_what_a_rank_waits_for_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "0.calls"
    ring, wait = CallRing(path), PeerWait("send", 3, 7, "a.py:10")
    assert read_wait(path) is None
    ring.wait(wait)
    assert read_wait(path) == wait
    ring.wait(None)
    assert read_wait(path) is None and read_calls(path, {}, {}) == (0, [])
