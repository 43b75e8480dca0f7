"""Recorder of optimizer steps and of printed and saved values, for comparing two runs."""

from __future__ import annotations

import functools
import itertools
import linecache
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.parity import IN_TURN, ParityEnded, ParityStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import (
    is_of_program,
    last_assignment,
    pass_over_packages,
    relative_path,
    user_frame,
    user_location,
)
from ddpcheck.gather.patching import ErrorGuard, Patch, Recorder, in_a_line, patched
from ddpcheck.gather.state.fingerprints import is_shard, local_part
from ddpcheck.gather.steps.gradient_distance import norms, sketches
from ddpcheck.recipe.pytree import tree_tensors
from ddpcheck.record.optimizers.gradient_recorders import norm_before_clip, patch_clip_grad_norm
from ddpcheck.record.parity.draws import DrawReplay, Frameworks, Noise, RankLayers
from ddpcheck.record.parity.own_files import redirect_files
from ddpcheck.record.parity.sample_store import SampleReader
from ddpcheck.record.parity.samples import Samples
from ddpcheck.record.parity.shown import ShownRecorder, ValueTrace
from ddpcheck.record.rank.environment import ParityOptions, when_imported
from ddpcheck.record.recording import follow_steps
from ddpcheck.record.source import program_numbers
from ddpcheck.stream.entries import WatchingFailed

_DDP: Any = nn.parallel.DistributedDataParallel
_MOST_STEPS = 2048
_MOST_DESCRIBED = 1 << 14  # max recorded steps of all optimizers
_MOST_LOOKS = 64
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # rates in param_groups, set by the optimizer or by schedulers
_FEW = 64
_LARGEST = 1 << 22  # max elements of an input whose rows are compared
_FEATURES = 4
_OF_KERNELS = 8  # number of rounding errors by which activations of a deep model differ between two batch sizes


class ParityRecorder(Recorder, subjects=("parity",)):
    """Recorder of steps, values and inputs in this process, since torch was imported."""

    def __init__(self, options: ParityOptions) -> None:
        self._options = options
        self._add: Callable[[Entry], object] | None = None
        self._waiting: list[Entry] = []
        self._process = os.getpid()
        reader = SampleReader(Path(options.samples), options.world_size) if options.replays else None
        self._reader = reader
        self.samples = Samples(self.write, reader, options)
        self._draws = DrawReplay(self.samples, replays=options.draws)
        self._layers = RankLayers(self.samples)
        self._frameworks = Frameworks(is_single_process=reader is not None)
        self._optimizers: WeakKeyDictionary[Any, tuple[int, list[int]]] = WeakKeyDictionary()
        self._numbers = itertools.count()
        self._names: Any = WeakIdKeyDictionary()  # parameter names
        self._losses: list[torch.Tensor] = []
        self._loss_at: Location | None = None
        self._clip: tuple[float, float] | None = None  # (norm, max_norm) of the last clip since the step
        self._input_features = torch.zeros(_FEATURES + 1, dtype=torch.float64)
        self._steps = 0
        self._full_at = 0
        self._in_closure: ParityStep | None = None  # pending step, if the optimizer was called with a closure
        self._described = self._stepped_inside = 0
        self._rates: list[float] | None = None  # the single process's own rates while the ranks' rates are set
        self._trace = ValueTrace(self.write, lambda: self.samples.loads)
        self._shows = ShownRecorder(self.write, self.samples, lambda: self._steps, self._known_rates)
        self._looks = 0
        self.samples.on_pass = self._look
        self._noise = Noise() if options.is_noise else None
        if options.as_rank:
            Patch(dist, "get_rank", functools.partial(_as_rank, rank=options.as_rank))
        follow_steps(self)
        patched(torch.autograd, "backward", self._backward)
        patched(_DDP, "__init__", self._wraps)
        patched(_DDP, "forward", self._forwards)
        patched(torch.optim.Optimizer, "__init__", self._constructs)
        patched(nn.Module, "train", self._switches)
        patch_clip_grad_norm(self._clips)
        when_imported(("numpy.random",), self._draws.follow_numpy)

    def begin(self, add: Callable[[Entry], object], folder: Path, rank: int) -> None:
        """Write recorded and later entries to the log of a rank."""
        self._add, waiting, self._waiting = add, self._waiting, []
        self.samples.begin(folder, rank)
        for entry in waiting:
            add(entry)

    def close(self, why: str = "") -> None:
        """Write the last entries, at the end of the script or comparison."""
        self._trace.end(evaluates=self.samples.evaluates, steps=self._steps)
        full, splits = self.samples.why_full, self.samples.splits_statistics
        batch = self._options.batch if self.samples.is_smaller else 0
        full_at = self._full_at if full else 0
        entry = ParityEnded(self._steps, self.samples.backwards, why, full_at, splits, full, batch)
        scaled = (*sorted(self.samples.scaled),)
        self.write(replace(entry, steps_schedules=self._frameworks.steps_schedules, scaled=scaled))

    def write(self, entry: Entry) -> None:
        if os.getpid() == self._process:
            (self._waiting.append if self._add is None else self._add)(entry)

    # The loop

    def _wraps(self, _wrapper: Any, module: Any = None, *_arguments: Any, **_named: Any) -> Iterator[None]:
        yield
        self.samples.draws = True
        if isinstance(module, nn.Module):
            self._name(module)

    def _name(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self._names.setdefault(parameter, name)

    def _constructs(self, optimizer: Any, *_arguments: Any, **_named: Any) -> Iterator[None]:
        yield
        self.samples.draws = True
        if self._noise is not None:
            self._noise.begin()
            parameters = [local_part(p) for group in optimizer.param_groups for p in group["params"]]
            self._noise.round(parameters, _OF_KERNELS)

    def _switches(self, _module: Any, mode: bool = True) -> None:
        if not mode:
            self._look()
            self.samples.note_evaluation()

    def _look(self) -> None:
        """Record the program's numbers before a possible evaluation."""
        if not self.samples.evaluates and self._looks < _MOST_LOOKS:
            self._looks += 1
            self._shows.look()
        self._trace.begin()

    def _forwards(self, wrapper: Any, *inputs: Any, **named: Any) -> None:
        if self._noise is not None:  # not earlier: the script may construct another model after its first wrapper
            self._noise.begin()
        if not wrapper.training or not torch.is_grad_enabled():
            return
        for tensor in tree_tensors((inputs, named)):
            if tensor.dim() and 0 < tensor.numel() <= _LARGEST and tensor.layout == torch.strided:
                self._input_features += _features(tensor.detach())

    def _backward(self, tensors: Any = None, *_arguments: Any, **_named: Any) -> None:
        if os.getpid() != self._process:
            return
        limit = self._options.backwards
        if self._reader is not None and 0 < limit <= self.samples.backwards:
            self._leave(f"after {limit} backward passes, for which samples were recorded")
        self._trace.end(evaluates=self.samples.evaluates, steps=self._steps)
        if not self.samples.why_full:
            self._full_at = self.samples.backwards
        self.samples.note_backward()
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            self._losses.append(tensors.detach())
            frame = user_frame(sys._getframe(1))
            self._loss_at = None if frame is None else _loss_line(frame.f_code.co_filename, frame.f_lineno)

    def _clips(self, *arguments: Any, **named: Any) -> None:
        limit, norm = named.get("max_norm", arguments[1:2]), norm_before_clip(arguments, named)
        if norm is not None and not math.isinf(norm):
            self._clip = float(norm), float(limit[0] if isinstance(limit, tuple) else limit)

    def _leave(self, why: str) -> None:
        """End the process without an exception, which the script could catch."""
        self.close(why)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def before_step(self, optimizer: Any, has_closure: bool, inside: bool) -> None:
        """Record an optimizer's gradients before its step, and set the ranks' learning rates.

        If the optimizer has a closure, which computes the gradients, they are recorded after the step.
        """
        if os.getpid() != self._process:
            return
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = next(self._numbers), [0]
        number, counts = self._optimizers[optimizer]
        count = counts[0]
        counts[0] += 1
        if not inside or self._stepped_inside < self.samples.backwards:  # steps in parameter hooks count once
            self._steps += 1
            self._stepped_inside = self.samples.backwards if inside else 0
        if self._reader is not None and 0 < self._options.steps < self._steps:
            self._leave(f"after {self._options.steps} optimizer steps, as --check-parity-steps says")
        if count >= _MOST_STEPS or self._described >= _MOST_DESCRIBED:
            return
        self._described += 1
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        step = self._step_of(optimizer, number, count, rates)
        if has_closure:
            self._in_closure = step
        else:
            self._note_gradients(optimizer, step)
        key = f"rates {number} {count}"
        if self._reader is None:
            self.samples.keep(key, rates)
        elif (recorded := self._reader.get(key)) and recorded[0] != rates and len(recorded[0]) == len(rates):
            self._rates = rates
            _set_rates(optimizer, recorded[0])

    def _compare_rows(self, number: int) -> None:
        """Exit if the first step has the rows of several micro-batches per rank."""
        key, rows = f"rows {number}", self._input_features[-1].item()
        if self._reader is None:
            self.samples.keep(key, rows)
            return
        rank_rows = self._reader.get(key)
        if len(rank_rows) > 1 and not self._options.in_turn and 0 < sum(rank_rows) * len(rank_rows) == rows:
            self._leave(IN_TURN)

    def after_step(self, optimizer: Any, _has_closure: bool) -> None:
        if (step := self._in_closure) is not None:
            self._in_closure = None
            self._note_gradients(optimizer, step)
        if self._rates is not None:
            _set_rates(optimizer, self._rates)
            self._rates = None

    def _step_of(self, optimizer: Any, number: int, count: int, rates: Sequence[float]) -> ParityStep:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not count and any(p not in self._names for p in parameters):
            for _, value in program_numbers.program_contents():
                if isinstance(value, nn.Module):
                    self._name(value)
        names = [self._names.get(p, f"parameter {index}") for index, p in enumerate(parameters)]
        values = norms({f"{index}": local_part(p) for index, p in enumerate(parameters)})
        return ParityStep(
            number,
            count,
            user_location(sys._getframe(3)),
            values=(*values.values(),),
            rates=tuple(rates),
            sharded=any(map(_is_part, parameters)),
            names=() if count else tuple(names),
            elements=tuple(local_part(p).numel() for p in parameters) if not count else (),
        )

    def _note_gradients(self, optimizer: Any, step: ParityStep) -> None:
        if not step.count:
            self._compare_rows(step.optimizer)
        parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
        gradients = {f"{index}": local_part(p.grad) for index, p in parameters.items() if p.grad is not None}
        if self._noise is not None:
            self._noise.round(gradients.values())
        sizes = norms(gradients)
        if step.sharded:  # keep one replica of each, so that the ranks' norms combine to the full norm
            sizes = {index: size * _counts(parameters[int(index)]) for index, size in sizes.items()}
        entry = replace(
            step,
            norms=tuple(sizes.get(f"{index}", -1.0) for index in parameters),
            gradient=() if step.sharded else _together(sketches(gradients)),
            losses=tuple(float(loss) for loss in self._losses[:_FEW]),
            loss_at=self._loss_at,
            clip=self._clip,
            backwards=self.samples.backwards,
            samples=tuple((self._input_features * (not self.samples.is_padded)).tolist()),  # padded rows differ
        )
        self.write(entry)
        self._clip, self._losses, self._input_features = None, [], torch.zeros_like(self._input_features)

    def _known_rates(self) -> set[float]:
        groups = (group for optimizer in [*self._optimizers] for group in optimizer.param_groups)
        return {float(value) for group in groups for name, value in group.items() if name in _RATES}


_LOSS = re.compile(r"scale\((\w+)\)|backward\((\w+)|(\w+)\.backward\(")


@functools.cache
def _loss_line(path: str, line: int) -> Location:
    """Return the last assignment of a backward call's loss, or the call's line."""
    location, match = Location(relative_path(path), line), _LOSS.search(linecache.getline(path, line))
    name = next(filter(None, match.groups()), "") if match else ""
    return (last_assignment(location, name) if name else None) or location


def _features(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums of nonlinear functions of a tensor's rows, then the row count.

    These are random Fourier features (Rahimi and Recht, 2007). Sums over ranks equal sums over all rows; different rows
    have different sums, while rounding changes little.
    """
    rows = tensor.reshape(len(tensor), -1).cpu().double()
    generator = torch.Generator().manual_seed(rows.shape[1])
    directions = torch.randn(rows.shape[1], _FEATURES, generator=generator, dtype=torch.float64)
    return torch.cat([(rows @ directions / rows.shape[1] ** 0.5).cos().sum(0), torch.tensor([float(len(rows))])])


def _as_rank(original: Callable[..., int], rank: int) -> Callable[..., int]:
    """Make `get_rank` return `rank` to callers in the program, not in packages."""

    @functools.wraps(original)
    def get_rank(*arguments: Any, **named: Any) -> int:
        actual = original(*arguments, **named)
        return rank if is_of_program(sys._getframe(1).f_code.co_filename) else actual

    return get_rank


def _is_part(parameter: torch.Tensor) -> bool:
    """Return True if a parameter is sharded by `fully_shard`, tensor parallelism or FullyShardedDataParallel."""
    in_fsdp1 = getattr(parameter, "_fsdp_flattened", False) or type(parameter).__name__ == "FlatParameter"
    return is_shard(parameter) or in_fsdp1


def _counts(parameter: Any) -> bool:
    """Return False if this rank's shard duplicates the shard of a lower rank."""
    if not is_shard(parameter):
        return _is_part(parameter) or not dist.is_initialized() or dist.get_rank() == 0
    coordinate = parameter.device_mesh.get_coordinate() or ()
    return not any(i for i, placement in zip(coordinate, parameter.placements, strict=True) if placement.is_replicate())


def _together(parts: Mapping[str, tuple[float, ...]]) -> tuple[float, ...]:
    """Add up the sketches of all tensors, permuted and with tensor-dependent signs."""
    size = max(map(len, parts.values()), default=0)
    total = [0.0] * size
    for index, part in enumerate(parts.values()):
        for column, value in enumerate(part):
            position = (column * 7 + index * 13) % size
            total[position] += value if (index * 31 + column * 17) % 5 % 2 else -value
    return tuple(total)


def _set_rates(optimizer: Any, rates: Sequence[float]) -> None:
    groups = [group for group in optimizer.param_groups if "lr" in group]
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


recorder: ParityRecorder | None = None
"""Recorder of this process, or None before torch is imported."""


def start(options: ParityOptions, folder: str) -> None:
    """Start recording; torch has just been imported.

    A single process, possibly without a process group, writes its files and its log below `folder`.
    """
    global recorder
    pass_over_packages()
    if options.replays:
        redirect_files(folder, options.since, [options.samples])
    recorder = current = ParityRecorder(options)

    def failed(error: Exception, failed_recorder: Recorder) -> None:
        current.write(WatchingFailed("", failed_recorder.name, ("parity",), 0, in_a_line(error)))

    ErrorGuard.taken_by = failed
