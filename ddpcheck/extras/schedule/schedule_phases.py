"""Phases that simulate one rank, whose tensors stand for the tensors of other ranks.

A rank that is the source of a broadcast or scatter stores the data in a folder for ranks that are simulated later.
Small tensors of collectives called from Python are stored too, since a branch may depend on them (a vote to skip a
step): a later simulation round gets the answers of a real world. Only the order of collectives matters here, not the
values. torch's `FakeProcessGroup` is similar, but leaves results unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ddpcheck.findings.evidence.endings import ScheduledCall, Simulated, SimulatedRank
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.source_lines import frames_from
from ddpcheck.gather.collectives import collective_log
from ddpcheck.gather.collectives.fake_collectives import CompletedWork
from ddpcheck.gather.collectives.groups import name_of_group
from ddpcheck.gather.ddp.sync_batchnorm import synchronised_on_cpu
from ddpcheck.gather.phases.local_step import sample_count
from ddpcheck.gather.state.randomness import make_deterministic, seed_everything
from ddpcheck.gather.state.training_mode import into_training
from ddpcheck.gather.steps import training_step
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.recipe.target import load_on_rank
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds.compilation import run_eagerly

_RANKS_OF_A_MACHINE = 8  # in the environment variables of the launcher


def simulate(target: str | Recipe, seed: int, rank: int, world: Simulated) -> SimulatedRank:
    """Train as one rank without the other ranks, and save the collectives."""
    local_size = min(_RANKS_OF_A_MACHINE, world.world_size)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world.world_size), LOCAL_WORLD_SIZE=str(local_size))
    os.environ.update(LOCAL_RANK=str(rank % local_size), GROUP_RANK=str(rank // local_size))
    run_eagerly()
    calls, answers = init_simulated_group(rank, world.world_size, world.folder)
    with synchronised_on_cpu():
        recipe, device = load_on_rank(target), torch.device("cpu")
        make_deterministic(device)
        this_rank.set_status("building the model")
        seed_everything(training_step.model_seed(seed))
        module = recipe.build_model()
        into_training(module)
        this_rank.set_status("wrapping the model")
        wrapped = recipe.wrap_module(module, device)
        optimizer = recipe.build_optimizer(p for p in wrapped.parameters() if p.requires_grad)
        for step in range(world.steps):
            batch = training_step.make_batch(recipe, step, seed=seed, world_size=world.shards)
            shard = recipe.local_batch(batch, rank % world.shards, world.shards)
            training_step.run_optimizer(optimizer, "zero_grad")
            loss = training_step.compute_loss(
                recipe, wrapped, shard, step=step, seed=training_step.step_seed(seed, step, rank)
            )
            this_rank.set_status(f"step {step}: backward")
            training_step.run_backward(loss.total)
            this_rank.set_status(f"step {step}: optimizer")
            training_step.run_optimizer(optimizer, "step")
    answers.write()
    return SimulatedRank(rank, _write_schedule(calls, world.folder))


def count_shards(target: str | Recipe, seed: int, world_size: int) -> int:
    """Return the number of shards per batch; at most 2 if ranks outnumber samples."""
    recipe = load_on_rank(target)
    if recipe.shard is not None:
        return world_size
    size = sample_count(training_step.make_batch(recipe, 0, seed=seed, world_size=1))
    return world_size if size is None or size >= world_size else min(2, max(size, 1))


def _write_schedule(calls: list[ScheduledCall], folder: Path) -> str:
    data = msgspec.msgpack.encode(calls)
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    file = folder / f"schedule-{digest}"
    if not file.exists():
        part = folder / f"{digest}-{os.getpid()}.part"
        part.write_bytes(data)
        part.replace(file)
    return digest


_LARGEST = 1024  # max bytes per rank and call
_REDUCED_BY = {"SUM": "sum", "PRODUCT": "prod", "AVG": "mean", "MIN": "amin", "MAX": "amax"}
_SKIPPED = ("ddpcheck.", "torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "typing_extensions")
_Tensors = list[torch.Tensor]
_Parts = list[_Tensors | None]  # tensors per C++ collective of one call; None if too large


class SimulatedAnswers:
    """Results for the collectives of a simulated rank, from tensors sent in earlier rounds."""

    def __init__(self, folder: Path, rank: int, num_calls: Callable[[], int]) -> None:
        """Use the answers that `combine` saved; `num_calls` counts collectives called from Python."""
        self._folder = folder
        self._rank = rank
        self._num_calls = num_calls
        self._last = -1
        self._sent: dict[str, tuple[tuple[int, ...], list[_Parts]]] = {}  # group name -> (ranks, sent tensors per call)

    def ask(self, group: Any, name: str, tensors: Any) -> list[_Tensors] | None:
        """Record this rank's input of a collective; return all ranks' inputs, None if unknown.

        One Python call may run several collectives (`all_gather_object` gathers sizes first): all get answers, or none.
        """
        if not collective_log.in_collective() or _is_made_by_torch(sys._getframe(1)):
            return None
        members, calls = self._sent.setdefault(name, (tuple(dist.get_process_group_ranks(group)), []))
        if self._num_calls() != self._last:
            self._last = self._num_calls()
            calls.append([])
        small = sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= _LARGEST
        calls[-1].append([tensor.detach().clone() for tensor in tensors] if small else None)
        with contextlib.suppress(OSError, IndexError):
            calls_by_rank: list[list[_Tensors]] = torch.load(self._folder / _file_of(name, len(calls) - 1))
            sent = [parts[len(calls[-1]) - 1] for parts in calls_by_rank]
            if list(map(_spec, sent[members.index(self._rank)])) == list(map(_spec, tensors)):
                return sent
        return None

    def write(self) -> None:
        """Save the tensors sent by this rank."""
        torch.save(self._sent, self._folder / f"given-{self._rank}")


def _is_made_by_torch(frame: FrameType | None) -> bool:
    modules = (str(caller.f_globals.get("__name__", "")) for caller in frames_from(frame))
    return next((name for name in modules if not name.startswith(_SKIPPED)), "").startswith("torch.")


def reduced(sent: list[torch.Tensor], operation: Any) -> torch.Tensor | None:
    """Reduce the tensors of all ranks; None for an unknown operation."""
    method = next((method for name, method in _REDUCED_BY.items() if operation == getattr(dist.ReduceOp, name)), "")
    if not method:
        return None
    stacked = torch.stack(sent)
    wide = stacked if stacked.is_floating_point() or stacked.is_complex() or method != "mean" else stacked.double()
    result: torch.Tensor = getattr(wide, method)(0)
    return result


def combine(world: Simulated) -> str:
    """Save all ranks' tensors as collective results for the next round, if shapes agree.

    Returns a digest of the tensors that differ between ranks, or '' if none differ.
    """
    sent: dict[tuple[str, tuple[int, ...], int], list[_Parts]] = {}
    for rank in range(world.world_size):
        for name, (members, calls) in torch.load(world.folder / f"given-{rank}").items():
            for number, parts in enumerate(calls):
                sent.setdefault((name, members, number), []).append(parts)
    digest = hashlib.blake2b(digest_size=16)
    differ = False
    for key, parts_by_rank in sent.items():
        reprs = [
            repr([None if part is None else [(_spec(tensor), tensor.tolist()) for tensor in part] for part in parts])
            for parts in parts_by_rank
        ]
        if len(set(reprs)) > 1:
            differ = True
            digest.update(repr((key, reprs)).encode())
        name, members, number = key
        if len(parts_by_rank) == len(members) and (aligned := _align(parts_by_rank)) is not None:
            torch.save(aligned, world.folder / _file_of(name, number))
    return digest.hexdigest() if differ else ""


def _align(parts_by_rank: list[_Parts]) -> list[list[_Tensors]] | None:
    """Pad pickled objects to equal length; return tensors by rank, None if shapes differ."""
    aligned: list[list[_Tensors]] = [[] for _ in parts_by_rank]
    if len({len(parts) for parts in parts_by_rank}) > 1:
        return None
    for rank_parts in zip(*parts_by_rank, strict=True):
        known = [part for part in rank_parts if part is not None]
        longest = max((len(part[0]) for part in known if _is_object(part)), default=0)
        if longest and all(map(_is_object, known)):
            known = [[torch.nn.functional.pad(part[0], (0, longest - len(part[0])))] for part in known]
        if len(known) < len(rank_parts) or len({tuple(map(_spec, part)) for part in known}) > 1:
            return None
        for parts, part in zip(aligned, known, strict=True):
            parts.append(part)
    return aligned


def _is_object(part: _Tensors) -> bool:
    return len(part) == 1 and part[0].dtype == torch.uint8 and part[0].dim() == 1


def _file_of(name: str, number: int) -> str:
    return f"answer-{name}-{number}".replace("/", "_")


def _spec(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


BACKEND = "simulated"
_LARGEST_SENT = 1 << 20  # max bytes stored by a root for the other ranks
_Group: Any = dist.ProcessGroup


class SimulatedGroup(_Group):  # type: ignore[misc]
    """Process group with only this rank as a process; other ranks are simulated."""

    def __init__(self, rank: int, size: int, folder: Path, answers: SimulatedAnswers) -> None:
        super().__init__(rank, size)
        self._folder = folder
        self._answers = answers
        self._sent: Counter[str] = Counter()
        self._name = ""

    def _log(self, operation: str, *tensors: Any) -> None:
        """Log a collective called by DDP's C++ code; calls from Python are logged elsewhere."""
        payload = ", ".join(f"{str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape)}" for t in tensors)
        collective_log.log_ddp_collective(f"{operation} of DDP", payload, self)

    def _share_from_root(self, operation: str, root: int, tensors: list[torch.Tensor], own: list[torch.Tensor]) -> None:
        """Simulate a collective with a source: `root` saves tensors `own`, other ranks load `tensors`."""
        number = self._sent[operation]
        self._sent[operation] += 1
        file = self._folder / f"{operation}-{name_of_group(self)}-{number}".replace("/", "_")
        if root == self.rank():
            if sum(t.numel() * t.element_size() for t in own) <= _LARGEST_SENT:
                torch.save([t.detach().clone() for t in own], file)
            return
        with contextlib.suppress(OSError, RuntimeError, EOFError):
            sent = torch.load(file)
            values = [sent[self.rank()]] if operation == "scatter" else sent
            for tensor, value in zip(tensors, values, strict=True):
                tensor.detach().copy_(value)

    # Methods called by torch

    def getBackendName(self) -> str:
        return BACKEND

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        self._log("all_reduce", *tensors)
        operation, sent = getattr(opts, "reduceOp", None), self._answers.ask(self, self._name, tensors)
        for index, tensor in enumerate(tensors):
            answer = None if sent is None else reduced([rank_tensors[index] for rank_tensors in sent], operation)
            if answer is None:
                _scale_to_world(tensor, operation, self.size())
            else:
                tensor.detach().copy_(answer)
        return CompletedWork(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        return self.allreduce(tensors, opts) if getattr(opts, "rootRank", 0) == self.rank() else CompletedWork(tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        self._log("broadcast", *tensors)
        self._share_from_root("broadcast", getattr(opts, "rootRank", 0), tensors, tensors)
        return CompletedWork(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self._log("all_gather", *inputs)
        sent = self._answers.ask(self, self._name, inputs) or [inputs] * self.size()
        for index, output in enumerate(outputs):
            for part, rank_tensors in zip(output, sent, strict=True):
                part.copy_(rank_tensors[index])
        return CompletedWork(outputs[0] if outputs else [])

    def _allgather_base(self, output: Any, source: Any, opts: Any = None) -> Any:
        sent = self._answers.ask(self, self._name, [source]) or [[source]] * self.size()
        output.copy_(torch.cat([part.reshape(-1) for (part,) in sent]).reshape(output.shape))
        return CompletedWork([output])

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, input_tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, input_tensor)
        return CompletedWork(outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, input_list in zip(outputs, inputs, strict=True):
            output.copy_(input_list[self.rank()])
            _scale_to_world(output, getattr(opts, "reduceOp", None), self.size())
        return CompletedWork(outputs)

    def _reduce_scatter_base(self, output: Any, source: Any, opts: Any = None) -> Any:
        self.reduce_scatter([output.reshape(-1)], [source.reshape(self.size(), -1)], opts)
        return CompletedWork([output])

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, input_tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, input_tensor, opts)
        return CompletedWork(outputs)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, input_tensor in zip(outputs, inputs, strict=True):
            source = input_tensor.reshape(-1)  # is repeated if it is shorter than the output
            if output.numel() and source.numel():
                index = torch.arange(output.numel()) % source.numel()
                output.copy_(source[index].reshape(output.shape))
        return CompletedWork(outputs)

    def alltoall_base(self, output: Any, source: Any, *_sizes: Any) -> Any:
        return self.alltoall([output], [source])

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, input_tensor in zip(outputs or (), inputs, strict=False):
            for part in output:
                part.copy_(input_tensor)
        return CompletedWork(outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        input_list = list(inputs[0]) if inputs else []
        if input_list:
            outputs[0].copy_(input_list[self.rank()])
        self._share_from_root("scatter", getattr(opts, "rootRank", 0), outputs, input_list)
        return CompletedWork(outputs)

    def barrier(self, opts: Any = None) -> Any:
        return CompletedWork([])

    def send(self, tensors: Any, *_args: Any) -> Any:
        return CompletedWork(tensors)

    recv = recv_anysource = send


def _scale_to_world(tensor: torch.Tensor, operation: Any, size: int) -> None:
    if operation == dist.ReduceOp.SUM:
        tensor.detach().mul_(size)
    elif operation == dist.ReduceOp.PRODUCT:
        tensor.detach().pow_(size)


def init_simulated_group(rank: int, world_size: int, folder: Path) -> tuple[list[ScheduledCall], SimulatedAnswers]:
    """Initialize a default process group with this rank real and all others simulated.

    Returns the list of this process's collectives, which grows with each call, and the recorder of sent tensors.
    """
    calls: list[ScheduledCall] = []
    answers = SimulatedAnswers(folder, rank, calls.__len__)

    def make(_store: Any, rank: int, size: int, _timeout: Any) -> SimulatedGroup:
        return SimulatedGroup(rank, size, folder, answers)

    dist.Backend.register_backend(BACKEND, make, devices=["cpu"])
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
    collective_log.replace_functions(("new_group",), _new_group_maker)
    collective_log.replace_functions(
        ("monitored_barrier",), lambda _name, _original: lambda group=None, *_args, **_kwargs: dist.barrier(group)
    )
    collective_log.record_calls(lambda call: calls.append(ScheduledCall(call)))
    collective_log.before_collective.append(functools.partial(_mark_waiting, calls))
    return calls, answers


def _new_group_maker(_name: str, original: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(original)
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(ranks, timeout, None, *args, **kwargs)

    return new_group


def _mark_waiting(calls: list[ScheduledCall], call: Call, kwargs: Mapping[str, Any]) -> None:
    """Set `waits` of the last collective, unless the call is asynchronous or functional."""
    if calls[-1].call is call:
        is_async = kwargs.get("async_op") or "self" in kwargs or "group_name" in kwargs
        calls[-1] = ScheduledCall(call, waits=not is_async)
