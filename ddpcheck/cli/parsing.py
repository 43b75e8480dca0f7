"""Parsers whose errors are one sentence, with the word that was probably meant.

This module is light: it never imports torch.
"""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ddpcheck.cli.output import complain
from ddpcheck.findings.errors import EXIT_CLEAN, EXIT_USAGE

_CHOICE = re.compile(r"^argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, as all errors of ddpcheck are."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse; what nobody knows is an error of the command that it was given to."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            whose: Parser = getattr(parsed, "parser", self)
            whose.refuse_unknown(unknown)
        return parsed

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """Refuse words that are left over, and say which option was probably meant."""
        self.error(f"unrecognized arguments: {' '.join(words)}{near_option(self, words)}")

    def error(self, message: str) -> NoReturn:
        from ddpcheck.worlds.launchers.detection import BY_HAND, detect

        launch = detect()
        if launch is not None and launch.rank and launch.launcher != BY_HAND:
            raise SystemExit(EXIT_CLEAN)  # rank 0 has been given the same, and says so
        complain(f"{better(message)} (see `{self.prog} --help`)")
        raise SystemExit(EXIT_USAGE)


class HelpFormatter(argparse.HelpFormatter):
    """Breaks lines at words; those that begin with a space, such as examples, stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for paragraph in text.split("\n\n"):
            as_it_is = any(line.startswith(" ") for line in paragraph.splitlines())
            filled.append(paragraph if as_it_is else "\n".join(self._split_lines(paragraph, width)))
        return "\n\n".join(filled)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)


def better(message: str) -> str:
    """A message of argparse; of a wrong choice with the choice that was probably meant."""
    found = _CHOICE.match(message)
    if not found:
        return message
    where, given, choices = found[1], found[2], [word.strip(" '") for word in found[3].split(",")]
    what = "command" if where == "COMMAND" else f"choice for {where}"
    close = difflib.get_close_matches(given, choices, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(choices)}"
    return f"there is no {what} {given!r}; {hint}"


def near_option(parser: argparse.ArgumentParser, words: Iterable[str]) -> str:
    """The option of a parser that the first unknown one was probably meant to be, in words; empty for none."""
    known = [name for name in parser._option_string_actions if name.startswith("--")]
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("-") and (close := difflib.get_close_matches(name, known, n=1)):
            return f"; did you mean {close[0]}?"
    return ""
