"""Loops of tensor parallel models, alone and on a grid of ranks that trains data parallel: healthy ones, and faults.

    ddpcheck run --standalone --nproc-per-node 4 tests/mesh_loops.py NAME ... [--fixed]

`FAULTS` says of each fault what `ddpcheck run` is to tell; with `--fixed` it is left out. `HEALTHY` have none.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import load, save  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, linear
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv
WORDS, LENGTH, WIDTH = 32, 8, 16
HELD: dict[Any, dict[str, Any]] = {}  # by DDP: its parameters, of which torch hides what is split in forward
SPLIT: dict[Any, list[str]] = {}  # by DDP: the names of those that are
GROUP: dict[Any, Any] = {}  # by DDP: the ranks that have the parts


class Block(nn.Module):
    def __init__(self, drops: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drops)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.down(self.up(self.norm(x)).relu()))
        return out


class Net(nn.Module):
    """Tells the next word."""

    def __init__(self, *, seed: int = 0, ties: bool = False, drops: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(drops) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if ties:
            self.head.weight = self.words.weight

    def embedded(self, x: Tensor) -> Tensor:
        out: Tensor = self.words(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedded(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Shifted(Net):
    """Has a parameter with values that are drawn, and that no plan splits."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def embedded(self, x: Tensor) -> Tensor:
        return super().embedded(x) + self.shift


def grid(tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))


def split(model: Net, mesh: DeviceMesh, *, sequence: bool = False, norms: bool = True, sums: bool = False) -> Net:
    """Colwise and rowwise; with `sequence`, norms and what is between blocks are split along the sequence.

    With `sums` the model returns a DTensor, of which each rank has some of the classes.
    """
    between: Any = Shard(1) if sequence else Replicate()
    ties = model.head.weight is model.words.weight
    plan: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between if sequence else Replicate(),
            output_layouts=Shard(-1) if sums else Replicate(),
            use_local_output=not sums,
        ),
    }
    if sequence and norms:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    if ties:
        model.head.weight = model.words.weight
    for block in model.blocks:
        of_block: dict[str, Any] = {
            "up": ColwiseParallel(input_layouts=between),
            "down": RowwiseParallel(output_layouts=between),
        }
        if sequence and norms:
            of_block |= {"norm": SequenceParallel()}
        parallelize_module(block, mesh, of_block)
    return model


def batches(
    mesh: DeviceMesh, epochs: int = 2, first: int = 0, sample: Any = None, seed: int | None = None
) -> Iterator[Tensor]:
    """By right: another part for each replica, the same for all ranks of one; or the part `sample`, of how many."""
    data = TensorDataset(torch.randint(WORDS, (48, LENGTH + 1), generator=torch.Generator().manual_seed(0)))
    dp = mesh["dp"]
    parts, part = sample or (dp.size(), dp.get_local_rank())
    sampler: DistributedSampler[Any] = DistributedSampler(data, parts, part)
    seed = dp.get_local_rank() if seed is None else seed
    torch.manual_seed(seed)
    for epoch in range(first, first + epochs):
        sampler.set_epoch(epoch)
        for (row,) in DataLoader(data, batch_size=8 // dp.size(), sampler=sampler):
            yield row


def loss_of(model: Any, rows: Tensor) -> Tensor:
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train(
    model: Any,
    mesh: DeviceMesh,
    optimizer: Any = None,
    *,
    rows: Iterable[Tensor] | None = None,
    loss: Callable[[Any, Tensor], Tensor] = loss_of,
    adjust: Callable[[Any], object] | None = lambda model: clip(model, 0.5),
    **data: Any,
) -> Any:
    """Train with `AdamW` or `optimizer`; `adjust` changes gradients before each step."""
    optimizer = optimizer or torch.optim.AdamW(parameters_of(model), lr=0.01)
    for batch in batches(mesh, **data) if rows is None else rows:
        optimizer.zero_grad()
        loss(model, batch).backward()
        if adjust:
            adjust(model)
        optimizer.step()
    return optimizer


def parameters_of(model: Any) -> list[Any]:
    return list(HELD[model].values() if model in HELD else model.parameters())


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters_of(model), lr=0.05)


def clip(model: Any, largest: float) -> None:
    """What is a DTensor on one mesh, and what is on none, has a norm of its own; under DDP, all of them are local."""
    if isinstance(model, DistributedDataParallel):
        own = {name: p.grad.square().sum() for name, p in HELD[model].items()}
        square = torch.stack([own.pop(name) for name in SPLIT[model]]).sum()
        dist.all_reduce(square, group=GROUP[model])
        square = square + torch.stack([*own.values()]).sum()
        nn.utils.clip_grads_with_norm_(HELD[model].values(), largest, square.sqrt())
        return
    by_mesh: dict[Any, list[Any]] = {}
    for p in model.parameters():
        by_mesh.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    norms = [nn.utils.get_total_norm([p.grad for p in some]) for some in by_mesh.values()]
    total = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    for some in by_mesh.values():
        nn.utils.clip_grads_with_norm_(some, largest, total)


def evaluate(model: Any, mesh: DeviceMesh) -> None:
    model.eval()
    right = torch.zeros(2)
    with torch.no_grad():
        for rows in batches(mesh, epochs=1):
            guess = model(rows[:, :-1]).argmax(-1)
            right += torch.stack([(guess == rows[:, 1:]).sum(), torch.tensor(guess.numel())])
    dist.all_reduce(right, group=mesh["dp"].get_group())
    if dist.get_rank() == 0:
        print(f"accuracy {float(right[0] / right[1]):.3f}")
    model.train()


def save_and_restore(model: Any, optimizer: Any) -> None:
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if isinstance(model, DistributedDataParallel):
        path = f"{folder[0]}/{dist.get_rank()}.pt"  # each rank has parts of its own
        torch.save({"model": HELD[model], "optimizer": optimizer.state_dict()}, path)
        read = torch.load(path)
        with torch.no_grad():
            for name, p in HELD[model].items():
                p.copy_(read["model"][name])
        optimizer.load_state_dict(read["optimizer"])
        return
    values, state = get_state_dict(model, optimizer)
    save({"model": values, "optimizer": state}, checkpoint_id=folder[0])
    load({"model": values, "optimizer": state}, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=state)


def wrapped(kind: str, net: Net | None = None, **plan: Any) -> tuple[Any, DeviceMesh]:
    """A model that is split over all ranks ("tp"), or over two, with `fully_shard` or DDP around it ("fsdp", "ddp")."""
    mesh = grid(dist.get_world_size() if kind == "tp" else 2)
    model = split(net or Net(), mesh["tp"], **plan)
    if kind == "tp":
        return model, mesh
    return (sharded(model, mesh["dp"]) if kind == "fsdp" else replicated(model, mesh)), mesh


def whole_loop(kind: str, *, sequence: bool = False, **options: Any) -> None:
    model, mesh = wrapped(kind, Net(**options), sequence=sequence)
    optimizer = train(model, mesh)
    evaluate(model, mesh)
    save_and_restore(model, optimizer)
    train(model, mesh, optimizer, first=2)


def tp_of_library_clip() -> None:
    model, mesh = wrapped("tp", sequence=True)
    parts = [p for p in model.parameters() if isinstance(p, DTensor)]
    train(model, mesh, sgd(model), adjust=lambda model: clip_grad_norm_(parts, 0.5))


def tp_of_parts_of_sequences() -> None:
    """Each rank of a model is given its part of the sequences, by right: the plan says so."""
    mesh = grid(2)
    torch.manual_seed(0)
    layouts: Any = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    whole = PrepareModuleInput(**layouts, use_local_output=True)
    plan: dict[str, Any] = {"": whole, "up": ColwiseParallel(), "down": RowwiseParallel()}
    model: Any = fully_shard(parallelize_module(Block(), mesh["tp"], plan), mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    own = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    for _ in range(12):
        x = torch.randn(4, LENGTH, WIDTH, generator=own)
        optimizer.zero_grad()
        part = x.chunk(mesh["tp"].size(), 1)[mesh["tp"].get_local_rank()].contiguous()
        (model(part) - x.sum(-1, keepdim=True)).square().mean().backward()
        optimizer.step()


def tp_and_fsdp_of_sums() -> None:
    """Sums of parts of the classes, divided by the number of words of all replicas; gradients are added up."""
    model, mesh = wrapped("fsdp", sequence=True, sums=True)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for rows in batches(mesh):
        count = torch.tensor(float(rows[:, 1:].numel()))
        dist.all_reduce(count, group=mesh["dp"].get_group())
        optimizer.zero_grad()
        with loss_parallel():
            out = model(rows[:, :-1]).flatten(0, 1)
            (cross_entropy(out, rows[:, 1:].flatten(), reduction="sum") / count).backward()
        optimizer.step()


OPTIONS: dict[str, dict[str, Any]] = {"": {}, "_sequence": {"sequence": True}, "_drops": {"drops": 0.1}}
TIED = {"_tied": {"ties": True}}
HEALTHY: dict[str, Callable[[], object]] = {
    **{f"tp{suffix}": partial(whole_loop, "tp", **options) for suffix, options in (OPTIONS | TIED).items()},
    **{f"fsdp{suffix}": partial(whole_loop, "fsdp", **options) for suffix, options in (OPTIONS | TIED).items()},
    **{f"ddp{suffix}": partial(whole_loop, "ddp", **options) for suffix, options in OPTIONS.items()},
    "tp_of_library_clip": tp_of_library_clip,
    "fsdp_parts": tp_of_parts_of_sequences,
    "fsdp_sums": tp_and_fsdp_of_sums,
}


@dataclass(frozen=True)
class Expected:
    """What is to be said of a fault: by which rule, and at which line."""

    loop: Callable[[], object]
    code: str
    line: str


FAULTS: dict[str, Expected] = {}


def fault(code: str, line: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def note(loop: Callable[[], object]) -> Callable[[], object]:
        FAULTS[loop.__name__] = Expected(loop, code, line)
        return loop

    return note


def sharded(model: Net, mesh: DeviceMesh) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicated(model: Net, mesh: DeviceMesh) -> Any:
    parts = [n for n, p in model.named_parameters() if isinstance(p, DTensor) and p.placements != (Replicate(),)]
    wrapped = DistributedDataParallel(model, device_mesh=mesh["dp"])
    HELD[wrapped], SPLIT[wrapped], GROUP[wrapped] = dict(model.named_parameters()), parts, mesh["tp"].get_group()
    return wrapped


# The batches of a rank


@fault("DDP516", "DistributedSampler(data, parts, part)")
def sampler_over_the_world() -> None:
    """Each rank takes its part of the data: also those that compute one model together."""
    model, mesh = wrapped("fsdp")
    of_world = dist.get_world_size(), dist.get_rank()
    train(model, mesh, sample=None if FIXED else of_world)


@fault("DDP516", "return cross_entropy(model(rows[:, :-1])")
def batches_of_each_rank_with_parts_of_sequences() -> None:
    """No sampler, and each rank draws its batches; layers in the model have parts of the sequence, the model not."""
    model, mesh = wrapped("fsdp", sequence=True)
    own = torch.Generator().manual_seed(mesh["dp"].get_local_rank() if FIXED else dist.get_rank())
    rows = (torch.randint(WORDS, (4, LENGTH + 1), generator=own) for _ in range(12))
    train(model, mesh, sgd(model), rows=rows, adjust=None)


@fault("DDP516", "DistributedSampler(data, parts, part)")
def sampler_over_tensor_parallelism() -> None:
    """The sampler is given the other dimension of the mesh: both replicas take the same, and in each of them others."""
    model, mesh = wrapped("ddp")
    tp = mesh["tp"]
    train(model, mesh, sample=None if FIXED else (tp.size(), tp.get_local_rank()))


@fault("DDP505", "DistributedSampler(data, parts, part)")
def same_batches_everywhere() -> None:
    """All replicas take all of the data, in the same order."""
    model, mesh = wrapped("fsdp")
    train(model, mesh, sample=None if FIXED else (1, 0))


# What tensor parallelism does not split


@fault("DDP208", "parallelize_module(model, mesh, plan)")
def norms_start_differently() -> None:
    """Each rank of a model seeds it by its place: what the plan does not name stays so."""
    mesh = grid(2)
    model = split(Shifted(seed=0 if FIXED else mesh["tp"].get_local_rank()), mesh["tp"])
    train(sharded(model, mesh["dp"]), mesh)


@fault("DDP208", "model = split(Shifted(seed=0 if FIXED else")
def replicas_start_differently() -> None:
    """Each replica is seeded by its place in the data dimension, and fully_shard broadcasts nothing."""
    mesh = grid(2)
    model = split(Shifted(seed=0 if FIXED else mesh["dp"].get_local_rank()), mesh["tp"])
    train(sharded(model, mesh["dp"]), mesh)


@fault("DDP301", "parallelize_module(model, mesh, plan)")
def norms_not_in_the_plan() -> None:
    """What is between blocks is split along the sequence, and norms are not told: nothing adds up their gradients."""
    train(*wrapped("fsdp", sequence=True, norms=FIXED), adjust=None)


@fault("DDP301", "for batch in batches(mesh, **data)")
def dropout_of_each_rank() -> None:
    """Every rank draws its own dropout of what all ranks of a model compute alike."""
    model, mesh = wrapped("ddp", Net(drops=0.2))
    train(model, mesh, adjust=None, seed=mesh["dp"].get_local_rank() if FIXED else dist.get_rank())


# Layers that are split by hand, without DTensor


class Copied(torch.autograd.Function):
    """Goes into a layer that is split by columns: its gradient is the sum of those of all parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradient = gradient.clone()
        if FIXED:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Summed(torch.autograd.Function):
    """Comes out of a layer that is split by rows, as the sum of all parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class SplitBlock(Block):
    """Has its columns of `up`, and its rows of `down`."""

    def __init__(self, tp: DeviceMesh) -> None:
        super().__init__()
        self.group, size, place = tp.get_group(), tp.size(), tp.get_local_rank()
        self.up.weight, self.up.bias = (nn.Parameter(p.detach().chunk(size)[place]) for p in self.up.parameters())
        self.down.weight = nn.Parameter(self.down.weight.detach().chunk(size, 1)[place])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(Copied.apply(self.norm(x), self.group)).relu()
        out: Tensor = x + Summed.apply(linear(hidden, self.down.weight), self.group) + self.down.bias
        return out


@fault("DDP301", "dist.all_reduce(x, group=group)")
def gradient_of_a_part_by_hand() -> None:
    """The function before a layer that is split by hand forgets to add up the gradients of its parts."""
    mesh = grid(2)
    model = Shifted()
    for index in range(len(model.blocks)):
        model.blocks[index] = SplitBlock(mesh["tp"])
    train(DistributedDataParallel(model, process_group=mesh["dp"].get_group()), mesh, adjust=None)


# What is computed of parts


def clip_by_hand(model: Any) -> None:
    squares = {name: p.grad.square().sum() for name, p in HELD[model].items()}
    square = torch.stack([squares.pop(name) for name in [*squares] if not FIXED or name in SPLIT[model]]).sum()
    if FIXED:
        dist.all_reduce(square, group=GROUP[model])
        square = square + torch.stack([*squares.values()]).sum()
    for p in HELD[model].values():
        p.grad.mul_(0.1 / max(float(square.sqrt()), 0.1))


@fault("DDP306", "squares = {name: p.grad.square().sum()")
def norm_of_own_parts() -> None:
    """Each rank clips by the norm of its own parts."""
    model, mesh = wrapped("ddp")
    optimizer = torch.optim.AdamW(parameters_of(model), lr=0.01)
    for rows in batches(mesh):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        clip_by_hand(model)
        optimizer.step()


@fault("DDP303", "/ dist.get_world_size()")
def loss_divided_by_the_world() -> None:
    """The loss is divided by the number of all ranks, and DDP averages over the replicas."""

    def divided(model: Any, rows: Tensor) -> Tensor:
        loss = loss_of(model, rows)
        if not FIXED:
            loss = loss / dist.get_world_size()
        return loss

    model, mesh = wrapped("ddp")
    train(model, mesh, sgd(model), loss=divided, adjust=None)


# The order of things


@fault("DDP504", "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # too early")
def optimizer_before_the_split() -> None:
    """The optimizer is made first, and has the parameters of which there are parts now."""
    mesh = grid(dist.get_world_size())
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # too early
    model = split(model, mesh["tp"])
    if FIXED:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, mesh, optimizer)


def main() -> None:
    dist.init_process_group("gloo")
    loops = HEALTHY | {name: expected.loop for name, expected in FAULTS.items()}
    for name in [argument for argument in sys.argv[1:] if not argument.startswith("--")]:
        loops[name]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
