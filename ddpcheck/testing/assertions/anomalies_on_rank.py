"""Parameters that take no part in a loss, on one rank: for `assert_no_anomalous_params`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from ddpcheck.anomalous import detect_anomalous_params
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.source_lines import assignment_of, making_of
from ddpcheck.gather.autograd.autograd_graph import all_names, named_parameters, unregistered_tensors, walk_graph
from ddpcheck.gather.state.reachable import function_variables
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
    anomalies = []
    for name in missing:
        tied, shape = ", ".join(aliases[id(parameters[name])]), tuple(parameters[name].shape)
        anomalies.append(Anomaly(tied, shape, True, str(making_of(bare, name) or ""), causes.get(name, "")))
    for name in found.unregistered:
        if not _is_ignored((name,), ignore):
            shape = tuple(held[name].shape) if name in held else ()
            anomalies.append(Anomaly(name, shape, False, str(assignment_of(bare, name) or "")))
    return anomalies


def _is_ignored(names: Iterable[str], ignore: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in ignore)


def _hidden_in_checkpoints(loss: Any) -> set[int]:
    """The parameters of what was given to re-entrant checkpoints: they are in no graph before backward runs."""
    found: set[int] = set()
    roots = [tensor for tensor in tree_tensors(loss) if tensor.requires_grad]
    for node in walk_graph(roots).functions:
        if node._forward_cls is CheckpointFunction:
            for module in _modules_in(node.run_function):
                found |= {id(parameter) for parameter in module.parameters()}
    return found


def _modules_in(value: Any, depth: int = 0) -> Iterator[nn.Module]:
    """The modules that a function can reach: bound, as an argument, or in its closure."""
    inside: Iterable[Any] = ()
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        inside = [value.__self__, value.__func__]
    elif isinstance(value, FunctionType):
        inside = [variable.value for variable in function_variables(value)]
    elif isinstance(value, list | tuple | dict):
        inside = tree_leaves(value)
    for one in inside if depth < 5 else ():
        yield from _modules_in(one, depth + 1)
