"""Optimizer of the recipe on parameter copies, as a baseline for sharded steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from ddpcheck.findings.errors import TargetError
from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.tracebacks import is_own_bug
from ddpcheck.gather.collectives.collective_log import replace_collectives
from ddpcheck.gather.collectives.fake_collectives import CommunicatesError
from ddpcheck.gather.state.randomness import drawn_since, generator_states
from ddpcheck.gather.steps.gradient_distance import difference, eps_of, norm
from ddpcheck.gather.steps.training_step import run_optimizer
from ddpcheck.recipe.recipe import Recipe, error_summary

_PART_OF_UPDATE = 0.1  # e.g. a norm over half of the elements is off by a factor of 1.4
_ROUNDINGS = 16.0


class CopiedOptimizer:
    """Second optimizer of the recipe, to verify the update of the sharded optimizer.

    It updates copies of the full parameters or of this rank's shards. `trouble`: reason why it cannot verify, or ''.
    """

    def __init__(self, recipe: Recipe, parameters: Mapping[str, torch.Tensor], trouble: str = "") -> None:
        self.trouble = trouble
        if trouble:
            return
        self._parameters = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
        try:
            self._optimizer = recipe.build_optimizer(self._parameters.values())
        except TargetError as error:
            self.trouble = str(error)

    def differences(
        self,
        before: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        after: Mapping[str, torch.Tensor],
    ) -> tuple[Difference, ...]:
        """Repeat the step from `before` on copies; return deviations of `after`, relative to updates."""
        if self.trouble:
            return ()
        params = self._parameters
        with torch.no_grad():
            for name, parameter in params.items():
                parameter.copy_(before[name])
                parameter.grad = gradients[name].clone() if name in gradients else None
        device = next(iter(params.values())).device
        states = generator_states(device)
        try:
            with replace_collectives(_raise_communicates):
                run_optimizer(self._optimizer, "step")
        except CommunicatesError:
            self.trouble = "the optimizer communicates"
        except Exception as error:
            if is_own_bug(error):
                raise
            self.trouble = f"on a copy of the parameters its step raised {error_summary(error)}"
        if libraries := drawn_since(states, device):
            self.trouble = f"the optimizer draws random numbers from {' and '.join(sorted(libraries))}"
        return () if self.trouble else tuple(_compare(name, before[name], after[name], p) for name, p in params.items())


def _raise_communicates(_operation: str, _arguments: Mapping[str, Any], _call: object) -> NoReturn:
    raise CommunicatesError


def _compare(name: str, before: torch.Tensor, after: torch.Tensor, copy: nn.Parameter) -> Difference:
    update, size = norm(copy.detach() - before), norm(copy.detach())
    rounding = _ROUNDINGS * eps_of(copy.dtype) * size / update if update else 0.0
    return difference(name, after, copy.detach(), scale=update, tolerance=_PART_OF_UPDATE + rounding)
