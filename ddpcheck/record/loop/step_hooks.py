"""One hook before the steps of all optimizers, and one after: they call what follows steps at the time."""

from __future__ import annotations

from typing import Any, Protocol

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddpcheck.gather.autograd.autograd_graph import in_backward
from ddpcheck.record.module_hooks import UnpickledHook, remove_hooks


class StepFollower(Protocol):
    """Is told of the steps of every optimizer; `has_closure`: of a function, which runs the last passes before it."""

    def before_step(self, optimizer: Any, has_closure: bool, inside: bool, /) -> None:
        """One is about to step; `inside` of a backward pass: on one parameter, say, when DDP has averaged that."""

    def after_step(self, optimizer: Any, has_closure: bool, /) -> None:
        """It has stepped."""


# In another tuple whenever one begins or ends, so that each may end while all of them are called. The hooks themselves
# go with the last one, and not by the garbage collector: torch must not meet one that is taken off meanwhile.
_followers: tuple[StepFollower, ...] = ()
_handles: list[Any] = []


def follow_steps(follower: StepFollower) -> None:
    """Tell `follower` from now on, after all others; may be called again."""
    global _followers
    if follower not in _followers:
        _followers = (*_followers, follower)
    if not _handles:
        before, after = UnpickledHook(_before), UnpickledHook(_after)
        _handles[:] = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]


def unfollow_steps(follower: StepFollower) -> None:
    """Tell it no more; may be called again. The last one must not end in a step."""
    global _followers
    _followers = tuple(one for one in _followers if one is not follower)
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
    return any(map(callable, (*arguments[1:], *named.values())))  # the first one is the optimizer
