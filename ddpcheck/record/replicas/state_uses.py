"""Record evaluation calls of modules like the wrapped ones, and loads without effect."""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ddpcheck.findings.evidence.replicas import NothingLoaded, StateUsed, digest_of_values
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import lines_of_program, user_location
from ddpcheck.gather.forward_hooks import OutsideOfTraining, after_forward, hooks_put_aside, scripting_in
from ddpcheck.gather.patching import Patch, Recorder, patched
from ddpcheck.gather.state.fingerprints import fingerprint, is_shard
from ddpcheck.record.recording import Recording, UnpickledHook
from ddpcheck.stream.rank_report import is_probed

_MOST = 16  # modules


class LoadRecorder(Recorder, subjects=("files",)):
    """Recorder of `load_state_dict` calls that load nothing, for `sink`.

    Reports at the next step or at the end, unless the state is loaded again with other keys, or another state is.
    """

    def __init__(self, sink: Callable[[NothingLoaded], object]) -> None:
        self._sink = sink
        self.waits = False  # True if there may be something to report
        self._in_vain: WeakKeyDictionary[nn.Module, NothingLoaded] = WeakKeyDictionary()
        patched(nn.Module, "load_state_dict", self._loads)

    def _loads(self, module: nn.Module, *arguments: Any, **named: Any) -> Generator[None, Any, None]:
        state = arguments[0] if arguments else named["state_dict"]
        result = yield
        missing, unexpected = list(result.missing_keys), set(result.unexpected_keys)
        if isinstance(module, torch.jit.ScriptModule) or not missing or not unexpected.issuperset(state):
            for related in [m for m in self._in_vain if _holds(module, m) or _holds(m, module)]:
                del self._in_vain[related]
        elif (prefix := common_prefix(missing, list(state))) is not None and len(self._in_vain) < _MOST:
            name, has_prefix, keys = type(module).__name__, prefix[0], prefix[1]
            self.waits = True
            self._in_vain[module] = NothingLoaded(name, user_location(), keys, has_prefix, len(missing))

    def hand_over(self) -> None:
        """Report loads without effect, before an optimizer step or at the end."""
        for entry in list(self._in_vain.values()):
            self._sink(entry)
        self._in_vain.clear()
        self.waits = False


def _holds(module: nn.Module, other: nn.Module) -> bool:
    return any(submodule is other for submodule in module.modules())


def common_prefix(missing: Sequence[str], unexpected: Sequence[str]) -> tuple[bool, str] | None:
    """Return the prefix ("module.") by which keys of state and module differ.

    Returns:
        (True if the state has the prefix, prefix), or None if no prefix matches most keys of the smaller side: a state
        may contain adapters only, or a module may be a part of the saved model.
    """
    fewest, keys_of_module, keys_of_state = min(len(missing), len(unexpected)), set(missing), set(unexpected)
    for key, other_key in itertools.chain(
        itertools.product(missing[:4], unexpected), itertools.product(missing, unexpected[:4])
    ):
        if other_key.endswith(f".{key}"):
            prefix = other_key.removesuffix(key)
            if 2 * sum(f"{prefix}{name}" in keys_of_state for name in missing) > fewest:
                return True, prefix
        elif key.endswith(f".{other_key}"):
            prefix = key.removesuffix(other_key)
            if 2 * sum(f"{prefix}{name}" in keys_of_module for name in unexpected) > fewest:
                return False, prefix
    return None


_MOST_MODULES = 64
_MOST_LINES = 64  # calling lines per module
_MOST_FEATURES = 16  # features of a BatchNorm layer
_NORMS: tuple[Any, ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_ALL_OF_THE_FIRST = 4  # recorded uses per line; then fewer and fewer


@dataclass(slots=True)
class _Followed:
    name: str
    location: Location | None
    wrapped: bool
    loaded: int | None = None  # digest of the values loaded since the last optimizer step
    step: int = -1  # optimizer step of the last use
    fresh: set[tuple[str, ...]] = field(default_factory=set)  # lines that used the module since that step
    uses: Counter[tuple[str, ...]] = field(default_factory=Counter)  # number of steps with a use, by line


class UseRecorder(Recorder, subjects=("replicas",)):
    """Recorder of uses of wrapped modules, of copies, and of modules with loaded states.

    A use is a call in evaluation or without gradients: the first by a line after an optimizer step or a load.
    """

    def __init__(self, run: Recording, held: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._run = run
        self._held = held  # returns the tensors of all optimizers
        self._followed: WeakKeyDictionary[nn.Module, _Followed] = WeakKeyDictionary()
        self._reset: WeakKeyDictionary[nn.Module, Location | None] = WeakKeyDictionary()  # resetting line, after a step
        patched(nn.Module, "load_state_dict", self._loads)
        for kind in _NORMS:
            patched(kind, "reset_running_stats", self._resets)
        Patch(torch.jit, "script", functools.partial(scripting_in, hooks_put_aside))

    def follow(self, module: nn.Module, name: str, location: Location | None, *, wrapped: bool = False) -> None:
        """Follow the calls of a module, unless sharded (shards differ between ranks)."""
        if module in self._followed or len(self._followed) >= _MOST_MODULES:
            return
        if not any(map(is_shard, nn.Module.parameters(module))):
            entry = _Followed(name, location, wrapped)
            for layer in _layers(module):
                if layer not in self._followed:
                    self._followed[layer] = entry
                    after_forward(layer, OutsideOfTraining(UnpickledHook(self._called)))

    def follow_wrapped(self) -> None:
        for watch in list(self._run.watches):
            if not watch.is_sharded:
                self.follow(watch.module, type(watch.module).__name__, None, wrapped=True)

    def _loads(self, module: nn.Module, *_arguments: Any, **_named: Any) -> Iterator[None]:
        yield
        if not self._run.steps or isinstance(module, torch.jit.ScriptModule):
            return
        for layer in module.modules() if self._reset else ():
            self._reset.pop(layer, None)
        self.follow_wrapped()
        shapes = _shapes(module)
        if not shapes or all(_shapes(watch.module) != shapes for watch in list(self._run.watches)):
            return
        self.follow(module, type(module).__name__, None)
        for entry in (self._followed[layer] for layer in _layers(module) if layer in self._followed):
            entry.loaded, entry.step, entry.location = _digest(module), -1, user_location()

    def _resets(self, layer: nn.Module) -> None:
        if self._run.steps:
            self._reset[layer] = user_location()

    def _called(self, module: nn.Module, *_arguments: Any) -> None:
        use, step = self._followed.get(module), self._run.steps
        if use is None or not step or not _evaluates(module, use):
            return
        if use.step != step:
            use.loaded = use.loaded if use.step == -1 else None
            use.step, use.fresh = step, set()
        lines = lines_of_program(sys._getframe(1))
        if lines in use.fresh or not lines or (lines not in use.uses and len(use.uses) >= _MOST_LINES):
            return
        use.fresh.add(lines)
        use.uses[lines] += 1
        if use.uses[lines] > _ALL_OF_THE_FIRST and not is_probed(use.uses[lines]):
            return
        if not use.wrapped and not {id(p) for p in self._held()}.isdisjoint(map(id, nn.Module.parameters(module))):
            return  # trained by an optimizer
        digest = _digest(module)
        reset = next((layer for layer in module.modules() if layer in self._reset), None) if self._reset else None
        statistics, line = ((), None) if reset is None else (_statistics(reset), self._reset[reset])
        self._run.add(
            StateUsed(step, use.name, lines, digest, use.wrapped, digest == use.loaded, use.location, statistics, line)
        )


def _digest(module: nn.Module) -> int:
    return digest_of_values(fingerprint(p.detach()) for _, p in nn.Module.named_parameters(module))


def _statistics(layer: nn.Module) -> tuple[float, ...]:
    """Return the first running means and variances; () in training mode."""
    tensors = [getattr(layer, name) for name in ("running_mean", "running_var")]
    if layer.training or any(tensor is None for tensor in tensors):
        return ()
    return tuple(torch.cat([tensor[:_MOST_FEATURES] for tensor in tensors]).tolist())


def _evaluates(module: nn.Module, one: _Followed) -> bool:
    """Return True if a call only needs outputs (some train in eval mode)."""
    return not torch.is_grad_enabled() or (not module.training and (one.loaded is not None or not one.wrapped))


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, and inner modules with all of its parameters."""
    count, pending = len(_shapes(module)), [module]
    for layer in pending:  # grows in the loop
        yield layer
        pending += [child for child in layer.children() if len(_shapes(child)) == count][:1]


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return sorted(tuple(p.shape) for _, p in nn.Module.named_parameters(module))
