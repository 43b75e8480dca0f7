"""Forward passes: arguments for a rerun that explains missing parameters, and outputs."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import nn

from ddpcheck.findings.evidence.steps import PathEnd
from ddpcheck.gather.autograd.autograd_graph import MODULE_INTERNALS, node_of, walk_graph
from ddpcheck.gather.autograd.gradient_paths import Explainer
from ddpcheck.gather.collectives.fake_collectives import alone
from ddpcheck.gather.state.module_state import capture_attributes
from ddpcheck.gather.state.reachable import refill
from ddpcheck.recipe.pytree import tree_leaves
from ddpcheck.worlds.compilation import stance
from ddpcheck.worlds.generators import generators, set_generators

_DEPTH = 3  # nesting depth of searched objects


class Snapshot(Struct):
    """Call of the wrapped module: references to its arguments, and random states."""

    arguments: tuple[Any, ...]  # positional arguments
    named: Mapping[str, Any]  # keyword arguments
    forward: Any  # replacement of the module's `forward` by a framework, or `None`
    random: dict[str, Any]  # state of torch's generator; if `thorough`, also of Python's and numpy's
    autocast: tuple[tuple[str, torch.dtype], ...]  # (device type, dtype) of each enabled autocast
    # indices of the returned tensors that the loss uses; `None` if unknown
    used: tuple[int, ...] | None = None

    @classmethod
    def take(
        cls, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any], *, thorough: bool
    ) -> Snapshot:
        """Record a call of `module` before it runs; `thorough` costs about 40 microseconds."""
        autocast: tuple[tuple[str, torch.dtype], ...] = ()
        for device_type in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device_type):
                autocast = (*autocast, (device_type, torch.get_autocast_dtype(device_type)))
        return cls(arguments, named, vars(module).get("forward"), generators(thorough=thorough), autocast)

    def explain(
        self,
        module: nn.Module,
        missing: Mapping[str, torch.Tensor],
        around: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> dict[str, PathEnd]:
        """Rerun the forward pass on this rank; return the end of each missing path.

        Restores the module's buffers and attributes, the generators and `.grad`. Side effects outside of the module
        happen twice. Compiled code runs eagerly.

        `around` returns a context in which a framework does not count or log the rerun.
        """
        if any(isinstance(argument, Iterator) for argument in (*self.arguments, *self.named.values())):
            return dict.fromkeys(missing, PathEnd("unknown"))  # a rerun would consume data of the run

        reached: set[int] = set()

        def forward() -> Sequence[torch.Tensor]:
            set_generators(self.random)
            with contextlib.ExitStack() as stack:
                for device_type, dtype in self.autocast:
                    stack.enter_context(torch.autocast(device_type, dtype))
                stack.callback(_set_forward, module, vars(module).get("forward"))
                _set_forward(module, self.forward)
                output = module(*self.arguments, **self.named)
            tensors = differentiable_tensors(output)
            losses = [t for index, t in enumerate(tensors) if self.used is None or index in self.used]
            constants = (t for t in _tensors(output) if not t.requires_grad and t.is_floating_point())
            losses += constants  # the loss may use constants, too
            reached.update(id(leaf) for leaf in walk_graph(losses).leaves)
            return losses

        random_state = generators(thorough=True)
        state = capture_attributes(module, buffers=True)
        containers = [(value, copy.copy(value)) for value in _containers(module)]
        try:
            with around(), alone(), torch.enable_grad(), stance("force_eager"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # already shown by the first run
                ends = Explainer(module, forward, lambda: state.restore(module)).explain(missing)
        except Exception:  # report the finding without a cause
            return dict.fromkeys(missing, PathEnd("unknown"))
        finally:
            state.restore(module)
            for value, content in containers:
                refill(value, content)
            set_generators(random_state)
        # A branch may depend on the state of a step (a counter): then the rerun has taken another branch.
        return {name: PathEnd("unknown") if id(missing[name]) in reached else end for name, end in ends.items()}


def _containers(module: nn.Module) -> Iterator[Any]:
    """Yield containers in attributes of `module`, e.g. outputs collected over an epoch."""
    for part in module.modules():
        for key, value in vars(part).items():
            if key not in MODULE_INTERNALS and type(value) in (list, dict, set, deque):
                yield value


def _set_forward(module: nn.Module, forward: Any) -> None:
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward


# Tensors in a forward output, also inside objects of user classes


def differentiable_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors in `output` that have a gradient node."""
    if isinstance(output, torch.Tensor):  # fast path of the usual case
        return [] if node_of(output) is None else [output]
    return [tensor for tensor in _tensors(output) if node_of(tensor) is not None]


def trainable_leaves(output: Any) -> list[torch.Tensor]:
    """Return the leaf tensors in `output` that require grad."""
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad and node_of(output) is None else []
    return [tensor for tensor in _tensors(output) if tensor.requires_grad and node_of(tensor) is None]


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    pending = [(output, 0)]
    while pending:
        value, depth = pending.pop()
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif depth < _DEPTH and not isinstance(leaf, nn.Module | type):
                with contextlib.suppress(Exception):  # no `__dict__`, or attribute access raises
                    pending.append((list(vars(leaf).values()), depth + 1))
