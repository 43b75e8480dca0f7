"""`CheckedDistributedDataParallel`: self-checking DDP with the step methods of mmengine's wrapper."""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.consistency import check_consistency as compare_modules
from ddpcheck.consistency import gather_if_different
from ddpcheck.findings.errors import FindingsError, UsageError, WrongTypeError
from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import Severity
from ddpcheck.gather.ddp.ddp_wrapper import constructor_options, outermost_sharded
from ddpcheck.gather.ddp.sharding import refuse_fsdp1
from ddpcheck.gather.state.module_description import describe
from ddpcheck.monitor.reporting import FindingReporter, OnFinding, WatchOptions, format_finding
from ddpcheck.monitor.watch import Watch
from ddpcheck.recipe.pytree import tree_tensors
from ddpcheck.record.recording import UnpickledHook
from ddpcheck.rules.parameters.ddp110_uninitialised_parameter import judge_uninitialised
from ddpcheck.rules.replicas.ddp221_wrapper_options import judge_wrapper_options
from ddpcheck.rules.replicas.descriptions import judge_descriptions

_DDP = nn.parallel.DistributedDataParallel


class CheckedDistributedDataParallel(_DDP):
    """`DistributedDataParallel` that reports faults during training.

    Arguments, attributes and keys of `state_dict` are the same as in DDP; `load_state_dict` also accepts keys of the
    bare module. A healthy step costs one query of the autograd engine. For an existing wrapper, use `ddpcheck.watch`.

    Args:
        module: The module to wrap.
        *args: Positional arguments of `DistributedDataParallel`.
        detect_anomalous_params: Find parameters that do not take part in the loss as DDP expects: DDP101 to DDP108,
            with cause, ranks and steps, before a rank hangs.
        check_consistency: Compare modules and options of the ranks before DDP's own first collective, which hangs or
            aborts on some differences. A number N repeats the comparison, with parameters, buffers and gradients, every
            N synchronized backward passes.
        check_parity_every: Every so many synchronized backward passes, compare DDP's averaged gradients with an average
            by ddpcheck (DDP302, 303).
        check_normalisation: Find means of means over micro-batches or ranks with unequal numbers of targets (tokens,
            say): DDP514, 305.
        on_finding: "raise" raises `FindingsError` for errors, on all ranks in the same backward pass, and warns of the
            rest; "warn" warns of both; a function is called with each `Finding`. Each cause is reported once.
        ignore: Rules that are not reported because the behavior is intended, by code, prefix of a code or name.
        check_timeout: Seconds to wait for the other ranks in a comparison.
        **kwargs: Keyword arguments of `DistributedDataParallel`.

    Attributes:
        watch: The `Watch` that follows the loop.

    Raises:
        FindingsError: The modules or options of the ranks differ, and `on_finding` is "raise" or DDP's collectives
            would hang, abort or mix up tensors.
        HangError: A rank does not construct its wrapper.
        UsageError: An argument has an invalid value.
    """

    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        detect_anomalous_params: bool = True,
        check_consistency: bool | int = True,
        check_parity_every: int = 0,
        check_normalisation: bool = True,
        on_finding: OnFinding = "raise",
        ignore: Sequence[str] = (),
        check_timeout: float = 60.0,
        **kwargs: Any,
    ) -> None:
        interval = 0 if isinstance(check_consistency, bool) else check_consistency
        if not isinstance(interval, int) or interval < 0:
            raise UsageError(
                "check_consistency is True, False, or a number of steps after which to repeat the comparison, not "
                f"{check_consistency!r}"
            )
        watch_options = WatchOptions(
            detect_anomalous_params=detect_anomalous_params,
            check_consistency_every=interval,
            check_parity_every=check_parity_every,
            check_normalisation=check_normalisation,
            on_finding=on_finding,
            ignore=ignore,
            timeout=check_timeout,
        )
        _check_module(module)
        group = _group_of(*args, **kwargs)
        first = not dist.is_initialized() or dist.get_rank(group) == 0
        reporter = FindingReporter(watch_options, shows_warnings=first)
        if check_consistency:
            options = constructor_options(_DDP.__init__, self, module, *args, **kwargs)
            findings, impossible = _judge_construction(module, options, group, check_timeout)
            reporter.report(findings)
            errors = [finding for finding in findings if finding.severity is Severity.ERROR]
            if impossible and errors:  # also under on_finding="warn"
                raise FindingsError("\n".join(format_finding(finding) for finding in errors), errors)
        super().__init__(module, *args, **kwargs)
        if check_consistency:
            reporter.report(compare_modules(self, group, timeout=check_timeout))
        self._watch_options = watch_options
        self.watch = Watch(self, watch_options, reported=reporter.findings, began_alike=bool(check_consistency))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return all findings so far."""
        return self.watch.findings

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        del state["watch"]  # belongs to this process
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = state[name].items()
            state[name] = OrderedDict((key, hook) for key, hook in hooks if not isinstance(hook, UnpickledHook))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.watch = Watch(self, self._watch_options)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict, also with keys of the bare module (without "module.")."""
        keys = self.state_dict().keys()
        if state_dict and not keys & state_dict.keys():
            renamed = OrderedDict((f"module.{key}", value) for key, value in state_dict.items())
            if keys & renamed.keys():
                renamed._metadata = getattr(state_dict, "_metadata", None)  # type: ignore[attr-defined]
                state_dict = renamed
        return super().load_state_dict(state_dict, *args, **kwargs)

    # Step methods of mmengine's wrapper

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        """Run a training step, as `mmengine.model.MMDistributedDataParallel.train_step` does.

        Args:
            data: A batch, prepared by the module's `data_preprocessor` if there is one.
            optim_wrapper: mmengine's `OptimWrapper`, or an optimizer.

        Returns:
            Values to log, by name.
        """
        context = getattr(optim_wrapper, "optim_context", None)
        with context(self) if context is not None else contextlib.nullcontext():
            losses = self._forward_with(self, self._preprocess(data, training=True), mode="loss")
        loss, log = self._parse_losses(losses)
        if hasattr(optim_wrapper, "update_params"):
            optim_wrapper.update_params(loss)
        else:
            optim_wrapper.zero_grad()
            loss.backward()
            optim_wrapper.step()
        return log

    def val_step(self, data: Any) -> Any:
        """Run the module's own `val_step`, or predict without gradients; nothing is synchronized."""
        return self._predict("val_step", data)

    def test_step(self, data: Any) -> Any:
        """Run the module's own `test_step`, or predict without gradients; nothing is synchronized."""
        return self._predict("test_step", data)

    def _predict(self, name: str, data: Any) -> Any:
        step = getattr(self.module, name, None)
        if step is not None:
            return step(data)
        with torch.no_grad():
            return self._forward_with(self.module, self._preprocess(data, training=False), mode="predict")

    def _preprocess(self, data: Any, *, training: bool) -> Any:
        prepare = getattr(self.module, "data_preprocessor", None)
        return data if prepare is None else prepare(data, training)

    def _forward_with(self, module: nn.Module, data: Any, *, mode: str) -> Any:
        parameters = inspect.signature(self.module.forward).parameters
        kwargs = {"mode": mode} if "mode" in parameters else {}
        if isinstance(data, Mapping):
            return module(**data, **kwargs)
        return module(*data, **kwargs) if isinstance(data, list | tuple) else module(data, **kwargs)

    def _parse_losses(self, losses: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        parse = getattr(self.module, "parse_losses", None)
        if parse is not None:
            loss, log = parse(losses)
            return loss, log
        if isinstance(losses, torch.Tensor):
            return losses.mean(), {"loss": losses.detach().mean()}
        if not isinstance(losses, Mapping):
            raise UsageError(f"train_step: forward returned {type(losses).__name__}, not a loss or a dict of losses")
        means = {name: torch.stack([t.mean() for t in tree_tensors(value)]).sum() for name, value in losses.items()}
        loss_terms = [value for name, value in means.items() if "loss" in name]
        if not loss_terms:
            raise UsageError(f"train_step: no entry of the output of forward has 'loss' in its name: {list(losses)}")
        total = torch.stack(loss_terms).sum()
        return total, {"loss": total.detach(), **{name: value.detach() for name, value in means.items()}}


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        name = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise WrongTypeError(f"CheckedDistributedDataParallel wraps an nn.Module, and was given {name}")
    if any(isinstance(part, _DDP) for part in module.modules()):
        raise UsageError(
            f"CheckedDistributedDataParallel was given a {type(module).__name__} that is, or holds, a "
            "DistributedDataParallel; wrap the bare module, or follow that wrapper by ddpcheck.watch"
        )
    refuse_fsdp1(module, "the module that CheckedDistributedDataParallel was given")
    if outermost_sharded(module):
        raise UsageError(
            f"CheckedDistributedDataParallel was given a {type(module).__name__} that fully_shard has sharded, which "
            "already averages gradients; use ddpcheck.watch instead"
        )


def _group_of(*args: Any, **kwargs: Any) -> Any:
    try:
        arguments = inspect.signature(_DDP.__init__).bind(None, None, *args, **kwargs).arguments
    except TypeError:
        return None  # the constructor raises
    mesh = arguments.get("device_mesh")
    return arguments.get("process_group") if mesh is None else mesh.get_group(mesh_dim=0)


def _judge_construction(
    module: nn.Module, options: Mapping[str, str], group: Any, timeout: float
) -> tuple[list[Finding], bool]:
    """Return findings on differences between ranks, and True if DDP's constructor would fail."""
    if not dist.is_initialized():
        return [], False  # the constructor raises
    own_entry = (describe(module), dict(options))
    name = CheckedDistributedDataParallel.__name__
    absence = f"construct {name} within {timeout:g} s; every rank of its process group must"
    entries = gather_if_different(own_entry, group, "construction", timeout, absence) or [own_entry]
    descriptions = [description for description, _ in entries]
    uninitialised = judge_uninitialised([description.uninitialised for description in descriptions])
    differences = judge_wrapper_options([rank_options for _, rank_options in entries], "DistributedDataParallel")
    impossible = [*uninitialised, *(finding for finding in differences if finding.severity is Severity.ERROR)]
    differs = len({_collective_tensors(*entry) for entry in entries}) > 1
    return [*uninitialised, *judge_descriptions(descriptions), *differences], bool(impossible) or differs


def _collective_tensors(description: ModuleDescription, options: Mapping[str, str]) -> tuple[Any, ...]:
    """Return shapes and dtypes of the tensors in DDP's collectives, in order."""
    trained = tuple((p.shape, p.dtype, p.stride) for p in description.parameters if p.requires_grad)
    parameters = () if options.get("init_sync") == "False" else description.parameters
    buffers = () if options.get("broadcast_buffers") == "False" else description.buffers
    return trained, tuple((tensor.shape, tensor.dtype) for tensor in (*parameters, *buffers))
