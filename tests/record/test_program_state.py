"""What `ddpcheck run` finds in the variables of a program."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from ddpcheck.findings.evidence.script import LocalModel
from ddpcheck.record.recording import Recording
from ddpcheck.record.replicas.program_state import StateRecorder, _may_be_weights, names_of_tensors
from ddpcheck.record.replicas.tables import is_order_of_a_set, tables_of, tables_of_program


class Labels:
    def __init__(self) -> None:
        self.index = {"cat": 0, "dog": 1}
        self.counts = {"cat": 3}  # of one item: no table


class Trainer:
    def __init__(self) -> None:
        self.data = Labels()
        self.modules: list[ModuleType] = [torch]
        self.vocabulary = {"a": 0, "b": 1}


def test_an_object_of_the_user_is_followed_to_its_tables() -> None:
    (table,) = tables_of(Labels(), None)
    assert (table.name, table.values) == ("Labels.index", {"'cat'": "0", "'dog'": "1"})
    assert table.location is not None  # the line that assigns it, and not the loop in which it is seen
    assert "self.index = " in Path(__file__).read_text().splitlines()[table.location.line - 1]


def test_a_module_of_the_user_is_followed_and_one_that_is_installed_is_not() -> None:
    own, installed = ModuleType("own"), ModuleType("installed")
    own.__file__, installed.__file__ = str(Path(__file__).parents[1] / "own.py"), torch.__file__
    for module in (own, installed):
        vars(module)["labels"] = {"cat": 0, "dog": 1}
    trainer, late = Trainer(), {"x": 0, "y": 1}
    paths = {table.name for table in tables_of_program()}
    assert {"own.labels", "trainer.vocabulary", "late"} <= paths, (trainer, late)
    assert "installed.labels" not in paths
    assert not any(path.startswith("__builtins__.") for path in paths)


class Kinds:
    def __init__(self, *orders: list[str]) -> None:
        self.kinds, self.shown, self.sorted_kinds = orders

    def numbers(self) -> list[int]:
        return [self.kinds.index(name) for name in self.sorted_kinds] + [self.sorted_kinds.index("cat")]


@pytest.mark.parametrize("count", [6, 60])
def test_a_list_made_of_a_set_of_which_places_are_asked(count: int) -> None:
    names = [f"kind {number}" for number in range(count)]
    made = (list(set(names[start:] + names[:start])) for start in range(count))  # where hashes collide, not all are
    of_a_set = next(order for order in made if is_order_of_a_set(order))
    other = next(one for one in (sorted(names), names[::-1], names[1::2] + names[::2]) if not is_order_of_a_set(one))
    (table,) = tables_of(Kinds(of_a_set, of_a_set, other), None)
    assert table.name == "Kinds.kinds.index()" and table.values[repr(of_a_set[2])] == "2"
    assert table.location is not None and table.location.path.endswith("test_program_state.py")


@pytest.mark.parametrize(
    ("of", "near"),
    [
        (lambda ours, other: ours * 0.999 + other * 0.001, True),
        (lambda ours, other: other, True),  # an average that was begun from weights of another start
        (lambda ours, other: (ours + other) / 2, True),
        (lambda ours, other: other.square() * 3, False),  # Fisher information
        (lambda ours, other: other * 0.01, False),  # residuals of gradients
        (lambda ours, other: torch.zeros_like(ours), True),  # an average that is begun from nothing
    ],
)
def test_a_copy_is_known_by_its_direction_or_by_its_size(of: Any, near: bool) -> None:
    ours, other = (nn.Linear(8, 64).weight.detach() for _ in range(2))
    assert _may_be_weights({"w": of(ours, other)}, {"w": ours}) == near


class Online(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.predictor = nn.Linear(8, 16)


def recorder_of_nothing() -> StateRecorder:
    return StateRecorder(Recording(print), Mock(), lambda *_: None)


def found_twice(value: Any, *wrapped: nn.Module) -> list[str]:
    """What is found in a variable at two looks beside wrapped modules: the names of its tensors."""
    seen: list[LocalModel] = []
    run: Any = Recording(seen.append)
    run.watches = [
        SimpleNamespace(module=module, is_sharded=False, parameters=dict(named()), module_parameters=named)
        for module, named in ((module, module.named_parameters) for module in wrapped)
    ]
    recorder = StateRecorder(run, Mock(), lambda *_: None)

    def train() -> None:
        average = value
        for count in range(2):
            recorder.record_models(0, count, wrapped[0].parameters())
        assert average is value

    train()
    return [name for one in seen if one.count == 1 and one.name in ("average", "value") for name in one.values]


@pytest.mark.parametrize(
    ("held", "names"),
    [
        (lambda online: deepcopy(online), 6),
        (lambda online: deepcopy(online.encoder), 4),
        (lambda online: Online().encoder, 4),  # from another start
        (lambda online: deepcopy(online.predictor), 2),
        (lambda online: {n: p.detach().clone() for n, p in online.encoder.named_parameters()}, 4),
        (lambda online: [p.detach().clone() for p in online.encoder.parameters()], 4),
        (lambda online: online.encoder, 0),  # no copy
        (lambda online: nn.Linear(8, 16), 0),  # like a single layer, by chance
        (lambda online: [torch.randn(16, 8), torch.ones(16)], 0),
        (lambda online: [torch.zeros_like(p) for p in online.encoder.parameters()], 0),  # a momentum
        (lambda online: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), 0),  # other names
    ],
)
def test_copies_of_a_wrapped_module_and_of_its_parts(held: Any, names: int) -> None:
    torch.manual_seed(0)
    online = Online()
    assert len(found_twice(held(online), online)) == names


@pytest.mark.parametrize(("frozen", "names"), [(True, 6), (False, 0)])
def test_a_teacher_that_is_wrapped_too_is_a_copy_once_it_is_frozen(frozen: bool, names: int) -> None:
    online = Online()
    teacher = deepcopy(online).requires_grad_(not frozen)
    assert len(found_twice(teacher, online, teacher)) == names


@pytest.mark.parametrize(
    ("criterion", "held"),
    [
        (nn.CrossEntropyLoss(weight=torch.ones(3)), ["weight"]),  # by a count of the labels, which may be a rank's own
        (nn.CrossEntropyLoss(), []),
        (nn.Softmax(dim=1), []),
    ],
)
def test_the_buffers_of_a_loss_through_which_backward_comes(criterion: nn.Module, held: list[str]) -> None:
    buffers_of = recorder_of_nothing()._criterion_buffers
    logits = torch.zeros(2, 3)
    targets = () if isinstance(criterion, nn.Softmax) else (torch.zeros(2, dtype=torch.int64),)
    assert not buffers_of(criterion)
    criterion(logits, *targets)
    assert not buffers_of(criterion)  # in evaluation only
    criterion(logits.requires_grad_(), *targets)
    assert list(buffers_of(criterion)) == held


def test_a_module_that_is_no_copy_is_looked_at_once_it_is_called_and_some_times_only() -> None:
    constants, teacher = recorder_of_nothing()._constant_parameters, nn.Linear(3, 2)
    assert not constants("teacher", teacher) and not constants("loss", nn.MSELoss())
    with torch.no_grad():
        teacher(torch.zeros(1, 3))
    assert [list(constants("teacher", teacher)) for _ in range(4)] == [["weight", "bias"]] * 3 + [[]]


def test_of_a_module_that_is_called_by_another_method_the_parts_that_are_called_are_looked_at() -> None:
    recorder, online = recorder_of_nothing(), Online()
    for found in ([], [], ["predictor.weight", "predictor.bias"]):  # until it has been there twice, it may be called
        assert list(recorder._constant_parameters("clip", online)) == found
        online.predictor(torch.zeros(1, 8))


def test_tensors_that_no_module_has_are_named_by_the_variables_that_hold_them() -> None:
    scale, outer, by_name = torch.ones(1), [torch.ones(2), torch.ones(3)], {"head": torch.ones(4)}
    wanted = {id(scale), id(outer[1]), id(by_name["head"])}
    assert set(names_of_tensors(wanted).values()) == {"scale", "outer[1]", "by_name['head']"}
