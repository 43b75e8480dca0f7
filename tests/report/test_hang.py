"""`ddpcheck hang`: lines at which ranks part, dumps of Flight Recorder that are read and written, and bad ones."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import pickle
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcheck import cli
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location, Report
from ddpcheck.findings.selection import Suppression
from ddpcheck.report.hang.hang_report import report_on_hang
from ddpcheck.report.settings import Settings
from ddpcheck.rules.collectives.first_divergence import judge_call_sites, judge_divergences
from ddpcheck.run.ending import Ending, judge_ending
from ddpcheck.run.flight_dumps import write_flight_records
from ddpcheck.run.hang_watch import Hang
from ddpcheck.stream.entries import RankStarted
from ddpcheck.stream.rank_log import RankLog, read_logs
from ddpcheck.testing.fixture import DDPWorld
from tests.reports import only

# Logs: each letter is a barrier, and the line that calls it


def logs_of(*programs: str, operation: str = "barrier") -> list[list[Call]]:
    members = tuple(range(len(programs)))
    return [
        [Call(operation, "0", members, location=f"train.py:{ord(line)}") for line in program] for program in programs
    ]


def line(letter: str) -> Location:
    return Location("train.py", ord(letter))


@pytest.mark.parametrize(
    ("programs", "place", "where", "ranks"),
    [
        (("AAxE", "AAE"), 2, "x", (0,)),  # in a function that rank 0 alone calls
        (("AAE", "AAxE", "AAE"), 2, "x", (1,)),
        (("AAxE", "AAxE", "AAE"), 2, "x", (2,)),  # the one that leaves it out
        (("AAAE", "AAAAE"), 3, "A", (1,)),  # a step more in a loop
        (("ABABABE", "ABABE"), 4, "A", (0,)),
        (("xE" * 9 + "x", "E" * 18), 0, "x", (0,)),  # in every epoch
        (("dAAxE", "eAAE"), 3, "x", (0,)),  # d and e are branches of one if
    ],
)
def test_a_call_in_addition_is_told_and_not_the_last_one(
    programs: Sequence[str], place: int, where: str, ranks: tuple[int, ...]
) -> None:
    finding = only(judge_divergences(logs_of(*programs)))
    assert (finding.code, finding.location, finding.ranks) == ("DDP403", line(where), ranks)
    assert f"Collective number {place} pairs up different lines" in finding.message
    assert f"train.py:{ord(where)}" in finding.fix


@pytest.mark.parametrize(
    "programs",
    [
        ("AAdE", "AAeEE"),  # d and e are branches of one if, and rank 1 waits in its last call
        ("dAeA", "fAgAA"),
        ("AhBhBhE", "AsBsBs"),  # a helper on one rank, another on the others
        ("abbabbE", "babbab"),  # ranks take turns
        ("abababa", "bababa"),
        ("AxhhE", "Ahhh"),  # rank 1 has the helper's line where rank 0 has one of its own
        ("AAAAB", "AAAA"),
        ("A", ""),
    ],
)
def test_other_lines_on_other_ranks_are_healthy(programs: Sequence[str]) -> None:
    assert judge_call_sites(logs_of(*programs)) == []
    finding = only(judge_divergences(logs_of(*programs)))  # what the operations say
    assert "never did" in finding.message


def test_senders_and_receivers_of_unknown_roots_take_turns_on_lines_of_their_own() -> None:
    turns = ("baabaaE", "abaaba")
    assert judge_call_sites(logs_of(*turns, operation="broadcast")) == []


def test_calls_of_unknown_lines_prove_nothing() -> None:
    rank_0, rank_1 = logs_of("AxEE", "AEE")
    assert judge_call_sites([rank_0, rank_1]) != []
    unknown = [replace(call, location="") if place > 1 else call for place, call in enumerate(rank_0)]
    assert judge_call_sites([unknown, [rank_1[0], *(replace(call, location="") for call in rank_1[1:])]]) == []


def test_what_pairs_up_is_in_step() -> None:
    assert judge_divergences(logs_of("AxE", "AEE")) == []


def test_where_operations_part_after_lines_the_lines_are_the_reason() -> None:
    rank_0, rank_1 = logs_of("AxBC", "ABCD")
    reduce = functools.partial(replace, operation="all_reduce")
    rank_0[3], rank_1[2] = reduce(rank_0[3]), reduce(rank_1[2])
    finding = only(judge_divergences([rank_0, rank_1]))
    assert finding.location == line("x")
    clean = logs_of("ABC", "ABC")
    clean[1][2] = reduce(clean[1][2])
    assert "number 2 differs between the ranks" in only(judge_divergences(clean)).message


def test_a_rank_at_work_may_still_come() -> None:
    assert judge_divergences(logs_of("AxE", "AE"), at_work=(1,)) == []


programs = st.text(string.ascii_uppercase[:4], min_size=1, max_size=40)


@given(programs, st.data(), st.integers(2, 5))
def test_a_call_that_one_rank_makes_in_addition_is_found_wherever_it_is(
    program: str, data: st.DataObject, ranks: int
) -> None:
    place = data.draw(st.integers(0, len(program) - 1))
    extra = data.draw(st.integers(0, ranks - 1))
    whole = [program[:place] + "x" + program[place:] if rank == extra else program for rank in range(ranks)]
    finding = only(judge_divergences(logs_of(*whole)))
    assert finding.location == line("x") and f"number {place} " in finding.message
    assert finding.ranks == (extra,)


@given(programs, st.sets(st.integers(0, 39)), st.integers(1, 40))
def test_branches_by_rank_and_a_rank_that_stops_early_are_no_call_in_addition(
    program: str, branches: set[int], kept: int
) -> None:
    first = "".join("d" if place in branches else one for place, one in enumerate(program))
    second = "".join("e" if place in branches else one for place, one in enumerate(program))
    assert judge_call_sites(logs_of(first, second[:kept])) == []


# Dumps


def entry(number: int, operation: str = "gloo:barrier", where: int = 1, **more: Any) -> dict[str, Any]:
    frames = [
        {"name": "wrapper", "filename": "/usr/lib/python3.9/site-packages/torch/distributed/x.py", "line": 9},
        {"name": "inner", "filename": "/usr/lib/python3.9/contextlib.py", "line": 8},
        {"name": "main", "filename": "/job/train.py", "line": where},
    ]
    return {
        "record_id": number - 1,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": operation,
        "input_sizes": [[3]],
        "input_dtypes": ["Float"],
        "output_sizes": [[3]],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "retired": True,
        "is_p2p": False,
        "frames": frames,
    } | more


def write(folder: Path, *ranks: Sequence[dict[str, Any]], **more: Any) -> str:
    for rank, entries in enumerate(ranks):
        if entries is not None:
            (folder / f"rank_{rank}").write_bytes(pickle.dumps({"version": "2.10", "entries": list(entries), **more}))
    return str(folder)


def hang(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Report]:
    code = cli.main(["hang", *arguments, "--format", "json"])
    return code, Report.from_json(capsys.readouterr().out)


def open_(number: int, **more: Any) -> dict[str, Any]:
    return entry(number, retired=False, **more)


def test_a_rank_that_waits_and_one_that_never_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, [entry(1), open_(2, where=5)], [entry(1)])
    code, report = hang(capsys, folder)
    finding = only(report.findings)
    assert (code, finding.code, finding.ranks, finding.location) == (4, "DDP403", (1,), Location("train.py", 5))
    assert "rank 0: waits in barrier() at train.py:5" in finding.evidence
    assert "rank 1: waits in no collective; its last one, barrier() at train.py:1, has ended" in finding.evidence
    (timeline,) = report.timelines
    assert [(one.rank, one.waiting, one.waits_for) for one in timeline.ranks] == [(0, True, (1,)), (1, False, ())]
    assert timeline.parts_at == 1 and timeline.ranks[0].at_end == "waits in barrier() at train.py:5"
    assert hang(capsys, folder, "--fail-on", "never")[0] == 0
    code, report = hang(capsys, folder, "--ignore", "DDP403")
    assert (code, report.ignored, report.status) == (0, ("DDP403",), "ignored")


def test_a_rank_that_is_only_behind_has_not_parted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = hang(capsys, write(tmp_path, [entry(1), entry(2)], [entry(1)]))
    assert (code, report.findings, report.status) == (0, (), "clean")


def test_all_ranks_in_one_collective_do_not_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = hang(capsys, write(tmp_path, [entry(1), open_(2)], [entry(1), open_(2)]))
    assert (code, report.findings) == (0, ())
    assert "ranks 0 and 1 were still in barrier() at train.py:1" in report.checks[1].detail


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (entry(2, "gloo:all_reduce", input_sizes=[[4]]), "float32 of shape (4,)"),
        (entry(2, "gloo:all_reduce", input_dtypes=["BFloat16"]), "bfloat16 of shape (3,)"),
        (entry(2, "gloo:all_gather"), "all_gather"),
    ],
    ids=["shape", "dtype", "operation"],
)
def test_other_operations_sizes_and_dtypes(tmp_path: Path, other: dict[str, Any], words: str) -> None:
    reduce = entry(2, "gloo:all_reduce")
    finding = only(report_on_hang(write(tmp_path, [entry(1), reduce], [entry(1), other])).findings)
    assert finding.message.startswith("Rank 0 reaches all_reduce") and words in finding.message
    assert any("Collective number 1 differs between the ranks" in one for one in finding.evidence)


def test_what_differs_rightly_between_ranks(tmp_path: Path) -> None:
    root = [entry(1, "gloo:gather"), entry(2, "gloo:scatter"), entry(3, "nccl:all_to_all")]
    other = [
        entry(1, "gloo:gather", output_sizes=[], output_dtypes=[]),
        entry(2, "gloo:scatter", input_sizes=[], input_dtypes=[]),
        entry(3, "nccl:all_to_all", input_sizes=[[1]], output_sizes=[[9]]),
    ]
    assert report_on_hang(write(tmp_path, root, other)).findings == ()


def test_a_hang_that_is_suppressed_is_shown_and_does_not_count(tmp_path: Path, monkeypatch) -> None:
    dumps = write(tmp_path, [entry(1), entry(2)], [entry(1), entry(2, "gloo:all_reduce")])
    assert only(report_on_hang(dumps).findings).code == "DDP403"
    report = report_on_hang(dumps, Settings(suppress=(Suppression("DDP403", "meant"),)))
    assert (report.findings, report.status, report.accepted[0].reason) == ((), "ignored", "meant")
    assert report.checks[1].status == "ignored"
    (tmp_path / "pyproject.toml").write_text("[[tool.ddpcheck.suppress]]\ncode = 'DDP403'\nreason = 'meant'\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["hang", dumps]) == 0


def test_lines_part_where_operations_pair_up(tmp_path: Path) -> None:
    rank_0 = [entry(1), entry(2, where=30), open_(3, where=5)]
    finding = only(report_on_hang(write(tmp_path, rank_0, [entry(1), entry(2, where=5)])).findings)
    assert (finding.location, finding.ranks) == (Location("train.py", 30), (0,))


def test_a_ring_that_has_wrapped_is_lined_up_by_number(tmp_path: Path) -> None:
    lines = [entry(number, where=number % 7) for number in range(1, 60)]
    rank_0 = [*lines[20:], open_(60, where=5)]
    rank_1 = lines[33:]
    report = report_on_hang(write(tmp_path, rank_0, rank_1))
    finding = only(report.findings)
    assert (finding.ranks, finding.location) == ((1,), Location("train.py", 5))
    assert finding.evidence[-1] == "rank 0 waits for rank 1 in barrier() at train.py:5, number 60"
    assert "earlier collectives of ranks 0 and 1 are lost" in report.checks[0].detail


def test_numbers_that_gloo_gives_to_what_it_does_not_record_shift_nothing(tmp_path: Path) -> None:
    def barriers(*numbers: int) -> list[dict[str, Any]]:
        return [entry(number, where=number, record_id=at) for at, number in enumerate(numbers)]

    assert report_on_hang(write(tmp_path, barriers(1, 4, 5), barriers(1, 4, 5))).findings == ()
    assert report_on_hang(write(tmp_path, barriers(1, 4), barriers(1))).findings == ()
    finding = only(report_on_hang(write(tmp_path, barriers(1, 4), barriers(1, 2))).findings)
    assert any("unrecorded" in one for one in finding.evidence)


def test_process_groups_are_compared_each_by_itself(tmp_path: Path) -> None:
    def of(group: str, number: int, **more: Any) -> dict[str, Any]:
        return entry(number, process_group=(group, "tensor"), **more)

    config = {"0": {"ranks": "[0, 1, 2]"}, "1": {"ranks": "[0, 1]"}, "2": {"ranks": "[1, 2]"}}
    ranks = [entry(1), of("1", 1)], [of("2", 1), entry(1), of("1", 1)], [of("2", 1), entry(1)]
    assert report_on_hang(write(tmp_path, *ranks, pg_config=config)).findings == ()
    waiting = [*ranks[1], of("2", 2, where=6, retired=False)]
    finding = only(report_on_hang(write(tmp_path, ranks[0], waiting, ranks[2], pg_config=config)).findings)
    assert (finding.ranks, finding.evidence[0]) == ((2,), "process group 2")
    alone = [entry(1), of("7", 1, retired=False, where=8)]
    finding = only(report_on_hang(write(tmp_path, alone, [entry(1)], [entry(1)])).findings)
    assert (finding.code, finding.ranks, finding.location) == ("DDP402", (0,), Location("train.py", 8))


def test_sends_and_receives_are_waited_in_and_are_no_collectives(tmp_path: Path) -> None:
    send = entry(0, "nccl:send 0->1", is_p2p=True, p2p_seq_id=1, retired=False, where=4)
    ended = [entry(1, "nccl:all_reduce"), entry(1, "nccl:coalesced")]  # the last ends a group of sends
    finding = only(report_on_hang(write(tmp_path, [*ended, send], ended[:1])).findings)
    assert (finding.code, finding.ranks, finding.location) == ("DDP402", (1,), Location("train.py", 4))
    answer = entry(0, "nccl:recv 1<-0", is_p2p=True, p2p_seq_id=1, retired=False, where=5)
    report = report_on_hang(write(tmp_path, [*ended, send], [ended[0], answer]))
    assert report.findings == () and "rank 0 was still in send 0->1() at train.py:4" in report.checks[1].detail


def test_a_rank_without_a_dump_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gather = entry(1, "gloo:all_gather", input_sizes=[[1]], output_sizes=[[4, 1]])
    code, report = hang(capsys, write(tmp_path, [gather], None, [gather]))  # type: ignore[arg-type]
    assert (code, report.status, report.world["world_size"]) == (0, "incomplete", 4)
    assert report.checks[0].detail == "2 of 4: no dump of ranks 1 and 3"
    code, report = hang(capsys, write(tmp_path, [gather, open_(2)], None, [gather]))  # type: ignore[arg-type]
    assert code == 4 and only(report.findings).evidence[-1] == "ranks 1 and 3: no dump"


def test_a_rank_whose_dump_is_empty_has_called_nothing(tmp_path: Path) -> None:
    """A dump without stacks is written although a thread holds the GIL, and that with stacks is not."""
    finding = only(report_on_hang(write(tmp_path, [open_(1, where=6)], [], [open_(1, where=6)])).findings)
    assert finding.ranks == (1,) and finding.location == Location("train.py", 6)
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    (tmp_path / "rank_1").write_bytes(pickle.dumps({"version": "2.9", "pg_config": config, "pg_status": {}}))
    assert only(report_on_hang(str(tmp_path)).findings).ranks == (1,)


def test_json_has_no_lines_and_says_so(tmp_path: Path) -> None:
    for rank in (0, 1):
        entries = [{key: value for key, value in entry(1).items() if key != "frames"}]
        (tmp_path / f"job_rank_{rank}.json").write_text(json.dumps({"entries": entries}))
    report = report_on_hang(str(tmp_path))
    assert (report.findings, report.checks[2].status) == ((), "skipped")
    write(tmp_path, [entry(1)], [entry(1)])  # of both, the one with lines
    assert report_on_hang(str(tmp_path)).checks[2].status == "passed"


# torchcomms


def of_comms(*calls: str, first: int = 0, **more: Any) -> list[dict[str, Any]]:
    """Entries as its recorder writes them (version 2.10): `calls` are a group and an operation each; the last waits."""
    entries = []
    for record, call in enumerate(calls, first):
        group, operation = call.split()
        numbers = {"record_id": record, "collective_seq_id": record, "op_id": record, "pg_id": 0}
        state = {"state": "scheduled", "retired": record < first + len(calls) - 1}
        one = entry(0, f"nccl:{operation}", where=record + 1, process_group=[group, "nccl"], **numbers, **state, **more)
        entries.append(one)
    return entries


def config(*groups: str) -> dict[str, Any]:
    return {name: {"name": name, "desc": "nccl", "ranks": "[0,1]"} for name in groups}


def test_torchcomms_counts_all_groups_together(tmp_path: Path) -> None:
    """A rank that is in more groups, or sends, gives other numbers to the same collectives."""
    one = of_comms("main all_reduce", "tp all_reduce", "main send", "main all_reduce", "main barrier")
    two = of_comms("main all_reduce", "main recv", "main all_reduce", "tp all_reduce", "main barrier")
    for at, other in ((one, two), (one, [*two[:-1], *of_comms("main all_reduce", first=4)])):
        report = report_on_hang(write(tmp_path, at, other, pg_config=config("main", "tp")))
        if other is two:
            assert report.findings == () and report.world["world_size"] == 2
        else:
            finding = only(report.findings)
            assert finding.code == "DDP403" and finding.evidence[0] == "process group main (nccl)"
            assert "barrier() at train.py:5" in "\n".join(finding.evidence)


def test_lost_entries_of_torchcomms_are_lined_up_in_a_single_group_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ring = of_comms(*["main all_reduce"] * 3, first=7)
    longer = of_comms(*["main all_reduce"] * 3, "main barrier", first=7)
    found = report_on_hang(write(tmp_path, ring, longer, pg_config=config("main"))).findings
    assert only(found).ranks == (0,) and "process group main (nccl)" in only(found).evidence[0]
    later = of_comms(*["main all_reduce"] * 2, first=8)
    assert report_on_hang(write(tmp_path, ring, later, pg_config=config("main"))).findings == ()
    for calls, groups in ((["main all_reduce"], ["main", "tp"]), (["main send"], ["main"])):
        code = cli.main(["hang", write(tmp_path, of_comms(*calls, first=7), ring, pg_config=config(*groups))])
        assert code == 2 and "the rest cannot be aligned" in capsys.readouterr().err


def test_json_of_torchcomms_without_entries_is_a_rank_that_has_called_nothing(tmp_path: Path) -> None:
    entries = [{key: value for key, value in one.items() if key != "frames"} for one in of_comms("main barrier")]
    for rank, more in enumerate(({"entries": entries}, {})):
        text = json.dumps({"version": "2.10", "pg_config": config("main"), "pg_status": {}, **more})
        (tmp_path / f"rank_{rank}").write_text(text)
    assert only(report_on_hang(str(tmp_path)).findings).ranks == (1,)


def test_a_collective_of_unequal_parts_has_no_payload_that_matches(tmp_path: Path) -> None:
    ranks = [of_comms("main all_gather_v", input_sizes=[[rank + 1]]) for rank in (0, 1)]
    assert report_on_hang(write(tmp_path, *ranks, pg_config=config("main"))).findings == ()


# Bad input


class _Foreign:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("loaded",)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("rank_0", b"", "neither JSON nor a whole pickle"),
        ("rank_0", b"hello", "neither JSON nor a whole pickle"),
        ("rank_0", b"{", "neither JSON nor a whole pickle"),
        ("rank_0", pickle.dumps({"entries": []})[:9], "neither JSON nor a whole pickle"),
        ("rank_0", pickle.dumps([1]), "it has no list of entries"),
        ("rank_0.json", b'{"entries": 3}', "it has no list of entries"),
        ("rank_0", pickle.dumps({"entries": [{"a": 1}]}), "can read (KeyError: 'profiling_name')"),
        ("rank_0", pickle.dumps({"entries": [], "rank": _Foreign()}), "it holds builtins.print, and not plain data"),
        ("rank_0", pickle.dumps({"entries": [], "rank": "x"}), "its rank is 'x'"),
        ("notes.txt", b"", "no Flight Recorder dumps in"),
        ("", b"", "it is empty"),
    ],
)
def test_what_is_no_dump_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, data: bytes, words: str
) -> None:
    if name:
        (tmp_path / name).write_bytes(data)
    assert cli.main(["hang", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and len(err.splitlines()) == 1


def test_a_folder_that_is_not_there_and_two_dumps_of_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hang", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    write(tmp_path, [entry(1)])
    (tmp_path / "old_rank_0").write_bytes((tmp_path / "rank_0").read_bytes())
    assert cli.main(["hang", str(tmp_path / "rank_0")]) == 2
    assert "is a file" in capsys.readouterr().err
    assert cli.main(["hang", str(tmp_path)]) == 2
    assert "are of rank 0: old_rank_0 and rank_0" in capsys.readouterr().err


# Real ranks


@pytest.mark.slow
def test_dumps_of_real_ranks(ddp_world: DDPWorld, tmp_path: Path) -> None:
    def train(folder: str, rank_0_saves: bool) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from tests.report.test_hang import dump_to, save

        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        for _ in range(3):
            model(torch.ones(2, 2)).sum().backward()
        if rank_0_saves and dist.get_rank() == 0:
            save()
        work = dist.barrier(async_op=True)
        if not rank_0_saves or dist.get_rank() == 1:
            work.wait()
        dump_to(folder)

    for saves in (False, True):  # after which a barrier is open
        (folder := tmp_path / str(saves)).mkdir()
        ddp_world.run(train, str(folder), saves)
    finding = only(report_on_hang(str(tmp_path / "True")).findings)
    assert finding.location is not None and (finding.code, finding.ranks) == ("DDP403", (0,))
    source = Path(__file__).read_text().splitlines()
    assert finding.location.path.endswith("test_hang.py") and "in save" in source[finding.location.line - 1]
    assert any("has ended" in fact and "rank 1" in fact for fact in finding.evidence)
    assert report_on_hang(str(tmp_path / "False")).status == "clean"


def save() -> None:
    """What rank 0 alone calls."""
    import torch.distributed as dist

    dist.barrier(async_op=True)  # in save


def dump_to(folder: str) -> None:
    """Write what the recorder of this rank holds, once all that will end has ended."""
    import time

    import torch
    import torch.distributed as dist

    time.sleep(0.5)
    recorder = vars(torch._C._distributed_c10d)["_dump_fr_trace"]
    for name, with_stacks in ((f"quick_rank_{dist.get_rank()}", False), (f"rank_{dist.get_rank()}", True)):
        Path(folder, name).write_bytes(recorder(True, with_stacks, False))


# Dumps of `ddpcheck run`


def ring_of(folder: Path, *logs: Sequence[Call]) -> None:
    for rank, calls in enumerate(logs):
        log = RankLog(folder, RankStarted(rank, len(logs), "gloo"))
        for call in calls:
            log.add_call(call)


REDUCE = Call("all_reduce", "0", (0, 1), "float32 of shape (3,)", location="train.py:5")
OTHERS = [
    replace(REDUCE, operation="DistributedDataParallel.backward", payload="", location="train.py:7"),
    replace(REDUCE, operation="all_gather", payload="bfloat16 of shape (2, 3)"),
    replace(REDUCE, operation="broadcast", payload="int64 of shape (), root 1"),
    replace(REDUCE, operation="reduce_scatter_tensor", payload=""),
    replace(REDUCE, operation="all_to_all_single", payload=""),
    replace(REDUCE, operation="all_gather_object", payload="", group="1"),
    replace(REDUCE, operation="new_group", payload="ranks [0, 1]"),
    replace(REDUCE, operation="gather", payload="root 0", location=""),
]
SHORT = [REDUCE, *OTHERS]
STACK = (
    'Current thread 0x1 (most recent call first):\n  File "torch/distributed/distributed_c10d.py", line 1 in barrier\n'
)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (([REDUCE], []), "missing ranks: {1}"),
        (([REDUCE], [OTHERS[0]]), None),  # one operation in the recorder's words
        (([REDUCE], [replace(REDUCE, payload="float32 of shape (4,)")]), "has errors"),
        (([REDUCE], [replace(REDUCE, operation="barrier", payload="")]), "COLLECTIVE_TYPE_MISMATCH"),
        (logs_of("AAxE", "AAE"), "missing ranks: {1}"),
    ],
)
def test_torchs_own_analysis_reads_the_dumps_of_a_run_and_the_verdict_is_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: Sequence[Sequence[Call]], words: str | None
) -> None:
    from torch.distributed.flight_recorder import fr_trace

    logs, dumps = tmp_path / "logs", tmp_path / "dumps"
    for folder in (logs, dumps):
        folder.mkdir()
    ring_of(logs, *([*SHORT, *of_rank] for of_rank in more))
    ranks = read_logs(logs)
    ending = Ending(4, hang=Hang(9.0, {0: STACK, 1: STACK}))
    (run,) = judge_ending(ranks, ending, [])
    write_flight_records(dumps, ranks, ending)
    with caplog.at_level("INFO"):
        try:
            fr_trace.main([str(dumps)])
        finally:
            gc.enable()  # which it turns off
    assert words is None or words in caplog.text
    finding = only(report_on_hang(str(dumps)).findings)
    same = ("code", "subjects", "ranks", "location", "fix")
    assert [getattr(finding, name) for name in same] == [getattr(run, name) for name in same]


def test_a_run_that_ended_well_leaves_dumps_in_which_nothing_is_open(tmp_path: Path) -> None:
    logs, dumps = tmp_path / "logs", tmp_path / "dumps"
    for folder in (logs, dumps):
        folder.mkdir()
    ring_of(logs, SHORT, SHORT)
    write_flight_records(dumps, read_logs(logs), Ending())
    report = report_on_hang(str(dumps))
    assert report.status == "clean" and "still in" not in report.checks[1].detail


def test_the_folder_for_dumps_has_to_be_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank_0").touch()
    assert cli.main(["run", "--check-flight-recorder", str(tmp_path), __file__]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert cli.main(["run", "--check-flight-recorder", str(tmp_path / "rank_0"), __file__]) == 2
    assert "cannot write to" in capsys.readouterr().err


def test_long_logs_of_many_ranks_are_compared() -> None:
    program = "AB" * 200 + "C" * 99
    turns = itertools.cycle("de")
    logs = logs_of(*(f"{next(turns)}{program}{'x' if rank == 9 else ''}E" for rank in range(32)))
    assert only(judge_divergences(logs)).ranks == (9,)
