"""A first recipe for a model: the guess that it is made of, its text, and where it belongs."""

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
    """One argument of forward."""

    name: str  # of forward's parameter
    shape: tuple[int, ...] = ()  # of one sample
    high: int | None = None  # whole numbers below this one; None for normal random numbers

    @property
    def code(self) -> str:
        """Makes it, from SAMPLES and generator."""
        sizes = ", ".join(["SAMPLES", *map(str, self.shape)])
        if self.high is None:
            return f"torch.randn({sizes}, generator=generator)"
        shape = f"({sizes})" if self.shape else "(SAMPLES,)"
        return f"torch.randint({self.high}, {shape}, generator=generator)"


Output = Literal["tensor", "scalar", "sequence", "mapping"]
"""What forward returns: a tensor with samples in dim 0, a tensor without dimensions, or several tensors."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Inputs that forward accepts, and what it made of them."""

    inputs: tuple[Input, ...]  # where none is accepted, the arguments of forward, of which only the names are known
    output: Output | None  # None where nothing that was tried works
    tried: int = 0  # how many inputs were tried in vain
    error: str = ""  # what forward said of the first


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
tensors = [one for one in {output} if torch.is_tensor(one) and one.requires_grad]
return [one.float().square().mean() for one in tensors]  # ddpcheck adds them up"""
_LOSSES: Mapping[Output, str] = {
    "tensor": "return output.float().square().mean()",
    "scalar": "return output",
    "sequence": _OF_SEVERAL.format(output="output"),
    "mapping": _OF_SEVERAL.format(output="output.values()"),
}

_UNKNOWN_LOSS = """return output.float().square().mean()  # or output["loss"], if the model computes it"""


def place_of_recipe(model: str, output: str | None = None) -> Path:
    """The file of the first recipe for a model: beside its file, or in the working folder for one of a module.

    Raises:
        UsageError: `model` names no class, or `output` lies where the model could not be imported from.
    """
    place, attribute = split_target(model)
    if not attribute:
        raise UsageError(f"{model} names no class; write {model}:Net, with the name of the model")
    if not is_path(place):
        return Path(output or f"check_{place.rpartition('.')[2]}.py")
    file = find_file(place)
    if not file.stem.isidentifier() or file.stem in sys.stdlib_module_names:
        raise UsageError(f"{place} cannot be imported by the name {file.stem!r}; name it as pkg.module:{attribute}")
    path = Path(output) if output else Path(place).with_name(f"check_{file.stem}.py")
    if path.resolve().parent != file.parent:
        raise UsageError(f"{path} must be in the folder of {place}, from where the model can be imported")
    return path


def recipe_text(module: str, attribute: str, arguments: str, guess: Guess, command: str) -> str:
    """The recipe of the model that `attribute` of a module makes, where its constructor is given `arguments`."""
    names = ", ".join(one.name for one in guess.inputs)
    if guess.output is None:
        edit, inputs = "TODO: ddpcheck could not guess the inputs.", _TODO.format(names=names)
    else:
        edit = "EDIT: replace the random numbers by your data."
        inputs = "\n".join([*(f"{one.name} = {one.code}" for one in guess.inputs), f"return {names}"])
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
