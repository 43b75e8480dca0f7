"""The handles of asynchronous collectives, on real ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.loop import PendingTensorWritten, WorkAwaited, WorkDropped

AVERAGE = dist.ReduceOp.AVG


def started(tensor: torch.Tensor, *, op: Any = dist.ReduceOp.SUM, pause: float = 0.0) -> dist.Work:
    """Start a collective; gloo's thread has written the result, and divided it, after a pause of 0.2 seconds."""
    work = dist.all_reduce(tensor, op=op, async_op=True)
    time.sleep(pause)
    assert work is not None
    return work


def dropped(gradient: torch.Tensor) -> None:
    dist.all_reduce(gradient.data, async_op=True)


def of_a_number(gradient: torch.Tensor) -> None:
    number = torch.ones(1)
    dist.all_reduce(number, async_op=True)
    number += 1


def of_an_item(gradient: torch.Tensor) -> None:
    numbers = {"loss": torch.ones(1)}
    dist.all_reduce(numbers["loss"], async_op=True)
    numbers["loss"] += 1


def of_a_buffer(gradient: torch.Tensor) -> None:
    norm = torch.nn.BatchNorm1d(2)
    dist.all_reduce(norm.running_mean, async_op=True)
    norm.reset_running_stats()


def coalesced(gradient: torch.Tensor) -> None:
    with dist._coalescing_manager(async_ops=True) as handles:
        dist.all_reduce(gradient, async_op=True)
    handles.wait()


def of_sparse_numbers(gradient: torch.Tensor) -> None:
    started(torch.eye(2).to_sparse(), pause=0.2).wait()


def of_an_average(gradient: torch.Tensor) -> None:
    started(gradient, op=AVERAGE).wait()
    started(gradient, op=AVERAGE, pause=0.2).wait()
    gradient += 1


def of_an_average_onto_a_rank(gradient: torch.Tensor) -> None:
    work: Any = dist.reduce(torch.ones(3), 0, op=AVERAGE, async_op=True)
    time.sleep(0.2)
    work.wait()


def of_a_part_of_what_is_scattered(gradient: torch.Tensor) -> None:
    whole = torch.ones(8)
    work: Any = dist.reduce_scatter_tensor(whole.chunk(2)[dist.get_rank()], whole, async_op=True)
    work.wait()


def written_while_it_is_scattered(gradient: torch.Tensor) -> None:
    whole = torch.cat([gradient, gradient[:1]])
    work: Any = dist.reduce_scatter_tensor(torch.empty(2), whole, op=AVERAGE, async_op=True)
    whole.zero_()
    work.wait()


def of_groups_of_single_ranks(gradient: torch.Tensor) -> None:
    for rank in range(dist.get_world_size()):
        work = dist.all_reduce(gradient, group=dist.new_group([rank]), async_op=True)
        if work is not None:  # None on ranks that are no members
            work.wait()


def of_what_nobody_reads(gradient: torch.Tensor) -> None:
    dist.all_reduce(torch.ones(1), async_op=True)


def waited_late(gradient: torch.Tensor, **options: Any) -> None:
    work = started(gradient, **options)
    gradient /= 2
    work.wait()


def waited(gradient: torch.Tensor) -> None:
    started(gradient).wait()
    gradient /= 2


def asked_in_turn(gradient: torch.Tensor) -> None:
    work = started(gradient)
    while not work.is_completed():
        pass


def parts(gradient: torch.Tensor) -> None:
    """Each is written after the one before has been started; and they have their version in common."""
    flat = torch.zeros(4)
    works = []
    for place in range(4):
        flat[place] = place
        works.append(started(flat[place : place + 1]))
    for work in works:
        work.wait()


def then(gradient: torch.Tensor) -> None:
    started(gradient).get_future().then(lambda future: future.value()[0] / 2).wait()


LATE = [partial(waited_late, **options) for options in ({}, {"op": AVERAGE}, {"op": AVERAGE, "pause": 0.2})]
AWAITED = [waited, asked_in_turn, parts, then, of_sparse_numbers, of_an_average, of_an_average_onto_a_rank]
CASES: list[tuple[list[type[Entry]], Sequence[Callable[[torch.Tensor], None]]]] = [
    ([WorkDropped], [dropped, of_a_number, of_an_item, of_a_buffer]),
    ([], [of_what_nobody_reads, coalesced]),
    ([WorkAwaited, PendingTensorWritten], [*LATE, written_while_it_is_scattered]),
    ([WorkAwaited], [*AWAITED, of_groups_of_single_ranks, of_a_part_of_what_is_scattered]),
]
NO_GRADIENTS = (of_a_number, of_an_item, of_a_buffer, written_while_it_is_scattered)


@pytest.mark.ddp(world_size=2)
def test_what_becomes_of_asynchronous_collectives() -> None:
    from ddpcheck.gather.collectives.collective_log import record_calls
    from ddpcheck.record.rank.work_recorder import WorkRecorder

    seen: list[Entry] = []
    gradient = torch.ones(3)
    record_calls(lambda call: None)
    recorder = WorkRecorder(seen.append, lambda places: gradient.data_ptr() in places)
    for case, kinds in ((case, kinds) for kinds, cases in CASES for case in cases):
        seen.clear()
        recorder._reported.clear()
        case(gradient)
        assert [type(entry) for entry in seen] == kinds, case
        faults = [entry for entry in seen if isinstance(entry, WorkDropped | PendingTensorWritten)]
        assert all(fault.of_gradients == (case not in NO_GRADIENTS) for fault in faults), case
        dist.barrier()
        dist.barrier(async_op=True)
