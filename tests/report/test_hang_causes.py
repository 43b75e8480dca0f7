"""`ddpcheck hang` on dumps of nccl: one finding a cause, with the ranks at which all waits end."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddpcheck.findings.report import Finding
from ddpcheck.report.hang.hang_report import report_on_hang
from tests.report.simulated_jobs import Job, Kind

SHAPES = {
    "data parallel": {"data": 4},
    "tensor and data parallel": {"tensor": 2, "data": 2},
    "pipeline": {"pipeline": 4},
    "all three": {"tensor": 2, "data": 2, "pipeline": 2},
}


def cause(job: Job, folder: Path, *, active_only: bool = True, without: Sequence[int] = ()) -> Finding:
    report = report_on_hang(job.write(folder, active_only=active_only, without=without))
    assert len(report.findings) == 1, [finding.message for finding in report.findings]
    (finding,) = report.findings
    assert len(finding.evidence) <= 14
    return finding


@pytest.mark.parametrize("active_only", [True, False], ids=["unfinished calls", "all calls"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_rank_that_calls_nothing_any_more_is_named(tmp_path: Path, shape: dict[str, int], active_only: bool) -> None:
    for stopped in (0, 2, 3):
        (folder := tmp_path / str(stopped)).mkdir()
        job = Job(**shape, steps=6, hosts={stopped: 2})
        finding = cause(job, folder, active_only=active_only)
        assert (finding.code, finding.ranks) == ("DDP402", (stopped,))
        assert f"Rank {stopped} stopped calling collectives, and the other {job.size - 1} ranks" in finding.message
        assert "py-spy" in finding.fix


@pytest.mark.parametrize("shape", ["data parallel", "all three"])
def test_a_device_that_completes_nothing_is_not_a_mismatch(tmp_path: Path, shape: str) -> None:
    finding = cause(Job(**SHAPES[shape], steps=4, devices={1: 2, 2: 2}), tmp_path)
    assert (finding.code, finding.ranks) == ("DDP402", (1, 2))
    assert "The device stopped on ranks 1 and 2" in finding.message and "Xid" in finding.fix
    assert any(line.startswith("rank 1 has enqueued calls up to number") for line in finding.evidence)


@pytest.mark.parametrize(
    ("job", "without", "ranks", "words"),
    [
        (
            *(Job(tensor=2, data=2, pipeline=2, hosts={5: 4, 6: 4}), [], (5, 6)),
            ["the other 6 ranks wait for that", "\nranks 5 and 6 have no open collective: all have ended\n"],
        ),
        # The device of rank 0 stops in the last call, which rank 1 completes, and rank 1 then waits for the pipeline.
        (Job(tensor=2, pipeline=2, steps=2, devices={0: 8}), [], (0,), ["The device stopped"]),
        (Job(tensor=2, data=2, hosts={3: 4}), [3], (3,), ["Rank 3 left no dump, and the other 3 ranks wait"]),
        (Job(tensor=2, pipeline=2, devices={2: 1, 3: 1}), [], (2, 3), ["which does not end"]),
    ],
    ids=["two places", "a peer without open calls", "no dump of the cause", "a group as a whole"],
)
def test_one_cause(tmp_path: Path, job: Job, without: list[int], ranks: tuple[int, ...], words: list[str]) -> None:
    finding = cause(job, tmp_path, without=without)
    text = "\n".join([finding.message, *finding.evidence, "(end)"])
    assert finding.ranks == ranks and not [part for part in words if part not in text], text


def test_a_stopped_host_and_a_stopped_device_are_two_stories(tmp_path: Path) -> None:
    job = Job(tensor=2, data=2, steps=4, devices={0: 2}, hosts={3: 4})
    findings = report_on_hang(job.write(tmp_path)).findings
    assert [(finding.ranks, "device" in finding.message) for finding in findings] == [((0,), True), ((3,), False)]


@pytest.mark.parametrize("active_only", [True, False], ids=["unfinished calls", "all calls"])
def test_a_mismatch_in_a_subgroup_is_told_alone(tmp_path: Path, active_only: bool) -> None:
    mismatch = Kind("TENSOR", "_all_gather_base", (9, 9))
    finding = cause(Job(tensor=4, pipeline=2, mismatches={5: (5, mismatch)}), tmp_path, active_only=active_only)
    assert (finding.code, finding.ranks) == ("DDP403", (5,))
    assert "float32 of shape (9, 9)" in "\n".join(finding.evidence)
    assert any(line.startswith("ranks 0 to 3 wait for ranks 4 to 7 in send or recv") for line in finding.evidence)


def test_a_rank_that_came_late_to_a_call_in_which_all_are(tmp_path: Path) -> None:
    dumps = Job(data=4).run()
    for rank, dump in enumerate(dumps):
        dump["entries"][2] |= {"state": "scheduled", "retired": False}
        del dump["entries"][3:]
        if rank == 2:
            dump["entries"][2]["time_created_ns"] += 500 * 10**9
        (tmp_path / f"job_{rank}").write_bytes(pickle.dumps(dump))
    (finding,) = report_on_hang(str(tmp_path)).findings
    assert finding.ranks == (2,) and "Rank 2 came 500 s late to all_reduce" in finding.message
    assert "init_process_group(timeout=...)" in finding.fix


def test_two_groups_in_another_order_on_two_ranks(tmp_path: Path) -> None:
    swapped = Job(tensor=2, data=2, steps=1)
    programs = {rank: list(swapped.program(rank)) for rank in range(swapped.size)}
    last = len(programs[0]) - 1
    for rank, kinds in programs.items():
        kinds[last - 1 :] = [*kinds[last - 1 :][:: 1 if rank < 2 else -1]]
    swapped.program = lambda rank: iter(programs[rank])  # type: ignore[method-assign,assignment,return-value]
    finding = cause(swapped, tmp_path)
    assert finding.code == "DDP403" and "wait for each other" in finding.message
    assert "in the same order" in finding.fix


def test_a_job_in_which_all_calls_have_ended_is_clean(tmp_path: Path) -> None:
    for name, shape in SHAPES.items():
        (folder := tmp_path / name).mkdir()
        assert report_on_hang(Job(**shape).write(folder, active_only=False)).findings == ()
