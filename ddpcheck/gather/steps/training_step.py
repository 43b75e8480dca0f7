"""Training step of a recipe in any process: seeds, batch, loss and backward."""

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
from ddpcheck.findings.tracebacks import runs_target
from ddpcheck.gather.autograd.autograd_graph import named_parameters, unregistered_tensors
from ddpcheck.gather.state.fingerprints import fingerprint, plain_values, sums_of_rows, version_counter
from ddpcheck.gather.state.randomness import (
    QuietRandomness,
    SampleRandomness,
    drawn_since,
    generator_states,
    mixed_seed,
    seed_everything,
    without_rnn_dropout,
)
from ddpcheck.gather.steps.gradient_distance import dense
from ddpcheck.recipe.pytree import batch_size, copied, equal_parts, named_tensors, tree_tensors, upcast
from ddpcheck.recipe.recipe import Recipe, call_loss
from ddpcheck.worlds.rank import set_status

_BATCH_SEED, _MODEL_SEED, _STEP_SEED = 1, 2, 3
_MOST_BYTES = 1 << 28  # max bytes of a batch for sample fingerprints
_ROW_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number

Gradients = dict[str, torch.Tensor]


@dataclass(slots=True)
class Loss:
    """Loss of one step, with its graph."""

    parts: list[torch.Tensor]  # scalar tensors returned by the recipe that require grad
    total: torch.Tensor  # sum of `parts`, root of backward
    drew: frozenset[str]  # libraries whose random generators were used
    batch: Any  # batch passed to the recipe
    names: list[str]  # path of each part in the recipe's result ("loss['penalty']")

    @property
    def value(self) -> float:
        """Return `total` as a Python number."""
        return float(self.total.detach())


def compute_loss(recipe: Recipe, model: nn.Module, batch: Any, *, step: int, seed: int, phase: str = "") -> Loss:
    """Seed the random generators, and compute the loss on a copy of `batch`."""
    set_status(f"step {step}: {phase}forward")
    seed_everything(seed)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batch = copied(batch)
    before = generator_states(device)
    result = call_loss(recipe, model, batch, step)
    drew = drawn_since(before, device)
    parts = list(tree_tensors(result))
    call = f"loss(model, batch) in step {step}"
    if not parts:
        raise TargetError(f"{call} returned {type(result).__name__} without any tensor; return a scalar tensor")
    for part in parts:
        if part.numel() != 1 and (part.requires_grad or len(parts) == 1):
            raise TargetError(
                f"{call} returned a tensor of shape {tuple(part.shape)}; reduce it to a scalar, as by .mean()"
            )
        if part.requires_grad and part.is_complex():
            raise TargetError(f"{call} returned a complex number, which has no gradient; take its .real or .abs()")
    names = [name for name, part in named_tensors(result, "loss") if part.requires_grad]
    terms = [part.reshape(()) for part in parts if part.requires_grad]  # the others are for logging only
    if not terms:
        raise TargetError(f"{call} does not require grad: no parameter of the model reaches it; is it detached?")
    total = functools.reduce(torch.add, terms)
    if not bool(torch.isfinite(total)):
        raise NonFiniteLossError(f"{call} is {float(total.detach())}: gradients that are not finite cannot be compared")
    return Loss(terms, total, drew, batch, names)


@runs_target
def run_backward(
    total: torch.Tensor,
    *,
    retain_graph: bool = False,
    module: nn.Module | None = None,
    since: Mapping[str, int] | None = None,
) -> None:
    """Call `backward` as a training loop does.

    If a saved tensor was modified in place, a note added to torch's error names the tensors of `module` that the
    error may refer to. `since`: result of `versions` at the start of the step.
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
    """Return the in-place version counter of each tensor of `module` by name."""
    return {name: version_counter(tensor) for name, tensor in _all_tensors(module)}


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    yield from unregistered_tensors(module)


def _overwritten(message: str, module: nn.Module, since: Mapping[str, int]) -> list[str]:
    """Return names of tensors that torch's in-place modification error may refer to.

    The message has the shape of the tensor or of a view of it (e.g. a transposed weight), and the version, which all
    views share.
    """
    match = _IN_PLACE.search(message)
    if match is None:
        return []
    shape = [int(size) for size in match[1].split(",") if size.strip()]
    candidates = [(name, tensor) for name, tensor in _all_tensors(module) if version_counter(tensor) == int(match[2])]
    candidates = [(name, tensor) for name, tensor in candidates if since.get(name) != version_counter(tensor)]
    exact = [name for name, tensor in candidates if list(tensor.shape) == shape]
    transposed = [name for name, tensor in candidates if sorted(tensor.shape) == sorted(shape)]
    parts = [name for name, tensor in candidates if tensor.numel() >= math.prod(shape)]
    return exact or transposed or parts


@runs_target
def run_optimizer(optimizer: torch.optim.Optimizer, method: Literal["step", "zero_grad"]) -> None:
    """Call a method of the optimizer as a training loop does."""
    getattr(optimizer, method)()


@contextlib.contextmanager
def random_numbers(which: RandomNumbers, model: nn.Module, batch: Any) -> Iterator[None]:
    """Draw the block's random numbers as torch does, from sample fingerprints, or as constants."""
    if which == "drawn":
        yield
        return
    # Upcast first: fingerprints must not depend on the dtype of `batch`.
    samples = sample_fingerprints(upcast(batch)) if which == "by sample" else ()
    with without_rnn_dropout(model), SampleRandomness(samples) if samples else QuietRandomness():
        yield


def compute_gradients(
    recipe: Recipe,
    model: nn.Module,
    batch: Any,
    *,
    step: int,
    seed: int,
    numbers: RandomNumbers = "drawn",
    phase: str = "",
) -> tuple[Gradients, Loss]:
    """Run forward and backward from cleared gradients; return dense gradients by name."""
    clear_gradients(model)
    parameters = named_parameters(model)  # before forward, which may replace parameters unknown to optimizer and DDP
    phase = phase if numbers == "drawn" else f"{phase}random numbers {numbers}, "
    with random_numbers(numbers, model, batch):
        loss = compute_loss(recipe, model, batch, step=step, seed=seed, phase=phase)
        set_status(f"step {step}: {phase}backward")
        run_backward(loss.total)
    return gradients_of(parameters), loss


def clear_gradients(model: nn.Module, *tensors: torch.Tensor) -> None:
    """Set `.grad` of the model's parameters and of `tensors` to None."""
    for parameter in (*model.parameters(), *tensors):
        parameter.grad = None


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> Gradients:
    """Return gradients by name, as dense tensors; parameters without a gradient are omitted."""
    return {name: dense(p.grad) for name, p in parameters.items() if p.grad is not None}


def visible_tensors(outputs: Sequence[Any], *, static_graph: bool = False) -> tuple[list[torch.Tensor], str]:
    """Return tensors DDP finds in `outputs`, and the class of an output without tensors.

    DDP searches lists, tuples, dicts and dataclasses (torch/nn/parallel/distributed.py, `_find_tensors`). With
    `static_graph` it searches `torch.utils._pytree` nodes: lists, tuples, dicts, and registered classes
    (`_tree_flatten_with_rref`, same file), but not dataclasses or dict subclasses.
    """
    visible: list[torch.Tensor] = []
    opaque = ""
    for output in outputs:
        leaves = tree_leaves(output) if static_graph else tree_tensors(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors and output is not None:
            opaque = opaque or type(output).__qualname__
        visible += [tensor for tensor in tensors if tensor.requires_grad]
    return visible, opaque


def model_seed(seed: int) -> int:
    return mixed_seed(seed, _MODEL_SEED)


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """Return a rank's random seed in a step (single process: rank 0)."""
    return mixed_seed(seed, _STEP_SEED, step, rank)


def batch_seed(seed: int, step: int) -> int:
    return mixed_seed(seed, _BATCH_SEED, step)


def make_batch(recipe: Recipe, step: int, *, seed: int, world_size: int) -> Any:
    """Build the global batch of `step` under its own seed.

    If ddpcheck shards the batch, it drops the last samples so that shards are equal: with unequal shards, the mean over
    ranks is not the mean over the batch, which is not a bug of the recipe.
    """
    set_status(f"step {step}: batch")
    seed_everything(batch_seed(seed, step))
    batch = recipe.global_batch(step)
    if recipe.shard is None:
        with contextlib.suppress(TargetError):  # raised again when the batch is sharded
            return equal_parts(batch, world_size)
    return batch


def dropped_samples_note(recipe: Recipe, step: int, *, seed: int, world_size: int) -> str:
    """Return a sentence on the samples that `make_batch` drops, or '' if none."""
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
    """Return fingerprints of a batch to compare it across processes."""
    return tuple(fingerprint(tensor) for tensor in tree_tensors(batch))


def sample_fingerprints(batch: Any) -> tuple[int, ...]:
    """Return one fingerprint per sample of `batch`, over the sample's rows in all tensors.

    The result is empty if the tensors differ in size of dim 0, are not dense or readable, or are too large.
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
    total = torch.zeros(size, dtype=torch.int64)
    for tensor in tensors:
        total = (total ^ (total >> 29)) * _ROW_MULTIPLIER + row_fingerprints(tensor.cpu())
    return tuple(total.tolist())


def row_fingerprints(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fingerprint of each row (dim 0) of a dense CPU tensor."""
    return sums_of_rows(tensor.resolve_conj().resolve_neg().contiguous().reshape(len(tensor), -1))
