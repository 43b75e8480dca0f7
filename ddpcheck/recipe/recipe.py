"""`Recipe`: model, batches and loss, and error reports for user functions."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from ddpcheck.findings.errors import DDPCheckError, TargetError, WrongTypeError
from ddpcheck.findings.source_lines import exception_location, format_traceback
from ddpcheck.findings.tracebacks import is_misuse, is_own_bug, runs_target
from ddpcheck.findings.wording import shorten, suggests_names
from ddpcheck.recipe.pytree import shard_batch, tree_tensors

Result = TypeVar("Result")

_DEFAULT_LEARNING_RATE = 0.01
_LONGEST_LINE = 300  # characters


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Functions that build the model, the batches and the loss of a check.

    Attributes:
        model: Called on every rank under the same seed; returns an `nn.Module`.
        batch: Called with the step, counted from 0, under the same seed on every rank; returns the GLOBAL batch: a
            tensor or nested tensors (dict, list, tuple, named tuple, dataclass) with the samples in dim 0.
        loss: Called with the model (bare or wrapped) and a batch; returns a scalar tensor, or nested scalars, which
            are summed.
        shard: `(batch, rank, world_size) -> local batch`; default: dim 0 in equal parts (`shard_batch`).
        optimizer: Called with the parameters; default: SGD with lr=0.01.
        ddp_kwargs: Keyword arguments of `DistributedDataParallel`.
        wrap: `(module, device) -> wrapped module`; default: `DistributedDataParallel(module, **ddp_kwargs)`.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Any]
    shard: Callable[[Any, int, int], Any] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    ddp_kwargs: Mapping[str, Any] = field(default_factory=dict)
    wrap: Callable[[nn.Module, torch.device], nn.Module] | None = None

    def __post_init__(self) -> None:
        for name in ("model", "batch", "loss", "shard", "optimizer", "wrap"):
            value = getattr(self, name)
            is_default = value is None and name in ("shard", "optimizer", "wrap")
            if not is_default and not callable(value):
                raise WrongTypeError(f"recipe: {name} must be a function, not {describe_type(value)}")
        if isinstance(self.model, nn.Module):
            raise WrongTypeError(
                f"recipe: model must be a function that builds the module, not {describe_type(self.model)}; every rank "
                "builds its own"
            )
        if not isinstance(self.ddp_kwargs, Mapping):
            raise WrongTypeError(f"recipe: ddp_kwargs must be a dict, not {describe_type(self.ddp_kwargs)}")

    def build_model(self) -> nn.Module:
        """Call `model()`.

        Raises:
            TargetError: `model` raised, or returned no module.
        """
        module = call_user("model()", self.model)
        if not isinstance(module, nn.Module):
            raise TargetError(f"model() returned {describe_type(module)}; it must return a torch.nn.Module")
        return module

    def global_batch(self, step: int) -> Any:
        """Call `batch(step)`.

        Raises:
            TargetError: `batch` raised, or returned no tensor.
        """
        batch = call_user(f"batch({step})", self.batch, step)
        if next(tree_tensors(batch), None) is None:
            raise TargetError(
                f"batch({step}) returned {describe_type(batch)} without any tensor; return a nest of tensors"
            )
        return batch

    def local_batch(self, batch: Any, rank: int, world_size: int) -> Any:
        """Return the shard of the global `batch` for `rank`."""
        if self.shard is None:
            return shard_batch(batch, rank, world_size)
        label = f"shard(batch, rank={rank}, world_size={world_size})"
        shard = call_user(label, self.shard, batch, rank, world_size)
        if shard is None:
            raise TargetError(f"{label} returned None; it must return the part of the batch that the rank works on")
        return shard

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Call `optimizer(parameters)`, or create the default SGD."""
        if self.optimizer is None:
            return torch.optim.SGD(parameters, lr=_DEFAULT_LEARNING_RATE)
        optimizer = call_user("optimizer(parameters)", self.optimizer, parameters)
        if not hasattr(optimizer, "step") or not hasattr(optimizer, "param_groups"):
            raise TargetError(f"optimizer(parameters) returned {describe_type(optimizer)}, not a torch optimizer")
        if _needs_closure(optimizer):
            raise TargetError(
                f"optimizer(parameters) returned {describe_type(optimizer)}, whose step() needs a closure, but a check "
                "calls it without one; leave optimizer out to check the gradients only"
            )
        return optimizer

    def wrap_module(self, module: nn.Module, device: torch.device) -> nn.Module:
        """Wrap `module` by `wrap` (default: DDP); all ranks have to call this method.

        Raises:
            TargetError: `wrap` raised, or returned no module.
        """
        if self.wrap is not None:
            wrapped = call_user("wrap(module, device)", self.wrap, module, device)
        else:
            kwargs = dict(self.ddp_kwargs)
            if device.type == "cuda":
                kwargs.setdefault("device_ids", [device.index])
            wrap = functools.partial(nn.parallel.DistributedDataParallel, module, **kwargs)
            wrapped = call_user("DistributedDataParallel(module, **ddp_kwargs)", wrap)
        if not isinstance(wrapped, nn.Module):
            raise TargetError(
                f"wrap(module, device) returned {describe_type(wrapped)}; it must return a torch.nn.Module"
            )
        return wrapped


Recipe.__init__ = suggests_names("recipe")(Recipe.__init__)  # type: ignore[method-assign]


def _needs_closure(optimizer: Any) -> bool:
    with contextlib.suppress(TypeError, ValueError):  # not a Python function
        params = inspect.signature(optimizer.step).parameters.values()
        return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in params)
    return False


@runs_target
def call_user(what: str, function: Callable[..., Result], *args: Any) -> Result:
    """Call a user function; turn its exceptions into a `TargetError` of one sentence.

    `what`: name of the function in this sentence.
    """
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        if is_misuse(error) if isinstance(error, DDPCheckError) else not is_own_bug(error):
            raise target_error(what, error) from error
        raise


@runs_target
def call_loss(recipe: Recipe, model: nn.Module, batch: Any, step: int) -> Any:
    """Call the loss of a recipe; exceptions of the user code propagate unchanged.

    Raises:
        TargetError: `loss` misused the API of ddpcheck, or cannot be called with `(model, batch)`.
        Exception: Any exception of the user code.
    """
    try:
        return recipe.loss(model, batch)
    except Exception as error:
        frames = error.__traceback__
        is_wrong_call = frames is not None and frames.tb_next is None  # no frame inside the loss
        if is_misuse(error) if isinstance(error, DDPCheckError) else is_wrong_call:
            raise target_error(f"loss(model, batch) in step {step}", error) from error
        raise


def require_target(target: object) -> None:
    """Raise `WrongTypeError` if `target` is not a `Recipe` or string."""
    if isinstance(target, Recipe | str):
        return
    hint = "name it in a string" if isinstance(target, os.PathLike) else "see `ddpcheck.Recipe`"
    if isinstance(target, nn.Module) or (isinstance(target, type) and issubclass(target, nn.Module)):
        name = target.__name__ if isinstance(target, type) else type(target).__name__
        hint = f"describe how it is trained: ddpcheck.Recipe(model={name}, batch=..., loss=...)"
    elif isinstance(target, FunctionType):
        hint = "call it, if it returns a recipe"
    elif isinstance(target, ModuleType):
        hint = f"name it in a string: {target.__name__!r}"
    raise WrongTypeError(
        f"target must be a ddpcheck.Recipe or a string that names one, not {describe_type(target)}; {hint}"
    )


def target_error(what: str, error: BaseException) -> TargetError:
    """Return a `TargetError` that names an exception and the user line that raised it."""
    location = exception_location(error)
    end = f" (at {location})" if location else ""
    if isinstance(error, SystemExit):
        return TargetError(f"{what} called exit({error.code!r}){end}; remove that call", detail=format_traceback(error))
    return TargetError(f"{what} raised {error_summary(error)}{end}", detail=format_traceback(error))


def error_summary(error: BaseException) -> str:
    """Return the class and the first line of the message of `error`."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {shorten(lines[0], _LONGEST_LINE)}" if lines else type(error).__name__


def describe_type(value: object) -> str:
    """Describe the type of `value`, such as "the class Net"."""
    if value is None:
        return "None"
    for kinds, word in ((type, "class"), (FunctionType, "function"), (ModuleType, "module")):
        if isinstance(value, kinds):
            return f"the {word} {value.__name__}"
    return f"a value of type {type(value).__name__}"
