"""DDP4xx: logs of collectives that do and do not match, logs of real ranks, and hangs told before the deadline."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from ddpcheck.findings.errors import EmptyShardError, HangError, RankFailure
from ddpcheck.findings.evidence.steps import Call, ReductionInput
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.rules import RULES
from ddpcheck.gather.collectives import collective_log
from ddpcheck.gather.collectives.collective_log import log_path, read_log, replace_collectives, without_logging
from ddpcheck.report.checking.check_worlds import CollectiveMismatchWatch
from ddpcheck.rules.collectives.ddp403_collective_mismatch import judge_collectives
from ddpcheck.rules.collectives.ddp405_uneven_iterations import judge_empty_shards
from ddpcheck.rules.collectives.ddp407_payload_mismatch import judge_packing
from ddpcheck.rules.collectives.diagnose import diagnose
from ddpcheck.rules.collectives.first_divergence import ranks_in_complete_collective
from ddpcheck.testing.fixture import DDPWorld
from ddpcheck.trace.failures import FailureFacts
from ddpcheck.worlds import failures
from ddpcheck.worlds import rank as this_rank
from tests.reports import only
from tests.tiers import share

REDUCE = Call("all_reduce", "0", (0, 1), "float32 of shape (3,)", "step 0: forward", "model.py:5")
GATHER = Call("all_gather", "0", (0, 1), "float32 of shape (3,)", "step 0: forward", "model.py:9")


def test_ranks_that_call_the_same_are_in_step() -> None:
    first, second = replace(REDUCE, group="1"), replace(GATHER, group="2")
    of_rank_1 = replace(REDUCE, group="3", members=(1,))
    for logs in (
        [[], []],
        [[REDUCE, GATHER, REDUCE]] * 2,
        [[REDUCE], [replace(REDUCE, location="other.py:1", place="step 0: loss")]],
        [[first, second], [second, first]],
        [[REDUCE], [of_rank_1, REDUCE, of_rank_1]],
    ):
        assert judge_collectives(logs) == []


@pytest.mark.parametrize("call", [GATHER, replace(REDUCE, payload="float32 of shape (4,)")])
def test_the_first_call_that_is_another_one_on_a_rank(call: Call) -> None:
    everyone = [replace(each, members=(0, 1, 2)) for each in (REDUCE, call)]
    finding = only(judge_collectives([everyone[:1], everyone, everyone[1:]]))
    assert finding.code == "DDP403" and finding.ranks == (2,) and "number 0" in finding.message
    assert "in step 0: forward" in finding.evidence[0]


def test_a_log_without_its_last_half_line_is_read(tmp_path: Path) -> None:
    lines = "".join(msgspec.json.encode(call).decode() + "\n" for call in (REDUCE, GATHER))
    log_path(tmp_path, 0).write_text(lines + lines[:40])
    assert read_log(tmp_path, 0) == [REDUCE, GATHER]
    log_path(tmp_path, 1).write_text("")
    assert read_log(tmp_path, 1) == [] and read_log(tmp_path, 2) == []


def test_a_log_names_files_whose_names_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = replace(REDUCE, location=os.fsdecode(b"caf\xe9.py:5"))
    monkeypatch.setattr(collective_log, "record_calls", lambda sink: sink(call))
    collective_log.record_collectives(tmp_path, 0)
    assert read_log(tmp_path, 0) == [call]


@pytest.fixture
def log(rank: int, tmp_path: Path) -> Callable[..., list[Call]]:
    """Reads what this rank, or another one, has called from here on."""
    collective_log.record_collectives(tmp_path, rank)
    return lambda of=rank: read_log(tmp_path, of)


@pytest.mark.ddp
def test_the_calls_of_real_ranks_are_logged_with_payload_place_and_line(log: Callable[..., list[Call]]) -> None:
    this_rank.set_status("step 7: forward")
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.zeros(3, requires_grad=True).detach())
    dist.broadcast(torch.zeros(2, 2, dtype=torch.int64), src=1, group=group)
    dist.all_gather([torch.zeros(1) for _ in range(2)], torch.ones(1))
    dist.all_gather_object([None, None], {"any": "thing"})
    with without_logging():
        dist.barrier()
    dist.barrier()
    assert this_rank.current_slots().collective == ""
    with without_logging():
        dist.barrier()
    assert judge_collectives([log(0), log(1)]) == []
    calls = log()
    assert [(call.operation, call.payload) for call in calls] == [
        ("new_group", "ranks [0, 1]"),
        ("all_reduce", "float32 of shape (3,)"),
        ("broadcast", "int64 of shape (2, 2), root 1"),
        ("all_gather", "float32 of shape (1,)"),
        ("all_gather_object", ""),
        ("barrier", ""),
    ]
    assert {call.place for call in calls} == {"step 7: forward"} and {call.members for call in calls} == {(0, 1)}
    assert all(call.location.rpartition(":")[0].endswith(os.path.basename(__file__)) for call in calls), calls
    assert len({call.group for call in calls}) == 2


@pytest.mark.ddp
@pytest.mark.filterwarnings("ignore::FutureWarning")  # some spellings are deprecated, and are used all the same
def test_collectives_of_autograd_functions_and_functional_ones_are_logged_once_each(
    log: Callable[..., list[Call]],
) -> None:
    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            total = x.clone()
            dist.all_reduce(total)
            return total

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient

    x = torch.ones(4, requires_grad=True)
    Summed.apply(x)
    dist.all_reduce(x * 2)
    functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    gathered = functional.all_gather_tensor(x.detach(), 0, [0, 1])
    assert gathered.shape == (8,)
    operator = torch.ops._c10d_functional.all_reduce
    total = torch.ops._c10d_functional.wait_tensor(operator(x.detach(), "sum", dist.group.WORLD.group_name))
    assert total.tolist() == [2.0] * 4 and isinstance(operator, torch._ops.OpOverloadPacket)
    torch.ops._c10d_functional.wait_tensor.default(operator.default(x.detach(), "sum", dist.group.WORLD.group_name))
    functional.broadcast(x, 0, dist.group.WORLD)
    assert this_rank.current_slots().collective == ""
    assert [(c.operation, c.members, c.elements, c.carries_gradient, c.differentiable) for c in log()] == [
        ("all_reduce", (0, 1), 4, False, True),
        ("all_reduce", (0, 1), 4, True, False),
        ("all_gather_tensor", (0, 1), 4, True, True),
        ("all_gather_tensor", (0, 1), 4, False, False),
        ("all_reduce", (0, 1), 4, False, False),
        ("all_reduce", (0, 1), 4, False, False),
        ("broadcast", (0, 1), 4, True, False),
    ]


@pytest.mark.ddp
def test_collectives_can_be_stood_in_for_and_are_made_again_afterwards(
    log: Callable[..., list[Call]], rank: int
) -> None:
    seen: list[str] = []
    x = torch.ones(1)
    with replace_collectives(lambda operation, given, call: seen.append(f"{operation} {sorted(given)} {call.payload}")):
        if rank == 0:  # no other rank comes, and it does not matter
            dist.all_reduce(x, op=dist.ReduceOp.SUM)
    assert seen == (["all_reduce ['op', 'tensor'] float32 of shape (1,)"] if rank == 0 else [])
    dist.all_reduce(x)
    assert x.item() == 2.0 and len(log()) == 1


class SlowToRead:
    def __reduce__(self) -> Any:
        return time.sleep, (1.0,)


def record_and(what: str) -> None:
    collective_log.record_collectives(this_rank.current().directory, this_rank.current().rank)
    this_rank.set_status("step 0: forward")
    if what.startswith("skip") and dist.get_rank() == 1:
        return
    if what == "come late" and dist.get_rank() == 1:
        time.sleep(2.0)
    if what == "take long to read what was gathered":
        dist.gather_object(SlowToRead(), [None, None] if dist.get_rank() == 0 else None)
    if what == "skip an asynchronous one":
        dist.all_reduce(torch.zeros(3), async_op=True).wait()
    else:
        dist.all_reduce(torch.zeros(3))


@pytest.fixture
def watched(ddp_world: DDPWorld) -> DDPWorld:
    """Ranks that have started, and of which a hang is told long before the deadline."""
    world = ddp_world(timeout=60, watch=CollectiveMismatchWatch(patience=0.5))
    world.run(int)
    return world


@pytest.mark.parametrize("what", share(["skip", "skip an asynchronous one"], ["skip"]))
def test_a_rank_that_waits_for_one_that_has_finished_is_told_long_before_the_deadline(
    watched: DDPWorld, what: str
) -> None:
    begun = time.monotonic()
    with pytest.raises(HangError, match=r"[Rr]ank 0 called all_reduce.*rank 1 never did") as caught:
        watched.run(record_and, what)
    assert time.monotonic() - begun < 10
    (stuck,) = [failure for failure in caught.value.failures if failure.kind == "stuck"]
    assert stuck.rank == 0 and stuck.place == "step 0: forward"
    assert what != "skip" or stuck.collective.startswith("all_reduce(")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["come late", "take long to read what was gathered"])
def test_a_rank_that_comes_late_is_waited_for(watched: DDPWorld, what: str) -> None:
    assert watched.run(record_and, what) == [None, None]


def test_who_is_in_a_collective_to_which_all_have_come_waits_for_nobody() -> None:
    gather, reduce = Call("gather_object", "0", (0, 1)), Call("all_reduce", "0", (0, 1), location="a.py:7")
    here = {0: str(gather), 1: str(reduce)}
    assert ranks_in_complete_collective([[gather], [gather, reduce]], here) == {0}
    assert ranks_in_complete_collective([[gather], [reduce]], here) == {0, 1}  # but they do not match
    assert ranks_in_complete_collective([[gather], [gather, reduce]], {0: "recv()"}) == set()
    assert ranks_in_complete_collective([[gather], []], {0: str(gather)}) == set()
    other = Call("all_reduce", "1", (0, 2))
    assert ranks_in_complete_collective([[other], [reduce], []], {0: str(other), 1: str(reduce)}) == set()


def packed(*values: float, operation: str = "all_reduce", location: str = "loss.py:7") -> ReductionInput:
    return ReductionInput(operation, location, values)


def test_the_same_numbers_in_another_order_are_told_with_the_line_and_the_rank() -> None:
    same = packed(0.5, 2.5, 7.0)
    finding = only(judge_packing([[same, packed(2.0, 3.0)], [same, packed(3.0, 2.0)], [same, packed(2.0, 3.0)]]))
    assert (finding.code, finding.subjects, finding.ranks) == ("DDP407", ("all_reduce",), (1,))
    assert finding.location == Location("loss.py", 7)
    assert "element 0: 2; on rank 1: 3, which is element 1 elsewhere" in finding.evidence
    assert len(judge_packing([[packed(2.0, 3.0)] * 2, [packed(3.0, 2.0)] * 2])) == 1, "a line that reduces twice"


def test_what_is_not_a_reordering_is_no_finding() -> None:
    for first, second in (  # equal, other values, sizes, not known, slots of several kinds, operations
        ((2.0, 3.0), packed(2.0, 3.0)),
        ((2.0, 3.0), packed(2.0, 4.0)),
        ((2.0, 3.0), packed(2.0, 3.0, 4.0)),
        ((), packed()),
        ((2.0, 3.0, 0.0, 0.0), packed(0.0, 0.0, 2.0, 3.0)),
        ((2.0, 1.0), packed(1.0, 2.0)),
        ((2.0, -1e9), packed(-1e9, 2.0)),
        ((2.0, 3.0), packed(3.0, 2.0, operation="reduce")),
    ):
        assert judge_packing([[packed(*first)], [second]]) == [], (first, second)


def failure(rank: int, kind: Any, message: str = "it failed", **more: Any) -> RankFailure:
    return RankFailure(rank, kind, message, float(rank), **more)


def judge(*failures: RankFailure, logs: list[list[Call]] | None = None, world_size: int = 2) -> Finding:
    return only(diagnose(FailureFacts(failures, logs or [[]] * world_size)))


def test_a_rank_that_raised_is_the_cause_and_the_one_that_fell_is_evidence() -> None:
    finding = judge(
        failure(1, "raised", "rank 1 raised ValueError: no", type="ValueError", place="step 2: forward"),
        failure(0, "fell", "connection closed by peer"),
    )
    assert (finding.code, finding.subjects, finding.ranks) == ("DDP401", ("step 2: forward",), (1,))
    assert len(finding.evidence) == 2 and finding.message.count(".") == 1
    assert diagnose(FailureFacts([], [[], []])) == []


WAITS_0 = failure(0, "stuck", collective="recv")


@pytest.mark.parametrize(
    ("failures", "code", "ranks"),
    [
        ([failure(0, "raised", type="KeyError"), failure(1, "raised", type="KeyError")], "DDP401", ()),
        ([failure(1, "exited", "rank 1 died of SIGKILL")], "DDP404", (1,)),
        ([WAITS_0], "DDP402", (0,)),
        ([WAITS_0, replace(WAITS_0, rank=1)], "DDP402", ()),
    ],
)
def test_the_cause_of_a_failure(failures: list[RankFailure], code: str, ranks: tuple[int, ...]) -> None:
    finding = judge(*failures)
    assert (finding.code, finding.ranks) == (code, ranks)
    assert code != "DDP401" or finding.message.startswith("Every rank")


@pytest.mark.parametrize("kind", ["raised", "died", "stuck"])
def test_the_line_of_a_failure_is_the_line_of_the_finding(kind: str) -> None:
    assert judge(failure(0, kind, location="pkg/model.py:5")).location == Location("pkg/model.py", 5)
    assert judge(failure(0, kind)).location is None


def test_the_advice_on_a_death_fits_the_signal() -> None:
    died = {code: failure(1, "died", exit_code=code, location="train.py:3") for code in (-11, -6, -9, 3)}
    advice = {code: judge(one).fix for code, one in died.items()}
    assert "memory" in advice[-9] and "last output" in advice[-6] and "C or C++" in advice[-11]
    assert "exception" in advice[3]
    for code in (-11, 3):  # no line to look at
        assert judge(replace(died[code], location="")).fix in ("", RULES["DDP404"].fix)


def test_the_rank_that_hangs_is_the_one_in_no_collective() -> None:
    waits = failure(0, "stuck", place="step 1: backward", collective="all_reduce(float32 of shape (3,))")
    sleeps = failure(1, "stuck", place="step 1: forward")
    finding = judge(waits, sleeps)
    assert (finding.code, finding.subjects, finding.ranks) == ("DDP402", ("step 1: forward",), (1,))
    assert "rank 0: waits in all_reduce(float32 of shape (3,)), in step 1: backward" in finding.evidence
    assert "rank 0: had finished" in only(diagnose(FailureFacts([sleeps], [[], []], [0]))).evidence


def test_the_advice_on_a_hang_is_for_what_the_ranks_do() -> None:
    reducing = '  File "torch/autograd/graph.py", line 3, in _engine_run_backward\n  File "train.py", line 3, in loss'
    looping = '  File "train.py", line 3, in loss\n  File "train.py", line 3, in main'
    in_backward = failure(0, "stuck", place="step 0: backward", stack=reducing, location="train.py:3")
    loops = failure(1, "stuck", place="step 0: forward", stack=looping, location="train.py:9")
    finding = judge(in_backward, loops)
    assert (finding.ranks, finding.subjects, str(finding.location)) == ((1,), ("step 0: forward",), "train.py:9")
    assert finding.what_to_do.startswith("The others wait for rank 1: end the loop")
    assert "--timeout" in finding.what_to_do
    every = judge(replace(loops, rank=0), loops)
    assert every.what_to_do.startswith("No rank waits for another: end the loop") and "--timeout" in every.what_to_do
    for place in ("loading the target", "building the model"):
        slow = judge(replace(loops, rank=0, place=place), replace(loops, place=place)).what_to_do
        assert "--timeout" in slow and "--preload" in slow and "collective" not in slow
    for waits in (WAITS_0, in_backward):
        assert judge(waits, replace(waits, rank=1)).what_to_do == RULES["DDP402"].fix


def test_a_rank_without_samples_is_the_cause_unless_all_are() -> None:
    empty = failure(1, "raised", exception=EmptyShardError("its shard is empty", 2))
    (finding,) = judge_empty_shards([empty], 2)
    assert (finding.code, finding.subjects, finding.ranks, finding.steps) == ("DDP405", ("step 2",), (1,), (2,))
    assert judge_empty_shards([empty, replace(empty, rank=0)], 2) == []
    assert judge_empty_shards([failure(1, "raised")], 2) == []


def test_a_mismatch_in_the_logs_is_the_cause_of_a_hang_or_of_a_broken_connection() -> None:
    logs = [[REDUCE], []]
    assert judge(failure(0, "stuck"), logs=logs).code == "DDP403"
    assert judge(failure(0, "raised", "gloo: connection closed by peer"), logs=logs).code == "DDP403"
    assert judge(failure(1, "raised", "rank 1 raised KeyError"), logs=logs).code == "DDP401"


@pytest.mark.parametrize(
    ("code", "one", "several"),
    [
        (-11, "rank 1 was killed by SIGSEGV", "ranks 1 and 2 were killed by SIGSEGV"),
        (1, "rank 1 ended with exit code 1 before its", "ranks 1 and 2 ended with exit code 1 before their"),
    ],
)
def test_what_happened_to_several_ranks_is_said_in_the_plural(code: int, one: str, several: str) -> None:
    for ranks, words in (([1], one), ([1, 2], several)):
        error = failures.rank_error([failures.failure_of_dead_rank(rank, code, 0.0) for rank in ranks])
        assert str(error).startswith(words)
        (finding,) = diagnose(FailureFacts(error.failures, [[]] * 4))
        assert finding.message.startswith(words[0].upper() + words[1:])
