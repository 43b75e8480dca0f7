"""Tensors in a folder: they come back as they were, and what is written into one copy is in no other."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.findings.errors import UsageError
from ddpcheck.gather.state.module_state import ModuleState, free_parameters, move_to_file, unshared_parameters
from ddpcheck.gather.state.tensor_file import TensorFile, TensorWriter, save

MANY = 100_000


def numbers(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


TENSORS = {
    "large": numbers(MANY),
    "small": numbers(3),
    "empty": torch.zeros(0, 4),
    "one": torch.tensor(2.5),
    "half": numbers(MANY, dtype=torch.bfloat16),
    "flags": numbers(MANY) > 0,
    "complex": numbers(MANY, dtype=torch.complex64),
    "channels last": numbers(8, 16, 32, 32).to(memory_format=torch.channels_last),
    "transposed": numbers(300, 400).T,
    "part": numbers(2 * MANY)[MANY:],
    "expanded": torch.ones(1).expand(MANY),
    "sparse": torch.eye(3).to_sparse(),
}


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    save(TENSORS.items(), tmp_path / "saved")
    back = TensorFile(tmp_path / "saved")
    assert set(back) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        assert torch.equal(back[name].to_dense(), tensor.to_dense()), name
    for name in ("channels last", "transposed"):  # kernels may depend on it
        assert back[name].stride() == TENSORS[name].stride()


def test_what_is_written_into_one_copy_is_in_no_other(tmp_path: Path) -> None:
    save([("weight", numbers(MANY)), ("other", numbers(MANY))], tmp_path / "saved")
    mine, theirs = (TensorFile(tmp_path / "saved", keep=True) for _ in range(2))
    weight = mine["weight"].zero_()
    assert torch.equal(mine["other"], numbers(MANY)) and not weight.any()
    assert torch.equal(theirs["weight"], numbers(MANY))
    save([("weight", torch.ones(MANY))], tmp_path / "saved")  # as the next step does
    assert torch.equal(theirs["weight"], numbers(MANY)) and not weight.any()


def test_what_is_written_twice_counts_as_it_was_written_last(tmp_path: Path) -> None:
    with TensorWriter(tmp_path / "saved") as writer:
        for name in ("small", "large"):
            assert writer.get(name) is None
            writer.add(name, TENSORS[name])
            writer.add(name, writer.get(name) + 1)
    back = TensorFile(tmp_path / "saved")
    assert torch.equal(back["small"], TENSORS["small"] + 1) and torch.equal(back["large"], TENSORS["large"] + 1)


def test_a_full_disk_is_told_with_what_to_do(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MANY, hard))
    try:
        with pytest.raises(UsageError, match="TMPDIR"):
            save([("weight", numbers(MANY))], tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_parameters_that_share_their_memory_keep_it(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = numbers(2 * MANY)
            self.first, self.second, self.own = (nn.Parameter(t) for t in (flat[:MANY], flat[MANY:], numbers(MANY)))
            self.tied = self.own
            self.alone = nn.Parameter(numbers(MANY))
            self.held = [self.alone.detach()]

    net = Net()
    assert unshared_parameters(net) == {"own"}
    assert move_to_file(net, tmp_path / "built") == {"own"} and net.tied is net.own
    assert torch.equal(net.own.detach(), numbers(MANY)) and not list(tmp_path.iterdir())
    assert net.first.untyped_storage().data_ptr() == net.second.untyped_storage().data_ptr()


def test_parameters_that_were_let_go_of_come_back_in_their_own_dtype(tmp_path: Path) -> None:
    net = nn.Linear(300, 300)
    save([(name, p + 1) for name, p in net.named_parameters()], tmp_path / "state")
    wanted = {name: p.detach().double() + 1 for name, p in net.named_parameters()}
    free_parameters(net, {"weight"}, torch.float64)
    net.double()
    assert net.weight.shape == (300, 300) and net.weight.untyped_storage().nbytes() == 8
    ModuleState(TensorFile(tmp_path / "state"), file=tmp_path / "state").restore(net, {"weight"})
    assert net.weight.dtype == torch.float64 and [path.name for path in tmp_path.iterdir()] == ["state"]
    assert all(torch.allclose(p, wanted[name]) for name, p in net.named_parameters())
