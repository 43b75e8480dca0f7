"""Tensors of every kind: none of them stops a fingerprint, a sketch or a description."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.findings.errors import NonFiniteLossError, RankFailure
from ddpcheck.gather.ddp.sharding import varying_params
from ddpcheck.gather.state.fingerprints import fingerprint, version_counter
from ddpcheck.gather.state.module_description import describe
from ddpcheck.gather.state.module_state import capture_state, move_to_device, non_persistent_buffers
from ddpcheck.gather.steps.gradient_distance import sketch
from ddpcheck.gather.steps.training_step import batch_fingerprint, sample_fingerprints
from ddpcheck.rules.loss.ddp305_loss_normalisation import judge_undefined_losses


class Lacking(torch.Tensor):
    """A subclass that computes nothing."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Lacking:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made: Lacking = make(cls, shape)
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, _args: Any = (), _named: Any = None) -> Any:
        raise NotImplementedError(str(function))


def fake(*shape: int) -> torch.Tensor:
    with torch._subclasses.FakeTensorMode():  # type: ignore[attr-defined]
        return torch.zeros(*shape)


def freed(*shape: int) -> torch.Tensor:
    made = torch.zeros(*shape)
    made.untyped_storage().resize_(0)
    return made


def nested(*sizes: int, **more: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(size, 2) for size in sizes], **more)


def quantised(value: float) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.full((2, 3), float(value)), 0.1, 0, torch.quint8)


def csr(value: float) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (torch.eye(3) * value).to_sparse_csr()


WITHOUT_VALUES: dict[str, Callable[[int], torch.Tensor]] = {
    "meta": lambda size: torch.empty(size, 2, device="meta"),
    "sparse meta": lambda size: torch.eye(size).to_sparse().to("meta"),
    "fake": lambda size: fake(size, 2),
    "freed": lambda size: freed(size, 2),
    "subclass": lambda size: Lacking((size, 2)),
}
WITH_VALUES: dict[str, Callable[[int], torch.Tensor]] = {
    "sparse": lambda value: (torch.eye(3) * value).to_sparse(),
    "csr": csr,
    "quantised": quantised,
    "complex": lambda value: torch.full((3,), value + 1j),
    "conjugated": lambda value: torch.full((3,), value + 1j).conj(),
    "float8": lambda value: torch.full((3,), float(value)).to(torch.float8_e4m3fn),
    "nested": lambda value: nested(1, 2) * value,
    "jagged": lambda value: nested(1, 2, layout=torch.jagged) * value,
}


@pytest.mark.parametrize("kind", WITHOUT_VALUES)
def test_a_tensor_without_values_is_compared_by_its_shape(kind: str) -> None:
    make = WITHOUT_VALUES[kind]
    assert fingerprint(make(3)) == fingerprint(make(3)) != fingerprint(make(4))


@pytest.mark.parametrize("kind", WITH_VALUES)
def test_a_tensor_with_values_is_compared_by_them(kind: str) -> None:
    make = WITH_VALUES[kind]
    assert fingerprint(make(1)) == fingerprint(make(1)) != fingerprint(make(2))


@pytest.mark.parametrize("make", [*WITHOUT_VALUES.values(), *WITH_VALUES.values(), lambda _size: torch.empty(0, 2)])
def test_nothing_stops_at_a_tensor(make: Callable[[int], torch.Tensor]) -> None:
    tensor = make(3)
    assert sketch(tensor).isfinite().all() and len(batch_fingerprint([tensor])) == 1
    sample_fingerprints([tensor])
    module = nn.Module()
    module.register_buffer("registered", tensor)
    module.held = [tensor]
    assert pickle.loads(pickle.dumps(describe(module))) == describe(module)


@pytest.mark.parametrize(("of_batch", "ranks", "found"), [(1.2, [1], 1), (math.nan, [1], 0), (1.2, [0, 1], 0)])
def test_a_loss_that_only_some_ranks_cannot_compute(of_batch: float, ranks: list[int], found: int) -> None:
    error = NonFiniteLossError("loss(model, batch) in step 2 is nan")
    failures = [RankFailure(rank, "raised", "", 0.0, exception=error) for rank in ranks]
    findings = judge_undefined_losses(failures, of_batch, 2, 2)
    assert [finding.code for finding in findings] == ["DDP305"] * found


def test_what_is_on_the_meta_device_stays_there() -> None:
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    assert move_to_device(module, torch.device("cpu")) is module and module[1].weight.is_meta
    capture_state(module).restore(module)


def test_a_tensor_of_inference_mode_has_no_version() -> None:
    with torch.inference_mode():
        made = torch.zeros(2)
    assert version_counter(made) == -1
    assert version_counter(torch.zeros(2).add_(1)) == 1


def test_buffers_that_a_state_dict_leaves_out() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    module.register_buffer("mask", torch.ones(2), persistent=False)
    module[1].register_buffer("count", torch.ones(2), persistent=False)
    named = {name for name, _ in module.named_buffers()}
    assert non_persistent_buffers(module) == named - module.state_dict().keys() == {"mask", "1.count"}


def test_parts_whose_elements_are_all_the_same_or_all_nan_are_told_apart_from_others() -> None:
    drawn, ones, nan = torch.arange(3.0), torch.ones(3), torch.full((3,), math.nan)
    assert varying_params({"drawn": drawn, "ones": ones, "nan": nan, "some": drawn / 0}) == ("drawn", "some")
