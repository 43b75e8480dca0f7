"""One training step of a recipe, in any process: its seeds, its batch, its loss, its backward pass."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ddpcheck.findings.errors import NonFiniteLossError, TargetError
from ddpcheck.findings.evidence.gradients import RandomNumbers
from ddpcheck.findings.tracebacks import for_target
from ddpcheck.gather.autograd.autograd_graph import named_parameters, unregistered_tensors
from ddpcheck.gather.state.fingerprints import fingerprint, plain_values, sums_of_rows, version_of
from ddpcheck.gather.state.randomness import (
    QuietRandomness,
    SampleRandomness,
    drawn_since,
    generator_states,
    mixed_seed,
    quiet_modules,
    seed_everything,
)
from ddpcheck.gather.steps.gradient_distance import dense
from ddpcheck.recipe.pytree import batch_size, copied, equal_parts, named_tensors, tree_tensors, upcast
from ddpcheck.recipe.recipe import Recipe, call_loss
from ddpcheck.worlds.rank import set_status

_BATCH_SEED, _MODEL_SEED, _STEP_SEED = 1, 2, 3
_MOST_BYTES = 1 << 28  # of a batch whose samples are told apart
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number

Gradients = dict[str, torch.Tensor]


@dataclass(slots=True)
class Loss:
    """The loss of one step, with its graph."""

    parts: list[torch.Tensor]  # the scalar tensors that the recipe returned
    total: torch.Tensor  # their sum, which is what backward is called on
    drew: frozenset[str]  # the libraries from whose generators random numbers were drawn on the way
    batch: Any  # what the recipe was handed
    names: list[str]  # how to reach each part in what the recipe returned ("loss['penalty']")

    @property
    def value(self) -> float:
        """The sum as a number."""
        return float(self.total.detach())


def compute_loss(recipe: Recipe, model: nn.Module, batch: Any, *, step: int, seed: int, place: str = "") -> Loss:
    """Run the forward pass and the loss under `seed`, on a copy of `batch`, which they may write into or take apart.

    Raises:
        TargetError: The loss is no scalar tensor, no nest of them, not finite, or does not require grad.
        Exception: Whatever the user's code raises.
    """
    set_status(f"step {step}: {place}forward")
    seed_everything(seed)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batch = copied(batch)
    before = generator_states(device)
    result = call_loss(recipe, model, batch, step)
    drew = drawn_since(before, device)
    parts = list(tree_tensors(result))
    at = f"loss(model, batch) in step {step}"
    if not parts:
        raise TargetError(f"{at} returned {type(result).__name__} without any tensor; return a scalar tensor")
    for part in parts:
        if part.numel() != 1 and (part.requires_grad or len(parts) == 1):
            raise TargetError(
                f"{at} returned a tensor of shape {tuple(part.shape)}; reduce it to a scalar, as by .mean()"
            )
        if part.requires_grad and part.is_complex():
            raise TargetError(f"{at} returned a complex number, which has no gradient; take its .real or .abs()")
    names = [name for name, part in named_tensors(result, "loss") if part.requires_grad]
    terms = [part.reshape(()) for part in parts if part.requires_grad]  # the others are there to be logged
    if not terms:
        raise TargetError(f"{at} does not require grad: no parameter of the model reaches it; is it detached?")
    total = functools.reduce(torch.add, terms)
    if not bool(torch.isfinite(total)):
        raise NonFiniteLossError(f"{at} is {float(total.detach())}: gradients that are not finite cannot be compared")
    return Loss(terms, total, drew, batch, names)


@for_target
def run_backward(
    total: torch.Tensor,
    *,
    retain_graph: bool = False,
    module: nn.Module | None = None,
    since: Mapping[str, int] | None = None,
) -> None:
    """Call `backward` as a training loop does.

    Where it finds a saved tensor overwritten that may be one of `module`, a note on the error names it; `since` has the
    versions of its tensors when the step began.
    """
    try:
        total.backward(retain_graph=retain_graph)
    except RuntimeError as error:
        if module is not None and (names := _overwritten(str(error), module, since or {})):
            error.add_note(f"{OVERWRITTEN}{', '.join(names)}")
        raise


OVERWRITTEN = "ddpcheck: overwritten in place: "
_IN_PLACE = re.compile(r"modified by an inplace operation: \[\S+ \[([\d, ]*)\]\].* is at version (\d+)", re.DOTALL)


def versions(module: nn.Module) -> dict[str, int]:
    """The version of each tensor that `module` holds, by name: how often it has been written to in place."""
    return {name: version_of(tensor) for name, tensor in _all_held(module)}


def _all_held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    yield from unregistered_tensors(module)


def _overwritten(message: str, module: nn.Module, since: Mapping[str, int]) -> list[str]:
    """The tensors of `module` that torch may mean when it says that a saved tensor has been modified in place.

    It tells the shape, of a view perhaps (that of a transposed weight), and the version, which views share.
    """
    said = _IN_PLACE.search(message)
    if said is None:
        return []
    shape = [int(size) for size in said[1].split(",") if size.strip()]
    there = [(name, tensor) for name, tensor in _all_held(module) if version_of(tensor) == int(said[2])]
    there = [(name, tensor) for name, tensor in there if since.get(name) != version_of(tensor)]
    exact = [name for name, tensor in there if list(tensor.shape) == shape]
    turned = [name for name, tensor in there if sorted(tensor.shape) == sorted(shape)]
    parts = [name for name, tensor in there if tensor.numel() >= math.prod(shape)]
    return exact or turned or parts


@for_target
def run_optimizer(optimizer: torch.optim.Optimizer, method: Literal["step", "zero_grad"]) -> None:
    """Call a method of the optimizer as a training loop does."""
    getattr(optimizer, method)()


@contextlib.contextmanager
def random_numbers(which: RandomNumbers, model: nn.Module, batch: Any) -> Iterator[None]:
    """A block in which the forward and backward passes of `model` on `batch` get such random numbers."""
    if which == "drawn":
        yield
        return
    # Of what is the same in each dtype in which `batch` may come.
    samples = sample_fingerprints(upcast(batch)) if which == "by sample" else ()
    with quiet_modules(model), SampleRandomness(samples) if samples else QuietRandomness():
        yield


def compute_gradients(
    recipe: Recipe,
    model: nn.Module,
    batch: Any,
    *,
    step: int,
    seed: int,
    numbers: RandomNumbers = "drawn",
    place: str = "",
) -> tuple[Gradients, Loss]:
    """Forward and backward from cleared gradients; returns the dense gradients that arrived, by name."""
    clear_gradients(model)
    parameters = named_parameters(model)  # forward may put others in their place, which no optimizer or DDP knows
    place = place if numbers == "drawn" else f"{place}random numbers {numbers}, "
    with random_numbers(numbers, model, batch):
        loss = compute_loss(recipe, model, batch, step=step, seed=seed, place=place)
        set_status(f"step {step}: {place}backward")
        run_backward(loss.total)
    return gradients_of(parameters), loss


def clear_gradients(model: nn.Module, *others: torch.Tensor) -> None:
    """Set every `.grad` to None, so that what arrives can be told from what was there; also of what it has no more."""
    for parameter in (*model.parameters(), *others):
        parameter.grad = None


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> Gradients:
    """The gradients that are there, dense, by name; not copied: the next step clears `.grad` and gets new ones."""
    return {name: dense(p.grad) for name, p in parameters.items() if p.grad is not None}


def visible_tensors(outputs: Sequence[Any], *, static_graph: bool = False) -> tuple[list[torch.Tensor], str]:
    """The tensors that DDP finds in what `forward` returned, and the class of the first output in which it finds none.

    DDP looks into lists, tuples, dicts and dataclasses (torch/nn/parallel/distributed.py, `_find_tensors`).
    With `static_graph` it looks into what `torch.utils._pytree` has as nodes: lists, tuples, dicts, and classes
    that are registered there (`_tree_flatten_with_rref`, same file); dataclasses and subclasses of dict are none.
    """
    found: list[torch.Tensor] = []
    opaque = ""
    for output in outputs:
        leaves = tree_leaves(output) if static_graph else tree_tensors(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors and output is not None:
            opaque = opaque or type(output).__qualname__
        found += [tensor for tensor in tensors if tensor.requires_grad]
    return found, opaque


def model_seed(seed: int) -> int:
    """The seed under which `model()` is called."""
    return mixed_seed(seed, _MODEL_SEED)


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """The seed of the random numbers that a rank draws in a step; a single process draws as rank 0."""
    return mixed_seed(seed, _STEP_SEED, step, rank)


def batch_seed(seed: int, step: int) -> int:
    """The seed under which `batch(step)` is called."""
    return mixed_seed(seed, _BATCH_SEED, step)


def make_batch(recipe: Recipe, step: int, *, seed: int, world_size: int) -> Any:
    """The global batch of `step`, made under a seed of its own.

    Where ddpcheck splits it itself, samples that do not divide by the ranks are left out: unequal shards would make the
    mean of the ranks another thing than the mean of the batch, and that would be no fault of the recipe.
    """
    set_status(f"step {step}: batch")
    seed_everything(batch_seed(seed, step))
    batch = recipe.global_batch(step)
    if recipe.shard is None:
        with contextlib.suppress(TargetError):  # told where the batch is split
            return equal_parts(batch, world_size)
    return batch


def uneven_batch(recipe: Recipe, step: int, *, seed: int, world_size: int) -> str:
    """A sentence on the samples that `make_batch` leaves out; empty where there are none."""
    if recipe.shard is not None:
        return ""
    seed_everything(batch_seed(seed, step))
    with contextlib.suppress(TargetError):
        size = batch_size(recipe.global_batch(step))
        if size > world_size and size % world_size:
            return (
                f"the batch of {size} samples does not divide by {world_size} ranks: it was checked with equal shards, "
                f"without the last {size % world_size}"
            )
    return ""


def batch_fingerprint(batch: Any) -> tuple[int, ...]:
    """Tells whether two processes hold the same batch."""
    return tuple(fingerprint(tensor) for tensor in tree_tensors(batch))


def sample_fingerprints(batch: Any) -> tuple[int, ...]:
    """One fingerprint for each sample of `batch`, of the bits of its row in every tensor.

    Returns:
        Nothing where the tensors do not agree on the number of samples, or are too large.
    """
    tensors = [tensor for tensor in tree_tensors(batch) if tensor.dim() > 0]
    if any(t.is_nested or t.layout != torch.strided or t.is_quantized or plain_values(t) is None for t in tensors):
        return ()
    tensors = [tensor.detach() for tensor in tensors]
    try:
        size = batch_size(batch)
    except TargetError:
        return ()
    if size == 0 or sum(t.numel() * t.element_size() for t in tensors) > _MOST_BYTES:
        return ()
    return fingerprints_of_rows(tensors)


def fingerprints_of_rows(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """One fingerprint for each row that the tensors have together, which are as long as each other."""
    total = torch.zeros(len(tensors[0]), dtype=torch.int64)
    for tensor in tensors:
        total = (total ^ (total >> 29)) * _ODD + row_fingerprints(tensor.detach().cpu())
    return tuple(total.tolist())


def row_fingerprints(tensor: torch.Tensor) -> torch.Tensor:
    """A fingerprint of the bits of each row (element of the first dimension) of a dense tensor on the CPU."""
    return sums_of_rows(tensor.resolve_conj().resolve_neg().contiguous().reshape(len(tensor), -1))
