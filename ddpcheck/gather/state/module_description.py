"""The description of a module on one rank: plain data that can be compared across ranks without moving a tensor."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ddpcheck.findings.evidence.modules import ModuleDescription, TensorRecord
from ddpcheck.findings.figures import MOST_MODULES, ModuleEntry
from ddpcheck.findings.replace import replace
from ddpcheck.gather.autograd.autograd_graph import all_names, unregistered_tensors
from ddpcheck.gather.state.tensor_values import plain_values, shape_of

_LAZY = (UninitializedParameter, UninitializedBuffer)
_CHUNK = 1 << 16  # words of eight bytes; half a megabyte stays in a core's cache
_MASK = (1 << 64) - 1


def describe(module: nn.Module) -> ModuleDescription:
    """Describe everything about `module` that DDP takes to be the same on every rank."""
    return replace(
        structure_of(module),
        state=tuple(
            (name, shape_of(tensor), fingerprint(tensor))
            for name, tensor in unregistered_tensors(module)
            if not isinstance(tensor, _LAZY)
        ),
    )


def structure_of(module: nn.Module) -> ModuleDescription:
    """As `describe`, without any values: that of tensors that are held without being registered is not there."""
    return replace(
        layout_of(module),
        ties=tuple(sorted(names for names in all_names(module).values() if len(names) > 1)),
        modules=tuple(
            (name, type(submodule).__qualname__, _options(submodule), submodule.training)
            for name, submodule in module.named_modules()
        ),
        uninitialised=tuple(
            name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if isinstance(tensor, _LAZY)
        ),
    )


def layout_of(module: nn.Module) -> ModuleDescription:
    """The parameters and buffers of `module`, without their values and all else."""
    return ModuleDescription(
        parameters=tuple(_record(n, p) for n, p in module.named_parameters() if not isinstance(p, _LAZY)),
        buffers=tuple(_record(n, b) for n, b in module.named_buffers() if not isinstance(b, _LAZY)),
    )


def _record(name: str, tensor: torch.Tensor) -> TensorRecord:
    dense = tensor.layout == torch.strided and not tensor.is_nested
    return TensorRecord(
        name=name,
        shape=shape_of(tensor),
        dtype=str(tensor.dtype).removeprefix("torch."),
        stride=tuple(tensor.stride()) if dense else (),
        requires_grad=tensor.requires_grad,
        device=tensor.device.type,
    )


def module_entries(module: nn.Module) -> tuple[ModuleEntry, ...]:
    """The modules of `module`, the first MOST_MODULES of them, each with its own parameters."""
    entries = []
    for name, submodule in itertools.islice(module.named_modules(), MOST_MODULES):
        own = dict(submodule.named_parameters(recurse=False))
        elements = sum(parameter.numel() for parameter in own.values() if not isinstance(parameter, _LAZY))
        entries.append(ModuleEntry(name, type(submodule).__qualname__, tuple(own), elements))
    return tuple(entries)


def _options(module: nn.Module) -> str:
    """The options of torch's own layers; what a user's class says of itself may well name the rank."""
    return module.extra_repr() if type(module).__module__.startswith("torch.nn.") else ""


def digest_of(value: object) -> str:
    """A digest of fixed size of plain data, equal for equal data."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def fingerprints(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """The fingerprint of each tensor by name."""
    return {name: fingerprint(tensor) for name, tensor in tensors}


def fingerprint(tensor: torch.Tensor) -> int:
    """A 64-bit fingerprint of the bits of `tensor`, computed where the tensor is.

    Equal bits give equal fingerprints (so -0.0 and 0.0 differ, and a NaN equals itself). The bits are taken eight
    bytes at a time, folded so that no bit is only at the top (there a product forgets its weight), weighted by a
    pseudo-random odd number for each place, and summed modulo 2**64. Of a tensor without values that can be read
    (`plain_values`), shape and dtype count.
    """
    values = plain_values(tensor)
    if values is not None and len(values) == 1:
        try:
            return _of_bits(values[0])
        except (NotImplementedError, TypeError):  # of a subclass, which lacks an operation
            values = None
    parts = None if values is None else [fingerprint(value) for value in values]
    return int(digest_of((parts, shape_of(tensor), str(tensor.dtype)))[:15], 16)


def _of_bits(value: torch.Tensor) -> int:
    octets = value.contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % 8:  # a view into a bucket, say: words of eight bytes must be aligned
        octets = octets.clone()
    whole = octets.numel() // 8 * 8
    words = octets[:whole].view(torch.int64)
    weights = _weights(octets.device, min(_CHUNK, words.numel()))
    total = octets.numel()
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK]
        mixed = part >> 32
        mixed &= 0xFFFFFFFF  # the shift copies the sign, and would make a word look like its complement
        mixed ^= part
        mixed *= weights[: part.numel()]
        total = (total * 0x9E3779B97F4A7C15 + int(mixed.sum())) & _MASK
    for octet in octets[whole:].tolist():
        total = (total * 0x2545F4914F6CDD1D + octet + 1) & _MASK
    return total


_WEIGHTS: dict[torch.device, torch.Tensor] = {}


def _weights(device: torch.device, count: int) -> torch.Tensor:
    """At least `count` pseudo-random odd numbers, the same in every process."""
    known = _WEIGHTS.get(device)
    if known is None or len(known) < count:
        index = torch.arange(1, (1 << max(count, 64).bit_length()) + 1, dtype=torch.int64, device=device)
        mixed = index * -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
        mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687  # the constants of splitmix64
        known = _WEIGHTS[device] = ((mixed ^ (mixed >> 27)) * -7723592293110705685) | 1
    return known
