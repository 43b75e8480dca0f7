"""The script that shows a finding: the target's own code, and a demonstration with what that needs."""

from __future__ import annotations

import ast
import functools
import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.source_lines import relative_path
from ddpcheck.findings.wording import format_ranks, format_steps, join_names, printable
from ddpcheck.judge.gradients.loss_terms import BY_SAMPLE
from ddpcheck.report.repro.choice import Demonstration, steps_for, tolerance_for, world_size_for
from ddpcheck.report.repro.target_code import imports_of, names_in

if TYPE_CHECKING:
    from ddpcheck.report.repro.probe import TargetInfo

_PACKAGE = Path(__file__).parents[2]
SOURCES = (
    *(f"report/repro/demonstrations/{name}.py" for name in ("training", "ranks", "harness")),
    *(f"gather/state/{name}.py" for name in ("training_mode", "randomness", "sample_randomness", "tensor_values")),
    *(f"gather/steps/{name}.py" for name in ("training_step", "gradient_distance")),
    *("gather/autograd/autograd_graph.py", "gather/ddp/sync_batchnorm.py", "recipe/pytree.py"),
)
"""The modules of ddpcheck that scripts have parts of."""
_WIDTH = 88
_STAND_IN = '''\
import dataclasses
import sys
import types


@dataclasses.dataclass
class Recipe:
    """What is trained, and how; stands in for ddpcheck.Recipe."""

    model: object
    batch: object
    loss: object
    shard: object = None
    optimizer: object = None
    ddp_kwargs: dict = dataclasses.field(default_factory=dict)
    wrap: object = None


'''


def script_name(finding: Finding) -> str:
    """The name of the script that shows `finding`."""
    return f"repro_{finding.code.lower()}.py"


def script_for(
    finding: Finding,
    chosen: Demonstration,
    report: Report,
    target: TargetInfo,
    beside: Mapping[str, str],
    imported: Iterable[tuple[str, str]],
) -> str:
    """A script with the code of `target` that shows `finding` in the way that was `chosen`.

    Args:
        finding: What it shows.
        chosen: How.
        report: Where the finding is from: versions, world, tolerances.
        target: Whose code it holds.
        beside: The files that are written into the same folder, path to text.
        imported: The modules of ddpcheck that the code imports, and the names in them.
    """
    lines = Path(target.file).read_text(encoding="utf-8").rstrip().split("\n")
    code = "\n".join([*lines, *beside.values()])
    syncbn = ("SyncBatchNorm" in code or "sync_batchnorm" in code) and report.world.get("device", "cpu") == "cpu"
    future = []
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":  # it has to be the first of the script
            future += [alias.name for alias in node.names]
            own = slice(node.lineno - 1, node.end_lineno)
            rest = re.sub(r"from __future__ import [^;#]*(; *)?", "", lines[own][0])
            lines[own] = [rest, *[""] * len(lines[own][1:])]
    middle = f"from __future__ import {', '.join(future)}\n\n" if future else ""
    middle += _STAND_IN + _renaming(target, imported)
    middle += f"# The code under test, from {relative_path(target.file)}\n\n"
    roles = ", ".join(f"{role}={role}" for role in target.given)
    recipe = target.attribute or f'sys.modules["ddpcheck"].Recipe({roles})'
    function = "show_the_fault"
    while function in "\n".join(lines):
        function += "_"
    shown = _demonstration(finding, chosen, report, target, syncbn, function)
    line, said = None, ""
    for _ in range(3):  # until the docstring says its own length right
        said = _docstring(finding, report, chosen, line, beside)
        if finding.location is not None and finding.location.path == relative_path(target.file):
            line = (said + middle).count("\n") + finding.location.line
    parts = ["\n".join(lines), "# The training loop, and what shows the fault", shown, f"{function}({recipe})\n"]
    return said + middle + "\n\n\n".join(parts)


def _renaming(target: TargetInfo, imported: Iterable[tuple[str, str]]) -> str:
    """What makes the script the module that the target is, and gives it what it imports from ddpcheck."""
    names = {part for module, name in imported for part in (*module.split(".")[1:], name)} - {"", "*", "Recipe"}
    given = ", ".join(["Recipe=Recipe", *(f"{name}=object" for name in sorted(names))])
    modules = json.dumps(sorted({"ddpcheck", *(module for module, _ in imported)}))
    return (
        f'__name__, __package__ = "{target.module}", "{target.package}"  # what is for "__main__" does not run\n'
        'sys.modules[__name__] = sys.modules["__main__"]\n'
        f"sys.modules.update(dict.fromkeys({modules}, types.SimpleNamespace({given})))\n\n"
    )


# The demonstration


def _demonstration(
    finding: Finding, chosen: Demonstration, report: Report, target: TargetInfo, cpu_syncbn: bool, function: str
) -> str:
    """The function that shows the fault: all that it needs is in it, so that names of the target are not touched."""
    arguments = ["made(recipe)", *filter(None, [chosen.facts])]
    joins_itself = chosen.name == "global_gradient"  # after the single process
    if joins_itself:
        by_sample = BY_SAMPLE in finding.tags
        numbers = "randomness_by_sample" if by_sample else "without_randomness" if target.forward_draws else ""
        arguments += [f"numbers={numbers}"] if numbers else []
        in_group = "process group of one" in " ".join(map(str, report.world.get("notes", ())))
        arguments += ["in_group=True"] if in_group else []
    last = [*([] if joins_itself else ["join()"]), f"leave({chosen.name}({', '.join(arguments)}))"]
    if cpu_syncbn:
        last = ["with synchronised_on_cpu():  # not needed on GPUs", *(f"    {line}" for line in last)]
    show = "\n".join(last)
    needed = _needed(names_in(ast.parse(show)))
    imports = sorted(text for text in needed.values() if text.startswith(("import ", "from ")))
    settings = _settings(finding, chosen, report)
    values = [f"{name} = {value}" for name, value in settings.items() if name in needed]
    code = dict.fromkeys(text for name, text in needed.items() if name not in settings and text not in imports)
    text = "\n\n".join(["\n".join(imports), "\n".join(values), *code, show])
    said = '"""Show the fault; all that this needs is in it, since names of it may be in use above."""'
    return f"def {function}(recipe):\n" + textwrap.indent(f"{said}\n{text}", "    ")


def _settings(finding: Finding, chosen: Demonstration, report: Report) -> dict[str, str]:
    """The values of the settings in `demonstrations/harness.py`."""
    on_gpu = 'torch.device("cuda", RANK % torch.cuda.device_count())\ntorch.cuda.set_device(DEVICE)'
    return {
        "RANK": 'int(os.environ["RANK"])',
        "WORLD_SIZE": 'int(os.environ["WORLD_SIZE"])',
        "DEVICE": 'torch.device("cpu")' if report.world.get("device", "cpu") == "cpu" else on_gpu,
        "BACKEND": f'"{report.world.get("backend", "gloo")}"',
        "SEED": str(report.world.get("seed", 0)),
        "STEPS": str(steps_for(finding, report, chosen)),
        "SUBJECTS": json.dumps(finding.subjects),
        "TOLERANCE": f"{tolerance_for(report, chosen):g}",
        "TIMEOUT": f"{chosen.timeout}  # seconds, after which a collective gives up",
    }


@functools.cache
def _library() -> dict[str, str]:
    """What the modules define and import, by name, without what is for ddpcheck or type checkers only."""
    found: dict[str, str] = {}
    for source in SOURCES:
        text = (_PACKAGE / source).read_text(encoding="utf-8")
        text = re.sub(r"  # type: ignore.*|^ *@passes_on\n", "", text, flags=re.MULTILINE)
        lines = text.split("\n")
        for node in ast.parse(text).body:
            for bound, (module, name) in imports_of(node).items():
                if module.partition(".")[0] not in ("ddpcheck", "__future__"):
                    found[bound] = f"from {module} import {name}" if name else ast.unparse(node)
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
                found |= dict.fromkeys(names, "\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return found


def _needed(roots: Iterable[str]) -> dict[str, str]:
    """What `roots` need of that, in order."""
    library, pending, kept = _library(), list(roots), set[str]()
    while pending:
        name = pending.pop()
        if name in library and name not in kept:
            kept.add(name)
            pending += names_in(ast.parse(library[name]))
    return {name: text for name, text in library.items() if name in kept}


# The docstring


def _docstring(finding: Finding, report: Report, chosen: Demonstration, line: int | None, beside: Iterable[str]) -> str:
    here = f", line {line} here" if line else ""
    steps = f", in {format_steps(finding.steps)}" if finding.steps else ""
    world, environment, files = report.world, report.environment, [*beside]
    seen_with = [f"torch {environment.get('torch', '?')}", f"Python {environment.get('python', '?')}"]
    seen_with += [str(environment.get("platform", "")), str(world.get("backend", "gloo"))]
    fields = {
        "what": join_names(finding.subjects, most=8),
        "where": f"{finding.location}{here}" if finding.location else "",
        "ranks": (format_ranks(finding.ranks) if finding.ranks else "every rank") + steps,
        "seen with": ", ".join(filter(None, seen_with)),
        "found by": " ".join(filter(None, ["ddpcheck", report.tool.get("version", "")])) + ", which wrote this file",
        "needs": "torch" + (f", and beside it {join_names(files, most=9)}" if files else ""),
    }
    exits = "The exit code is not 0 where the fault shows, and 0 where it does not."
    paragraphs = [
        _wrapped(f"{finding.code} {RULES[finding.code].name}: {finding.message}"),
        "\n".join(_field(label, said) for label, said in fields.items() if said),
        "Run it with",
        f"    torchrun --standalone --nproc-per-node {world_size_for(finding, report)} {script_name(finding)}",
        _wrapped(f"Each rank prints {chosen.expect}. {exits}"),
    ]
    return '"""' + _safe("\n\n".join(paragraphs)) + '\n"""\n\n'


def _field(label: str, text: str) -> str:
    return textwrap.indent(_wrapped(text, _WIDTH - 11), " " * 11).replace(" " * 11, f"{label:<11}", 1)


def _wrapped(text: str, width: int = _WIDTH - 3) -> str:
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _safe(text: str) -> str:
    """`text` as the inside of a docstring, whatever is in it."""
    return printable(text, "\n").replace("\\", "\\\\").replace('"""', "'''").removesuffix('"')
