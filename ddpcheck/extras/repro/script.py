"""Generate a reproduction script from the code of the target and the harness."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.source_lines import is_user_file, relative_path
from ddpcheck.findings.wording import format_ranks, format_steps, join_names, printable
from ddpcheck.rules.loss.ddp305_loss_normalisation import BY_SAMPLE

if TYPE_CHECKING:
    from ddpcheck.extras.repro.probe import TargetInfo


class Comparison(NamedTuple):
    """Facts that a script prints on each rank, and a test for the defect."""

    steps: str  # steps to run: "all", "two", "first" (up to the fault), "next" (one more), "named" (0 if none named)
    facts: str  # expression that yields the facts, with `rank`, a `Rank` of the harness
    at_fault: str  # test of the values of a fact by rank, in `ranks`; "differ": between ranks
    prints: str  # description of the facts


_TABLE = """
missing | next | rank.unused()
    all(len(v) == rank.steps for v in ranks) or (any(ranks) and not rank.tolerated)
    parameters without gradient on this rank, by step, and the error that DDP raises
unregistered | two | rank.look("forward", rank.stray) | any | shapes of tensors with gradients that DDP does not know
zero | all | rank.look("backward", rank.kinds) | "a gradient" not in str(ranks)
    parameters whose gradient is zero in every step
search | all | rank.look("backward", rank.search) | all("True, unused: 0" in text for v in ranks for _, text in v)
    that DDP searches for unused parameters, and finds none
stale | all | rank.look("backward step", rank.kinds)
    all(t[0] == "a" for v in ranks for _, t in v[::2]) and len({t[-8:] for v in ranks for _, t in v}) == 1
    parameters that have a gradient in every step and never move
discarded | first | rank.discarded() | any | parameters whose gradient is zeroed before a step has used it
layouts | named | rank.look("bare start backward", rank.structure) | differ | layouts of parameters, buffers and modules
options | named | rank.look("start step", rank.options) | differ | options of wrapper and optimizer
parameters | named | rank.look("start step", lambda: dict(rank.net.named_parameters())) | differ | values of parameters
buffers | first | rank.look("step", lambda: dict(rank.net.named_buffers())) | differ | values of buffers
attributes | first | rank.look("step", rank.attributes) | differ | values of attributes that are no buffers
state | first | rank.look("step", rank.state) | differ
    values of parameters, buffers and state of the optimizer
reduction | first | rank.reductions() | differ or ", 0 of" in str(ranks)
    gradients that differ between ranks after backward or the error that DDP raises, and no_sync called in vain
next-reduction | next | rank.reductions() | differ | the error that DDP raises, or gradients after backward
average | first | rank.compare(lambda: rank.last(bare=True, average=True)) | any
    how far DDP's gradients are from the average of the ranks' own, or the error that DDP raises
single-process | first | rank.compare(rank.single_process(numbers), numbers=numbers) | any
    how far DDP's gradients are from those of one process on the whole batch
repetition | first | rank.compare(lambda: rank.last(bare=True), bare=True) | any | how far two runs are apart
progress | all | rank.look("batch", rank.empty) | any
    its position or failure, and steps in which it has no samples; if it is stuck, its Python stack after the timeout
packing | first | rank.recorded("reduced") | differ and all(sorted(str(v)) == sorted(str(ranks[0])) for v in ranks)
    the numbers that it reduces for rank 0's samples, if other ranks have them in another order
shards | first | rank.shards() | any | how many of its samples are on another rank too, and how many on none
draws | first | rank.recorded("drawn") | all(v == ranks[0] for v in ranks)
    the random numbers that it draws although each rank has a different seed, if all draw the same
"""
COMPARISONS = {
    name: Comparison(*fields)
    for name, *fields in (re.split(r" \| |\n +", row) for row in re.split(r"\n(?=[^ ])", _TABLE.strip()))
}
"""Comparisons by the name that follows "repro" in the `Checks` field of a rule."""
_ON_EACH_RANK = ("missing", "unregistered", "zero", "search")  # comparisons that need no values of other ranks


def why_none(finding: Finding, report: Report) -> str:
    """Return the reason why a finding has no reproduction script, or ""."""
    rule = RULES[finding.code]
    text = f"no script shows {finding.code} ({rule.name})"
    if rule.repro not in COMPARISONS:
        return text
    if _is_split(report) and not (rule.no_gradient and not rule.conditional_use):  # reproducible without shared samples
        return f"{text} of a model that is split over ranks (tensor parallelism)"
    return ""


def _is_split(report: Report) -> bool:
    return any(str(note).startswith("tensor parallelism: ") for note in report.world.get("notes", ()))


def world_size_for(finding: Finding, report: Report) -> int:
    """Return the smallest world size known to show the fault."""
    reported = int(report.world.get("world_size", 2))
    rule = RULES[finding.code]
    on_each_rank = rule.repro in _ON_EACH_RANK and not (rule.conditional_use or rule.undecided or finding.ranks)
    return min(reported, 2) if on_each_rank and not _is_split(report) else reported


def tolerance_for(finding: Finding, report: Report) -> float:
    """Return the tolerance of the script, between the reported tolerance and the reported error."""
    comparison = RULES[finding.code].repro
    reference = "local" if comparison == "average" else "single-process"
    entries = [entry for entry in report.parity if entry.reference == reference]
    if comparison == "repetition" or not entries:
        return 1e-5 if comparison == "repetition" else 1e-3  # reordered sums change less
    beyond = [entry.relative_error / 3 for entry in entries if entry.relative_error > entry.tolerance]
    return float(f"{min([max(1e-4, *(10 * entry.tolerance for entry in entries)), max(beyond, default=1.0)]):.1g}")


def script_name(finding: Finding) -> str:
    """Return the file name of the script for `finding`."""
    return f"repro_{finding.code.lower()}.py"


_SCRIPT = '''\
import dataclasses
import sys
import types


@dataclasses.dataclass
class Recipe:
    """A model with its batch and loss; replaces ddpcheck.Recipe."""

    model: object
    batch: object
    loss: object
    shard: object = None
    optimizer: object = None
    ddp_kwargs: dict = dataclasses.field(default_factory=dict)
    wrap: object = None


__name__, __package__ = "{target.module}", "{target.package}"  # what is for "__main__" does not run
sys.modules[__name__] = sys.modules["__main__"]
sys.modules.update(dict.fromkeys({modules}, types.SimpleNamespace({given})))

# The code under test, from {file}

{code}


# The training loop, and what shows the fault


def {function}(recipe):
{shown}


{function}({recipe})
'''


def script_for(
    finding: Finding, report: Report, target: TargetInfo, beside: Mapping[str, str], ours: Iterable[tuple[str, str]]
) -> str:
    """Return a script that contains the code of `target` and reproduces `finding`.

    `beside`: text of each copied user module, by path. `ours`: (module, name) of each ddpcheck import in user code.
    """
    code, head = Path(target.file).read_text(encoding="utf-8").rstrip(), ""
    lines, file, function = code.split("\n"), relative_path(target.file), "show_the_fault"
    for node in ast.parse(code).body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":  # must come first in the script
            head += "".join(f"from __future__ import {alias.name}\n\n" for alias in node.names)
            rest = re.sub(r"from __future__ import [^;#]*(; *)?", "", lines[node.lineno - 1])
            lines[node.lineno - 1 : node.end_lineno] = [rest, *[""] * ((node.end_lineno or 0) - node.lineno)]
    while function in code:
        function += "_"
    names = {part for module, name in ours for part in (*module.split(".")[1:], name)} - {"", "*", "Recipe"}
    script = head + _SCRIPT.format(
        target=target,
        modules=json.dumps(sorted({"ddpcheck", *(module for module, _ in ours)})),
        given=", ".join(["Recipe=Recipe", *(f"{name}=object" for name in sorted(names))]),
        file=file,
        code="\n".join(lines),
        function=function,
        shown=textwrap.indent(
            _repro_body(finding, report, target.uses_random_numbers, "\n".join([code, *beside.values()])), "    "
        ),
        recipe=target.attribute or f'sys.modules["ddpcheck"].Recipe({", ".join(f"{p}={p}" for p in target.parts)})',
    )
    line, here = "", f"# The code under test, from {file}\n\n"
    for _ in range(2):  # the line number depends on the length of the docstring
        docstring = _docstring(finding, report, line, beside)
        if finding.location is not None and finding.location.path == file:
            line = f", line {(docstring + script.partition(here)[0]).count(chr(10)) + 2 + finding.location.line} here"
    return docstring + script


def _repro_body(finding: Finding, report: Report, uses_random_numbers: bool, code: str) -> str:
    """Return the body of the script's function, including the parts of the harness needed."""
    comparison, world = COMPARISONS[RULES[finding.code].repro], report.world
    num_steps, first = int(world.get("steps", 3)), min(finding.steps, default=0) + 1
    steps_to_failure = first if finding.steps else 0  # 0: the initial state shows the fault, and a step may crash
    counts = {"first": first, "next": max(first, min(first + 1, num_steps)), "two": max(first, 2), "all": num_steps}
    at_fault = comparison.at_fault.replace("differ", "any(v != ranks[0] for v in ranks)")
    show = f"rank.show({comparison.facts}, {'any' if at_fault == 'any' else 'at_fault'})"
    if world.get("device", "cpu") == "cpu" and re.search("SyncBatchNorm|sync_batchnorm", code):
        show = f"with synchronised_on_cpu():  # not needed on GPUs\n    {show}"
    settings = {
        **{name: world.get(name, usual) for name, usual in (("device", "cpu"), ("backend", "gloo"), ("seed", 0))},
        "steps": counts.get(comparison.steps, steps_to_failure),
        "may_hang": RULES[finding.code].family == "running",
        "subjects": [*finding.subjects],
        "tolerance": tolerance_for(finding, report),
        "in_group": "process group of one" in " ".join(map(str, world.get("notes", ()))),
    }
    which = "by sample" if BY_SAMPLE in finding.tags else "constant"
    drawn = f'def numbers(module, data):\n    return random_numbers("{which}", module, data)'
    functions = {
        f"def at_fault(ranks):\n    return {at_fault}": at_fault != "any",
        drawn if uses_random_numbers else "numbers = None": "numbers" in comparison.facts,
    }
    texts = {name: json.dumps(x) if isinstance(x, str | list) else repr(x) for name, x in settings.items()}
    kwargs = "\n".join(f"    {name}={text}," for name, text in texts.items())
    constructor = f"rank = Rank(\n    recipe,\n{kwargs}\n)"
    show = "\n\n".join([constructor, *(function for function, needed in functions.items() if needed), show])
    library, pending, needed = _library(), [show], set[str]()
    while pending:
        tree = ast.parse(textwrap.dedent(pending.pop()))
        names = names_in(tree) | {f".{item.attr}" for item in ast.walk(tree) if isinstance(item, ast.Attribute)}
        pending += [library[name] for name in names & library.keys() - needed]
        needed |= names
    parts = dict.fromkeys(text for name, text in library.items() if name in needed)
    imports = sorted(text for text in parts if text.startswith(("import ", "from ")))
    docstring = '"""Show the fault; all that this needs is in it, since names of it may be in use above."""'
    return "\n\n".join(["\n".join([docstring, *imports]), *(part for part in parts if part not in imports), show])


_SOURCES = (
    "extras/repro/harness.py",
    *(f"gather/state/{name}.py" for name in ("training_mode", "randomness", "fingerprints")),
    *(f"gather/steps/{name}.py" for name in ("training_step", "gradient_distance")),
    *(f"gather/ddp/{name}.py" for name in ("ddp_wrapper", "sync_batchnorm")),
    *("gather/autograd/autograd_graph.py", "recipe/pytree.py"),
)
"""Modules of ddpcheck whose code is copied into scripts, in this order."""


@functools.cache
def _library() -> dict[str, str]:
    """Map names in `_SOURCES` (".name" for methods of `Rank`) to code for scripts."""
    library: dict[str, str] = {}
    for source in _SOURCES:
        text = (Path(__file__).parents[2] / source).read_text(encoding="utf-8")
        text = re.sub(r"(?m)  # type: ignore.*|^ *@(forwards_calls|runs_target)\n|\bforwards_calls(?=\()", "", text)
        for node in (part for part in ast.parse(text).body for part in _parts_of(part)):
            for name, (module, item) in imports_of(node).items():
                if module.partition(".")[0] not in ("ddpcheck", "__future__"):
                    library[name] = f"from {module} import {item}" if item else ast.unparse(node)
            names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
            first = min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", ()))])
            names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else names
            library |= dict.fromkeys(names, "\n".join(text.split("\n")[first - 1 : node.end_lineno]))
    return library


def _parts_of(node: ast.stmt) -> list[ast.stmt]:
    """Return [node], or for class `Rank` the head and each method, to copy separately."""
    if not isinstance(node, ast.ClassDef) or node.name != "Rank":
        return [node]
    node.end_lineno, methods = node.body[2].end_lineno, [n for n in node.body[3:] if isinstance(n, ast.FunctionDef)]
    for method in methods:
        method.name = f".{method.name}"
    return [node, *methods]


def _docstring(finding: Finding, report: Report, line: str, beside: Iterable[str]) -> str:
    environment = report.environment
    seen_with = f"torch {environment.get('torch', '?')}, Python {environment.get('python', '?')}"
    world_size, rule = world_size_for(finding, report), RULES[finding.code]
    comparison = COMPARISONS[rule.repro]
    prints = f"{comparison.prints} that differ between ranks" if comparison.at_fault == "differ" else comparison.prints
    ranks = format_ranks(finding.ranks) if finding.ranks else "every rank"
    fields = {
        "what": join_names(finding.subjects, most=8),
        "where": f"{finding.location}{line}" if finding.location else "",
        "ranks": f"{ranks}, in {format_steps(finding.steps)}" if finding.steps else ranks,
        "seen with": f"{seen_with}, {environment.get('platform', '?')}, {report.world.get('backend', 'gloo')}",
        "found by": f"ddpcheck {report.tool.get('version', '')}, which wrote this file",
        "needs": ", and beside it ".join(filter(None, ["torch", join_names([*beside], most=9)])),
    }
    fill = functools.partial(textwrap.fill, width=85, break_long_words=False, break_on_hyphens=False)
    paragraphs = [
        fill(f"{finding.code} {rule.name}: {finding.message}"),
        "\n".join(fill(f"{label:<11}{text}", subsequent_indent=" " * 11) for label, text in fields.items() if text),
        f"Run it with\n\n    torchrun --standalone --nproc-per-node {world_size} {script_name(finding)}",
        fill(f"Each rank prints {prints}. The exit code is 1 if the fault shows, and 0 if not."),
    ]
    inside = printable("\n\n".join(paragraphs), "\n").replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{inside}\n"""\n\n'


def own_modules(entry: Path, package: str, loaded: Sequence[tuple[str, str]]) -> dict[str, Path]:
    """Return the source files of user modules, by path relative to the script.

    A user module is a file below the folder of `entry` or the working folder, and not installed. Such a module is
    imported by file `entry` of `package` or by a user module, even in a function, or `loaded` lists its (name, file).
    """
    roots = [entry.parents[len(package.split(".")) if package else 0], Path.cwd().resolve()]
    modules: dict[str, Path] = {}
    pending = [("", entry), *((name, Path(file).resolve()) for name, file in loaded)]
    while pending:
        name, path = pending.pop()
        if name:
            is_package = path.stem == "__init__"
            relative = name.replace(".", "/") + ("/__init__.py" if is_package else ".py")
            installed = {"site-packages", "dist-packages"} & set(path.parts) or not is_user_file(str(path))
            if relative in modules or path == entry or installed or not any(map(path.is_relative_to, roots)):
                continue
            modules[relative], package = path, name if is_package else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for module, item in imports_of(node).values():
                with contextlib.suppress(ImportError):  # relative import beyond the top-level package
                    parts = f"{importlib.util.resolve_name(module, package)}.{item}".rstrip(".").split(".")
                    for count in range(1, len(parts) + 1) if parts[0] != "ddpcheck" else ():
                        stems = [Path(root, *parts[:count]) for root in roots]
                        files = [file for stem in stems for file in (stem / "__init__.py", stem.with_suffix(".py"))]
                        pending += [(".".join(parts[:count]), file.resolve()) for file in files if file.is_file()][:1]
    return dict(sorted(modules.items()))


def imports_of(node: ast.AST) -> dict[str, tuple[str, str]]:
    """Map each name that an import statement binds to (module, name in the module)."""
    if isinstance(node, ast.Import):
        return {a.asname or a.name.partition(".")[0]: (a.name, "") for a in node.names}
    if isinstance(node, ast.ImportFrom):
        return {a.asname or a.name: ("." * node.level + (node.module or ""), a.name) for a in node.names}
    return {}


def names_in(node: ast.AST) -> set[str]:
    """Return the identifiers (`ast.Name`) in a piece of code."""
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


def imports_from_ddpcheck(path: Path, roots: Iterable[str] | None = None) -> list[tuple[str, str]]:
    """Return the (module, name) imports from ddpcheck in a user file.

    `roots`: names of the file that the script uses. Code that does not run for these names is ignored, such as tests
    and the `__name__ == "__main__"` block.

    Raises:
        UsageError: The code uses names of ddpcheck except `Recipe`.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    ours = {name: item for node in tree.body for name, item in imports_of(node).items() if _is_ours(item)}
    idle = [node for node in tree.body if roots is not None and _is_not_run_on_import(node)]
    wanted = {*(roots or ()), *(name for node in tree.body if node not in idle for name in names_in(node))}
    while used := [node for node in idle if getattr(node, "name", "") in wanted]:
        idle = [node for node in idle if node not in used]
        wanted.update(name for node in used for name in names_in(node))
    for item in (item for node in tree.body if node not in idle and not imports_of(node) for item in ast.walk(node)):
        what = "an import" if any(map(_is_ours, imports_of(item).values())) else ""
        if isinstance(item, ast.Attribute) and item.attr == "Recipe" and isinstance(item.value, ast.Name):
            item.value.id = "Recipe"  # an attribute of any object
        elif isinstance(item, ast.Name) and item.id in ours and ours[item.id][1] != "Recipe":
            what = ours[item.id][1] or item.id
        if what:
            raise UsageError(
                f"{relative_path(str(path))}:{getattr(item, 'lineno', 0)} needs ddpcheck itself ({what}), so no "
                "reproduction can run without it; keep the recipe in a file that imports only ddpcheck.Recipe"
            )
    return list(ours.values())


def _is_ours(item: tuple[str, str]) -> bool:
    return item[0].partition(".")[0] == "ddpcheck"


def _is_not_run_on_import(node: ast.stmt) -> bool:
    """Return True for a statement that is not needed if the file is imported.

    Such a statement is a `__main__` block, or a function or class that is undecorated or decorated only by pytest.
    """
    if isinstance(node, ast.If):
        return sorted(ast.unparse(node.test).split(" == ")) == ["'__main__'", "__name__"]
    marks = getattr(node, "decorator_list", None)
    return marks is not None and all(ast.unparse(mark).startswith("pytest.") for mark in marks)
