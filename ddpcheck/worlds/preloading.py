"""Importing the modules that the user wants to be there before ranks start. Light: torch comes with what is named."""

from __future__ import annotations

import importlib


def import_named(name: str) -> str:
    """Import the module `name`; returns why that cannot be done in a sentence, empty where it can."""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        return f"preload: the module {name!r} cannot be imported: {said}"
    return ""
