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
from ddpcheck.gather.patching import ErrorGuard, Patch, Recorder, one_line_error, patched
from ddpcheck.gather.state.fingerprints import is_dtensor, local_part
from ddpcheck.gather.steps.gradient_distance import norms, sketches
from ddpcheck.recipe.pytree import tree_tensors
from ddpcheck.record.optimizers.gradient_recorders import norm_before_clip, patch_clip_grad_norm
from ddpcheck.record.parity.draws import DrawReplay, DropoutReplay, Frameworks, Noise
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
_MOST_RECORDED = 1 << 14  # max recorded steps of all optimizers
_MOST_EVALUATIONS = 64
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # rates in param_groups, set by the optimizer or by schedulers
_FEW = 64
_LARGEST = 1 << 22  # max elements of an input whose rows are compared
_FEATURES = 4
_OF_KERNELS = 8  # number of rounding errors by which activations of a deep model differ between two batch sizes


class ParityRecorder(Recorder, subjects=("parity",)):
    """Recorder of steps, shown numbers and inputs, to compare ranks with a single process."""

    def __init__(self, options: ParityOptions) -> None:
        self._options = options
        self._add: Callable[[Entry], object] | None = None
        self._early_entries: list[Entry] = []
        self._process = os.getpid()
        reader = SampleReader(Path(options.samples), options.world_size) if options.replays else None
        self._reader = reader
        self.samples = Samples(self.write, reader, options)
        self._draws = DrawReplay(self.samples, replays=options.draws)
        self._layers = DropoutReplay(self.samples)
        self._frameworks = Frameworks(is_single_process=reader is not None)
        self._optimizers: WeakKeyDictionary[Any, tuple[int, list[int]]] = WeakKeyDictionary()
        self._optimizer_numbers = itertools.count()
        self._names: Any = WeakIdKeyDictionary()  # parameter names
        self._losses: list[torch.Tensor] = []
        self._loss_location: Location | None = None
        self._clip: tuple[float, float] | None = None  # (norm, max_norm) of the last clip since the step
        self._input_features = torch.zeros(_FEATURES + 1, dtype=torch.float64)
        self._steps = 0
        self._backwards_until_full = 0
        self._pending_step: ParityStep | None = None  # pending step, if the optimizer was called with a closure
        self._recorded_steps = self._last_backward_with_step = 0
        self._rates: list[float] | None = None  # the single process's own rates while the ranks' rates are set
        self._trace = ValueTrace(self.write, lambda: self.samples.loads)
        self._shown_recorder = ShownRecorder(self.write, self.samples, lambda: self._steps, self._known_rates)
        self._evaluation_count = 0
        self.samples.on_pass = self._begin_evaluation
        self._noise = Noise() if options.is_noise else None
        if options.as_rank:
            Patch(dist, "get_rank", functools.partial(_patched_get_rank, rank=options.as_rank))
        follow_steps(self)
        patched(torch.autograd, "backward", self._record_backward)
        patched(_DDP, "__init__", self._record_wrapper)
        patched(_DDP, "forward", self._record_inputs)
        patched(torch.optim.Optimizer, "__init__", self._record_optimizer)
        patched(nn.Module, "train", self._record_eval_mode)
        patch_clip_grad_norm(self._record_clip)
        when_imported(("numpy.random",), self._draws.follow_numpy)

    def begin(self, add: Callable[[Entry], object], folder: Path, rank: int) -> None:
        """Add entries recorded so far, and later entries, to the log of a rank."""
        self._add, waiting, self._early_entries = add, self._early_entries, []
        self.samples.begin(folder, rank)
        for entry in waiting:
            add(entry)

    def close(self, why: str = "") -> None:
        """Write the last entries; `why`: reason to end before the script does, or ""."""
        self._trace.end(evaluates=self.samples.evaluates, steps=self._steps)
        full, splits = self.samples.why_full, self.samples.splits_statistics
        batch = self._options.batch if self.samples.is_smaller else 0
        full_at = self._backwards_until_full if full else 0
        entry = ParityEnded(self._steps, self.samples.backwards, why, full_at, splits, full, batch)
        scaled = (*sorted(self.samples.scaled),)
        self.write(replace(entry, steps_schedules=self._frameworks.steps_schedules, scaled_variables=scaled))

    def write(self, entry: Entry) -> None:
        if os.getpid() == self._process:
            (self._early_entries.append if self._add is None else self._add)(entry)

    # The loop

    def _record_wrapper(self, _wrapper: Any, module: Any = None, *_arguments: Any, **_named: Any) -> Iterator[None]:
        yield
        self.samples.draws = True
        if isinstance(module, nn.Module):
            self._record_names(module)

    def _record_names(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            self._names.setdefault(parameter, name)

    def _record_optimizer(self, optimizer: Any, *_arguments: Any, **_named: Any) -> Iterator[None]:
        yield
        self.samples.draws = True
        if self._noise is not None:
            self._noise.begin()
            parameters = [local_part(p) for group in optimizer.param_groups for p in group["params"]]
            self._noise.round(parameters, _OF_KERNELS)

    def _record_eval_mode(self, _module: Any, mode: bool = True) -> None:
        if not mode:
            self._begin_evaluation()
            self.samples.note_evaluation()

    def _begin_evaluation(self) -> None:
        """Trace numbers from now on, since the script may be starting an evaluation."""
        if not self.samples.evaluates and self._evaluation_count < _MOST_EVALUATIONS:
            self._evaluation_count += 1
            self._shown_recorder.keep_known_numbers()
        self._trace.begin()

    def _record_inputs(self, wrapper: Any, *inputs: Any, **named: Any) -> None:
        if self._noise is not None:  # not earlier: the script may construct another model after its first wrapper
            self._noise.begin()
        if not wrapper.training or not torch.is_grad_enabled():
            return
        for tensor in tree_tensors((inputs, named)):
            if tensor.dim() and 0 < tensor.numel() <= _LARGEST and tensor.layout == torch.strided:
                self._input_features += _feature_sums(tensor.detach())

    def _record_backward(self, tensors: Any = None, *_arguments: Any, **_named: Any) -> None:
        if os.getpid() != self._process:
            return
        limit = self._options.backwards
        if self._reader is not None and 0 < limit <= self.samples.backwards:
            self._exit_process(f"after {limit} backward passes, for which samples were recorded")
        self._trace.end(evaluates=self.samples.evaluates, steps=self._steps)
        if not self.samples.why_full:
            self._backwards_until_full = self.samples.backwards
        self.samples.note_backward()
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            self._losses.append(tensors.detach())
            frame = user_frame(sys._getframe(1))
            self._loss_location = None if frame is None else _loss_line(frame.f_code.co_filename, frame.f_lineno)

    def _record_clip(self, *arguments: Any, **named: Any) -> None:
        limit, norm = named.get("max_norm", arguments[1:2]), norm_before_clip(arguments, named)
        if norm is not None and not math.isinf(norm):
            self._clip = float(norm), float(limit[0] if isinstance(limit, tuple) else limit)

    def _exit_process(self, why: str) -> None:
        """End the process without an exception, which the script could catch."""
        self.close(why)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def before_step(self, optimizer: Any, has_closure: bool, inside: bool) -> None:
        """Record gradients before an optimizer step; the single process uses the ranks' learning rates.

        With a closure, which computes the gradients, the gradients are recorded after the step.
        """
        if os.getpid() != self._process:
            return
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = next(self._optimizer_numbers), [0]
        number, counts = self._optimizers[optimizer]
        count = counts[0]
        counts[0] += 1
        if not inside or self._last_backward_with_step < self.samples.backwards:  # steps in parameter hooks count once
            self._steps += 1
            self._last_backward_with_step = self.samples.backwards if inside else 0
        if self._reader is not None and 0 < self._options.steps < self._steps:
            self._exit_process(f"after {self._options.steps} optimizer steps, as --check-parity-steps says")
        if count >= _MOST_STEPS or self._recorded_steps >= _MOST_RECORDED:
            return
        self._recorded_steps += 1
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        step = self._step_entry(optimizer, number, count, rates)
        if has_closure:
            self._pending_step = step
        else:
            self._write_step(optimizer, step)
        key = f"rates {number} {count}"
        if self._reader is None:
            self.samples.keep(key, rates)
        elif (recorded := self._reader.get(key)) and recorded[0] != rates and len(recorded[0]) == len(rates):
            self._rates = rates
            _set_rates(optimizer, recorded[0])

    def _exit_if_in_turn(self, number: int) -> None:
        """Exit (`IN_TURN`) if a single-process step has world-size times too many rows.

        The script accumulates more batches here than on ranks. A repeated run replays one rank's batch at a time.
        """
        key, rows = f"rows {number}", self._input_features[-1].item()
        if self._reader is None:
            self.samples.keep(key, rows)
            return
        rank_rows = self._reader.get(key)
        if len(rank_rows) > 1 and not self._options.in_turn and 0 < sum(rank_rows) * len(rank_rows) == rows:
            self._exit_process(IN_TURN)

    def after_step(self, optimizer: Any, _has_closure: bool) -> None:
        if (step := self._pending_step) is not None:
            self._pending_step = None
            self._write_step(optimizer, step)
        if self._rates is not None:
            _set_rates(optimizer, self._rates)
            self._rates = None

    def _step_entry(self, optimizer: Any, number: int, count: int, rates: Sequence[float]) -> ParityStep:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not count and any(p not in self._names for p in parameters):
            for _, value in program_numbers.program_contents():
                if isinstance(value, nn.Module):
                    self._record_names(value)
        names = [self._names.get(p, f"parameter {index}") for index, p in enumerate(parameters)]
        values = norms({f"{index}": local_part(p) for index, p in enumerate(parameters)})
        return ParityStep(
            number,
            count,
            user_location(sys._getframe(3)),
            values=(*values.values(),),
            rates=tuple(rates),
            sharded=any(map(_is_sharded, parameters)),
            names=() if count else tuple(names),
            elements=tuple(local_part(p).numel() for p in parameters) if not count else (),
        )

    def _write_step(self, optimizer: Any, step: ParityStep) -> None:
        if not step.count:
            self._exit_if_in_turn(step.optimizer)
        parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
        gradients = {f"{index}": local_part(p.grad) for index, p in parameters.items() if p.grad is not None}
        if self._noise is not None:
            self._noise.round(gradients.values())
        sizes = norms(gradients)
        if step.sharded:  # keep one replica of each, so that the ranks' norms combine to the full norm
            sizes = {index: size * _is_first_replica(parameters[int(index)]) for index, size in sizes.items()}
        entry = replace(
            step,
            norms=tuple(sizes.get(f"{index}", -1.0) for index in parameters),
            gradient=() if step.sharded else _sum_of_sketches(sketches(gradients)),
            losses=tuple(float(loss) for loss in self._losses[:_FEW]),
            loss_at=self._loss_location,
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
    """Return the line that last assigned a backward call's loss, or the call's line."""
    location, match = Location(relative_path(path), line), _LOSS.search(linecache.getline(path, line))
    name = next(filter(None, match.groups()), "") if match else ""
    return (last_assignment(location, name) if name else None) or location


def _feature_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums over rows of nonlinear functions of each row, then the row count.

    These are random Fourier features (Rahimi and Recht, 2007). Sums over ranks equal sums over all rows; different rows
    have different sums, while rounding changes little.
    """
    rows = tensor.reshape(len(tensor), -1).cpu().double()
    generator = torch.Generator().manual_seed(rows.shape[1])
    directions = torch.randn(rows.shape[1], _FEATURES, generator=generator, dtype=torch.float64)
    return torch.cat([(rows @ directions / rows.shape[1] ** 0.5).cos().sum(0), torch.tensor([float(len(rows))])])


def _patched_get_rank(original: Callable[..., int], rank: int) -> Callable[..., int]:
    """Make `get_rank` return `rank` to callers in the program, not in packages."""

    @functools.wraps(original)
    def get_rank(*arguments: Any, **named: Any) -> int:
        actual = original(*arguments, **named)
        return rank if is_of_program(sys._getframe(1).f_code.co_filename) else actual

    return get_rank


def _is_sharded(parameter: torch.Tensor) -> bool:
    in_fsdp1 = getattr(parameter, "_fsdp_flattened", False) or type(parameter).__name__ == "FlatParameter"
    return is_dtensor(parameter) or in_fsdp1


def _is_first_replica(parameter: Any) -> bool:
    """Return True if no lower rank holds the same shard or same whole parameter."""
    if not is_dtensor(parameter):
        return _is_sharded(parameter) or not dist.is_initialized() or dist.get_rank() == 0
    coordinate = parameter.device_mesh.get_coordinate() or ()
    return not any(i for i, placement in zip(coordinate, parameter.placements, strict=True) if placement.is_replicate())


def _sum_of_sketches(parts: Mapping[str, tuple[float, ...]]) -> tuple[float, ...]:
    """Add the parameters' gradient sketches; gradients exchanged between two parameters change the sum."""
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
    """Start the recorder of this process, right after the import of torch.

    In a single process, writes of the script to files are redirected below `folder`.
    """
    global recorder
    pass_over_packages()
    if options.replays:
        redirect_files(folder, options.since, [options.samples])
    recorder = current = ParityRecorder(options)

    def failed(error: Exception, failed_recorder: Recorder) -> None:
        current.write(WatchingFailed("", failed_recorder.name, ("parity",), 0, one_line_error(error)))

    ErrorGuard.error_handler = failed
