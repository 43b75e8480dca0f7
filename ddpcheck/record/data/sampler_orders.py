"""Epochs of samplers and datasets, and lines of epoch loops and loader arguments."""

from __future__ import annotations

import ast
import contextlib
import copy
import itertools
import sys
from collections.abc import Mapping
from inspect import CO_GENERATOR
from typing import Any

from torch.utils.data import Dataset

from ddpcheck.findings.program_blocks import blocks_around
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import file_of, frames_from, is_of_program, location_of, parsed_source, user_frame
from ddpcheck.gather.collectives.collective_log import unlogged
from ddpcheck.gather.collectives.fake_collectives import alone
from ddpcheck.gather.state.fingerprints import fingerprint
from ddpcheck.gather.state.randomness import generators_kept
from ddpcheck.recipe.pytree import tree_tensors

_MOST_INDICES = 1 << 16  # max indices of an order
_MOST_SAMPLES = 4  # max samples read from a dataset


def epoch_of(sampler: Any) -> int:
    """Return the `epoch` attribute of a sampler, or -1 if unknown."""
    value = getattr(sampler, "epoch", None)
    return value if type(value) is int else -1


def shuffles_by_epoch(sampler: Any, dataset: Any) -> bool:
    """Return True if copies of a sampler have different orders in two epochs.

    Runs user code, so call only for suspicious orders. Copies share the dataset and draw the same random numbers; their
    collectives return as if all ranks contributed the same values.
    """
    shared = [dataset, *(value for value in getattr(sampler, "__dict__", {}).values() if isinstance(value, Dataset))]
    orders = []
    for epoch in (0, 1):
        with contextlib.suppress(Exception), generators_kept(), unlogged(), alone():  # errors in user code
            copied = copy.deepcopy(sampler, {id(value): value for value in shared})
            copied.set_epoch(epoch) if hasattr(copied, "set_epoch") else setattr(copied, "epoch", epoch)
            orders.append(list(itertools.islice(copied, _MOST_INDICES)))
    return len(orders) > 1 and orders[0] != orders[1]


def makes_others(dataset: Any, size: int, before: Mapping[str, Any]) -> bool:
    """Return True if a dataset makes other samples with its attributes `before`."""
    digests = []
    for state in (before, {}):
        with contextlib.suppress(Exception), generators_kept(), unlogged(), alone():  # errors in user code
            copied = copy.copy(dataset)
            vars(copied).update(state)
            samples = [copied[index] for index in range(0, size, -(-size // _MOST_SAMPLES))]
            digests.append([fingerprint(tensor) for tensor in tree_tensors(samples)])
    return len(digests) > 1 and digests[0] != digests[1]


def epoch_line() -> Location | None:
    """Return the head of the loop around a loader pass, or `iter`'s line."""
    begun = user_frame(sys._getframe(1))
    for frame in frames_from(begun):
        location, file = location_of(frame), frame.f_code.co_filename
        loops = [block for block in blocks_around(file, location.path, location.line) if block.kind == "loop"]
        if is_of_program(file) and (around := [block for block in loops if block.line != location.line]):
            by_hand = frame is begun and around == loops and not frame.f_code.co_flags & CO_GENERATOR
            return location if by_hand else replace(location, line=around[-1].line)
    return None


def argument_line(call: Location, name: str) -> Location:
    """Return the line of a call's keyword argument, else the call's line."""
    calls = (node for node in ast.walk(parsed_source(file_of(str(call)))) if isinstance(node, ast.Call))
    keywords = (keyword for node in calls if node.lineno == call.line for keyword in node.keywords)
    return replace(call, line=next((keyword.value.lineno for keyword in keywords if keyword.arg == name), call.line))
