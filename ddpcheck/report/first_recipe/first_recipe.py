"""A first recipe for a model: builds it, guesses its inputs, and says where the recipe belongs.

This module is light: torch is only imported when a model is built.
"""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpcheck.findings.errors import TargetError, UsageError
from ddpcheck.recipe.target import find_file, is_path, split_target
from ddpcheck.report.first_recipe.inputs import Guess, NoGuess
from ddpcheck.report.first_recipe.writing import recipe_text


@dataclass(frozen=True, slots=True)
class FirstRecipe:
    """A recipe that has been thought of, and not yet been written.

    Attributes:
        path: Where it goes.
        text: What it says.
        guess: What it takes for the inputs of the model.
    """

    path: Path
    text: str
    guess: Guess | NoGuess


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
        raise UsageError(f"{path} must lie beside {place}, from where the model can be imported")
    return path


def make_first_recipe(maker: Any, model: str, arguments: str, path: Path) -> FirstRecipe:
    """Build the model and guess what goes into it.

    Args:
        maker: What `model` names, as `load_object` finds it.
        model: `pkg.module:Class` or `path/to/file.py:Class`; also a function that returns the model.
        arguments: Of the constructor, as Python writes them; literals only.
        path: Where the recipe goes.

    Raises:
        UsageError: It is no model, or its constructor needs other arguments.
        TargetError: The user's code raised.
    """
    positional, named, spelled = _parsed(arguments)
    place, attribute = split_target(model)
    made = _build(maker, attribute, positional, named)
    from ddpcheck.report.first_recipe.guessing import guess_inputs

    guess = guess_inputs(made)
    module = find_file(place).stem if is_path(place) else place
    text = recipe_text(module, attribute, spelled, guess, f"ddpcheck report {path.as_posix()}")
    return FirstRecipe(path, text, guess)


def _parsed(arguments: str) -> tuple[list[Any], dict[str, Any], str]:
    """Positional and named arguments, and how they are spelled."""
    wanted = "arguments of the constructor as Python writes them, such as '3, hidden=16'"
    expected = f"--args: expected {wanted}, got {arguments!r}"
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
    except (SyntaxError, ValueError):
        raise UsageError(expected) from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise UsageError(expected)
    try:
        positional = [ast.literal_eval(one) for one in call.args]
        named = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords if one.arg}
    except ValueError:
        raise UsageError(f"{expected}; only numbers, texts, and lists and the like of them") from None
    if len(named) != len(call.keywords):
        raise UsageError(expected)
    return positional, named, ast.unparse(call).removeprefix("f(").removesuffix(")")


def _build(maker: Any, attribute: str, positional: list[Any], named: dict[str, Any]) -> Any:
    from torch import nn

    from ddpcheck.recipe.recipe import blame, kind_of

    if not callable(maker) or isinstance(maker, nn.Module):
        raise UsageError(f"{attribute} is {kind_of(maker)}; name a class of a model, or a function that returns one")
    if isinstance(maker, type) and not issubclass(maker, nn.Module):
        raise UsageError(f"{attribute} is a class that is no torch.nn.Module")
    try:
        signature = inspect.signature(maker)
        signature.bind(*positional, **named)
    except TypeError as error:
        needed = [
            one.name
            for one in signature.parameters.values()
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
        example = ", ".join(f"{name}=..." for name in needed)
        raise UsageError(
            f"{attribute}({', '.join(needed)}) cannot be called like that: {error}; give its arguments, as in "
            f"--args '{example}'"
        ) from None
    except ValueError:
        pass  # no signature to look at: call it and see
    try:
        made = maker(*positional, **named)
    except (Exception, SystemExit) as error:
        raise blame(f"{attribute}()", error) from error
    if not isinstance(made, nn.Module):
        raise TargetError(f"{attribute}() returned {kind_of(made)}; it must return a torch.nn.Module")
    return made
