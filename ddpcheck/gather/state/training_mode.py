"""Training mode, which a training loop sets before its first step."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

BUILT_IN_EVAL_MODE = "model() returns the model in eval mode; it was checked in training mode, as after model.train()"


def into_training(module: nn.Module) -> bool:
    """Call `module.train()`; return True if the module itself was in eval mode.

    A user's override of `train` may keep submodules in eval mode. If `module` was in training mode, submodules that the
    recipe's `model()` had set to eval mode stay in eval mode.
    """
    evaluating = not module.training
    if not evaluating and not any(_is_overridden(part) for part in module.modules()):
        return False
    eval_modules = [] if evaluating else [part for part in module.modules() if not part.training]
    if not _is_overridden(module) or _accepts_mode(module.train):
        module.train()
    else:  # `train` is the user's training function
        nn.Module.train(module)
    for part in eval_modules:
        part.training = False
    return evaluating


def _is_overridden(module: nn.Module) -> bool:
    return getattr(module.train, "__func__", module.train) is not nn.Module.train


def _accepts_mode(train: Any) -> bool:
    try:
        params = list(inspect.signature(train).parameters.values())
    except (TypeError, ValueError):
        return True
    return bool(params) and all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in params)
