"""Plain data in this rank's program outside tensors: label maps, file lists, numbers."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch

from ddpcheck.gather.autograd.autograd_graph import MODULE_INTERNALS
from ddpcheck.gather.phases.rank_state import rank_state
from ddpcheck.gather.state.reachable import PLAIN, function_variables, is_user_object
from ddpcheck.worlds import rank as this_rank

_MOST_ITEMS = 1 << 20
_MOST_STATE = 1000  # per container that `changed_data` compares; skips e.g. a vocabulary
_MOST_ELEMENTS = 64  # per tensor
_DEEPEST = 4
_CONTAINERS = (list, tuple, dict, set, frozenset)


def note_program_data() -> None:
    """Store hashes of `program_data` before the first step, for `changed_data`."""
    this_rank.state["program data"] = {name: hash(text) for name, text in program_data(_MOST_STATE).items()}


def changed_data() -> list[str]:
    """Return names of `program_data` values that changed since `note_program_data`."""
    before = this_rank.state.get("program data", {})
    after = program_data(_MOST_STATE)
    return [name for name, digest in before.items() if name in after and hash(after[name]) != digest]


def program_data(most: int = _MOST_ITEMS) -> dict[str, str]:
    """Return, as text, plain data in module attributes and in variables of recipe functions."""
    state = rank_state()
    texts: dict[str, str] = {}
    for prefix, module in state.module.named_modules():
        for key, value in vars(module).items():
            if key not in MODULE_INTERNALS and not key.startswith("_") and not _has_tensors(value):
                texts.update(_texts_in(f"{prefix}.{key}" if prefix else key, value, 0, most))
    for role in ("loss", "shard"):
        function = getattr(state.recipe, role, None)
        function = getattr(function, "__func__", function)
        for variable in function_variables(function) if isinstance(function, FunctionType) else ():
            for key, text in _texts_in(variable.name, variable.value, 0, most).items():
                texts.setdefault(key, text)
    return texts


def _texts_in(name: str, value: Any, depth: int, most: int = _MOST_ITEMS) -> Mapping[str, str]:
    """Return the plain data in `value` as texts by name, with sets sorted."""
    if isinstance(value, bool):
        return {}  # usually an "is rank 0" flag
    if isinstance(value, (*PLAIN, *_CONTAINERS, torch.Tensor)):
        text = _text_of(value, depth, most)
        return {name: text} if text else {}
    if depth < 1 and is_user_object(value) and not callable(value):
        inner = [_texts_in(f"{name}.{key}", item, depth + 1, most) for key, item in vars(value).items()]
        return {key: text for texts in inner for key, text in texts.items()}
    return {}


def _has_tensors(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else [value]
    return any(isinstance(item, torch.Tensor) for item in items)


def _text_of(value: Any, depth: int, most: int) -> str:
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):  # only small tensors that are not trained
        odd = value.requires_grad or value.is_nested or value.layout != torch.strided
        return "" if odd or value.numel() > _MOST_ELEMENTS else f"tensor({value.tolist()})"
    if depth > _DEEPEST or not isinstance(value, _CONTAINERS) or len(value) > most:
        return ""
    items = [_text_of(item, depth + 1, most) for item in value]
    if isinstance(value, dict):
        texts = [_text_of(item, depth + 1, most) for item in value.values()]
        items = [f"{key}: {text}" if key and text else "" for key, text in zip(items, texts, strict=True)]
    if not all(items):
        return ""
    opening, closing = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
    return opening + ", ".join(sorted(items) if isinstance(value, set | frozenset) else items) + closing
