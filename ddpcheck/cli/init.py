"""`ddpcheck init`: writes a first recipe for a model, and checks it."""

from __future__ import annotations

import argparse

from ddpcheck.cli.checks import CHECK_SETTINGS, run_report
from ddpcheck.cli.output import reason_of, say
from ddpcheck.findings.errors import EXIT_TARGET, UsageError
from ddpcheck.recipe.target import load_object
from ddpcheck.report.first_recipe.first_recipe import place_of_recipe


def run_init(arguments: argparse.Namespace) -> int:
    """Write a recipe, and check it; 3 where the inputs of the model could not be guessed."""
    path = place_of_recipe(arguments.model, arguments.output)
    maker = load_object(arguments.model)  # a wrong name is told before a file that is there
    if path.exists() and not arguments.force:
        raise UsageError(f"{path} is there already; --force overwrites it, -o FILE writes another one")
    from ddpcheck.report.first_recipe.guessing import make_first_recipe

    check = f"ddpcheck report {path.as_posix()}"
    text, guess = make_first_recipe(maker, arguments.model, arguments.args, check)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {reason_of(error)}") from error
    if guess.output is None:
        names = ", ".join(one.name for one in guess.inputs)
        why = f"{guess.tried} inputs were tried, the first gave {guess.error}" if guess.tried else guess.error
        say(f"wrote {path}, without inputs: what goes into forward({names}) could not be guessed ({why})")
        say(f"fill in batch() where {path} says TODO, then run:\n  {check}")
        return EXIT_TARGET
    inputs = ", ".join(f"{one.name} = {one.code}" for one in guess.inputs)
    say(f"wrote {path}; a guess that forward accepts: {inputs}; now checking it")
    given = dict.fromkeys((*CHECK_SETTINGS, "fail_on", "repro", "baseline", "output", "format"))
    given |= {"target": str(path), "matrix": False, "schedule": None, "launcher": "off", "command_line": check}
    code = run_report(argparse.Namespace(**given), None)
    say(f"the data and the loss are stand-ins: put your own where {path} says EDIT, then run:\n  {check}")
    return code
