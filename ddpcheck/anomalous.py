"""`detect_anomalous_params`: find parameters that do not contribute to a loss, in any training loop.

Findings are made by `ddpcheck.rules.parameters`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpcheck.findings.errors import UsageError, WrongTypeError
from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.steps import GradientState, PathEnd, StepEvidence
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import Names
from ddpcheck.rules.parameters.contribution import judge_parameters

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class AnomalousParameters:
    """The result of `detect_anomalous_params`."""

    missing: tuple[str, ...] = ()  # parameters that require grad but are not reached by backward
    unregistered: tuple[str, ...] = ()  # leaves reached by backward that are not parameters of the model
    findings: tuple[Finding, ...] = ()  # one per cause

    def __bool__(self) -> bool:
        return bool(self.missing or self.unregistered)


def detect_anomalous_params(
    loss: Any, model: nn.Module, *, replay: Callable[[], Any] | None = None
) -> AnomalousParameters:
    """Find parameters of `model` that do not contribute to `loss`; call before `loss.backward()`.

    Queries the autograd engine, which is fast on a million nodes; the graph and the gradients are not changed.
    Parameters used in a re-entrant checkpoint are not in the graph of the loss and are reported too.

    Args:
        loss: A tensor or a nested structure of tensors; the loss is the sum of all their elements.
        model: The module, wrapped or not; reported names are relative to the bare module.
        replay: Function that recomputes the loss. If set, the cause (DDP101, 102 or 103) and the line where a path is
            cut are reported; if not, every missing parameter is reported as DDP101.

    Returns:
        The parameter names, and one finding per cause.

    Raises:
        UsageError: `loss` has no tensor that requires grad, or the model is or contains a `FullyShardedDataParallel`
            (FSDP1).
    """
    from torch import nn

    from ddpcheck.gather.autograd.autograd_graph import LossGraph, all_names, named_parameters, reached_by
    from ddpcheck.gather.autograd.gradient_paths import Explainer
    from ddpcheck.gather.autograd.unregistered_leaves import unregistered_leaves
    from ddpcheck.gather.ddp.sharding import refuse_fsdp1
    from ddpcheck.recipe.pytree import tree_tensors
    from ddpcheck.recipe.recipe import describe_type

    if not isinstance(model, nn.Module):
        raise WrongTypeError(f"detect_anomalous_params takes the loss and an nn.Module, not {describe_type(model)}")
    refuse_fsdp1(model, "the model of detect_anomalous_params")
    if hasattr(model, "reducer") and hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    losses = [tensor.sum() for tensor in tree_tensors(loss) if tensor.requires_grad]
    if not losses:
        raise UsageError("detect_anomalous_params: the loss has no tensor that requires grad; call it before backward")
    total = sum(losses[1:], losses[0])
    parameters = {name: param for name, param in named_parameters(model).items() if param.requires_grad}
    reached = reached_by(total, list(parameters.values()))
    missing = [name for name, is_reached in zip(parameters, reached, strict=True) if not is_reached]
    leaves = unregistered_leaves(LossGraph([total]).leaves, model)
    ends = dict.fromkeys(missing, PathEnd("unused"))
    if missing and (forward := replay) is not None:
        ends = Explainer(model, lambda: list(tree_tensors(forward()))).explain({n: parameters[n] for n in missing})
    states: dict[str, GradientState] = {name: "missing" if name in ends else "contributes" for name in parameters}
    evidence = StepEvidence(rank=0, step=0, states=states, path_ends=ends, unregistered=leaves)
    aliases = all_names(model)
    names = Names({name: aliases[id(parameter)] for name, parameter in parameters.items()})
    return AnomalousParameters(
        missing=names.subjects(missing),
        unregistered=tuple(leaf.name for leaf in leaves),
        findings=tuple(judge_parameters([evidence], WrapperFacts(), names)),
    )
