"""Build a model and guess inputs from its layers and forward signature."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.errors import TargetError, UsageError
from ddpcheck.recipe.recipe import describe_type, target_error
from ddpcheck.recipe.target import find_file, is_path, split_target
from ddpcheck.report.first_recipe.first_recipe import Guess, Input, Output, recipe_text

MOST_TRIES = 60
_LENGTH = 16  # sequence length
_IMAGES = (32, 28, 64, 224)
_SIGNALS = (64, 1024, 16000)

Sample = tuple[tuple[int, ...], int | None]
"""(shape of one sample, exclusive bound of random integers or None for normal random numbers)"""


def make_first_recipe(maker: Any, model: str, arguments: str, command: str) -> tuple[str, Guess]:
    """Build the model and guess inputs; return recipe text and guess.

    Args:
        maker: The object named by `model`, from `load_object`.
        model: `pkg.module:Class` or `path/to/file.py:Class`; also a function that returns the model.
        arguments: Arguments of the constructor as Python source; literals only.
        command: Command line that checks the recipe.

    Raises:
        UsageError: The object is not a model, or the constructor needs other arguments.
        TargetError: The user code raised, or returned no module.
    """
    positional, named, source = _parse_arguments(arguments)
    module, attribute = split_target(model)
    guess = guess_inputs(_build(maker, attribute, positional, named))
    module = find_file(module).stem if is_path(module) else module
    return recipe_text(module, attribute, source, guess, command), guess


def _parse_arguments(arguments: str) -> tuple[list[Any], dict[str, Any], str]:
    """Parse `--args`; return positional and keyword arguments, and the normalized source."""
    hint = "arguments of the constructor as Python writes them, such as '3, hidden=16'"
    expected = f"--args: expected {hint}, got {arguments!r}"
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
    except (SyntaxError, ValueError):
        raise UsageError(expected) from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise UsageError(expected)
    try:
        positional = [ast.literal_eval(arg) for arg in call.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
    except ValueError:
        raise UsageError(f"{expected}; only numbers, texts, and lists and the like of them") from None
    if len(named) != len(call.keywords):
        raise UsageError(expected)
    return positional, named, ast.unparse(call).removeprefix("f(").removesuffix(")")


def _build(maker: Any, attribute: str, positional: list[Any], named: dict[str, Any]) -> Any:
    if not callable(maker) or isinstance(maker, nn.Module):
        raise UsageError(
            f"{attribute} is {describe_type(maker)}; name a class of a model, or a function that returns one"
        )
    if isinstance(maker, type) and not issubclass(maker, nn.Module):
        raise UsageError(f"{attribute} is a class, but not a torch.nn.Module")
    try:
        signature = inspect.signature(maker)
        signature.bind(*positional, **named)
    except TypeError as error:
        needed = [
            param.name
            for param in signature.parameters.values()
            if param.default is param.empty and param.kind not in (param.VAR_POSITIONAL, param.VAR_KEYWORD)
        ]
        example = ", ".join(f"{name}=..." for name in needed)
        raise UsageError(
            f"{attribute}({', '.join(needed)}) cannot be called like that: {error}; give its arguments, as in "
            f"--args '{example}'"
        ) from None
    except ValueError:
        pass  # no signature available: try the call
    try:
        model = maker(*positional, **named)
    except (Exception, SystemExit) as error:
        raise target_error(f"{attribute}()", error) from error
    if not isinstance(model, nn.Module):
        raise TargetError(f"{attribute}() returned {describe_type(model)}; it must return a torch.nn.Module")
    return model


def guess_inputs(model: nn.Module) -> Guess:
    """Guess inputs that forward accepts in two batch sizes."""
    names = _argument_names(model)
    shapes = [fn(module) for module in model.modules() for kind, fn in _BY_LAYER.items() if isinstance(module, kind)]
    layers = [samples for samples in map(tuple, shapes) if samples]
    tried, first_error = 0, "no layer determines the shape of its input"
    for samples in itertools.islice(_guesses(model, names, layers), MOST_TRIES):
        inputs = tuple(Input(name, *sample) for name, sample in zip(names, samples, strict=True))
        tried += 1
        try:
            output = _run_batches(model, inputs)
        except Exception as error:  # the next guess may work
            output, message = None, f"{type(error).__name__}: {error}".splitlines()[0]
            first_error = message if tried == 1 else first_error
        if output is not None:
            return Guess(inputs, output)
    return Guess(tuple(map(Input, names)), None, tried, first_error)


def _argument_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of forward's required arguments, else of its first argument, else "x"."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    params = [param for param in inspect.signature(model.forward).parameters.values() if param.kind in positional]
    needed = tuple(param.name for param in params if param.default is inspect.Parameter.empty)
    return needed or tuple(param.name for param in params[:1]) or ("x",)


_BY_LAYER: Mapping[type[nn.Module], Callable[[Any], Iterable[Sample]]] = {
    nn.Linear: lambda layer: (((layer.in_features,), None), ((_LENGTH, layer.in_features), None)),
    nn.Conv1d: lambda layer: (((layer.in_channels, length), None) for length in _SIGNALS),
    nn.Conv2d: lambda layer: (((layer.in_channels, size, size), None) for size in _IMAGES),
    nn.Conv3d: lambda layer: (((layer.in_channels, 16, 16, 16), None),),
    nn.Embedding: lambda layer: (((_LENGTH,), layer.num_embeddings), ((), layer.num_embeddings)),
    nn.EmbeddingBag: lambda layer: (((_LENGTH,), layer.num_embeddings), ((), layer.num_embeddings)),
    nn.BatchNorm1d: lambda layer: (((layer.num_features,), None), ((layer.num_features, _LENGTH), None)),
    nn.BatchNorm2d: lambda layer: (((layer.num_features, 32, 32), None),),
    nn.LayerNorm: lambda layer: ((tuple(layer.normalized_shape), None), ((_LENGTH, *layer.normalized_shape), None)),
    nn.RNNBase: lambda layer: (((_LENGTH, layer.input_size), None),) if layer.batch_first else (),
    nn.MultiheadAttention: lambda layer: (((_LENGTH, layer.embed_dim), None),) if layer.batch_first else (),
    nn.Bilinear: lambda layer: (((layer.in1_features,), None), ((layer.in2_features,), None)),
}
"""Possible input samples by layer type, most common first."""


def _guesses(
    model: nn.Module, names: tuple[str, ...], layers: list[tuple[Sample, ...]]
) -> Iterator[tuple[Sample, ...]]:
    """Yield inputs to try, most likely first: by argument name, layer order, any layer."""
    flat = [sample for samples in layers for sample in samples]
    choices = []
    for index, name in enumerate(names):
        by_order = layers[index] if index < len(layers) else ()
        integers = [sample for sample in flat if sample[1] is not None]
        by_name = list(_samples_for_name(model, name, integers))
        choices.append(list(dict.fromkeys([*by_name, *by_order, *flat])))
    if len(names) == 1:
        yield from ((sample,) for sample in choices[0])
        return
    few = [samples[:7] for samples in choices]
    yield from sorted(itertools.product(*few), key=lambda row: sum(few[n].index(item) for n, item in enumerate(row)))


def _samples_for_name(model: nn.Module, name: str, integers: list[Sample]) -> Iterator[Sample]:
    words = name.lower()
    if any(word in words for word in ("label", "target")) or words == "y":
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        if linear:
            yield from (((), linear[-1].out_features), ((linear[-1].out_features,), None))
        yield from integers
    elif any(word in words for word in ("ids", "token", "idx", "index")):
        yield from integers


def _run_batches(model: nn.Module, inputs: tuple[Input, ...]) -> Output | None:
    """Run batches of 4 and 6 samples; return the output kind, None if different."""
    kinds = []
    for samples in (4, 6):
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        tensors = [
            torch.randn(samples, *spec.shape, generator=generator)
            if spec.high is None
            else torch.randint(spec.high, (samples, *spec.shape), generator=generator)
            for spec in inputs
        ]
        kinds.append(_output_kind(model(*tensors), samples))
    return kinds[0] if kinds[0] == kinds[1] else None


def _output_kind(output: Any, samples: int) -> Output | None:
    """Return the kind of an output; None if unusable in a loss."""
    if isinstance(output, torch.Tensor):
        if not output.requires_grad:
            return None
        if not output.ndim:
            return "scalar"
        return "tensor" if output.shape[0] == samples else None
    is_mapping = isinstance(output, Mapping)
    values = output.values() if is_mapping else output if isinstance(output, list | tuple) else ()
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
    if not tensors:
        return None
    return "mapping" if is_mapping else "sequence"
