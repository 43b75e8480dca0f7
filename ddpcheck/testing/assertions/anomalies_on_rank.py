"""Parameters that take no part in a loss, on one rank: for `assert_no_anomalous_params`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from ddpcheck.anomalous import detect_anomalous_params
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.source_lines import assignment_of, making_of
from ddpcheck.gather.autograd.autograd_graph import all_names, named_parameters, unregistered_tensors, walk_graph
from ddpcheck.recipe.pytree import tree_leaves, tree_tensors
from ddpcheck.testing.assertions.messages import Anomaly


def anomalies_of(loss: Any, model: nn.Module, ignore: Sequence[str], replay: Callable[[], Any] | None) -> list[Anomaly]:
    """The anomalous parameters of `model`, but for ignored ones and those that a re-entrant checkpoint hides.

    Raises:
        UsageError: `loss` needs no gradient, no parameter requires one, or a pattern in `ignore` matches nothing.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is an nn.Module, not {type(model).__name__}")
    wrapped = hasattr(model, "reducer") and isinstance(getattr(model, "module", None), nn.Module)
    bare: nn.Module = model.module if wrapped else model  # type: ignore[assignment]
    parameters = {name: p for name, p in named_parameters(bare).items() if p.requires_grad}
    if not parameters:
        raise UsageError("no parameter of the model requires grad, so there is nothing that could take part")
    held = dict(unregistered_tensors(bare))
    aliases = all_names(bare)
    known = {alias for names in aliases.values() for alias in names} | held.keys()
    idle = [pattern for pattern in ignore if not any(fnmatchcase(name, pattern) for name in known)]
    if idle:
        raise UsageError(f"ignore names {idle[0]!r}, and no parameter of the model is called that")
    found = detect_anomalous_params(loss, bare)
    hidden = _hidden_in_checkpoints(loss) if found.missing else set()
    missing = [
        name
        for name, parameter in parameters.items()
        if name in found.missing and id(parameter) not in hidden and not _is_ignored(aliases[id(parameter)], ignore)
    ]
    causes: dict[str, str] = {}
    if missing and replay is not None:
        explained = detect_anomalous_params(loss, bare, replay=replay).findings
        causes = {name: f"{f.code}: {f.message}" for f in explained for name in f.subjects}
    anomalies = [
        Anomaly(
            ", ".join(aliases[id(parameters[name])]),
            tuple(parameters[name].shape),
            location=str(making_of(bare, name) or ""),
            cause=causes.get(name, ""),
        )
        for name in missing
    ]
    strange = [name for name in found.unregistered if not _is_ignored((name,), ignore)]
    return anomalies + [
        Anomaly(
            name,
            tuple(held[name].shape) if name in held else (),
            registered=False,
            location=str(assignment_of(bare, name) or ""),
        )
        for name in strange
    ]


def _is_ignored(names: Iterable[str], ignore: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in ignore)


def _hidden_in_checkpoints(loss: Any) -> set[int]:
    """The parameters of what was given to re-entrant checkpoints: they are in no graph before backward runs."""
    found: set[int] = set()
    roots = [tensor for tensor in tree_tensors(loss) if tensor.requires_grad]
    for node in walk_graph(roots).functions:
        if node._forward_cls is CheckpointFunction:
            for module in _modules_in(node.run_function, 0):
                found |= {id(parameter) for parameter in module.parameters()}
    return found


_DEPTH = 4


def _modules_in(value: Any, depth: int) -> Iterator[nn.Module]:
    """The modules that a function can reach: bound, as an argument, or in its closure."""
    if depth > _DEPTH:
        return
    if isinstance(value, nn.Module):
        yield value
        return
    inside: list[Any] = []
    if isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif callable(value):
        code, cells = getattr(value, "__code__", None), getattr(value, "__closure__", None) or ()
        inside = [getattr(value, "__self__", None), *(cell.cell_contents for cell in cells)]
        inside += [value.__globals__.get(name) for name in code.co_names] if code is not None else []
    elif isinstance(value, list | tuple | dict):
        inside = list(tree_leaves(value))
    for one in inside:
        if one is not None and not isinstance(one, torch.Tensor | type | str):
            yield from _modules_in(one, depth + 1)
