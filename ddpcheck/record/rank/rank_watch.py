"""Watch every wrapper that a rank of an unmodified script constructs.

Nothing here raises into the script: an error in ddpcheck stops a recorder and is reported.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import dis
import faulthandler
import functools
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.evidence.script import ReducedInPlace
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.named_functions import read_named_functions
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import (
    exception_location,
    format_traceback,
    frames_from,
    lines_of_program,
    location_of,
    pass_over_packages,
)
from ddpcheck.findings.tracebacks import forwards_calls, original_exception
from ddpcheck.gather.autograd.autograd_graph import node_of
from ddpcheck.gather.collectives import collective_log
from ddpcheck.gather.collectives.groups import backend_of, name_of_group
from ddpcheck.gather.ddp.ddp_wrapper import group_of
from ddpcheck.gather.patching import CALLER, ErrorGuard, Patch, Recorder, accompany, guarded, one_line_error, patched
from ddpcheck.gather.state.fingerprints import fingerprint
from ddpcheck.gather.steps.compilations import MODULES as OF_COMPILER
from ddpcheck.gather.steps.compilations import CompilationRecorder, patch_compiler_module
from ddpcheck.record.data.draw_recorder import DrawRecorder
from ddpcheck.record.data.loader_recorder import LoaderRecorder
from ddpcheck.record.evaluation.evaluation_recorder import EvaluationRecorder
from ddpcheck.record.loop.optimizer_steps import DDP_FILE
from ddpcheck.record.loss.gather_recorder import GatherRecorder, TargetRecorder
from ddpcheck.record.loss.loss_recorder import LossRecorder
from ddpcheck.record.optimizers.gradient_recorders import AutogradGradRecorder, names_in_failed_clip
from ddpcheck.record.optimizers.optimizer_recorder import OptimizerRecorder
from ddpcheck.record.optimizers.part_recorder import PartRecorder
from ddpcheck.record.optimizers.schedule_recorder import ResumeRecorder
from ddpcheck.record.rank.environment import STACK_SIGNAL, RunOptions, options_of_run, when_imported
from ddpcheck.record.rank.file_recorder import FileRecorder
from ddpcheck.record.rank.line_recorder import ConstructionRecorder, LineRecorder
from ddpcheck.record.rank.shard_recorder import ShardRecorder
from ddpcheck.record.rank.started_processes import local_world_size_of_launcher, on_end
from ddpcheck.record.rank.work_recorder import PeerRecorder, SumRecorder, WorkRecorder
from ddpcheck.record.rank.wrapper_recorder import WrapperRecorder
from ddpcheck.record.recording import Recording, UnpickledHook
from ddpcheck.record.replicas.module_uses import WriteRecorder
from ddpcheck.record.replicas.statistics_recorder import StatisticsRecorder
from ddpcheck.stream.entries import (
    UNNUMBERED,
    ExitCalled,
    GroupDestroyed,
    NotCompared,
    ProgramEnded,
    RankRaised,
    RankStarted,
    ThreadRaised,
    WatchingFailed,
    place_of_handling,
)
from ddpcheck.stream.rank_log import RankLog
from ddpcheck.worlds.failures import exception_data

_DDP: Any = nn.parallel.DistributedDataParallel
_MOST_OVERWRITES = 64  # max collectives with a hook on their tensor
_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # sent by a launcher to end a rank
_LAST_WORK = 0.03
"""Seconds to wait, at exit and before the process group is destroyed, while gloo's threads free the last work.

Freeing work takes the GIL: two races, also in plain torch. At interpreter shutdown, Python stops the thread in C++ and
the process aborts ("terminate called without an active exception"). If a wrapper is freed after the group, its reducer
drops the last reference to the group and joins the threads with the GIL held: a deadlock (see `hang_watch`)."""
_rank: _RankRecorder | None = None
_logs_faults = False  # True if the script has not enabled `faulthandler`, so fatal signals are logged


def begin(replacements: dict[str, Callable[..., Any]], stand_ins: Iterable[Callable[..., Any]]) -> None:
    """Watch every wrapper constructed from now on; call after joining a process group.

    `replacements` maps the name of a collective to the function to call instead. `stand_ins` are functions that already
    replace functions of torch, and that the script may have imported by name.
    """
    global _rank
    for function in stand_ins:
        forwards_calls(function)
    options = options_of_run(os.environ)
    if _rank is None and options is not None:
        _rank = _RankRecorder(options, replacements)


def begin_single_process(options: RunOptions) -> None:
    """Record the end of this single process, which may have no process group."""
    global _rank
    _rank = _RankRecorder(options, {})


class _RankRecorder:
    """Owner of this rank's log and recorders; forked processes (loader workers) are ignored."""

    def __init__(self, options: RunOptions, replacements: dict[str, Callable[..., Any]]) -> None:
        self._process = os.getpid()
        self._has_ended = self._has_raised = False
        self._main = _main_frame()
        self._counts_by_group: Counter[str] = Counter()  # number of wrappers, by process group
        self._overwrite_count = 0
        self._threads: WeakKeyDictionary[threading.Thread, tuple[str, ...]] = WeakKeyDictionary()  # lines of start()
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        has_group = dist.is_available() and dist.is_initialized()
        group = (dist.get_rank(), dist.get_world_size(), backend_of()) if has_group else (0, 1, "")
        started = RankStarted(*group, restart, launched=local_world_size_of_launcher())
        self._log = RankLog(Path(options.folder), started)
        self._run = Recording(self._log.add, options.every, self._log)
        self._watches = self._run.watches
        ErrorGuard.error_handler = self._record_failure
        self._parity: Any = None
        if options.parity is not None:
            from ddpcheck.record.parity import parity_recorder  # import only if needed

            self._parity = parity_recorder.recorder
        if self._parity is not None:
            self._parity.begin(self._log.add, Path(options.folder), started.rank)
        self._records_all = options.parity is None or not options.parity.replays
        guarded(self._start_recorders)(replacements)

    def _start_recorders(self, replacements: dict[str, Callable[..., Any]]) -> None:
        pass_over_packages()
        read_named_functions()  # a forked rank got the environment after the import
        if not self._records_all:
            self._patch_endings()
            atexit.register(guarded(self._write_end))
            return
        self._record_calls(replacements)
        self._patch_endings()
        run, add = self._run, self._log.add
        self._lines = lines = LineRecorder(run)
        self._writes = writes = WriteRecorder(run)
        self._optimizers = OptimizerRecorder(run, lines, writes)
        WorkRecorder(add, self._optimizers.are_gradients)
        PartRecorder(add, self._watches, run.every, lines).follow_script()
        evaluations, targets, gathers = EvaluationRecorder(add), TargetRecorder(run), GatherRecorder(run)
        self._loaders = LoaderRecorder(run, ResumeRecorder(self._optimizers.steps_of), evaluations.note_pass)
        self._draws = DrawRecorder(run)
        self._autograd_grads = AutogradGradRecorder(run)
        losses = LossRecorder(run, self._optimizers, (evaluations, targets, gathers), self._autograd_grads)
        self._compilations = CompilationRecorder(
            add, lambda: any(watch.module.training for watch in self._watches), lambda: run.steps
        )
        self._compilations.begin()
        when_imported(OF_COMPILER, guarded(patch_compiler_module))
        self._statistics = StatisticsRecorder(run)
        self._constructions = ConstructionRecorder()
        self._files = FileRecorder(run)
        ShardRecorder(
            lambda module, built, at: self._watch(module, began_alike=False, built=built, at=at), writes.follow_shard
        )
        for recorder in (evaluations, targets, gathers, losses, self._statistics):
            collective_log.before_collective.append(recorder.note_collective)
        self._sums = SumRecorder(add)
        collective_log.before_collective += (self._optimizers.allreduce_inputs.note, self._sums.note_input)
        collective_log.after_overwriting_collective.append(guarded(self._record_overwrite))
        patched(_DDP, "__init__", self._record_wrapper)
        patched(vars(dist)["Reducer"], "prepare_for_backward", self._record_prepare)
        atexit.register(guarded(self._write_end))

    def _record_wrapper(self, wrapper: nn.Module, *arguments: Any, **named: Any) -> Iterator[None]:
        watched = in_rank = os.getpid() == self._process
        if in_rank and type(wrapper).__module__.startswith("ddpcheck."):
            watched = False
            msg = f"the script watches its model itself ({type(wrapper).__name__}), so ddpcheck run does not compare it"
            self._log.add(NotCompared(UNNUMBERED, msg))
        if (
            watched
            and (begun := self._constructions.wrapper_entry((wrapper, *arguments), named, _DDP.__init__)) is not None
        ):
            self._log.add(begun)
        self._log.count_turn(begins=True)
        try:
            yield
        finally:
            self._log.count_turn(begins=False)
        if watched:
            self._watch(wrapper, began_alike=named.get("init_sync", True) is not False)

    def _record_prepare(self, reducer: Any, *outputs: Any) -> None:
        """Expect a backward pass if a framework (Lightning), not DDP, calls `prepare_for_backward`."""
        if sys._getframe(CALLER).f_code.co_filename != DDP_FILE:
            for watch in list(self._watches):
                watch.expects(reducer, outputs)

    def _record_calls(self, replacements: dict[str, Callable[..., Any]]) -> None:
        collective_log.record_calls(self._record_call, self._log.count_turn)
        PeerRecorder(self._run)
        for name in ("wait", "get"):
            patched(vars(dist)["Store"], name, self._record_store_wait)
        for name, function in vars(dist.distributed_c10d).items():
            if name in collective_log.COLLECTIVES and (original := getattr(function, "__wrapped__", None)) is not None:
                replacements[name] = collective_log.log_calls(name, getattr(original, "__wrapped__", original))
        if (stand_in := getattr(dist.destroy_process_group, "__wrapped__", None)) is not None:
            replacements["destroy_process_group"] = accompany(stand_in, self._record_destroy)

    def _record_call(self, call: Call) -> None:
        """Record a collective before it runs, with the thread and the exception being handled."""
        error, thread = sys.exc_info()[1], threading.current_thread()
        if thread in self._threads:
            lines = (*call.callers, *self._threads[thread])
            call = replace(call, thread=thread.name, callers=lines, location=call.location or next(iter(lines), ""))
        self._log.add_call(call if error is None or call.place else _with_handled_exception(call, error))

    def _record_destroy(self, group: Any = None) -> Iterator[None]:
        is_world = os.getpid() == self._process and dist.is_initialized() and group in (None, dist.group.WORLD)
        if is_world and "gloo" in backend_of():
            time.sleep(_LAST_WORK)
        yield
        if is_world:
            self._log.add(GroupDestroyed())

    def _record_store_wait(self, *_arguments: Any, **_named: Any) -> Iterator[None]:
        yield
        self._log.waited = True

    def _patch_endings(self) -> None:
        """Patch exits and excepthooks; register stack dumps for fatal signals and ddpcheck's requests."""
        self._log.open_stack_file(_write_stacks_to)
        os.register_at_fork(after_in_child=_unregister_stacks)

        def make(then: Callable[..., object]) -> Callable[..., object]:
            def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
                with contextlib.suppress(Exception):
                    self._record_error(error)
                then(kind, error, trace)

            return excepthook

        Patch(sys, "excepthook", make)
        patched(threading, "excepthook", self._record_thread_error)
        patched(threading.Thread, "start", self._record_thread_start)
        for module, name in ((sys, "exit"), (os, "_exit")):
            patched(module, name, functools.partial(self._record_exit, f"{module.__name__}.{name}"))
        if (quitter := getattr(builtins, "exit", None)) is not None:  # from `site`; `quit` has the same class
            patched(type(quitter), "__call__", functools.partial(self._record_exit, "exit"))
        on_end.append(guarded(self._record_process_end))

    def _record_exit(self, function: str, *_arguments: object, **_named: object) -> None:
        if str(sys._getframe(CALLER).f_globals.get("__name__")).startswith("multiprocessing."):
            return  # the normal exit of its child processes
        error, handled = sys.exc_info()[1], None
        if os.getpid() == self._process and isinstance(error, Exception):
            handled = {**exception_data(error, "", ""), "exception": None}
        self._log.add(ExitCalled(lines_of_program(sys._getframe(CALLER)), function, handled))

    def _record_thread_start(self, thread: threading.Thread) -> None:
        self._threads[thread] = lines_of_program(sys._getframe(CALLER))

    def _record_thread_error(self, hook_args: Any, *_more: object) -> None:
        """Record an uncaught exception of a thread, which Python only prints."""
        if os.getpid() == self._process and isinstance(error := hook_args.exc_value, Exception):
            name = hook_args.thread.name if hook_args.thread is not None else ""
            self._log.add(ThreadRaised(name, {**exception_data(error, "", ""), "exception": None}))

    def _record_error(self, error: BaseException) -> None:
        if os.getpid() == self._process:
            self._has_raised = True
            reply = {
                **exception_data(error, "", ""),
                "exception": None,
            }  # the agent cannot import classes of the script
            reply["clipped"] = names_in_failed_clip(error)
            self._log.add(RankRaised(reply))
            _write_torchrun_error(f"{reply['type']}: {reply['text']}", reply["traceback"])

    def _record_process_end(self, error: BaseException | None) -> None:
        """Record the end of a `multiprocessing` rank, where `atexit` may not run."""
        self._main = None
        if isinstance(error, SystemExit):
            self._write_end(ProgramEnded("raise", str(exception_location(error) or "")))
        elif error is not None:
            self._record_error(error)
            self._write_end(failing=True)
        else:
            self._write_end(ProgramEnded("end"))

    def _watch(
        self,
        wrapper: nn.Module,
        *,
        began_alike: bool,
        built: Mapping[str, int] | None = None,
        at: Location | None = None,
    ) -> WrapperRecorder | None:
        if os.getpid() != self._process:
            return None
        self._counts_by_group[group := name_of_group(group_of(wrapper) or dist.group.WORLD)] += 1
        count = self._counts_by_group[group]  # equal on all ranks of the group, which construct in the same order
        note = self._lines.note_changes
        watch = WrapperRecorder(self._run, wrapper, note, began_alike=began_alike, of_group=count, built=built, at=at)
        if watch.is_off:
            return None
        self._watches.add(watch)
        self._writes.follow_wrapper(watch)
        self._statistics.follow(wrapper, watch.number)
        self._run.wrappers += 1
        self._draws.begin()
        return watch

    def _record_overwrite(self, call: Call, call_args: Mapping[str, Any]) -> None:
        """Report an in-place collective on a tensor through which backward later sends a gradient."""
        self._sums.note_output(call, call_args)
        tensor, op = call_args.get("tensor"), call_args.get("op", dist.ReduceOp.SUM)
        is_world = len(call.members) == dist.get_world_size()
        is_sum, is_average = (is_world and call.operation == "all_reduce" and op == reduce_op for reduce_op in _SUMS)
        if call.operation in ("all_reduce", "broadcast") and is_world:
            self._optimizers.states.count_synchronized(tensor)
            if is_sum:
                self._optimizers.note_sum(tensor, Location.parse(call.location), call.callers)
        if not isinstance(tensor, torch.Tensor) or call.differentiable or not call.carries_gradient:
            return
        if node_of(tensor) is None:  # averaged parameters: no gradient flows through the collective
            return

        def on_gradient(gradient: torch.Tensor) -> None:
            factor = float(gradient) if gradient.numel() == 1 else None
            digest = fingerprint(gradient) if is_sum or is_average else 0
            location = Location.parse(call.location)
            self._log.add(ReducedInPlace(call.operation, location, gradient.numel(), factor, digest, is_average))
            handle.remove()

        if self._overwrite_count < _MOST_OVERWRITES:
            self._overwrite_count += 1
            handle = tensor.register_hook(UnpickledHook(on_gradient))

    def _record_failure(self, error: Exception, recorder: Recorder) -> None:
        self._watches.discard(recorder)
        steps = max([self._run.steps, *(watch.step for watch in self._watches)])
        fields = recorder.name, recorder.subjects, steps
        self._log.add(WatchingFailed(format_traceback(error, whole=True), *fields, one_line_error(error)))

    def _write_end(self, ended: ProgramEnded | None = None, *, failing: bool = False) -> None:
        if os.getpid() != self._process or self._has_ended:
            return
        self._has_ended = True
        if self._parity is not None:
            self._parity.close()
        if self._records_all:
            for recorder in (self._draws, self._loaders, self._optimizers, self._autograd_grads, self._files):
                recorder.close()
            self._writes.write()
            for watch in list(self._watches):
                watch.close(failing=failing or _last_error() is not None)
        ended = ended or _end_of_main(self._main)
        if self._main is not None and not ended.how and not self._has_raised and (error := _last_error()):
            self._record_error(error)  # the script has replaced our `sys.excepthook`
        self._log.add(ended)
        time.sleep(_LAST_WORK)


def _with_handled_exception(call: Call, error: BaseException) -> Call:
    """Add the exception being handled (`except` or `finally`) to a collective."""
    if not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration):
        return call
    with contextlib.suppress(Exception):  # `__str__` of the exception may raise
        kind, text, location = type(error).__qualname__, str(error), exception_location(error)
        if (original := original_exception(error)) is not None:
            kind, text, location = original.type, original.text, original.location or location
        lines = text.strip().splitlines() or [""]
        return replace(call, place=place_of_handling(kind, location, lines[0]))
    return call


def _write_stacks_to(descriptor: int) -> None:
    global _logs_faults
    _logs_faults = _logs_faults or not faulthandler.is_enabled()  # else keep the output file of the script
    if _logs_faults:
        faulthandler.enable(file=descriptor, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)
    for number in _ENDING:
        faulthandler.register(number, file=descriptor, all_threads=True, chain=True)


def _unregister_stacks() -> None:
    for number in (STACK_SIGNAL, *_ENDING):
        faulthandler.unregister(number)


def _write_torchrun_error(message: str, traceback: str) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if path and not os.path.exists(path):
        details = {"py_callstack": traceback, "timestamp": str(int(time.time()))}
        draft = f"{path}.{os.getpid()}"  # the agent may kill this process, or read the file, during the write
        with contextlib.suppress(OSError):
            Path(draft).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}), "utf-8")
            os.replace(draft, path)


def _main_frame() -> FrameType | None:
    """Return the main module's frame, or None; a reference keeps only the globals alive."""
    modules = (frame for frame in frames_from(sys._getframe()) if frame.f_code.co_name == "<module>")
    return next((frame for frame in modules if frame.f_globals.get("__name__") == "__main__"), None)


def _last_error() -> BaseException | None:
    error: BaseException | None = getattr(sys, "last_value", None)
    return error


def _end_of_main(frame: FrameType | None) -> ProgramEnded:
    """Return how the main module ended, with the last line in case of SystemExit.

    A SystemExit calls no hook. `f_lasti` is the last executed instruction of the frame, which outlives its module.
    """
    if frame is None:
        return ProgramEnded()
    operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    if operation.startswith("RETURN"):
        return ProgramEnded("end")
    if _last_error() is not None:
        return ProgramEnded()
    return ProgramEnded("raise" if operation == "RAISE_VARARGS" else "call", str(location_of(frame)))
