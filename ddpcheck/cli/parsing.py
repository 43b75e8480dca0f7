"""Argument parsers with one-sentence errors, suggestions for misspellings, and examples in the help."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from ddpcheck.cli.output import complain
from ddpcheck.findings.errors import EXIT_CLEAN, EXIT_USAGE

_CHOICE = re.compile(r"^argument (\S+): invalid choice: '([^']*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """Argument parser that prints an error as one sentence, like other errors of ddpcheck."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse arguments; an error on unrecognized arguments shows the usage of the subcommand."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            owner: Parser = getattr(parsed, "parser", self)
            owner.error(f"unrecognized arguments: {' '.join(unknown)}{near_option(owner, unknown)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        from ddpcheck.worlds.launchers.detection import BY_HAND, detect

        launch = detect()
        if launch is not None and launch.rank and launch.launcher != BY_HAND:
            raise SystemExit(EXIT_CLEAN)  # rank 0 has the same command line and prints the error
        complain(f"{with_suggestion(message)} (see `{self.prog} --help`)")
        raise SystemExit(EXIT_USAGE)


class HelpFormatter(argparse.HelpFormatter):
    """Help formatter that wraps lines at words and keeps indented paragraphs."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for paragraph in text.split("\n\n"):
            is_indented = any(line.startswith(" ") for line in paragraph.splitlines())
            filled.append(paragraph if is_indented else "\n".join(self._split_lines(paragraph, width)))
        return "\n\n".join(filled)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)


RUN_EPILOG = """\
exit codes: that of the script if it is not 0; 0 no findings at or above --check-fail-on; 1 such findings; 2 wrong usage
or configuration, or a bug in ddpcheck; 4 the ranks waited for each other, and ddpcheck has ended them
"""


def describe_run(parser: argparse.ArgumentParser, *, everything: bool) -> None:
    """Make torchrun's parser print the help of `ddpcheck run`; if `everything`, with torchrun's options."""
    parser.usage = "ddpcheck run [options of torchrun] [options of ddpcheck] script.py [arguments of the script]"
    parser.description = "Run a training script as torchrun does, watch its ranks, and report faults."
    parser.epilog, parser.formatter_class = f"{examples_of('run')}\n\n{RUN_EPILOG}", HelpFormatter
    positional, *others, ddpcheck_group = parser._action_groups
    parser._action_groups = [ddpcheck_group, positional, *others]
    ddpcheck_group.add_argument("--help-all", action="help", help="show this, and the options of torchrun")
    for action in {id(item): item for group in (positional, *others) for item in group._group_actions}.values():
        if action.dest != "help":
            first = re.split(r"[.;] | \((?:e\.g|see)", " ".join((action.help or "").split()))[0].rstrip(".")
            action.help = first.replace("%", "%%") if everything else argparse.SUPPRESS
            action.option_strings = [name for name in action.option_strings if "_" not in name]


def with_suggestion(message: str) -> str:
    """Rewrite an argparse error on an invalid choice to suggest the closest choice."""
    match = _CHOICE.match(message)
    if not match:
        return message
    argument, value, choices = match[1], match[2], [word.strip(" '") for word in match[3].split(",")]
    kind = argument.lower() if argument.isupper() else f"choice for {argument}"
    close = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(choices)}"
    return f"there is no {kind} {value!r}; {hint}"


# option -> its name in other commands
SYNONYMS = {"-o": "--output", "--nproc-per-node": "--world-size", "--world-size": "--nproc-per-node"}


def near_option(parser: argparse.ArgumentParser, words: Iterable[str]) -> str:
    """Return a hint with the option closest to an unknown option, or ""."""
    options = [name for name in parser._option_string_actions if name.startswith("--")]
    for word in words:
        name = word.partition("=")[0]
        name = SYNONYMS.get(name, name)
        if name.startswith("-") and (close := difflib.get_close_matches(name, options, n=1)):
            return f"; did you mean {close[0]}?"
    return ""


EXAMPLES: Mapping[str, tuple[tuple[str, str], ...]] = {  # command -> (example, description)
    "": (
        ("ddpcheck init net.py:Net", "write a first recipe for a model, and check it"),
        ("ddpcheck report recipe.py", "check a recipe on two ranks"),
        ("ddpcheck run --standalone --nproc-per-node 2 train.py", "run a script as torchrun does, and report on it"),
        ("ddpcheck explain DDP101", "show what a rule means, and how to fix it"),
        ("ddpcheck completion bash", "print the completion script of a shell"),
    ),
    "report": (
        ("ddpcheck report recipe.py", "functions model, batch and loss in recipe.py"),
        ("ddpcheck report pkg.recipes:small --world-size 4 --steps 5", "a ddpcheck.Recipe, on four ranks"),
        ("ddpcheck report recipe.py -o report.json", "save it; `ddpcheck render` converts it to other formats"),
        ("ddpcheck report recipe.py --baseline report.json", "count new findings only"),
        ("ddpcheck report recipe.py --repro repro", "write a script that shows the first finding without ddpcheck"),
    ),
    "run": (
        (
            "ddpcheck run --standalone --nproc-per-node 2 train.py --epochs 3",
            "the options of torchrun, then the script and its own",
        ),
        ("ddpcheck run --standalone --nproc-per-node 2 -m pkg.train", "a module"),
        ("ddpcheck run --check-output report.json --standalone --nproc-per-node 2 train.py", "save the report"),
        (
            "ddpcheck run --check-parity --standalone --nproc-per-node 2 train.py",
            "also compare it with a single process",
        ),
    ),
    "hang": (
        ("ddpcheck hang dumps/", "Flight Recorder dumps, one per rank"),
        ("ddpcheck hang http://node0:25999", "a running job, through its debug server"),
    ),
    "live": (("ddpcheck live", "in another terminal, while `ddpcheck run` is running"),),
    "graph": (("ddpcheck graph recipe.py -o graph.svg", "a picture; needs the extra `graph`, and Graphviz"),),
    "explain": (("ddpcheck explain DDP101 hang", "by code, prefix of a code or name"),),
    "rules": (("ddpcheck rules --format json", "for programs"),),
    "test-rule": (("ddpcheck test-rule lab_rules.py", "two runs for each rule: broken_lab001() and fixed_lab001()"),),
    "diff": (
        ("ddpcheck diff old.json new.json", "exits with 1 if there is a new error"),
        ("ddpcheck diff old.json new.json --fail-on warning -o diff.md", "warnings fail as well; as Markdown"),
    ),
    "schema": (("ddpcheck schema report > report.schema.json", "to validate reports with"),),
    "render": (
        ("ddpcheck render report.json", "as text"),
        ("ddpcheck render report.json -o report.sarif", "for code scanning"),
    ),
    "completion": (
        ("ddpcheck completion bash > ~/.local/share/bash-completion/completions/ddpcheck", ""),
        ('ddpcheck completion zsh > "${fpath[1]}/_ddpcheck"', ""),
        ("ddpcheck completion fish > ~/.config/fish/completions/ddpcheck.fish", ""),
    ),
    "env": (("ddpcheck env --format json", "to attach to a bug report"),),
    "init": (
        ("ddpcheck init net.py:Net", "writes check_net.py beside net.py, and checks it"),
        ("ddpcheck init pkg.models:Net --args '3, hidden=16'", "for a constructor that needs arguments"),
    ),
}


def examples_of(command: str) -> str:
    """Return the examples of a command for its help; "" without examples."""
    examples = EXAMPLES.get(command, ())
    lines = [line for example, words in examples for line in (f"  {example}", *([f"      {words}"] if words else []))]
    return "\n".join(["examples:", *lines]) if lines else ""
