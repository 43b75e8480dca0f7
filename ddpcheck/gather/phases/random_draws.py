"""The random numbers that a forward pass draws for its samples: whether ranks draw the same ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddpcheck.findings.evidence.steps import SharedDraw
from ddpcheck.findings.exception_origin import passes_on
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_user_file, user_location
from ddpcheck.gather.phases.rank_state import rank_state, replays_step
from ddpcheck.gather.state.module_description import fingerprint
from ddpcheck.gather.steps.batch_coupling import watched_modules
from ddpcheck.recipe.pytree import tree_tensors


class _Draws(TorchDispatchMode):
    """Keeps a fingerprint of what every seeded operation drew that has a value for each of `samples` samples."""

    def __init__(self, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.samples = samples
        self.found: list[SharedDraw] = []
        self.modules: list[str] = []
        self.seeded: Location | None = None

    @passes_on
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn = [t for t in tree_tensors(result) if t.dim() and t.shape[0] == self.samples]
            if drawn:  # of a dropout the mask comes last
                module = self.modules[-1] if self.modules else ""
                self.found.append(SharedDraw(func.overloadpacket.__name__, module, self.seeded, fingerprint(drawn[-1])))
        return result


class Choices(TorchDispatchMode):
    """Notes where operations draw what chooses among many: a permutation, or indices that are no value a sample."""

    def __init__(self, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.samples = samples
        self.found: dict[str, None] = {}

    @passes_on
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "randperm" or (name in _INDICES and result.dim() == 1 and len(result) not in (1, self.samples)):
            where = user_location()
            self.found[f"torch.{name}{f' at {where}' if where else ''}"] = None
        return result


_INDICES = ("randint", "multinomial")


@replays_step
def draws(step: int) -> list[SharedDraw]:
    """The random numbers that the forward pass of a step draws for its samples on this rank."""
    state = rank_state()
    log = _Draws(next((len(t) for t in tree_tensors(state.step.batch) if t.dim()), 0))
    modules = watched_modules(
        state.reference.module, lambda name, _inputs: log.modules.append(name), lambda _name, _output: log.modules.pop()
    )
    with modules, _seeding_seen(log), log:
        state.run_loss(step, "drawing, ")
    return log.found


@contextmanager
def _seeding_seen(log: _Draws) -> Iterator[None]:
    """Note the line of the user's code that seeds torch's global generator."""
    original = torch.manual_seed

    @passes_on
    def manual_seed(seed: int) -> torch.Generator:
        caller = sys._getframe(1)
        if is_user_file(caller.f_code.co_filename):
            log.seeded = user_location(caller)
        return original(seed)

    torch.manual_seed = manual_seed
    try:
        yield
    finally:
        torch.manual_seed = original
