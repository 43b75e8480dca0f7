"""Guesses the inputs of a model from its first layers and the signature of its forward, and tries them.

This module runs the model: it imports torch.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ddpcheck.report.first_recipe.inputs import Guess, Input, NoGuess, Output

MOST_TRIES = 60
_LENGTH = 16  # of a sequence
_IMAGES = (32, 28, 64, 224)
_SIGNALS = (64, 1024, 16000)

Sample = tuple[tuple[int, ...], int | None]
"""The shape of one sample, and the number below which its values are; None for normal random numbers."""


def guess_inputs(model: nn.Module) -> Guess | NoGuess:
    """Inputs that the model's forward accepts in batches of two sizes, and what it returns for them."""
    names = _arguments(model)
    layers = [samples for module in model.modules() if (samples := tuple(_samples(module)))]
    tried, first = 0, "no layer tells what goes in"
    for samples in itertools.islice(_combinations(model, names, layers), MOST_TRIES):
        inputs = tuple(Input(name, *sample) for name, sample in zip(names, samples, strict=True))
        tried += 1
        try:
            output = _try(model, inputs)
        except Exception as error:  # whatever the model raises, the next guess may be right
            output, said = None, f"{type(error).__name__}: {error}".splitlines()[0]
            first = said if tried == 1 else first
        if output is not None:
            return Guess(inputs, output)
    return NoGuess(names, tried, first)


def _arguments(model: nn.Module) -> tuple[str, ...]:
    """The names of the arguments that forward needs, or of its first one where it needs none."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [one for one in inspect.signature(model.forward).parameters.values() if one.kind in positional]
    needed = tuple(one.name for one in given if one.default is inspect.Parameter.empty)
    return needed or tuple(one.name for one in given[:1]) or ("x",)


def _samples(layer: nn.Module) -> Iterator[Sample]:
    """What a layer takes, the most usual first; nothing for a layer that does not tell."""
    if isinstance(layer, nn.Linear):
        yield from (((layer.in_features,), None), ((_LENGTH, layer.in_features), None))
    elif isinstance(layer, nn.Conv1d):
        yield from (((layer.in_channels, length), None) for length in _SIGNALS)
    elif isinstance(layer, nn.Conv2d):
        yield from (((layer.in_channels, size, size), None) for size in _IMAGES)
    elif isinstance(layer, nn.Conv3d):
        yield (layer.in_channels, 16, 16, 16), None
    elif isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        yield from (((_LENGTH,), layer.num_embeddings), ((), layer.num_embeddings))
    elif isinstance(layer, nn.BatchNorm1d):
        yield from (((layer.num_features,), None), ((layer.num_features, _LENGTH), None))
    elif isinstance(layer, nn.BatchNorm2d):
        yield (layer.num_features, 32, 32), None
    elif isinstance(layer, nn.LayerNorm):
        shape = tuple(layer.normalized_shape)
        yield from ((shape, None), ((_LENGTH, *shape), None))
    elif isinstance(layer, nn.RNNBase) and layer.batch_first:
        yield (_LENGTH, layer.input_size), None
    elif isinstance(layer, nn.MultiheadAttention) and layer.batch_first:
        yield (_LENGTH, layer.embed_dim), None
    elif isinstance(layer, nn.Bilinear):
        yield from (((layer.in1_features,), None), ((layer.in2_features,), None))


def _combinations(
    model: nn.Module, names: tuple[str, ...], layers: list[tuple[Sample, ...]]
) -> Iterator[tuple[Sample, ...]]:
    """Samples for each argument: first what its name suggests, then by the layer at its place, then by the others."""
    flat = [sample for samples in layers for sample in samples]
    choices = []
    for place, name in enumerate(names):
        own = layers[place] if place < len(layers) else ()
        whole = [sample for sample in flat if sample[1] is not None]
        named = list(_by_name(model, name, whole))
        choices.append(list(dict.fromkeys([*named, *own, *flat])))
    if len(names) == 1:
        yield from ((sample,) for sample in choices[0])
        return
    few = [some[:7] for some in choices]
    yield from sorted(itertools.product(*few), key=lambda row: sum(few[n].index(one) for n, one in enumerate(row)))


def _by_name(model: nn.Module, name: str, whole: list[Sample]) -> Iterator[Sample]:
    """What the name of an argument suggests."""
    words = name.lower()
    if any(word in words for word in ("label", "target")) or words == "y":
        last = [module for module in model.modules() if isinstance(module, nn.Linear)]
        if last:
            yield from (((), last[-1].out_features), ((last[-1].out_features,), None))
        yield from whole
    elif any(word in words for word in ("ids", "token", "idx", "index")):
        yield from whole


def _try(model: nn.Module, inputs: tuple[Input, ...]) -> Output | None:
    """What forward returns in a batch of 4 and in one of 6; None where that is not for each sample, or no loss's."""
    kinds = []
    for samples in (4, 6):
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        made = [_make(one, samples, generator) for one in inputs]
        kinds.append(_kind(model(*made), samples))
    return kinds[0] if kinds[0] == kinds[1] else None


def _make(one: Input, samples: int, generator: torch.Generator) -> torch.Tensor:
    if one.high is None:
        return torch.randn(samples, *one.shape, generator=generator)
    return torch.randint(one.high, (samples, *one.shape), generator=generator)


def _kind(output: Any, samples: int) -> Output | None:
    """What was returned, where a loss can be made of it."""
    if isinstance(output, torch.Tensor):
        if not output.requires_grad:
            return None
        if not output.ndim:
            return "scalar"
        return "tensor" if output.shape[0] == samples else None
    is_mapping = isinstance(output, Mapping)
    values = output.values() if is_mapping else output if isinstance(output, list | tuple) else ()
    found = [one for one in values if isinstance(one, torch.Tensor) and one.requires_grad]
    if not found:
        return None
    return "mapping" if is_mapping else "sequence"
