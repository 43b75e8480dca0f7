"""Calls of `wrapper.forward(...)`, which call no hook: DDP's own forward is noticed instead."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck.gather.patching import Patch, patched
from ddpcheck.record.living import Living


class Follower(Protocol):
    """Is told of DDP's own forward of every wrapper, also where a call of the wrapper has called its hooks before."""

    def forward_entered(self, wrapper: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """It begins."""

    def forward_left(self, wrapper: nn.Module, output: Any) -> None:
        """It returns."""


_followers: Living[Follower] = Living()
_patches: list[Patch] = []


def follow_forward(follower: Follower) -> None:
    """Tell `follower` from now on."""
    _followers.add(follower)
    if not _patches:
        for name, around in (("_pre_forward", _enters), ("_post_forward", _leaves)):
            if hasattr(DistributedDataParallel, name):  # private to torch; without them such a call is not known
                _patches.append(patched(DistributedDataParallel, name, around))


def unfollow_forward(follower: Follower) -> None:
    """Tell it no more; may be called again."""
    _followers.discard(follower)
    while _patches and not _followers:
        _patches.pop().undo()


def _enters(wrapper: nn.Module, /, *arguments: Any, **named: Any) -> None:
    for follower in _followers:
        follower.forward_entered(wrapper, arguments, named)


def _leaves(wrapper: nn.Module, *_arguments: Any) -> Generator[None, Any, None]:
    output = yield
    for follower in _followers:
        follower.forward_left(wrapper, output)
