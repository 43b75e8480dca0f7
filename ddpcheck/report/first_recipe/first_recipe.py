"""Text and path of a first recipe for a model."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddpcheck.findings.errors import UsageError
from ddpcheck.recipe.target import find_file, is_path, split_target


@dataclass(frozen=True, slots=True)
class Input:
    """Guessed argument of forward."""

    name: str  # name of the argument
    shape: tuple[int, ...] = ()  # shape of one sample
    high: int | None = None  # exclusive bound of random integers; None for normal random numbers

    @property
    def code(self) -> str:
        """Return Python code that makes the input from the variables SAMPLES and generator."""
        sizes = ", ".join(["SAMPLES", *map(str, self.shape)])
        if self.high is None:
            return f"torch.randn({sizes}, generator=generator)"
        shape = f"({sizes})" if self.shape else "(SAMPLES,)"
        return f"torch.randint({self.high}, {shape}, generator=generator)"


Output = Literal["tensor", "scalar", "sequence", "mapping"]
"""Output of forward: tensor with samples in dim 0, 0-dim tensor, or several tensors."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Inputs that forward accepts, and the kind of output."""

    inputs: tuple[Input, ...]  # if no guess works, only the argument names
    output: Output | None  # None if no guess works
    tried: int = 0  # number of rejected guesses
    error: str = ""  # error message of the first guess


_RECIPE = '''\
"""Checks {attribute} under DistributedDataParallel: `{command}`."""

import torch
from {module} import {name}

SAMPLES = 8  # in the global batch, which the ranks share


def model():
    """Called on every rank, under the same seed."""
    return {attribute}({arguments})


def batch(step):
    """The GLOBAL batch of a step, samples in dim 0; the same at every call.

    {edit}
    """
    generator = torch.Generator().manual_seed(step)
{inputs}


def loss(model, batch):
    """Called with the model, bare or wrapped in DDP, and a rank's part of the batch.

    EDIT: replace {instead} by your loss.
    """
    output = model({batch})
{loss}
'''
_TODO = """\
# TODO: return the arguments of forward, {names}, for SAMPLES samples.
raise NotImplementedError("TODO: say in batch() what goes into the model")"""
_OF_SEVERAL = """\
tensors = [out for out in {output} if torch.is_tensor(out) and out.requires_grad]
return [out.float().square().mean() for out in tensors]  # ddpcheck adds them up"""
_LOSSES: Mapping[Output, str] = {
    "tensor": "return output.float().square().mean()",
    "scalar": "return output",
    "sequence": _OF_SEVERAL.format(output="output"),
    "mapping": _OF_SEVERAL.format(output="output.values()"),
}

_UNKNOWN_LOSS = """return output.float().square().mean()  # or output["loss"], if the model computes it"""


def recipe_path(model: str, output: str | None = None) -> Path:
    """Return the path of a new recipe: `output`, or `check_NAME.py` by default.

    The default is beside the model's file, or in the working folder if `model` is `pkg.module:Class`.

    Raises:
        UsageError: `model` names no class, or the model cannot be imported from the folder of `output`.
    """
    source, attribute = split_target(model)
    if not attribute:
        raise UsageError(f"{model} names no class; write {model}:Net, with the name of the model")
    if not is_path(source):
        return Path(output or f"check_{source.rpartition('.')[2]}.py")
    file = find_file(source)
    if not file.stem.isidentifier() or file.stem in sys.stdlib_module_names:
        raise UsageError(f"{source} cannot be imported by the name {file.stem!r}; name it as pkg.module:{attribute}")
    path = Path(output) if output else Path(source).with_name(f"check_{file.stem}.py")
    if path.resolve().parent != file.parent:
        raise UsageError(f"{path} must be in the folder of {source}, from where the model can be imported")
    return path


def recipe_text(module: str, attribute: str, arguments: str, guess: Guess, command: str) -> str:
    """Return the text of the recipe for the model `attribute(arguments)` of a module."""
    names = ", ".join(spec.name for spec in guess.inputs)
    if guess.output is None:
        edit, inputs = "TODO: ddpcheck could not guess the inputs.", _TODO.format(names=names)
    else:
        edit = "EDIT: replace the random numbers by your data."
        inputs = "\n".join([*(f"{spec.name} = {spec.code}" for spec in guess.inputs), f"return {names}"])
    return _RECIPE.format(
        attribute=attribute,
        command=command,
        module=module,
        name=attribute.partition(".")[0],
        arguments=arguments,
        edit=edit,
        inputs=textwrap.indent(inputs, "    "),
        instead="the output of the model" if guess.output == "scalar" else "the mean square of the output",
        batch="*batch" if len(guess.inputs) > 1 else "batch",
        loss=textwrap.indent(_LOSSES[guess.output] if guess.output else _UNKNOWN_LOSS, "    "),
    )
