"""Healthy loops of models that `fully_shard` shards, one after the other in one script, without a finding.

ddpcheck run --standalone --nproc-per-node 2 tests/healthy_shards.py [NAME ...]
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import load, save  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Net(nn.Module):
    def __init__(self, *, seed: int = 0, batch_norm: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(8, 17)  # an uneven part on each rank
        self.norm = nn.BatchNorm1d(17) if batch_norm else nn.LayerNorm(17)
        self.second = nn.Linear(17, 16)
        self.head = nn.Linear(16, 3)
        self.recomputes = recomputes

    def forward(self, x: Tensor, *, short: bool = False) -> Tensor:
        x = self.norm(self.layer(self.body, x).relu())
        x = x[:, :16] if short else self.layer(self.second, x).relu()
        out: Tensor = self.head(x)
        return out

    def layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return out


def sharded(model: nn.Module | None = None, *, layers: bool = True, shape: tuple[int, ...] = (), **options: Any) -> Any:
    model = model or Net()
    shape = shape or (WORLD,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for part in [*model.children()][0::2] if layers else []:
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def batches(first: int = 0, epochs: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    torch.manual_seed(RANK)
    for epoch in range(first, first + epochs):
        sampler.set_epoch(epoch)
        yield from DataLoader(data, batch_size=4, sampler=sampler)


def steps(model: Any, optimizer: Any = None, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Hand out batches, before which gradients are zeroed, and after which the optimizer steps."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in batches(first):
        optimizer.zero_grad()
        yield x, y
        optimizer.step()


def train(model: Any, optimizer: Any = None, *, first: int = 0, clips: bool = False, scheduled: bool = False) -> Any:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 32) if scheduled else None
    for x, y in batches(first):
        optimizer.zero_grad()
        cross_entropy(model(x).float(), y).backward()
        if clips:
            clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return optimizer


def frozen() -> None:
    model = Net()
    model.body.requires_grad_(False)
    train(sharded(model))


def recomputed_by_a_wrapper() -> None:
    model = Net()
    model.body = nn.Sequential(model.body)
    model.body[0] = checkpoint_wrapper(model.body[0])  # whose parameters have other names than those in the model
    model.body = checkpoint_wrapper(model.body)
    train(sharded(model))


def accumulated(*, synced: bool, late: bool = False) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number, (x, y) in enumerate(batches(), 1):
        last = number % 4 == 0
        if not synced and not late:
            model.set_requires_gradient_sync(last)
        loss = cross_entropy(model(x), y) / 4
        if late:  # what counts is what is set when backward runs
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def saved_and_restored() -> None:
    model = sharded()
    optimizer = train(model)
    folder: list[Any] = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder)
    values, state = get_state_dict(model, optimizer)
    save({"model": values, "optimizer": state}, checkpoint_id=folder[0])
    whole = get_model_state_dict(model, options=FULL)
    if RANK == 0:
        torch.save(whole, f"{folder[0]}/whole.pt")
    dist.barrier()
    load({"model": values, "optimizer": state}, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=state)
    train(model, optimizer, first=2)


def handed_out_by_rank_0() -> None:
    model = Net(seed=RANK)
    values = model.state_dict() if RANK == 0 else {}
    sharded(model)
    set_model_state_dict(model, values, options=FROM_RANK_0)
    train(model)


def made_without_values() -> None:
    with torch.device("meta"):
        model = Net()
    sharded(model).to_empty(device="cpu")
    torch.manual_seed(RANK)  # each rank draws its own shards
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    train(model)


def evaluated() -> None:
    model, optimizer = sharded(), None
    for epoch in (0, 2):
        optimizer = train(model, optimizer, first=epoch)
        model.eval()
        right = torch.zeros(2)
        with torch.no_grad():
            for x, y in batches(epochs=1):
                right += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
        dist.all_reduce(right)
        if RANK == 0:
            print(f"accuracy {float(right[0] / right[1]):.3f}")
        model.train()


def averaged_weights() -> None:
    model = sharded()
    average = {name: value.detach().clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 0.1)


def averaged_statistics() -> None:
    model = sharded(Net(batch_norm=True))
    train(model)
    for statistic in model.buffers():
        dist.all_reduce(statistic)
        statistic.copy_(statistic / WORLD)


def clipped_by_hand() -> None:
    model = sharded()
    for x, y in steps(model):
        cross_entropy(model(x), y).backward()
        shards = [p.grad.to_local() for p in model.parameters()]
        square = torch.stack([shard.square().sum() for shard in shards]).sum()
        dist.all_reduce(square)
        for shard in shards:
            shard.mul_(min(1.0, 0.1 / float(square.sqrt())))


def summed_by_count() -> None:
    """Sums of all ranks, each divided by the number of samples of all ranks, and gradients that are added up."""
    model = sharded()
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo multiplies no other way
    for x, y in steps(model):
        count = torch.tensor(float(len(y)))
        dist.all_reduce(count)
        (cross_entropy(model(x), y, reduction="sum") / count).backward()


def two_backward_passes() -> None:
    model = sharded()
    for x, y in steps(model):
        out = model(x)
        cross_entropy(out, y).backward(retain_graph=True)
        (0.01 * out.square().mean()).backward()


def two_models() -> None:
    teacher, student = sharded(), sharded(layers=False)
    of_teacher, of_student = (torch.optim.SGD(model.parameters(), lr=0.05) for model in (teacher, student))
    for x, y in batches():
        of_teacher.zero_grad()
        cross_entropy(teacher(x), y).backward()
        of_teacher.step()
        of_student.zero_grad()
        (student(x) - teacher(x).detach()).square().mean().backward()
        of_student.step()


def branch_of_all_ranks() -> None:
    """A layer has no part in every second step, on any rank."""
    model = sharded()
    for number, (x, y) in enumerate(steps(model)):
        cross_entropy(model(x, short=number % 2 == 1), y).backward()


def by_another_method() -> None:
    class Scorer(Net):
        def forward(self, x: Tensor, *, short: bool = False) -> Tensor:
            raise NotImplementedError

        def score(self, x: Tensor) -> Tensor:
            return Net.forward(self, x)

    model = sharded(Scorer())
    register_fsdp_forward_method(model, "score")
    for x, y in steps(model):
        cross_entropy(model.score(x), y).backward()


def unfrozen_later() -> None:
    model = Net()
    model.body.requires_grad_(False)
    model = sharded(model)
    train(model)
    model.body.requires_grad_(True)
    train(model, first=2)
    model.head.requires_grad_(False)
    train(model, first=4)


def moved() -> None:
    model = sharded().to("cpu")
    optimizer = train(model)
    model.to("cpu")
    train(model, optimizer, first=2)


def loaded_by_assignment() -> None:
    model = sharded()
    train(model)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    train(model, first=2)


LOOPS: dict[str, Callable[[], object]] = {
    "whole": lambda: train(sharded(layers=False)),
    "layers": lambda: train(sharded(), clips=True, scheduled=True),
    "not_resharded": lambda: train(sharded(reshard_after_forward=False)),
    "all_resharded": lambda: train(sharded(reshard_after_forward=True)),
    "half_precision": lambda: train(sharded(mp_policy=HALF)),
    "recomputed": lambda: train(sharded(Net(recomputes=True))),
    "compiled": lambda: train(torch.compile(sharded(), backend="aot_eager")),
    "accumulated": partial(accumulated, synced=False),
    "accumulated_late": partial(accumulated, synced=False, late=True),
    "accumulated_synced": partial(accumulated, synced=True),
    "hybrid": lambda: train(sharded(shape=(2, WORLD // 2)), clips=True) if WORLD > 3 else None,
}
for _loop in (
    *(recomputed_by_a_wrapper, frozen, saved_and_restored, handed_out_by_rank_0, made_without_values),
    *(evaluated, averaged_weights, averaged_statistics, clipped_by_hand, summed_by_count),
    *(two_backward_passes, two_models, branch_of_all_ranks, by_another_method, moved, loaded_by_assignment),
):
    LOOPS[_loop.__name__] = _loop

BY_NAME: dict[str, Callable[[], object]] = {"unfrozen_later": unfrozen_later}
"""Only run where they are named: clean, but not all of their optimizers' parameters are watched."""

if __name__ == "__main__":
    for name in sys.argv[1:] or LOOPS:
        (LOOPS | BY_NAME)[name]()
    dist.destroy_process_group()
