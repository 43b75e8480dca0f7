"""A forward pass: its arguments, kept to run it again and say why a parameter is missing, and what it has returned."""

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

_DEPTH = 3  # of objects in objects


class Snapshot(Struct):
    """A call of the wrapped module: references to its arguments, not copies, and the state of random generators."""

    arguments: tuple[Any, ...]  # positional ones
    named: Mapping[str, Any]  # the others
    forward: Any  # the function that a framework had put in the place of the module's `forward`, if one had
    random: dict[str, Any]  # the state of torch's generator, and of Python's and numpy's where `thorough`
    autocast: tuple[tuple[str, torch.dtype], ...]  # device type and dtype of the autocasts that were on
    # the positions, among the tensors that forward returned, of those that take part in the loss; `None` where that is
    # not known
    used: tuple[int, ...] | None = None

    @classmethod
    def take(
        cls, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any], *, thorough: bool
    ) -> Snapshot:
        """Record a call of `module` that is about to be made; `thorough` costs some 40 microseconds more."""
        autocast: tuple[tuple[str, torch.dtype], ...] = ()
        for kind in ("cuda", "cpu"):
            if torch.is_autocast_enabled(kind):
                autocast = (*autocast, (kind, torch.get_autocast_dtype(kind)))
        return cls(arguments, named, vars(module).get("forward"), generators(thorough=thorough), autocast)

    def explain(
        self,
        module: nn.Module,
        missing: Mapping[str, torch.Tensor],
        around: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> dict[str, PathEnd]:
        """Run the forward pass again, on this rank alone, and say where the path of each of `missing` ends.

        Afterwards the module's buffers and attributes, the generators and `.grad` are what they were. What the forward
        pass changes outside of the module is changed once more. What is compiled runs as it is written.

        `around` makes a context to run it in, in which a framework does not count or log it a second time.
        """
        if any(isinstance(argument, Iterator) for argument in (*self.arguments, *self.named.values())):
            return dict.fromkeys(missing, PathEnd("unknown"))  # it would take from the data of the run

        reached: set[int] = set()

        def forward() -> Sequence[torch.Tensor]:
            set_generators(self.random)
            with contextlib.ExitStack() as stack:
                for kind, dtype in self.autocast:
                    stack.enter_context(torch.autocast(kind, dtype))
                stack.callback(_set_forward, module, vars(module).get("forward"))
                _set_forward(module, self.forward)
                output = module(*self.arguments, **self.named)
            tensors = differentiable_tensors(output)
            losses = [t for index, t in enumerate(tensors) if self.used is None or index in self.used]
            losses += _constants(output)  # which the loss may have, too
            reached.update(id(leaf) for leaf in walk_graph(losses).leaves)
            return losses

        now = generators(thorough=True)
        state = capture_attributes(module, buffers=True)
        containers = [(value, copy.copy(value)) for value in _containers(module)]
        try:
            with around(), alone(), torch.enable_grad(), stance("force_eager"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the forward pass has shown them
                ends = Explainer(module, forward, lambda: state.restore(module)).explain(missing)
        except Exception:  # the finding is made without its cause
            return dict.fromkeys(missing, PathEnd("unknown"))
        finally:
            state.restore(module)
            for value, before in containers:
                refill(value, before)
            set_generators(now)
        # A branch may depend on what a step has left behind (a counter): then this pass has taken another branch.
        return {name: PathEnd("unknown") if id(missing[name]) in reached else end for name, end in ends.items()}


def _containers(module: nn.Module) -> Iterator[Any]:
    """Lists and the like that parts of `module` hold: outputs that are collected for the end of an epoch, say."""
    for part in module.modules():
        for key, value in vars(part).items():
            if key not in MODULE_INTERNALS and type(value) in (list, dict, set, deque):
                yield value


def _set_forward(module: nn.Module, forward: Any) -> None:
    if forward is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = forward


# The tensors that a forward pass has returned, in objects of the user's classes too


def differentiable_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in `output` through which a gradient can come."""
    if isinstance(output, torch.Tensor):  # as a rule: no need to look into it
        return [] if node_of(output) is None else [output]
    return [tensor for tensor in _tensors(output) if node_of(tensor) is not None]


def trainable_leaves(output: Any) -> list[torch.Tensor]:
    """The tensors in `output` that require grad and that nothing has computed."""
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad and node_of(output) is None else []
    return [tensor for tensor in _tensors(output) if tensor.requires_grad and node_of(tensor) is None]


def _constants(output: Any) -> list[torch.Tensor]:
    """The numbers in `output` through which no gradient can come."""
    return [tensor for tensor in _tensors(output) if not tensor.requires_grad and tensor.is_floating_point()]


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    pending = [(output, 0)]
    while pending:
        value, depth = pending.pop()
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif depth < _DEPTH and not isinstance(leaf, nn.Module | type):
                with contextlib.suppress(Exception):  # no attributes, or an object that does not like to be asked
                    pending.append((list(vars(leaf).values()), depth + 1))
