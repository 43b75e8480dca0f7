"""Training mode, into which a training loop puts its model before the first step."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

ARRIVED_EVALUATING = "model() returns the model in eval mode; it was checked in training mode, as after model.train()"


def into_training(module: nn.Module) -> bool:
    """Call `module.train()` as a training loop does; what a `train` of the user's keeps in eval mode stays there.

    So does what `model()` has put into eval mode inside a module that is in training mode.

    Returns:
        Whether the module itself was in eval mode.
    """
    evaluating = not module.training
    if not evaluating and not any(_is_overridden(part) for part in module.modules()):
        return False
    kept = [] if evaluating else [part for part in module.modules() if not part.training]
    if not _is_overridden(module) or _takes_a_mode(module.train):
        module.train()
    else:  # it trains the model
        nn.Module.train(module)
    for part in kept:
        part.training = False
    return evaluating


def _is_overridden(module: nn.Module) -> bool:
    return getattr(module.train, "__func__", module.train) is not nn.Module.train


def _takes_a_mode(train: Any) -> bool:
    """Whether a `train` can be called as that of a module is: without arguments, or with the mode alone."""
    try:
        given = list(inspect.signature(train).parameters.values())
    except (TypeError, ValueError):
        return True
    return bool(given) and all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given)
