"""`ddpcheck hang`: lines at which ranks part, dumps of Flight Recorder that are read and written, and bad ones."""

from __future__ import annotations

import gc
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

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
        (("AAxE", "AAxE", "AAE"), 2, "x", (2,)),  # the one that leaves it out
        (("xE" * 9 + "x", "E" * 18), 0, "x", (0,)),  # in every epoch
        (("dAAxE", "eAAE"), 3, "x", (0,)),  # d and e are branches of one if
    ],
)
def test_a_call_in_addition(programs: Sequence[str], place: int, where: str, ranks: tuple[int, ...]) -> None:
    finding = only(judge_divergences(logs_of(*programs)))
    assert (finding.code, finding.location, finding.ranks) == ("DDP403", line(where), ranks)
    assert f"Collective number {place} pairs up different lines" in finding.message
    assert f"train.py:{ord(where)}" in finding.fix


@pytest.mark.parametrize(
    "programs",
    [
        ("AAdE", "AAeEE"),  # d and e are branches of one if, and rank 1 waits in its last call
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


def test_what_proves_nothing_is_no_divergence() -> None:
    assert judge_call_sites(logs_of("baabaaE", "abaaba", operation="broadcast")) == []  # turns, with unknown roots
    assert judge_divergences(logs_of("AxE", "AEE")) == []
    assert judge_divergences(logs_of("AxE", "AE"), at_work=(1,)) == []  # rank 1 may still come
    rank_0, rank_1 = logs_of("AxEE", "AEE")
    assert judge_call_sites([rank_0, rank_1]) != []
    unknown = [replace(call, location="") if place > 1 else call for place, call in enumerate(rank_0)]
    assert judge_call_sites([unknown, [rank_1[0], *(replace(call, location="") for call in rank_1[1:])]]) == []


def test_where_operations_part_after_lines_the_lines_are_the_reason() -> None:
    rank_0, rank_1 = logs_of("AxBC", "ABCD")
    rank_0[3], rank_1[2] = (replace(call, operation="all_reduce") for call in (rank_0[3], rank_1[2]))
    assert only(judge_divergences([rank_0, rank_1])).location == line("x")


# Dumps

Entries = list[dict[str, Any]]


def entry(number: int, operation: str = "gloo:barrier", where: int = 1, **more: Any) -> dict[str, Any]:
    files = {"site-packages/torch/distributed/x.py": 9, "contextlib.py": 8}
    frames = [{"name": "f", "filename": f"/usr/lib/python3.9/{file}", "line": line} for file, line in files.items()]
    frames.append({"name": "main", "filename": "/job/train.py", "line": where})
    sizes = {"input_sizes": [[3]], "input_dtypes": ["Float"], "output_sizes": [[3]], "output_dtypes": ["Float"]}
    numbers = {"record_id": number - 1, "collective_seq_id": number, "p2p_seq_id": 0}
    state = {"state": "scheduled", "retired": True, "is_p2p": False, "process_group": ("0", "default_pg")}
    return {"profiling_name": operation, "frames": frames, **numbers, **sizes, **state, **more}


def open_(number: int, **more: Any) -> dict[str, Any]:
    return entry(number, retired=False, **more)


def without_lines(entries: Entries) -> Entries:
    return [{key: value for key, value in each.items() if key != "frames"} for each in entries]


def write(folder: Path, *ranks: Entries | None, **more: Any) -> str:
    for rank, entries in enumerate(ranks):
        if entries is not None:
            (folder / f"rank_{rank}").write_bytes(pickle.dumps({"version": "2.10", "entries": list(entries), **more}))
    return str(folder)


def config(*groups: str) -> dict[str, Any]:
    return {name: {"name": name, "desc": "nccl", "ranks": "[0,1]"} for name in groups}


def of_comms(*calls: str, first: int = 0, **more: Any) -> Entries:
    """Entries as torchcomms writes them (version 2.10): `calls` are a group and an operation each; the last waits."""
    entries = []
    for record, call in enumerate(calls, first):
        group, operation = call.split()
        numbers = {"record_id": record, "collective_seq_id": record, "op_id": record, "pg_id": 0}
        state = {"state": "scheduled", "retired": record < first + len(calls) - 1}
        call_entry = {"process_group": [group, "nccl"], **numbers, **state, **more}
        entries.append(entry(0, f"nccl:{operation}", where=record + 1, **call_entry))
    return entries


def barriers(*numbers: int) -> Entries:
    """Number the calls of a gloo dump, which also counts calls that it does not record."""
    return [entry(number, where=number, record_id=at) for at, number in enumerate(numbers)]


def of_group(group: str, number: int, **more: Any) -> dict[str, Any]:
    return entry(number, process_group=(group, "tensor"), **more)


ON_ROOT = [entry(1, "gloo:gather"), entry(2, "gloo:scatter"), entry(3, "nccl:all_to_all")]
ON_OTHERS = [
    entry(1, "gloo:gather", output_sizes=[], output_dtypes=[]),
    entry(2, "gloo:scatter", input_sizes=[], input_dtypes=[]),
    entry(3, "nccl:all_to_all", input_sizes=[[1]], output_sizes=[[9]]),
]
REDUCED = entry(2, "gloo:all_reduce")
REACHES = [
    *("\nRank 0 reaches all_reduce", "Collective number 1 differs between the ranks", "float32 of shape (4,)"),
]
LINES = [entry(number, where=number % 7) for number in range(1, 60)]
GROUPS = [entry(1), of_group("1", 1)], [of_group("2", 1), entry(1), of_group("1", 1)], [of_group("2", 1), entry(1)]
GROUP_2_WAITS = [GROUPS[0], [*GROUPS[1], of_group("2", 2, where=6, retired=False)], GROUPS[2]]
OF_GROUPS = {"pg_config": {"0": {"ranks": "[0, 1, 2]"}, "1": {"ranks": "[0, 1]"}, "2": {"ranks": "[1, 2]"}}}
SENDS = [
    entry(1, "nccl:all_reduce"),
    entry(1, "nccl:coalesced"),  # ends a group of sends
    entry(0, "nccl:send 0->1", is_p2p=True, p2p_seq_id=1, retired=False, where=4),
]
RECEIVES = [SENDS[0], entry(0, "nccl:recv 1<-0", is_p2p=True, p2p_seq_id=1, retired=False, where=5)]
# torchcomms counts all groups together: a rank in more groups, or that sends, numbers the same collectives differently.
IN_TWO_GROUPS = of_comms("main all_reduce", "tp all_reduce", "main send", "main all_reduce", "main barrier")
RECEIVER = of_comms("main all_reduce", "main recv", "main all_reduce", "tp all_reduce", "main barrier")
MAIN, BOTH = {"pg_config": config("main")}, {"pg_config": config("main", "tp")}
RING = of_comms(*["main all_reduce"] * 3, first=7)


@pytest.mark.parametrize(
    ("ranks", "more", "still_in"),
    [
        ([barriers(1, 4, 5), barriers(1, 4, 5)], {}, ""),
        ([barriers(1, 4), barriers(1)], {}, ""),
        ([[entry(1), open_(2)], [entry(1), open_(2)]], {}, "ranks 0 and 1 were still in barrier() at train.py:1"),
        ([ON_ROOT, ON_OTHERS], {}, ""),
        (GROUPS, OF_GROUPS, ""),
        ([SENDS, RECEIVES], {}, "rank 0 was still in send 0->1() at train.py:4"),
        ([IN_TWO_GROUPS, RECEIVER], BOTH, ""),
        ([RING, of_comms(*["main all_reduce"] * 2, first=8)], MAIN, ""),
        ([of_comms("main all_gather_v", input_sizes=[[rank + 1]]) for rank in (0, 1)], MAIN, ""),
    ],
    ids=["numbers", "behind", "all wait", "roots", "groups", "sends", "torchcomms", "torchcomms ring", "unequal parts"],
)
def test_ranks_that_have_not_parted(tmp_path: Path, ranks: list[Entries], more: Any, still_in: str) -> None:
    report = report_on_hang(write(tmp_path, *ranks, **more))
    assert (report.findings, report.status, report.world["world_size"]) == ((), "clean", len(ranks))
    assert still_in in report.checks[1].detail


@pytest.mark.parametrize(
    ("ranks", "more", "expected", "words"),
    [
        (
            [[entry(1), entry(2, where=30), open_(3, where=5)], [entry(1), entry(2, where=5)]],
            *({}, ("DDP403", (0,), 30), []),
        ),
        (
            [[*LINES[20:], open_(60, where=5)], LINES[33:]],
            *({}, ("DDP402", (1,), 5)),
            [
                "earlier collectives of ranks 0 and 1 are lost",
                "\nrank 0 waits for rank 1 in barrier() at train.py:5, number 60\n(end)",
            ],
        ),
        ([barriers(1, 4), barriers(1, 2)], {}, None, ["unrecorded"]),
        (GROUP_2_WAITS, OF_GROUPS, ("DDP403", (2,), 6), [".\nprocess group 2\n"]),
        ([[entry(1), of_group("7", 1, retired=False, where=8)], [entry(1)]], {}, ("DDP402", (0,), 8), []),
        ([SENDS, SENDS[:1]], {}, ("DDP402", (1,), 4), []),
        (
            [RING, of_comms(*["main all_reduce"] * 3, "main barrier", first=7)],
            *(MAIN, ("DDP402", (0,), 10), ["number 10 of process group main (nccl)"]),
        ),
        ([[entry(1), REDUCED], [entry(1), REDUCED | {"input_sizes": [[4]]}]], {}, None, REACHES),
    ],
    ids=[
        "lines",
        "a ring that has wrapped",
        "numbers",
        "groups",
        "a group of some",
        "sends",
        "torchcomms ring",
        "shape",
    ],
)
def test_ranks_that_have_parted(
    tmp_path: Path, ranks: list[Entries], more: Any, expected: tuple[object, ...] | None, words: list[str]
) -> None:
    report = report_on_hang(write(tmp_path, *ranks, **more))
    finding = only(report.findings)
    number = finding.location and finding.location.line
    assert not expected or (finding.code, finding.ranks, number) == expected
    text = "\n".join([report.checks[0].detail, finding.message, *finding.evidence, "(end)"])
    assert not [part for part in words if part not in text], text


def hang(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Report]:
    code = cli.main(["hang", *arguments, "--format", "json"])
    return code, Report.from_json(capsys.readouterr().out)


def test_a_rank_that_waits_and_one_that_never_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, [entry(1), open_(2, where=5)], [entry(1)])
    code, report = hang(capsys, folder)
    finding = only(report.findings)
    assert (code, finding.code, finding.ranks, finding.location) == (4, "DDP403", (1,), Location("train.py", 5))
    assert "rank 0: waits in barrier() at train.py:5" in finding.evidence
    assert "rank 1: waits in no collective; its last one, barrier() at train.py:1, has ended" in finding.evidence
    (timeline,) = report.timelines
    ranks = [(rank.rank, rank.waiting, rank.waits_for) for rank in timeline.ranks]
    assert ranks == [(0, True, (1,)), (1, False, ())]
    assert timeline.parts_at == 1 and timeline.ranks[0].at_end == "waits in barrier() at train.py:5"
    assert hang(capsys, folder, "--fail-on", "never")[0] == 0
    code, report = hang(capsys, folder, "--ignore", "DDP403")
    assert (code, report.ignored, report.status) == (0, ("DDP403",), "ignored")


def test_a_hang_that_is_suppressed_is_shown_and_does_not_count(tmp_path: Path, monkeypatch) -> None:
    dumps = write(tmp_path, [entry(1), entry(2)], [entry(1), entry(2, "gloo:all_reduce")])
    report = report_on_hang(dumps, Settings(suppress=(Suppression("DDP403", "meant"),)))
    assert (report.findings, report.status, report.accepted[0].reason) == ((), "ignored", "meant")
    assert report.checks[1].status == "ignored"
    (tmp_path / "pyproject.toml").write_text("[[tool.ddpcheck.suppress]]\ncode = 'DDP403'\nreason = 'meant'\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["hang", dumps]) == 0


def test_a_rank_without_a_dump_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gather = entry(1, "gloo:all_gather", input_sizes=[[1]], output_sizes=[[4, 1]])
    code, report = hang(capsys, write(tmp_path, [gather], None, [gather]))
    assert (code, report.status, report.world["world_size"]) == (0, "incomplete", 4)
    assert report.checks[0].detail == "2 of 4: no dump of ranks 1 and 3"


def test_a_dump_without_a_list_of_entries_is_a_rank_that_has_called_nothing(tmp_path: Path) -> None:
    for rank, more in enumerate(({"entries": without_lines(of_comms("main barrier"))}, {})):
        text = json.dumps({"version": "2.10", "pg_config": config("main"), "pg_status": {}, **more})
        (tmp_path / f"rank_{rank}").write_text(text)
    assert only(report_on_hang(str(tmp_path)).findings).ranks == (1,)


def test_json_has_no_lines_and_says_so(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"job_rank_{rank}.json").write_text(json.dumps({"entries": without_lines([entry(1)])}))
    report = report_on_hang(str(tmp_path))
    assert (report.findings, report.checks[2].status) == ((), "skipped")
    write(tmp_path, [entry(1)], [entry(1)])  # of both, the one with lines
    for more in ("job_rank_0", "zero_rank_0"):  # in any order of names, also beside two without lines
        assert report_on_hang(str(tmp_path)).checks[2].status == "passed"
        (tmp_path / f"again_{more}.json").write_bytes((tmp_path / "job_rank_0.json").read_bytes())


@pytest.mark.parametrize(("calls", "groups"), [("main all_reduce", ["main", "tp"]), ("main send", ["main"])])
def test_lost_entries_of_torchcomms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], calls: str, groups: list[str]
) -> None:
    assert cli.main(["hang", write(tmp_path, of_comms(calls, first=7), RING, pg_config=config(*groups))]) == 2
    assert "the rest cannot be aligned" in capsys.readouterr().err


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
    def train(folder: str) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from tests.report.test_hang import dump_to, save

        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        for _ in range(3):
            model(torch.ones(2, 2)).sum().backward()
        if dist.get_rank() == 0:
            save()
        work = dist.barrier(async_op=True)
        if dist.get_rank() == 1:
            work.wait()
        dump_to(folder)

    ddp_world.run(train, str(tmp_path))
    finding = only(report_on_hang(str(tmp_path)).findings)
    assert finding.location is not None and (finding.code, finding.ranks) == ("DDP403", (0,))
    source = Path(__file__).read_text().splitlines()
    assert finding.location.path.endswith("test_hang.py") and "in save" in source[finding.location.line - 1]
    assert any("has ended" in fact and "rank 1" in fact for fact in finding.evidence)


def save() -> None:
    import torch.distributed as dist

    dist.barrier(async_op=True)  # in save


def dump_to(folder: str) -> None:
    """Write what the recorder of this rank holds, once all that will end has ended."""
    import time

    import torch
    import torch.distributed as dist

    time.sleep(0.5)
    recorder = vars(torch._C._distributed_c10d)["_dump_fr_trace"]
    Path(folder, f"rank_{dist.get_rank()}").write_bytes(recorder(True, True, False))


# Dumps of `ddpcheck run`


def ring_of(folder: Path, *logs: Sequence[Call]) -> tuple[Any, Path]:
    for name in ("logs", "dumps"):
        (folder / name).mkdir()
    for rank, calls in enumerate(logs):
        log = RankLog(folder / "logs", RankStarted(rank, len(logs), "gloo"))
        for call in calls:
            log.add_call(call)
    return read_logs(folder / "logs"), folder / "dumps"


REDUCE = Call("all_reduce", "0", (0, 1), "float32 of shape (3,)", location="train.py:5")
OTHERS = [
    replace(REDUCE, operation="DistributedDataParallel.backward", payload="", location="train.py:7"),
    replace(REDUCE, operation="all_gather", payload="bfloat16 of shape (2, 3)"),
    replace(REDUCE, operation="reduce_scatter_tensor", payload=""),
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
        (([REDUCE], [OTHERS[0]]), ""),  # one operation in the recorder's words
        (([REDUCE], [replace(REDUCE, payload="float32 of shape (4,)")]), "has errors"),
        (logs_of("AAxE", "AAE"), "missing ranks: {1}"),
    ],
)
def test_torchs_own_analysis_reads_the_dumps_of_a_run_and_the_verdict_is_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: Sequence[Sequence[Call]], words: str
) -> None:
    from torch.distributed.flight_recorder import fr_trace

    ranks, dumps = ring_of(tmp_path, *([*SHORT, *of_rank] for of_rank in more))
    ending = Ending(4, hang=Hang(9.0, {0: STACK, 1: STACK}))
    (run,) = judge_ending(ranks, ending, [])
    write_flight_records(dumps, ranks, ending)
    with caplog.at_level("INFO"):
        try:
            fr_trace.main([str(dumps)])
        finally:
            gc.enable()  # which it turns off
    assert words in caplog.text
    finding = only(report_on_hang(str(dumps)).findings)
    same = ("code", "subjects", "ranks", "location", "fix")
    assert [getattr(finding, name) for name in same] == [getattr(run, name) for name in same]


def test_a_run_that_ended_well_leaves_dumps_in_which_nothing_is_open(tmp_path: Path) -> None:
    ranks, dumps = ring_of(tmp_path, SHORT, SHORT)
    write_flight_records(dumps, ranks, Ending())
    report = report_on_hang(str(dumps))
    assert report.status == "clean" and "still in" not in report.checks[1].detail


def test_the_folder_for_dumps_has_to_be_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank_0").touch()
    assert cli.main(["run", "--check-flight-recorder", str(tmp_path), __file__]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert cli.main(["run", "--check-flight-recorder", str(tmp_path / "rank_0"), __file__]) == 2
    assert "cannot write to" in capsys.readouterr().err
