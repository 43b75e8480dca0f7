"""Computations of the assertions on a rank: anomalous parameters, fingerprints, distances."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.checkpoint import CheckpointFunction

from ddpcheck.anomalous import detect_anomalous_params
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.findings.source_lines import assignment_of, assignment_of_parameter
from ddpcheck.gather.autograd.autograd_graph import LossGraph, all_names, named_parameters, unregistered_tensors
from ddpcheck.gather.collectives.store_exchange import StoreExchange
from ddpcheck.gather.state.fingerprints import fingerprint
from ddpcheck.gather.state.reachable import function_variables
from ddpcheck.recipe.pytree import tree_leaves, tree_tensors
from ddpcheck.testing.assertions.messages import Anomaly, ComparedItem, CompareOptions, Mismatch


def anomalies_of(loss: Any, model: nn.Module, ignore: Sequence[str], replay: Callable[[], Any] | None) -> list[Anomaly]:
    """Return the anomalies of `model`, except parameters ignored or in re-entrant checkpoints.

    Raises:
        UsageError: `loss` requires no grad, no parameter requires grad, or a pattern in `ignore` matches nothing.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is an nn.Module, not {type(model).__name__}")
    wrapped = hasattr(model, "reducer") and isinstance(getattr(model, "module", None), nn.Module)
    bare: nn.Module = model.module if wrapped else model  # type: ignore[assignment]
    parameters = {name: p for name, p in named_parameters(bare).items() if p.requires_grad}
    if not parameters:
        raise UsageError("no parameter of the model requires grad, so there is nothing that could take part")
    unregistered = dict(unregistered_tensors(bare))
    aliases = all_names(bare)
    valid_names = {alias for names in aliases.values() for alias in names} | unregistered.keys()
    unmatched = [pattern for pattern in ignore if not any(fnmatchcase(name, pattern) for name in valid_names)]
    if unmatched:
        raise UsageError(f"ignore names {unmatched[0]!r}, and no parameter of the model is called that")
    detected = detect_anomalous_params(loss, bare)
    hidden = _parameters_in_checkpoints(loss) if detected.missing else set()
    missing = [
        name
        for name, parameter in parameters.items()
        if name in detected.missing and id(parameter) not in hidden and not _is_ignored(aliases[id(parameter)], ignore)
    ]
    causes: dict[str, str] = {}
    if missing and replay is not None:
        findings = detect_anomalous_params(loss, bare, replay=replay).findings
        causes = {name: f"{f.code}: {f.message}" for f in findings for name in f.subjects}
    anomalies = []
    for name in missing:
        tied, shape = ", ".join(aliases[id(parameters[name])]), tuple(parameters[name].shape)
        anomalies.append(
            Anomaly(tied, shape, True, str(assignment_of_parameter(bare, name) or ""), causes.get(name, ""))
        )
    for name in detected.unregistered:
        if not _is_ignored((name,), ignore):
            shape = tuple(unregistered[name].shape) if name in unregistered else ()
            anomalies.append(Anomaly(name, shape, False, str(assignment_of(bare, name) or "")))
    return anomalies


def _is_ignored(names: Iterable[str], ignore: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in ignore)


def _parameters_in_checkpoints(loss: Any) -> set[int]:
    """Return ids of parameters used in re-entrant checkpoints, which the graph lacks before backward."""
    param_ids: set[int] = set()
    roots = [tensor for tensor in tree_tensors(loss) if tensor.requires_grad]
    for node in LossGraph(roots).functions:
        if node._forward_cls is CheckpointFunction:
            for module in _modules_in(node.run_function):
                param_ids |= {id(parameter) for parameter in module.parameters()}
    return param_ids


def _modules_in(value: Any, depth: int = 0) -> Iterator[nn.Module]:
    """Yield modules that a function refers to: as `self`, partial argument or variable."""
    children: Iterable[Any] = ()
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, functools.partial):
        children = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        children = [value.__self__, value.__func__]
    elif isinstance(value, FunctionType):
        children = [variable.value for variable in function_variables(value)]
    elif isinstance(value, list | tuple | dict):
        children = tree_leaves(value)
    for child in children if depth < 5 else ():
        yield from _modules_in(child, depth + 1)


_PIECE = 1 << 24  # bytes in one broadcast
_PLAIN = (str, bytes, type(None), enum.Enum, torch.dtype, torch.layout, torch.device, torch.memory_format, slice, range)
_NUMBER_TYPES = (bool, int, float, complex)
_KEY_TYPES = (str, bytes, *_NUMBER_TYPES, type(None), enum.Enum)
_DENSE_PARTS = {  # methods that return the dense parts of a tensor, by layout
    torch.sparse_coo: ("indices", "values"),
    torch.jagged: ("offsets", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
# path, kind (of `ComparedItem`) and a dense tensor, a number, a plain value or the number of items in a container
Item = tuple[str, str, Any]


def items_of(value: Any) -> list[Item]:
    """Flatten a tensor, number, module or nesting of these, in fixed order.

    Raises:
        UsageError: A part of `value` has no data or a type that cannot be compared.
    """
    try:
        with torch.no_grad():
            return list(_walk(value, "", ()))
    except RecursionError:
        raise UsageError("the argument is nested too deeply; pass its tensors in a flat list") from None


def _walk(value: Any, path: str, parent_ids: tuple[int, ...]) -> Iterator[Item]:
    if isinstance(value, torch.Tensor):
        yield from _walk_tensor(value, path)
    elif isinstance(value, nn.Module):
        tensors = [*value.named_parameters(), *value.named_buffers()]
        yield path, "module", len(tensors)
        for name, tensor in tensors:
            yield from _walk_tensor(tensor, f"{path}.{name}")
    elif isinstance(value, _PLAIN):
        yield path, "value", repr(value.type if isinstance(value, torch.device) else value)
    elif isinstance(value, _NUMBER_TYPES):
        number_type: Any = next(kind for kind in _NUMBER_TYPES if isinstance(value, kind))
        yield path, "number", number_type(value)  # numpy's float64 is a float
    elif type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        try:
            tensor = torch.from_numpy(value.copy()) if getattr(value, "ndim", 0) else torch.tensor(value.item())
        except Exception as error:
            raise UsageError(f"{_item_at(path)} is a numpy value that torch does not take: {error}") from None
        yield from _walk_tensor(tensor, path)
    else:
        if id(value) in parent_ids:
            raise UsageError(f"{_item_at(path)} contains itself")
        entries, kind = _container_items(value, path)
        yield path, kind, len(entries)
        for key, entry in entries:
            yield from _walk(entry, f"{path}{key}", (*parent_ids, id(value)))


def _container_items(value: Any, path: str) -> tuple[list[tuple[str, Any]], str]:
    """Return (items, kind) of a container, with items of a mapping sorted by key."""
    if isinstance(value, Mapping):
        for key in value:
            if not all(isinstance(part, _KEY_TYPES) for part in (key if isinstance(key, tuple) else (key,))):
                raise UsageError(
                    f"{_item_at(path)} has a key of type {type(key).__name__}, which other ranks cannot be asked for; "
                    "use strings or numbers (optimizer.state_dict() and not optimizer.state)"
                )
        return sorted(((f"[{key!r}]", value[key]) for key in value), key=lambda entry: entry[0]), "mapping"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields], "named tuple"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return [(f".{name}", getattr(value, name)) for name in fields], "dataclass"
    if isinstance(value, Sequence | Iterator) or type(value).__name__ == "deque":
        return [(f"[{index}]", entry) for index, entry in enumerate(value)], "sequence"
    raise UsageError(
        f"{_item_at(path)} is of type {type(value).__qualname__}, which cannot be compared across ranks; pass tensors, "
        "numbers, strings, None, modules, or lists, tuples, dicts and dataclasses of them"
    )


def _item_at(path: str) -> str:
    return f"item {path.removeprefix('.')}" if path else "the argument"


def _walk_tensor(tensor: torch.Tensor, path: str) -> Iterator[Item]:
    """Yield the tensor, and the dense parts of a sparse, nested or quantized tensor."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise UsageError(f"{_item_at(path)} is lazy and has no values yet; run a forward pass first")
    if type(tensor).__module__.startswith("torch.distributed"):
        raise UsageError(
            f"{_item_at(path)} is a {type(tensor).__name__}, of which each rank holds a part; pass .full_tensor() or "
            ".to_local()"
        )
    if tensor.is_meta:
        raise UsageError(f"{_item_at(path)} is on the meta device and has no values")
    tensor = tensor.detach()
    yield path, "tensor", tensor
    if tensor.is_quantized:
        yield f"{path}.dequantize()", "tensor", tensor.dequantize()
    elif tensor.is_nested and tensor.layout != torch.jagged:
        for index, part in enumerate(tensor.unbind()):
            yield from _walk_tensor(part, f"{path}[{index}]")
    elif tensor.layout != torch.strided:
        merged = tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor
        for name in _DENSE_PARTS.get(tensor.layout, ("to_dense",)):
            yield f"{path}.{name}()", "tensor", getattr(merged, name)()


def compared_items(items: Sequence[Item], options: CompareOptions, *, canonical: bool) -> tuple[ComparedItem, ...]:
    """Return a `ComparedItem` for each item, with a fingerprint of each tensor.

    `canonical` gives equal values the same bits: 0.0 and -0.0, and all NaNs. It copies each tensor: use it only after
    plain fingerprints differ.
    """
    with torch.no_grad():
        return tuple(_compared_item(*item, options, canonical=canonical) for item in items)


def _compared_item(path: str, kind: str, value: Any, options: CompareOptions, *, canonical: bool) -> ComparedItem:
    if kind == "number":
        return ComparedItem(path, kind, value, nans="it is NaN" if value != value else "")
    if kind != "tensor":
        return ComparedItem(path, kind, value)
    dense = value.layout == torch.strided and not value.is_quantized and not value.is_nested
    attributes = {
        "shape": (value.size(0),) if value.is_nested else tuple(map(int, value.shape)),
        "dtype": str(value.dtype).removeprefix("torch."),
        "layout": str(value.layout).removeprefix("torch."),
    }
    if options.check_device:
        attributes["device"] = value.device.type
    if options.check_stride:
        attributes["stride"] = tuple(value.stride()) if dense else ()
    return ComparedItem(
        path,
        kind,
        attributes=tuple((name, str(text)) for name, text in attributes.items()),
        fingerprint=fingerprint(_with_canonical_bits(value) if canonical else value) if dense else 0,
        nans=_nan_text(value) if dense else "",
    )


def _nan_text(tensor: torch.Tensor) -> str:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return ""
    nans = torch.isnan(tensor.float() if tensor.dtype.itemsize == 1 else tensor)
    count = int(nans.count_nonzero())
    suffix = f", the first at index {_first_true_index(nans)}" if count and tensor.dim() else ""
    return f"{count} / {tensor.numel()} elements are NaN{suffix}" if count else ""


def _first_true_index(mask: torch.Tensor) -> tuple[int, ...]:
    flat_index = mask.reshape(-1).byte().argmax()
    return tuple(int(index) for index in torch.unravel_index(flat_index, mask.shape))


def _with_canonical_bits(tensor: torch.Tensor) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    real = (real.float() if real.dtype.itemsize == 1 else real) + 0.0  # -0.0 + 0.0 is 0.0
    return real.masked_fill_(torch.isnan(real), math.nan)


def with_distances(
    mismatches: Sequence[Mismatch], items: Sequence[Item], options: CompareOptions, group: Any, exchange: StoreExchange
) -> list[Mismatch]:
    """Return `mismatches` with the distances of tensors from the reference rank's tensor.

    If `options` are exact, only the first mismatch gets distances. Every rank of `group` has to call this function,
    since it broadcasts the tensors of the reference ranks.
    """
    selected = [item for item in (mismatches[:1] if options.exact else mismatches) if item.measurable]
    if not selected:
        return list(mismatches)
    tensors = {path: value for path, kind, value in items if kind == "tensor"}
    local_distances: list[tuple[float, str]] = []
    with torch.no_grad():
        for item in selected:
            tensor = tensors[item.path].resolve_conj().resolve_neg().contiguous()
            received = _broadcast_from(tensor, item.reference, group, keep=exchange.rank in item.differing_ranks)
            local_distances.append((0.0, "") if received is None else _distance(tensor.cpu(), received, options))
    by_rank = exchange.all_gather("measured", local_distances)
    by_path = {
        item.path: dict(zip(exchange.ranks, distances, strict=True))
        for item, distances in zip(selected, zip(*by_rank, strict=True), strict=True)
    }
    return [replace(item, distances=by_path.get(item.path, {})) for item in mismatches]


def _broadcast_from(tensor: torch.Tensor, source: int, group: Any, *, keep: bool) -> torch.Tensor | None:
    """Broadcast the tensor of rank `source`; return a CPU copy if `keep`, else `None`."""
    kinds = [pair.partition(":")[0] for pair in str(dist.get_backend_config(group)).split(",")]
    device = torch.device("cpu" if "cpu" in kinds else kinds[0])  # "cuda" means the current GPU
    received = torch.empty_like(tensor, device="cpu") if keep else None
    pieces = tensor.reshape(-1).view(torch.uint8).split(_PIECE)
    targets = pieces if received is None else received.reshape(-1).view(torch.uint8).split(_PIECE)
    for piece, target in zip(pieces, targets, strict=True):
        buffer = piece.to(device, copy=True)
        dist.broadcast(buffer, src=source, group=group)
        if keep:
            target.copy_(buffer)
    return received


def _distance(got: torch.Tensor, want: torch.Tensor, options: CompareOptions) -> tuple[float, str]:
    """Return maximum difference and message of `torch.testing.assert_close`; (0.0, '') if close."""
    if got.is_complex() or got.is_floating_point():
        min_dtype = torch.complex64 if got.is_complex() else torch.float32
        dtype = got.dtype if got.dtype.itemsize >= min_dtype.itemsize else min_dtype
    else:
        dtype = torch.int64 if options.exact else torch.float64  # isclose rounds integers to float32
    actual, expected = got.to(dtype), want.to(dtype)
    try:
        torch.testing.assert_close(actual, expected, rtol=options.rtol, atol=options.atol, equal_nan=options.equal_nan)
        return 0.0, ""
    except AssertionError as error:
        lines = [line.rstrip(".") for line in str(error).partition("\n\n")[2].splitlines()]
    except Exception as error:  # do not raise: other ranks wait for this rank
        return math.inf, f"How far could not be measured ({type(error).__name__}: {error})"
    if got.dim():
        is_close = torch.isclose(actual, expected, rtol=options.rtol, atol=options.atol, equal_nan=options.equal_nan)
        index = _first_true_index(~is_close)
        lines.append(f"First mismatch at index {index}: {got[index].item()} instead of {want[index].item()}")
    worst = float((actual - expected).abs().max())
    return math.inf if math.isnan(worst) else worst, "\n".join(lines)
