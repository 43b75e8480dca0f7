"""What hooks make of the gradient of a parameter, on real gradients; and that the hooks stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddpcheck.findings.evidence.loop import HookedGradient
from ddpcheck.record.parameters.hooked_gradients import HookedGradients
from ddpcheck.record.recording import remove_hooks

GIVEN = torch.tensor([[0.5, -1.0, 2.0], [0.25, 3.0, -4.0]])
MASK = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])


def seen(
    *hooks: Callable[[Tensor], Tensor | None], given: Tensor = GIVEN, after: Callable[[Tensor], None] | None = None
) -> tuple[HookedGradients, Tensor]:
    """What was seen of a gradient that goes through hooks, and what they have left."""
    parameter = nn.Parameter(torch.zeros_like(given))
    for hook in hooks:
        parameter.register_hook(hook)
    if after is not None:
        parameter.register_post_accumulate_grad_hook(after)
    looks = HookedGradients()
    handles = looks.attach("weight", parameter, lambda _: None)
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    handles.append(node.register_prehook(lambda gradients: looks.arrived("weight", gradients[0])))
    (parameter * given).sum().backward()
    remove_hooks(handles)
    assert parameter.grad is not None
    left = parameter.grad.clone()
    parameter.grad = None
    (parameter * given).sum().backward()  # as it is without ours
    assert torch.equal(left, parameter.grad)
    return looks, left


@pytest.mark.parametrize(
    ("hook", "kind", "number"),
    [
        (lambda g: g * 0.25, "scaled", 0.25),
        (lambda g: g / g.norm(), "scaled", 1 / float(GIVEN.norm())),
        (lambda g: g * MASK, "masked", 1.0),
        (lambda g: g * MASK * 3, "masked", 3.0),
        (lambda g: g - g.mean(1, keepdim=True), "", 0.0),  # linear: the average of what it leaves is right
        (lambda g: g + 0.1, "", 0.0),
        (lambda g: g * MASK.clamp(0.5), "", 0.0),  # a factor for each element
    ],
)
def test_kinds_of_changes(hook: Callable[[Tensor], Tensor], kind: str, number: float) -> None:
    (change,) = seen(hook)[0].changed.values()
    assert (change.kind, change.number) == (kind, pytest.approx(number))


def test_elements_that_are_cut_off_at_a_limit() -> None:
    (change,) = seen(lambda g: g.clamp(-0.4, 0.4))[0].changed.values()
    assert (change.kind, change.number) == ("limited", pytest.approx(0.4))


def test_gradients_of_one_size_that_a_factor_makes_smaller_are_not_limited() -> None:
    mask = torch.tensor([1.0, 0.5, 0.5, 0.5, 0.5, 1.0])
    assert seen(lambda g: g * mask, given=torch.tensor([1.0, -1.0] * 3))[0].changed == {"weight": HookedGradient()}


def test_masks_are_told_apart_where_no_gradient_is_zero_anyway() -> None:
    ((one,), (other,)) = (seen(lambda g, m=mask: g * m)[0].changed.values() for mask in (MASK, MASK.flip(0)))  # type: ignore[misc]
    assert one.zeros != other.zeros
    assert seen(lambda g: g * MASK, given=GIVEN * MASK.flip(0))[0].changed["weight"].kind == ""


def test_a_hook_that_only_looks_or_that_cuts_nothing_off_changes_nothing() -> None:
    norms: list[float] = []
    assert not seen(lambda g: norms.append(float(g.norm())), lambda g: g.clamp(-9, 9))[0].changed


def test_several_hooks_are_seen_together_in_place_or_after_the_gradient_is_accumulated() -> None:
    def halves(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad *= 0.5

    looks, left = seen(lambda g: g * 2, lambda g: g * 3, after=halves)
    assert torch.allclose(left, GIVEN * 3)
    assert looks.changed["weight"] == HookedGradient("scaled", 0.5)  # what comes last
    assert looks.location is not None and looks.location.path.endswith("test_hooked_gradients.py")
    assert seen(lambda g: g.mul_(0.25))[0].changed["weight"].kind == "scaled"


def test_a_parameter_that_is_frozen_for_a_while_keeps_its_hooks_to_itself() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.register_hook(lambda g: g * 2)
    parameter.requires_grad_(requires_grad=False)
    assert HookedGradients().attach("weight", parameter, lambda _: None) == []


@pytest.mark.parametrize(
    ("register", "factor", "found"),
    [
        ("register_full_backward_hook", 0.25, {"head": pytest.approx(0.25)}),
        ("register_full_backward_pre_hook", 0.25, {"head": pytest.approx(0.25)}),
        ("register_full_backward_hook", GIVEN[0, :1], {"head": pytest.approx(0.5)}),
        ("register_full_backward_hook", MASK[0], {}),  # for each element its own
        ("register_full_backward_hook", 1.0, {}),
        ("register_full_backward_hook", None, {}),  # it only looks
    ],
)
def test_factors_of_backward_hooks_of_modules(register: str, factor: float | Tensor | None, found: object) -> None:
    body, head = nn.Linear(2, 3), nn.Linear(3, 3)

    def hook(_module: nn.Module, gradients: tuple[Tensor], *_more: object) -> tuple[Tensor, ...] | None:
        return None if factor is None else tuple(one * factor for one in gradients)

    getattr(head, register)(hook)

    def gradients() -> list[Tensor]:
        head.zero_grad()
        body.zero_grad()
        head(body(torch.ones(2, 2))).sum().backward()
        return [p.grad for p in (*body.parameters(), *head.parameters()) if p.grad is not None]

    without, looks = gradients(), HookedGradients()
    handles = [*looks.attach_to_module("body", body), *looks.attach_to_module("head", head)]
    assert all(map(torch.equal, gradients(), without)) and looks.factors == found
    remove_hooks(handles)
    looks.factors.clear()
    assert all(map(torch.equal, gradients(), without)) and not looks.factors
