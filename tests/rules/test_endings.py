"""A hang as its story: which rank did what, and at which line of the program, from evidence made by hand."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.findings.evidence.endings import PeerWait, RankAtEnd
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.program_blocks import blocks_around
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
from ddpcheck.stream.log_file import CallRing, read_calls, read_wait
from ddpcheck.trace.positions import EndingFacts
from tests.reports import assert_says, only

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
    dist.barrier()  # last

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
            break  # good
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
LINES = PROGRAM.splitlines()
MAIN = len(LINES)  # the line that calls what the test is about
FILE = Path(tempfile.mkdtemp(), "train.py")
FILE.write_text(PROGRAM)
BLOCKS = {f"train.py:{line}": blocks_around(str(FILE), "train.py", line) for line in range(1, MAIN + 1)}
CODES = {"b": DDP_BACKWARD, "f": DDP_FORWARD, "|": "barrier", "r": "all_reduce", "c": "broadcast", "g": "gather"}
TEXTS = CODES | {"b": ".backward()", "f": "model(", "e": "# last", "D": "D(", "G": "G(z).b", "L": "G_loss(", "H": "H("}
CODES |= {"e": "barrier", "S": SHARD_FORWARD} | dict.fromkeys("DGLH", DDP_BACKWARD)
IN_CALLEE = {"s": ("save", "|"), "n": ("numbered", "c"), "k": ("score", "g")}


def line_of(function: str, text: str) -> int:
    """Return the number of the first line with a text in a function."""
    start = next(number for number, line in enumerate(LINES) if line.startswith(f"def {function}("))
    return next(number for number, line in enumerate(LINES[start:], start + 1) if text in line)


def at(function: str, text: str) -> Location:
    return Location("train.py", line_of(function, text))


def call(code: str, *lines: int, group: str = "0", members: Sequence[int] = (0, 1), **more: Any) -> Call:
    callers = tuple(f"train.py:{line}" for line in (*lines, MAIN))
    return Call(CODES[code], group, tuple(members), location=callers[0], callers=callers, **more)


def backward(number: int, batch: int = 0, *, function: str = "main", unsynced: int = 0, epoch: int = 0) -> Call:
    taken = f"batch {batch} of pass {epoch} over loader 0" if batch else ""
    place = place_of_backward(number, at(function, "model("), unsynced, taken)
    return call("b", line_of(function, ".backward()"), place=place)


def call_of(letter: str, function: str, members: Sequence[int]) -> Call:
    """Return a call of a rank.

    A digit is the number of a backward pass; a capital is a call in the line `save(model)`; other letters are in TEXTS.
    """
    if letter.isdigit():
        return backward(int(letter), function=function)
    if letter in IN_CALLEE:
        callee, code = IN_CALLEE[letter]
        return call(code, line_of(callee, CODES[code]), line_of(function, f"{callee}("), members=members)
    if function == "main" and letter.isupper():
        return call(letter.lower(), line_of("main", "save("), members=members)
    payload = {"D": "wrapper 2", "G": "wrapper 1"}.get(letter, "")
    return call(letter, line_of(function, TEXTS[letter]), members=members, payload=payload)


def calls_of(ranks: str) -> list[list[Call]]:
    """Return the calls of each rank: the word of a rank, behind that of the function, has a letter for each call."""
    function, *words = ranks.split()
    return [[call_of(letter, function, range(len(words))) for letter in word.rstrip(".")] for word in words]


def at_end(rank: int, calls: Sequence[Call], doing: str = "has run to its end", **more: Any) -> RankAtEnd:
    return RankAtEnd(rank, calls, doing=doing, ended=True, **more)


def judge(
    *ranks: Sequence[Call] | RankAtEnd, passes: Mapping[int, Sequence[LoaderPass]] | None = None
) -> list[Finding]:
    ends = []
    for rank, calls in enumerate(ranks):
        if not isinstance(calls, RankAtEnd):
            calls = RankAtEnd(rank, calls, doing=f"waits in {calls[-1]}", passes=(passes or {}).get(rank, ()))
        ends.append(calls)
    findings = judge_positions(EndingFacts(ends, BLOCKS))
    assert not any("ollective number" in finding.message for finding in findings)
    return findings


def assert_finding(
    findings: Sequence[Finding], code: str, rank: int, place: Location | None = None, words: str = ""
) -> Finding:
    at_place = f" at {place} in " if place else ""
    assert_says(findings, f"{code} ... of ranks ({rank},){at_place} ... {words}")
    return findings[0]


IF = at("main", "if rank == 0")
INNER = at("keeps_best", "for x")
IN_BRANCH = (f"in the branch at {IF}", "fix: take it out of the branch")
IN_SAME_PASS = ("in the branch at {place}, and rank 1 does not in the same pass", "fix: all_reduce its input")
BY_METRIC = ("fix: the metric", "fix: take barrier out of the branch")
UNKNOWN = ("evidence: not known", "fix: torchrun")
BY_CONDITION = ("evidence: while tokens < limit", "fix: the values that its condition reads")


def case(id: str, ranks: str, finding: str, *words: str) -> Any:
    """A row: `ranks`: function and calls of each rank; `finding`: code, rank, and text of the line."""
    return pytest.param(ranks, finding, words, id=id)


@pytest.mark.parametrize(
    ("ranks", "finding", "words"),
    [
        case("break", "main 123 12|", "DDP405 1 break", "after 2 backward passes and waits in barrier"),
        case("no pass skipped by a forward pass more", "main 12| 13c", "DDP403 1"),
        case("a call of one rank of four", "main 12s| 12| 12| 12|", "DDP403 0 save/barrier", *IN_BRANCH),
        case("a forward pass of one rank", "main f1F| f1|", "DDP403 0 save(", "fix: model.module(x)"),
        case("branches of one if", "main 1R 1c", "DDP403 1", f"in the other branch of the `if` at {IF}"),
        case("another order in the same line", "main RCRC RCCR", "DDP403 1", "reaches"),
        case("a forward pass waits", "main 1f 1|", "DDP405 1", "after 1 backward pass and waits"),
        case("the end before the others", "main 12 1.", "DDP405 1", "has run to its end"),
        case("a branch behind the loop is not the place", "finishes 1111 111|", "DDP405 1 for x"),
        case("a branch behind the loop is the place", "finishes 111 111|", "DDP403 1 dist.barrier"),
        case("a branch below the break", "keeps_copies 1|1111| 1|1111r", "DDP403 1 # good", "`break`"),
        case("a break above the last common call", "asks_first r|rrrr| r|rrrrc", "DDP403 0 if noisy"),
        case("the outermost loop that is left", "patient 1111111 111111|", "DDP405 1 while patience"),
        case("an inner loop in its last pass", "folds 111r1111 111r111|", "DDP405 1 for x"),
        case("an outer loop", "folds 111r111r1 111r111r|", "DDP405 1 for fold"),
        case("a loop that begins again", "rounds rcrr rcrc", "DDP405 1 for x"),
        case("the consumer of a generator stops", "streams n1111n1111n n1111n1111|", "DDP405 1 break"),
        case("an exception ends a loop", "guarded 123 12|", "DDP405 1 except", "by the `except` at {place}"),
        case("an exception leaves out a call", "scores kkk kk|", "DDP403 1 except", *UNKNOWN),
        case("contextlib.suppress leaves out a call", "tidies rcr rcc", "DDP403 1 suppress"),
        case("fewer passes of range", "steps bbbbbbbbb bbbbbbbb|", "DDP508 1 continue"),
        case("fewer passes, and a caught failure", "steps bbbbbbbbb. bbbbbbbb.", "DDP508 1 continue"),
        case("two wrappers", "adversaries DHD DHH", "DDP403 0 if fooled", *IN_SAME_PASS),
        case("the second branch after the last common call", "adversaries DLHDD DLHDL", "DDP403 1 if weak"),
        case("a barrier decided by a metric", "keeps_best bbb|bbb| bbb|bbbb", "DDP403 0 if score", *BY_METRIC),
        case("an inner loop left early", "keeps_best bbb|bb| bbb|bbb", "DDP405 0", f"left the loop at {INNER}"),
        case("a branch in the last pass, and the end", "keeps_best b|b| b|b.", "DDP403 0 if score"),
        case("a branch in the last pass", "keeps_best b|b|e b|be", "DDP403 0 if score"),
        case("a count of each rank ends a loop", "by_tokens bbb| bbbb", "DDP405 0 while", *BY_CONDITION),
        case("the second of two continues", "players DGDG DGDD", "DDP403 1 continue"),
        case("the first of two continues", "players DGDD DGDG", "DDP403 0 continue"),
    ],
)
def test_the_rank_and_the_line_that_ranks_diverge_at(ranks: str, finding: str, words: Sequence[str]) -> None:
    """A rank whose calls end with a dot has run to its end."""
    function, *by_rank = ranks.split()
    code, rank, *place = finding.split(" ", 2)
    location = at(*(place[0].split("/") if "/" in place[0] else (function, place[0]))) if place else None
    ends = [
        at_end(number, calls) if by_rank[number].endswith(".") else calls
        for number, calls in enumerate(calls_of(ranks))
    ]
    judged = assert_finding(judge(*ends), code, int(rank), location)
    for text in words:
        field, _, part = text.rpartition(": ")
        assert part.format(place=location) in str(getattr(judged, field or "message"))


def test_a_generator_expression_is_in_the_branch_of_its_line_once() -> None:
    findings = judge([backward(1), call("f", 13, 13), call("|", 16)], *calls_of("main 1|"))
    assert_says(findings, "in the branch at train.py:12")
    assert "branch" not in str(findings[0].evidence)


# Ranks at their ends, with loaders, groups and peers


def taken(batches: int, number: int = 0, *, line: int = 3, exhausted: bool = False) -> LoaderPass:
    """Return a pass over loader 0."""
    return LoaderPass(0, number, Location("train.py", line), "Samples", batches=batches, exhausted=exhausted)


def epoch(count: int, number: int = 0) -> list[Call]:
    """Return the backward passes of a pass over loader 0."""
    return [backward(n, n, epoch=number) for n in range(1, count + 1)]


def gone(exit_at: str) -> RankAtEnd:
    return at_end(1, [backward(1)], "has ended", exit_at=exit_at)


def stands(doing: str, *lines: str, **more: Any) -> RankAtEnd:
    """Return rank 0 after a backward pass."""
    return RankAtEnd(0, [backward(1)], doing=doing, lines=lines, **more)


def row(words: str, *ranks: Sequence[Call] | RankAtEnd, passes: Sequence[Sequence[LoaderPass]] = ()) -> Any:
    """Words of the only finding on ranks that went through loaders; no words: no finding."""
    return words, ranks, dict(enumerate(passes))


BEHIND = call("|", 16)
ANOTHER, BARRIER, TWO = [backward(1), call("r", 16)], [backward(1), BEHIND], [backward(1), backward(2)]
EVAL, TRAIN = (call("|", 16, group=name, group_words=f"the group {name}") for name in ("eval", "train"))
IN_TURN = "in the group eval, and rank 1 ... in the group train. | ... in the same order"
IN_GROUP, UNSYNCED = [backward(1), call("r", 13, group="1"), BEHIND], [backward(1), backward(3, unsynced=1), BEHIND]
RETURNS, SAVES = [backward(1), call("|", 21, MAIN)], at("save", "barrier")
SHORTER = "2 batches on rank 1 ... Join ... | rank 1: 2 batches, 5 samples |"
INDEXED = [[replace(taken(3), indices=range(5))], [replace(taken(2, exhausted=True), indices=range(5))]]
LOOP, WHILE = at("until_told", "while"), "| the loop runs while not told | ... condition"
WHOLE, NEXT = taken(2, line=LOOP.line + 1, exhausted=True), taken(1, 1, line=LOOP.line + 1)
BOTH, LEAVES = [[WHOLE, NEXT], [WHOLE]], [[taken(4, exhausted=True)], [taken(2)]]
ANEW = [[taken(3, line=MAIN)], [taken(2, line=MAIN, exhausted=True), taken(1, 1, line=MAIN)]]
OWN_PARTS = [[LoaderPass(1, 0, Location("train.py", MAIN), batches=5 + n, exhausted=True)] for n in (0, 1)]
LATER, UNTIL_3 = [*epoch(2), BEHIND], [*epoch(3), BEHIND]
SKIPS = [[*map(backward, numbers, (1, 2, 4)), BEHIND] for numbers in ((1, 2, 4), (1, 2, 3))]
DROPPED = [*epoch(4), backward(5, 1, epoch=1)], [*epoch(2), backward(3, 1, epoch=1), BEHIND]
OTHERS, LOST = calls_of("main 12")[0], at_end(0, [backward(1)], "raised RuntimeError", lines=("train.py:6",))
HANDLING = place_of_handling("ValueError", Location("train.py", 6), "odd: 3")
HANDLES = [call(code, line, place=HANDLING) for code, line in (("r", 13), ("c", 15), ("|", 16))]
RAISED = "(1,) at train.py:6 in ... Rank 1 raised ValueError: odd: 3, at train.py:6, and reaches barrier at train.py:16"
RECEIVES = stands("waits in recv at train.py:13", "train.py:13", f"train.py:{MAIN}")
OS_EXIT, PEER = "os._exit at train.py:13", PeerWait("irecv", 1, 0, "train.py:13")
WAITS = stands(f"waits in {PEER}", "train.py:13", waits_for=PEER)
WORKS = stands("was at work at data.py:7", "data.py:7", waits=False)


@pytest.mark.parametrize(
    ("words", "ranks", "passes"),
    [
        row("", *calls_of("main 1| 1|")),
        row("DDP502 ... of ranks (0,) ... under no_sync", UNSYNCED, *calls_of("main 123")),
        row(f"DDP403 ... at {SAVES} ... past the `return` at train.py:20", RETURNS, ANOTHER),
        row("DDP403 ... (0,) at train.py:13 in", IN_GROUP, BARRIER),
        row(f"DDP403 ... {IN_TURN}", [EVAL, TRAIN], [TRAIN, EVAL]),
        # by a loader
        row("DDP508 ... (1,) at train.py:8 in ... backward pass of batch 3 ... `continue`", epoch(4), SKIPS[0]),
        row("DDP508 ... (1,) at train.py:5 in ... forward pass of batch 3 ... `continue`", epoch(4), SKIPS[1]),
        row(f"DDP405 ... ('Samples',) of ranks (1,) at train.py:3 in ... {SHORTER}", epoch(3), LATER, passes=INDEXED),
        row("DDP405", epoch(3), LATER, passes=[[taken(3)], [taken(3)]]),
        row("DDP405", epoch(3), LATER, passes=[[taken(3)], [taken(2)]]),
        row("DDP405", epoch(3), LATER, passes=[[taken(3)], [taken(2, exhausted=True)]]),
        # rank 1 has begun its shorter shard anew, as rank 0 will; it waits for a call that rank 0 alone makes
        row(f"DDP403 ... (0,) at {SAVES} in", *calls_of("main 123s 1234"), passes=ANEW),
        row(f"DDP405 ... (1,) at {LOOP} in ... {WHILE}", *calls_of("until_told 123 12|"), passes=BOTH),
        row("DDP405 ... (1,) at train.py:11 in ... in batch 2", *DROPPED, passes=LEAVES),
        # rank 0 has shown itself a batch before, so its passes have other numbers; then it calls what others do not
        row("DDP403", [*epoch(2, 1), call("r", 13)], epoch(3), passes=[[taken(1, line=MAIN)]]),
        # each rank has evaluated its own part, which is uneven; rank 0 alone calls a barrier after that
        row("DDP403", [*TWO, call("|", 13), BEHIND], [*TWO, BEHIND], passes=OWN_PARTS),
        row("DDP403", at_end(0, [call("c", 20), *UNTIL_3]), at_end(1, UNTIL_3)),  # comes to the loop later
        # ended, raises, or waits for a peer
        row("DDP404 ... (1,) at train.py:13 in", OTHERS, gone("sys.exit at train.py:13")),
        row("DDP405 ... of ranks (1,)", OTHERS, gone(f"sys.exit at train.py:{MAIN}")),  # sys.exit(main())
        row("DDP404 ... of ranks (1,) ... raises SystemExit while rank 0", OTHERS, gone("SystemExit")),
        row(f"DDP404 ... (1,) at train.py:13 in ... calls {OS_EXIT} while rank 0 continues", LOST, gone(OS_EXIT)),
        row(f"DDP401 ... {RAISED}", OTHERS, [backward(1), HANDLES[2]]),
        row("DDP403", HANDLES[:1], HANDLES[1:2]),  # both handle it
        row("DDP403 ... ('recv',) of ranks (0,) at train.py:13 in", RECEIVES, BARRIER),
        row("DDP402 ... ('irecv',) ... at train.py:13", WAITS, BARRIER),
        row("DDP402 ... (0,) at data.py:7 in ... Rank 0 was at work at data.py:7, and rank 1 waits", WORKS, BARRIER),
    ],
)
def test_how_ranks_come_apart(words: str, ranks: Any, passes: Mapping[int, Sequence[LoaderPass]]) -> None:
    assert_says(judge(*ranks, passes=passes), words)


def test_a_collective_inside_of_join() -> None:
    def under_join(*batch: Call) -> list[list[Call]]:
        """Return the calls of two ranks until rank 0 has no further batch."""
        step = [call("r", 6, place=JOINING), backward(1), *batch]
        return [[*step, *[call("r", 3, place=JOINED)] * 2], step * 2]

    both = {rank: [taken(1 + rank, exhausted=rank == 0)] for rank in (0, 1)}
    findings = judge(*under_join(call("r", 11)), passes=both)
    assert_finding(findings, "DDP403", 1, Location("train.py", 11), "inside of `Join` ... with Join")
    assert "DDP405" not in str(judge(*under_join(), passes=both))


def test_the_batches_tell_whether_a_loop_has_begun_again() -> None:
    def passes(number: int, *batches: int) -> list[Call]:
        return [backward(9, batch, function="keeps_best", epoch=number) for batch in batches]

    barrier = call("|", line_of("keeps_best", "barrier"))
    both = [*passes(0, 1, 2, 3), barrier, *passes(1, 1, 2)]
    assert only(judge([*both, barrier], [*both, *passes(2, 1)])).code == "DDP403"
    assert only(judge([*both, barrier], [*both, *passes(1, 3)])).code == "DDP405"


def test_a_rank_that_has_ended_before_a_wrapper_that_another_one_constructs() -> None:
    ended, lost = at_end(1, [backward(1)]), replace(LOST, ended=False, constructs=True)
    words = "DDP403 ... (1,) at train.py:6 in ... rank 1 has run to the end of the script"
    assert_says(judge(lost, ended), words)
    assert not judge(replace(lost, constructs=False), ended)
    assert not judge(lost, replace(lost, rank=1))  # both are in it


def test_a_branch_in_which_a_rank_comes_to_another_group_is_told_with_both() -> None:
    own = call("r", 21, 13, group="4", group_words="the process group of train.py:2")
    rank_1 = [backward(1), replace(backward(2), group_words="the default process group")]
    words = "in the process group of train.py:2, in the branch at ... , in the default process group. |"
    findings = judge([backward(1), own], rank_1)
    assert_finding(findings, "DDP403", 0, Location("train.py", 13), f"{words} ... in the same order")
    (finding,) = judge([backward(1), call("r", 21, 13)], rank_1)
    assert finding.location == Location("train.py", 21) and "process groups" not in finding.fix


def test_the_blocks_around_a_line() -> None:
    around = blocks_around(str(FILE), "train.py", 9)
    kinds = [("function", 1), ("loop", 2), ("loop", 3), ("rest", 5), ("rest", 8)]
    assert [(block.kind, block.line) for block in around] == kinds
    assert around[1].exits == () and around[2].exits == ((11, "break"),) and around[1].times == 2
    assert blocks_around(str(FILE.with_name("none.py")), "none.py", 1) == ()


# Point-to-point calls


def waiting(rank: int, operation: str, peer: int, line: int, tag: int = 0) -> RankAtEnd:
    wait = PeerWait(operation, peer, tag, f"a.py:{line}")
    return RankAtEnd(rank, [], doing=f"waits in {wait}", waits_for=wait)


EACH = "each waits for the next one."
SENDS = f"send to rank 1 at a.py:10 and rank 1 waits in send to rank 0 at a.py:20: {EACH}"
TAGGED = f"isend to rank 1 at a.py:10 and rank 1 waits in irecv from rank 0 with tag 4 at a.py:20: {EACH}"


@pytest.mark.parametrize(
    ("ranks", "message", "fix"),
    [
        ([waiting(0, "send", 1, 10), waiting(1, "send", 0, 20)], SENDS, "receive first"),
        ([waiting(0, "isend", 1, 10), waiting(1, "irecv", 0, 20, tag=4)], TAGGED, "group and tag"),
        ([waiting(0, "recv", 1, 10), at_end(1, [], waits=False)], "recv from rank 1 at a.py:10 and rank 1 has", "send"),
    ],
)
def test_ranks_that_wait_for_each_other_in_point_to_point_calls(ranks: list[RankAtEnd], message: str, fix: str) -> None:
    finding = only(judge_positions(EndingFacts(ranks, {})))
    assert (finding.code, finding.location) == ("DDP402", Location("a.py", 10))
    assert finding.message.startswith(f"Rank 0 waits in {message}") and fix in finding.fix


def test_a_circle_of_some_ranks_is_told_and_who_waits_for_one_of_them_is_not() -> None:
    ring = [waiting(rank, "send", peer, 10) for rank, peer in ((0, 1), (1, 2), (2, 3), (3, 1))]
    assert only(judge_positions(EndingFacts(ring, {}))).ranks == (1, 2, 3)
    from_any = [waiting(rank, "recv", -1, 10) for rank in (0, 1)]
    assert not judge_positions(EndingFacts(from_any, {}))


def test_what_a_rank_waits_for_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "0.calls"
    ring, wait = CallRing(path), PeerWait("send", 3, 7, "a.py:10")
    assert read_wait(path) is None
    ring.wait(wait)
    assert read_wait(path) == wait
    ring.wait(None)
    assert read_wait(path) is None and read_calls(path, {}, {}) == (0, [])


# Ranks that skip the last pass of a loop, and ranks that have left it before


@pytest.mark.parametrize(
    ("forwards", "line", "skipped"), [({6: 3}, 8, "backward"), ({6: 2}, 5, "forward"), ({}, 9, "backward")]
)
def test_the_last_batch_that_a_rank_skips(forwards: dict[int, int], line: int, skipped: str) -> None:
    """Rank 1 has had all three batches, and stands behind the loop: it has not left it earlier."""
    own = {"lines": BEHIND.callers, "passes": [taken(3, exhausted=True)], "forwards": forwards}
    rank_1 = RankAtEnd(1, LATER, doing="waits in barrier", **own)
    words = f"Rank 1 skipped the {skipped} pass of batch 3 ... not Join ... | rank 1: 3 batches |"
    findings = judge(epoch(3), rank_1, passes={0: [taken(3)]})
    assert_finding(findings, "DDP508", 1, Location("train.py", line), words)


@pytest.mark.parametrize(("forwards", "code", "text"), [(3, "DDP508", "continue"), (2, "DDP405", "for x")])
def test_the_last_pass_of_a_loop_without_a_loader(forwards: int, code: str, text: str) -> None:
    passes, calls = calls_of("generated 123 12|")
    lines, line = calls[-1].callers[:1], at("generated", "model(").line
    rank_1 = RankAtEnd(1, calls, doing="waits", lines=lines, forwards={line: forwards})
    assert_finding(judge(passes, rank_1), code, 1, at("generated", text))


def test_a_forward_pass_of_one_rank_over_another_loader_in_the_same_loop_is_no_skipped_batch() -> None:
    """A function goes through the data for training, on all ranks, and for evaluation, on rank 0 alone."""
    trained = taken(1, 1, exhausted=True)
    passed = [call("f", 6), backward(1, 1, epoch=1)]
    rank_0, rank_1 = [*passed, call("f", 6)], at_end(1, passed, passes=[trained])
    findings = judge(rank_0, rank_1, passes={0: [trained, replace(taken(1), loader=1)]})
    assert [finding.code for finding in findings] != ["DDP508"]
    assert only(judge(rank_0, rank_1, passes={0: [taken(1, 1)]})).code == "DDP508"  # both went through this loader


@pytest.mark.parametrize("forwards", [{6: 3}, {}])
def test_what_one_rank_calls_before_the_loop_is_no_pass_of_it_that_was_skipped(forwards: dict[int, int]) -> None:
    """Both ranks have made all backward passes in the end; only one has made the first collective."""
    ended = {"passes": [taken(3, exhausted=True)], "forwards": forwards}
    findings = judge(at_end(0, [call("c", 20), *epoch(3)], **ended), at_end(1, epoch(3), **ended))
    assert_finding(findings, "DDP403", 0, Location("train.py", 20))


def of_shards(number: int, batch: int) -> Call:
    place = place_of_backward(number, Location("train.py", 6), 0, f"batch {batch} of pass 0 over loader 0")
    return call("S", 6, place=place)


def test_a_batch_that_a_rank_skips_under_fully_shard() -> None:
    """The others wait in the gathering of their last forward pass, before its backward pass."""
    rank_0 = [of_shards(n, n) for n in (1, 2, 3, 4)]
    findings = judge(rank_0, [*rank_0[:2], of_shards(3, 4), BEHIND])
    assert_finding(findings, "DDP508", 1, Location("train.py", 5), "the forward pass of batch 3")
    findings = judge(rank_0, [*rank_0[:3], BEHIND], passes={0: [taken(4)], 1: [taken(3, exhausted=True)]})
    assert_says(findings, "DDP405 ... at train.py:3 ... not Join")


@pytest.mark.parametrize(
    ("batches", "code", "line"), [((2, 3), "DDP508", 5), ((1, 2), "DDP405", 11)], ids=["skipped", "left"]
)
def test_a_rank_that_skips_and_then_meets_another_collective(batches: tuple[int, int], code: str, line: int) -> None:
    """Rank 0 is done with the loop, and in a function with an exit; rank 1 is in the forward pass of its last batch."""

    def rank(number: int, batches: tuple[int, int], last: Call, count: int, forwards: int) -> RankAtEnd:
        calls = [call("r", 6), backward(1, batches[0]), call("r", 6), backward(2, batches[1]), last]
        passes, doing = [taken(count, exhausted=count == 4)], f"waits in {last.operation}"
        return RankAtEnd(number, calls, doing=doing, lines=last.callers, passes=passes, forwards={6: forwards})

    findings = judge(rank(0, batches, call("|", 21, 13), 4, 2), rank(1, (1, 2), call("r", 6), 3, 3))
    assert_says(findings, f"{code} ... at train.py:{line} in")
