"""The text of a first recipe.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddpcheck.report.first_recipe.inputs import Guess, Input, NoGuess, Output

_TENSORS = "[one for one in {} if torch.is_tensor(one) and one.requires_grad]"
_LOSSES: Mapping[Output, tuple[str, ...]] = {
    "tensor": ("return output.float().square().mean()",),
    "scalar": ("return output",),
    "sequence": (
        f"tensors = {_TENSORS.format('output')}",
        "return [one.float().square().mean() for one in tensors]  # ddpcheck adds them up",
    ),
    "mapping": (
        f"tensors = {_TENSORS.format('output.values()')}",
        "return [one.float().square().mean() for one in tensors]  # ddpcheck adds them up",
    ),
}
_TODO = (
    "# TODO: return the arguments of forward, {names}, for SAMPLES samples.",
    'raise NotImplementedError("TODO: say in batch() what goes into the model")',
)


def recipe_text(module: str, attribute: str, arguments: str, guess: Guess | NoGuess, command: str) -> str:
    """The recipe of a model.

    Args:
        module: To import it from.
        attribute: The class, or the function that makes it.
        arguments: Of its constructor, as Python writes them.
        guess: What goes into it.
        command: That checks the recipe.
    """
    known = isinstance(guess, Guess)
    inputs = guess.inputs if isinstance(guess, Guess) else tuple(Input(name, ()) for name in guess.names)
    names = [one.name for one in inputs]
    if isinstance(guess, Guess):
        body = [f"{one.name} = {one.code}" for one in guess.inputs]
        body.append(f"return {', '.join(names)}")
    else:
        body = [line.format(names=", ".join(names)) for line in _TODO]
    edit = "EDIT: random numbers stand in for your data." if known else "TODO: ddpcheck could not guess the inputs."
    output = guess.output if isinstance(guess, Guess) else "tensor"
    instead = "what the model returns" if output == "scalar" else "the mean square of what the model returns"
    generator = ["generator = torch.Generator().manual_seed(step)"]
    lines = [
        f'"""Checks {attribute} under DistributedDataParallel: `{command}`."""',
        "",
        "import torch",
        f"from {module} import {attribute.partition('.')[0]}",
        "",
        "SAMPLES = 8  # in the global batch, which the ranks share",
        "",
        "",
        "def model():",
        '    """Called on every rank, under the same seed."""',
        f"    return {attribute}({arguments})",
        "",
        "",
        "def batch(step):",
        '    """The GLOBAL batch of a step, samples in dim 0; the same at every call.',
        "",
        f"    {edit}",
        '    """',
        *(f"    {line}" for line in [*generator, *body]),
        "",
        "",
        "def loss(model, batch):",
        '    """Called with the model, bare or wrapped in DDP, and a rank\'s part of the batch.',
        "",
        f"    EDIT: {instead} stands in for your loss.",
        '    """',
        f"    output = model({'*' if len(names) > 1 else ''}batch)",
        *(f"    {line}" for line in _LOSSES[output]),
    ]
    return "\n".join(lines) + "\n"
