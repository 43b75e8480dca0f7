"""Shared hooks before and after the steps of all optimizers."""

from __future__ import annotations

from typing import Any, Protocol

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpcheck.gather.autograd.autograd_graph import in_backward
from ddpcheck.record.module_hooks import UnpickledHook, remove_hooks


class StepFollower(Protocol):
    """Receiver of all optimizer steps; `has_closure`: a closure runs the last passes."""

    def before_step(self, optimizer: Any, has_closure: bool, inside: bool, /) -> None:
        """Handle the start of a step; `inside`: within a backward pass."""

    def after_step(self, optimizer: Any, has_closure: bool, /) -> None:
        """Handle the end of a step."""


# Replaced on each change, so that a follower may leave during a call. The hooks are removed with the last follower, not
# by the garbage collector: torch must not find a hook removed during iteration.
_followers: tuple[StepFollower, ...] = ()
_handles: list[Any] = []


def follow_steps(follower: StepFollower) -> None:
    """Notify `follower` from now on, after all others; idempotent."""
    global _followers
    if follower not in _followers:
        _followers = (*_followers, follower)
    if not _handles:
        before, after = UnpickledHook(_before), UnpickledHook(_after)
        _handles[:] = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]


def unfollow_steps(follower: StepFollower) -> None:
    """Stop notifying `follower`; idempotent. The last follower must not leave during a step."""
    global _followers
    _followers = tuple(entry for entry in _followers if entry is not follower)
    if not _followers:
        remove_hooks(_handles)


def _before(optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    has_closure, inside = len(arguments) + len(named) > 1 and _has_closure(arguments, named), in_backward()
    for follower in _followers:
        follower.before_step(optimizer, has_closure, inside)


def _after(optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    has_closure = len(arguments) + len(named) > 1 and _has_closure(arguments, named)
    for follower in _followers:
        follower.after_step(optimizer, has_closure)


def _has_closure(arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    return any(map(callable, (*arguments[1:], *named.values())))  # the first argument is the optimizer
