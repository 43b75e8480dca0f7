"""What `ddpcheck COMMAND --help` shows at its end: examples, each with a few words on what it does.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping

EXAMPLES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "": (
        ("ddpcheck init net.py:Net", "write a first recipe for a model, and check it"),
        ("ddpcheck report recipe.py", "check a recipe on two ranks"),
        ("ddpcheck run --nproc-per-node 2 train.py", "run a script as torchrun does, and report on it"),
        ("ddpcheck explain DDP101", "what a rule means, and what to do"),
        ("ddpcheck completion bash", "completion for a shell"),
    ),
    "report": (
        ("ddpcheck report recipe.py", "functions model, batch and loss in recipe.py"),
        ("ddpcheck report pkg.recipes:small --world-size 4 --steps 5", "a ddpcheck.Recipe, on four ranks"),
        ("ddpcheck report recipe.py -o report.json", "save it; `ddpcheck render` makes the other forms of it"),
        ("ddpcheck report recipe.py --baseline report.json", "only findings that are new count"),
        ("ddpcheck report recipe.py --repro repro", "write a script that shows the first finding without ddpcheck"),
    ),
    "run": (
        ("ddpcheck run --nproc-per-node 2 train.py --epochs 3", "the options of torchrun, then the script and its own"),
        ("ddpcheck run --nproc-per-node 2 -m pkg.train", "a module"),
        ("ddpcheck run --check-output report.json --nproc-per-node 2 train.py", "save the report"),
        ("ddpcheck run --check-baseline report.json --nproc-per-node 2 train.py", "only findings that are new count"),
    ),
    "hang": (
        ("ddpcheck hang dumps/", "dumps of Flight Recorder, one a rank"),
        ("ddpcheck hang http://node0:25999", "a job that runs, by its debug server"),
    ),
    "live": (("ddpcheck live", "while `ddpcheck run` goes on, in another terminal"),),
    "graph": (("ddpcheck graph recipe.py -o graph.svg", "a picture; needs Graphviz"),),
    "explain": (("ddpcheck explain DDP101 hang", "by code, prefix of a code or name"),),
    "rules": (("ddpcheck rules --format json", "for programs"),),
    "diff": (
        ("ddpcheck diff old.json new.json", "exits with 1 where there is a new error"),
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
    "env": (("ddpcheck env --format json", "to attach to a report of a bug"),),
    "init": (
        ("ddpcheck init net.py:Net", "writes check_net.py beside net.py, and checks it"),
        ("ddpcheck init pkg.models:Net --args '3, hidden=16'", "for a constructor that needs arguments"),
    ),
}


def examples_of(command: str) -> str:
    """The examples of a command, as the end of its help; empty where there are none."""
    given = EXAMPLES.get(command, ())
    lines = [line for example, words in given for line in (f"  {example}", *([f"      {words}"] if words else []))]
    return "\n".join(["examples:", *lines]) if lines else ""
