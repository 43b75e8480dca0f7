"""Detect calls of `wrapper.forward(...)`, which run no hooks, in DDP's own forward."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck.gather.patching import Patch, patched
from ddpcheck.record.module_hooks import Living

inside: set[int] = set()
"""`id()` of each wrapper in a forward pass detected by hooks."""


class Follower(Protocol):
    """Receiver of forward passes of any wrapper that ran no hook."""

    def enter_by_name(self, wrapper: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Handle the start of a forward pass."""

    def leave_by_name(self, wrapper: nn.Module, output: Any) -> None:
        """Handle the end of a forward pass."""


_followers: Living[Follower] = Living()
_patches: list[Patch] = []


def follow_forward(follower: Follower) -> None:
    """Notify `follower` from now on."""
    _followers.add(follower)
    if not _patches:
        for name, around in (("_pre_forward", _enters), ("_post_forward", _leaves)):
            _patches.append(patched(DistributedDataParallel, name, around))


def unfollow_forward(follower: Follower) -> None:
    """Stop notifying `follower`; idempotent."""
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
