"""Calls of a wrapper's forward by its name (`wrapper.forward(...)`), which call no hook: DDP's own one is noticed."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck.gather.patching import Patch, patched
from ddpcheck.record.module_hooks import Living

inside: set[int] = set()
"""The wrappers, by identity, of which a forward pass runs that was noticed by hooks."""


class Follower(Protocol):
    """Is told of each forward of any wrapper that no hook has been called for."""

    def enter_by_name(self, wrapper: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """It begins."""

    def leave_by_name(self, wrapper: nn.Module, output: Any) -> None:
        """It returns."""


_followers: Living[Follower] = Living()
_patches: list[Patch] = []


def follow_forward(follower: Follower) -> None:
    """Tell `follower` from now on."""
    _followers.add(follower)
    if not _patches:
        for name, around in (("_pre_forward", _enters), ("_post_forward", _leaves)):
            _patches.append(patched(DistributedDataParallel, name, around))


def unfollow_forward(follower: Follower) -> None:
    """Tell it no more; may be called again."""
    _followers.discard(follower)
    while _patches and not _followers:
        _patches.pop().undo()


def _enters(wrapper: nn.Module, /, *arguments: Any, **named: Any) -> None:
    for follower in _followers if id(wrapper) not in inside else ():
        follower.enter_by_name(wrapper, arguments, named)


def _leaves(wrapper: nn.Module, *_arguments: Any) -> Generator[None, Any, None]:
    if id(wrapper) in inside:
        return
    output = yield
    for follower in _followers:
        follower.leave_by_name(wrapper, output)
