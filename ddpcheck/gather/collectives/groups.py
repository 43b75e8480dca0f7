"""Process groups: names, ranks, and descriptions for reports."""

from __future__ import annotations

import contextlib
from typing import Any

Group = tuple[str, tuple[int, ...], str]
"""Name of a process group, its ranks, and its description for reports ("" if its creation was not recorded)."""


def named_group(handle: Any) -> Group:
    """Return name, ranks and description of `handle` (group, group name, ranks or mesh)."""
    import torch.distributed as dist

    name, members = _name_and_members(handle)
    if name in _recorded_groups:
        location, description = _recorded_groups[name]
        names = [group for group, entry in _recorded_groups.items() if entry[0] == location]
        number = f" (number {names.index(name) + 1} of that line)" if len(names) > 1 else ""
        return name, members, f"the process group{f' {description!r}' if description else ''} of {location}{number}"
    is_default = dist.is_initialized() and name == name_of_group(dist.group.WORLD)
    return name, members, "the default process group" if is_default else ""


def _name_and_members(handle: Any) -> tuple[str, tuple[int, ...]]:
    import torch.distributed as dist

    try:
        group: Any = dist.group.WORLD if handle is None else handle
        if isinstance(group, dist.ProcessGroup):
            return name_of_group(group), tuple(dist.get_process_group_ranks(group))
        if isinstance(group, tuple) and len(group) == 2 and hasattr(group[0], "get_group"):
            group = group[0].get_group(group[1])
        group = group.get_group() if hasattr(group, "get_group") else group
        if isinstance(group, str):
            group = vars(dist.distributed_c10d)["_resolve_process_group"](group)  # private to torch
        if isinstance(group, list | tuple) and all(isinstance(member, int) for member in group):
            has_all = set(group) == set(range(dist.get_world_size()))
            return _name_and_members(None)[0] if has_all else f"ranks {list(group)}", tuple(group)
        return name_of_group(group), tuple(dist.get_process_group_ranks(group))
    except Exception:  # not a group: the collective itself will raise
        return "", ()


def name_of_group(group: Any) -> str:
    """Return the name of a process group; '' if a Python implementation has none."""
    import torch.distributed as dist

    try:
        return str(group.group_name)
    except RuntimeError:
        with contextlib.suppress(AttributeError, KeyError):  # private to torch
            return str(vars(dist.distributed_c10d)["_world"].pg_names[group])
        return ""


def backend_of(group: Any = None) -> str:
    """Return a group's backend, or all its backends ("gloo, nccl") if none was chosen."""
    import torch.distributed as dist

    name = str(dist.get_backend(group))
    if name == "undefined":
        name = ", ".join(pair.partition(":")[2] for pair in str(dist.get_backend_config(group)).split(","))
    return name


_recorded_groups: dict[str, tuple[str, str]] = {}  # group name -> (creation line, `group_desc`)


def record_group(group: Any, location: str) -> None:
    """Record the creation line and the description of a process group."""
    import torch.distributed as dist

    if isinstance(group, dist.ProcessGroup) and location:
        description = getattr(group, "group_desc", "")
        _recorded_groups[name_of_group(group)] = location, "" if description == "undefined" else description
