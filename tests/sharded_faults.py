"""Faults of training with `fully_shard`, one function each, and the same loop without its fault.

    ddpcheck run --standalone --nproc-per-node 2 tests/sharded_faults.py NAME ... [--fixed]
    torchrun --standalone --nproc-per-node 2 tests/sharded_faults.py NAME ... [--fixed] --parity

Each is a loop that hands out its model after each step. With `--parity` it runs once more on a replica (DDP, as torch's
own tests have it), in step with the sharded one, and torch's `check_sharded_parity` compares the two after each step;
torch needs expecttest for that. `FAULTS` says of each what `ddpcheck run` is to tell.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

Loop = Callable[[], Iterator[nn.Module]]
FIXED = "--fixed" in sys.argv
STEPS = 12


@dataclass(frozen=True)
class Expected:
    """What is to be said of a fault: by which rule, at which line; and how many ranks it needs.

    `alike`: whether torch's comparison with a replica holds without the fault.
    """

    loop: Loop
    code: str
    line: str
    ranks: int
    alike: bool


FAULTS: dict[str, Expected] = {}
_sharding = True  # a replica is trained where it is not


def fault(code: str, line: str, *, ranks: int = 2, alike: bool = True) -> Callable[[Loop], Loop]:
    def note(loop: Loop) -> Loop:
        FAULTS[loop.__name__] = Expected(loop, code, line, ranks, alike)
        return loop

    return note


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


class Model(nn.Module):
    """A classifier of 4 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 4)

    def features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x))
        return out


def build(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Model()


def shard(model: Any, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """Shard it block by block; or replicate it, for the comparison."""
    if not _sharding:
        replicate(model, find_unused_parameters=True)
        with torch.no_grad():  # which it hangs its hooks in
            model(torch.zeros(1, 8))
        return model
    for block in model.blocks:
        fully_shard(block, mesh=mesh or line(), **options)
    return fully_shard(model, mesh=mesh or line(), **options)


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def local(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def part_of(whole: Tensor, of: Any) -> Tensor:
    """What a rank holds of a tensor that every rank has, if it is split as another one is."""
    split = isinstance(of, DTensor)
    return distribute_tensor(whole, of.device_mesh, of.placements, src_data_rank=None) if split else whole


def batches(rows: int = 8, steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    """Those of this rank."""
    drawn = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(steps):
        x = torch.randn(rows, 8, generator=drawn)
        yield x, x[:, :4].argmax(1)


def sgd(model: Any, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def train(
    model: Any,
    optimizer: Any = None,
    *,
    loss: Callable[[Any, Tensor, Tensor], Tensor] = lambda model, x, y: cross_entropy(model(x), y),
    adjust: Callable[[Any], object] = lambda parameters: None,
    **data: int,
) -> Iterator[nn.Module]:
    """Train with `AdamW` or `optimizer`; `adjust` is called with the parameters before each step."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches(**data):
        optimizer.zero_grad()
        loss(model, x, y).backward()
        adjust(model.parameters())
        optimizer.step()
        yield model


# Replicas and meshes


@fault("DDP208", "seed=0 if FIXED else dist.get_rank() // 2", ranks=4)
def replicas_start_differently() -> Iterator[nn.Module]:
    """Each group of replicas of an HSDP mesh seeds the model by its own number."""
    yield from train(shard(build(seed=0 if FIXED else dist.get_rank() // 2), grid()))


@fault("DDP301", "return fully_shard(model, mesh=mesh or line(), **options)", ranks=4)
def mesh_misses_ranks() -> Iterator[nn.Module]:
    """The mesh is the inner dimension of a grid: two pairs of ranks train separately."""
    yield from train(shard(build(), grid() if FIXED else grid()["shard"]))


@fault("DDP301", "return fully_shard(model, mesh=mesh or line(), **options)")
def mesh_of_one_rank() -> Iterator[nn.Module]:
    """The mesh is the dimension of a grid with a single rank: each rank trains alone."""
    mesh = line() if FIXED else init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))["model"]
    yield from train(shard(build(), mesh))


# Synchronisation


@fault("DDP502", "model.set_requires_gradient_sync(FIXED and last)")
def sync_left_off() -> Iterator[nn.Module]:
    """Micro-batches are counted from 1, so that none is the last one."""
    model = shard(build())
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        for number, (part, wanted) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            last = number == 1
            if _sharding:
                model.set_requires_gradient_sync(FIXED and last)
            (cross_entropy(model(part), wanted) / 2).backward()
        optimizer.step()
        yield model


@fault("DDP502", "model.set_requires_all_reduce(FIXED)", ranks=4)
def all_reduce_left_off() -> Iterator[nn.Module]:
    """The all-reduce between the replicas is switched off, and never switched on again."""
    model = shard(build(), grid())
    if _sharding:
        model.set_requires_all_reduce(FIXED)
    yield from train(model)


@fault("DDP303", "model.set_gradient_divide_factor(1.0)")
def divide_factor() -> Iterator[nn.Module]:
    """Gradients are divided by 1 instead of the number of ranks: the reduction is a sum."""
    model = shard(build())
    if _sharding and not FIXED:
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(1.0)
    yield from train(model, sgd(model, 0.02))


# Forward, and what takes part in it


@fault("DDP501", "x = self.stem(x)")
def other_method() -> Iterator[nn.Module]:
    """A warm-up loss calls `model.features`, for which no hook gathers the parameters."""
    model = build()
    model.head.requires_grad_(False)
    if not _sharding:
        model.forward = model.features
    shard(model)
    if _sharding and FIXED:
        register_fsdp_forward_method(model, "features")
    method = model.features if _sharding else model
    yield from train(model, sgd(model), loss=lambda model, x, y: method(x).square().mean())


class Gated(Model):
    """Its last block is only for batches with a large value."""

    def forward(self, x: Tensor) -> Tensor:
        large = x.max()
        if FIXED:
            dist.all_reduce(large, dist.ReduceOp.MAX)
        x = self.blocks[0](self.stem(x))
        out: Tensor = self.head(self.blocks.get_submodule("1")(x) if large > 2.2 else x)
        return out


@fault("DDP403", "(x) if large > 2.2 else x")
def block_unused_on_a_rank() -> Iterator[nn.Module]:
    """A rank skips a block, which is a separate FSDP group, depending on its batch."""
    torch.manual_seed(0)
    yield from train(shard(Gated()))


@fault("DDP111", "fully_shard(block, mesh=line())")
def module_in_no_group() -> Iterator[nn.Module]:
    """Only the blocks are sharded: nothing averages the gradients of the stem and the head."""
    model = build()
    if _sharding and not FIXED:
        for block in model.blocks:
            fully_shard(block, mesh=line())
    else:
        shard(model)
    yield from train(model, sgd(model))


@fault("DDP501", "+ 0.001 * penalty")
def tensors_mixed() -> Iterator[nn.Module]:
    """A penalty on the parameters, which are DTensors, is added to the loss, which is a tensor."""
    model = shard(build())
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        if FIXED and isinstance(penalty, DTensor):
            penalty = penalty.full_tensor()
        (cross_entropy(model(x), y) + 0.001 * penalty).backward()
        optimizer.step()
        yield model


# What is computed of a shard


def clip(parameters: Any) -> None:
    """Scale gradients to a norm of at most 0.1."""
    gradients = [local(p.grad) for p in parameters]
    square = torch.stack([part.square().sum() for part in gradients]).sum()
    if FIXED and _sharding:
        dist.all_reduce(square)
    for part in gradients:
        part.mul_(0.1 / max(float(square.sqrt()), 0.1))


@fault("DDP306", "square = torch.stack")
def norm_of_a_shard() -> Iterator[nn.Module]:
    """A helper clips by the norm of the shards of its rank."""
    model = shard(build())
    yield from train(model, sgd(model), adjust=clip)


@fault("DDP508", "if size < 1.05:")
def metric_of_a_shard() -> Iterator[nn.Module]:
    """A step is skipped if the gradient is large, by the norm of only the rank's shards."""
    model = shard(build())
    optimizer = sgd(model)
    for x, y in batches():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        square = torch.stack([local(p.grad).square().sum() for p in model.parameters()]).sum()
        if FIXED and _sharding:
            dist.all_reduce(square)
        size = float(square.sqrt()) * (1.0 if FIXED or not _sharding else 2**0.5)
        if size < 1.05:
            optimizer.step()
        yield model


# The loss


@fault("DDP305", "loss = errors.sum() / number")
def loss_per_rank() -> Iterator[nn.Module]:
    """Each rank divides its loss by its own number of valid targets."""

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        errors = cross_entropy(model(x), torch.where(x[:, 4] > 0.3, y, -100), ignore_index=-100, reduction="none")
        number = (x[:, 4] > 0.3).sum().float()
        if FIXED:
            dist.all_reduce(number, dist.ReduceOp.AVG)
        loss = errors.sum() / number.clamp(min=0.5)
        return loss

    model = shard(build())
    yield from train(model, sgd(model), loss=loss_of)


# Optimizers and values


class Trainer:
    """Makes its optimizer first, and shards the model when it fits it."""

    def __init__(self, model: Any) -> None:
        self.model = shard(model) if FIXED else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def fit(self) -> Iterator[nn.Module]:
        if not FIXED:
            shard(self.model)
        yield from train(self.model, self.optimizer)


@fault("DDP504", "self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)")
def optimizer_before_sharding() -> Iterator[nn.Module]:
    """A trainer creates its optimizer in the constructor, and shards the model later, in `fit`."""
    yield from Trainer(build()).fit()


@fault("DDP503", "p.data = p.data * 0.9")
def data_assigned() -> Iterator[nn.Module]:
    """Weights are decayed by an assignment to `.data`, which does not change a DTensor."""
    model = shard(build())
    for step in train(model, sgd(model)):
        for p in model.parameters():
            if FIXED:
                p.data.mul_(0.9)
            else:
                p.data = p.data * 0.9
        yield step


@fault("DDP306", "local(p.data).add_", ranks=4)
def data_differs_between_replicas() -> Iterator[nn.Module]:
    """Each rank adds noise from its own seed to shards that are replicated on other ranks."""
    model = shard(build(), grid())
    noise = torch.Generator().manual_seed(0 if FIXED else dist.get_rank())
    for step, _ in enumerate(train(model, sgd(model))):
        if step == 3:
            for p in model.parameters():
                drawn = 0.01 * torch.randn(p.shape, generator=noise)
                local(p.data).add_(local(part_of(drawn, p)))
        yield model


# Checkpoints


def folder() -> Path:
    made: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return Path(made[0])


@fault("DDP521", "torch.save(state, path)")
def shard_saved_as_the_whole() -> Iterator[nn.Module]:
    """Rank 0 saves `state_dict()`, as under DDP: it holds one shard of each parameter, and no other rank saves."""
    model = shard(build())
    yield from train(model)
    state = {name: value.full_tensor() if FIXED and _sharding else value for name, value in model.state_dict().items()}
    path = folder() / "model.pt"
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()


@fault("DDP521", "state = torch.load(own if FIXED or not _sharding else")
def shard_of_rank_0_loaded() -> Iterator[nn.Module]:
    """Every rank loads the shards of rank 0: the second half of each parameter is a duplicate of the first."""
    model = shard(build())
    optimizer, place = sgd(model), folder()
    for epoch in range(2):
        yield from train(model, optimizer, steps=STEPS // 2)
        if epoch == 0:
            own = place / f"{dist.get_rank()}.pt"
            torch.save({name: local(p) for name, p in model.named_parameters()}, own)
            dist.barrier()
            state = torch.load(own if FIXED or not _sharding else place / "0.pt")
            with torch.no_grad():
                for name, p in model.named_parameters():
                    local(p).copy_(state[name])


# Collectives that a rank skips


@fault("DDP508", "continue")
def batch_skipped() -> Iterator[nn.Module]:
    """A rank skips a batch depending on its content: the others wait in an all-gather, or pair it with a later one."""
    model = shard(build())
    optimizer = sgd(model)
    for x, y in DataLoader(list(batches()), batch_size=None):
        if not FIXED and bool(x.max() > 3.0):
            continue
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        yield model
    dist.barrier()


@fault("DDP403", "size = float(sum")
def gathered_by_one_rank() -> Iterator[nn.Module]:
    """Rank 0 alone gathers parameters, to print their size."""
    model = shard(build())
    for step, one in enumerate(train(model)):
        if step % 4 == 3 and (FIXED or dist.get_rank() == 0):
            size = float(sum(p.full_tensor().square().sum() if _sharding else p.sum() for p in model.parameters()))
            if dist.get_rank() == 0:
                print(f"size {size:.3f}")
        yield one


@fault("DDP403", "out = model(x)")
def evaluated_by_one_rank() -> Iterator[nn.Module]:
    """Rank 0 alone evaluates, as it may under DDP."""
    model = shard(build())
    for step, one in enumerate(train(model)):
        yield one
        if step % 4 == 3 and (FIXED or dist.get_rank() == 0):
            with torch.no_grad():
                for x, _ in batches(steps=2):
                    out = model(x)
                    out.argmax(1)


# Parts that are frozen


@fault("DDP305", "loss = cross_entropy(model(x), y, reduction")
def sum_of_unequal_batches() -> Iterator[nn.Module]:
    """With a frozen stem: each rank divides its summed loss by its local batch size, and the sizes differ."""
    model = build()
    model.stem.requires_grad_(False)
    model = shard(model)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model(x), y, reduction="sum") / (8 if FIXED else len(y))
        return loss

    yield from train(model, sgd(model, 0.01), loss=loss_of, rows=6 + 4 * dist.get_rank())


# Parameters that are replaced


@fault("DDP503", "model.head.weight = nn.Parameter(initial)")
def parameter_replaced() -> Iterator[nn.Module]:
    """The weight of the head is replaced for a new task: the next forward pass restores the old one."""
    model = shard(build())
    initial = torch.full((4, 16), 0.01)
    for step, one in enumerate(train(model)):
        yield one
        if step != 3:
            continue
        if FIXED:
            with torch.no_grad():
                model.head.weight.copy_(part_of(initial, model.head.weight))
        else:
            model.head.weight = nn.Parameter(initial)


class WithTable(Model):
    """A model that knows its smallest input by a table, of the shape of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 16)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + self.table(x[:, :4].argmin(1))


@fault("DDP503", "model.head.weight = model.table.weight")
def tied_after_steps() -> Iterator[nn.Module]:
    """The head is tied to the table after the first step: the next forward pass unties the two again."""
    torch.manual_seed(0)
    model = shard(WithTable())
    if FIXED:  # until the first forward pass, fully_shard takes other shards for its own
        model.head.weight = model.table.weight
    for step, one in enumerate(train(model)):
        yield one
        if step == 0 and not FIXED:
            model.head.weight = model.table.weight


@fault("DDP521", "model.load_state_dict(torch.load(path))")
def whole_loaded() -> Iterator[nn.Module]:
    """Full parameters are loaded into a model that is already sharded."""
    path = folder() / "model.pt"
    if dist.get_rank() == 0:
        torch.save(build(seed=1).state_dict(), path)
    dist.barrier()
    model = build()
    if FIXED:
        model.load_state_dict(torch.load(path))
    model = shard(model)
    if not FIXED:
        model.load_state_dict(torch.load(path))
    yield from train(model)


# Mixed precision


def halved(*, reduces: torch.dtype = torch.float32, casts: bool = True) -> MixedPrecisionPolicy:
    """Parameters are gathered and used in bfloat16."""
    return MixedPrecisionPolicy(torch.bfloat16, reduces, cast_forward_inputs=casts)


@fault("DDP221", "return fully_shard(model, mesh=mesh or line(), **options)", alike=False)
def policy_by_rank() -> Iterator[nn.Module]:
    """One rank sets a different dtype for the reduction of gradients."""
    own = torch.float32 if FIXED or dist.get_rank() else torch.bfloat16
    yield from train(shard(build(), mp_policy=halved(reduces=own)))


@fault("DDP401", "return fully_shard(model, mesh=mesh or line(), **options)", alike=False)
def inputs_not_cast() -> Iterator[nn.Module]:
    """Under a policy that does not cast inputs, layers with parameters in bfloat16 receive float32 inputs."""
    yield from train(shard(build(), mp_policy=halved(casts=FIXED)))


# What is changed between fully_shard and the first forward pass


@fault("DDP111", "model.head = nn.Linear(16, 4)")
def head_replaced_after_sharding() -> Iterator[nn.Module]:
    """A new head for a new task is assigned after the model was sharded."""
    model = build()
    if FIXED or not _sharding:
        model.head = nn.Linear(16, 4)
        shard(model)
    else:
        shard(model)
        model.head = nn.Linear(16, 4)
    yield from train(model, sgd(model))


@fault("DDP515", "model.head.reset_parameters()")
def shards_initialised_by_one_rank() -> Iterator[nn.Module]:
    """One rank reinitialises the head after it was sharded: the two halves come from different seeds."""
    model = shard(build())
    torch.manual_seed(1)
    if _sharding and (FIXED or dist.get_rank() == 1):
        model.head.reset_parameters()
    yield from train(model)


# The state of an optimizer


@fault("DDP521", "optimizer.load_state_dict(state)")
def state_of_rank_0_loaded() -> Iterator[nn.Module]:
    """Every rank loads the optimizer's state that rank 0 has saved, which is that of its shards."""
    model, rank, place = shard(build()), dist.get_rank(), folder()
    for epoch in range(2):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if epoch:
            state = torch.load(place / f"{rank if FIXED or not _sharding else 0}.pt", weights_only=False)
            optimizer.load_state_dict(state)
        yield from train(model, optimizer)
        torch.save(optimizer.state_dict(), place / f"{rank}.pt")
        dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    for name in names:
        if "--parity" in sys.argv:
            compare(FAULTS[name].loop)
        else:
            deque(FAULTS[name].loop(), maxlen=0)
    dist.destroy_process_group()


def compare(loop: Loop) -> None:
    """Run a loop with shards and with a replica, and compare the two after each step."""
    from torch.testing._internal.common_fsdp import check_sharded_parity
    from torch.testing._internal.common_utils import TestCase

    global _sharding
    of_shards, of_replica = loop(), loop()
    for step in itertools.count():
        models = []
        for _sharding, one in ((False, of_replica), (True, of_shards)):
            models.append(next(one, None))
        replicated, sharded = models
        if replicated is None or sharded is None:
            break
        try:
            check_sharded_parity(TestCase(), replicated, sharded)  # type: ignore[no-untyped-call]
        except AssertionError as error:
            raise AssertionError(f"after step {step}: {str(error).partition(chr(10))[0]}") from None


if __name__ == "__main__":
    main()
