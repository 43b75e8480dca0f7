"""The script that shows a finding: which demonstration, what to expect of it, and the target's own code with it."""

from __future__ import annotations

import ast
import functools
import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.source_lines import relative_path
from ddpcheck.findings.wording import format_ranks, format_steps, join_names, printable
from ddpcheck.judge.gradients.loss_terms import BY_SAMPLE
from ddpcheck.report.repro.target_code import imports_of, names_in

if TYPE_CHECKING:
    from ddpcheck.report.repro.probe import TargetInfo


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One way to show a fault."""

    codes: str  # of the rules that it shows
    name: str  # of the function in `demonstrations/`
    expect: str  # what each rank says where the fault shows
    facts: str = ""  # the function there that tells what is compared; empty for most
    # "first" for those up to the first that shows the fault, "next" for one more, "all" of the report's, or "named" for
    # none where the finding names no step
    steps: str = "first"
    timeout: int = 30  # seconds after which a collective gives up


_GRADIENTS = (
    "a gradient that should be the same on every rank after backward, and is not, or the error that DDP raises; and "
    "how many forward passes ran under no_sync where it was called: none, where that was in vain"
)
_LAYOUT = "a parameter or buffer: its position, shape, dtype, strides, mode and device"
_DIFFER = ", where the ranks differ"
_AFTER = f" after a step{_DIFFER}"

_ALL = (
    Demonstration(
        "DDP101 DDP102 DDP103 DDP104 DDP105 DDP108 DDP110 DDP112 DDP513",
        "unused",
        "the names of parameters without gradient on this rank, by step, and what DDP makes of it: an error, a hang "
        "that the timeout ends, or silence where it is the last step or find_unused_parameters tolerates it",
        steps="next",
        timeout=20,
    ),
    Demonstration("DDP106", "unregistered", "the shapes of tensors that receive gradient and that DDP does not know"),
    Demonstration(
        "DDP107 DDP307", "zero_gradient", "the names of parameters whose gradient is zero in every step", steps="all"
    ),
    Demonstration("DDP109", "needless_search", "that DDP searches, and that nothing is unused", steps="all"),
    Demonstration(
        "DDP201 DDP202 DDP203 DDP204 DDP205 DDP206 DDP207 DDP209 DDP211 DDP212 DDP213",
        "apart_before",
        _LAYOUT + _DIFFER,
        "layout",
        steps="named",
    ),
    Demonstration(
        "DDP222 DDP511",
        "apart_before",
        f"the class, settings and mode of a module{_DIFFER}",
        "module_classes",
        steps="named",
    ),
    Demonstration("DDP208", "apart", f"the value of a parameter{_DIFFER}", "parameter_values", steps="named"),
    Demonstration("DDP221", "apart", f"an option of the wrapper{_DIFFER}", "wrapper_options", steps="named"),
    Demonstration("DDP223 DDP507", "apart", f"an option of the optimizer{_DIFFER}", "optimizer_options", steps="named"),
    Demonstration("DDP214 DDP215", "apart", f"the value of a buffer{_AFTER}", "buffer_values"),
    Demonstration("DDP216", "apart", f"a tensor that is neither parameter nor buffer{_AFTER}", "unregistered_values"),
    Demonstration("DDP306 DDP508 DDP515", "apart", f"parameters, buffers or optimizer state{_AFTER}", "training_state"),
    Demonstration("DDP111 DDP301 DDP501 DDP502 DDP509", "gradients_apart", _GRADIENTS, timeout=20),
    Demonstration("DDP503", "gradients_apart", _GRADIENTS, steps="next", timeout=20),
    Demonstration(
        "DDP302 DDP311 DDP406",
        "local_average",
        "how far DDP's gradient is from the average of the ranks' own, or the error that DDP raises",
    ),
    Demonstration(
        "DDP303 DDP304 DDP305 DDP309 DDP310 DDP312 DDP514 DDP516",
        "global_gradient",
        "how far DDP's gradient is from that of one process on the whole batch",
    ),
    Demonstration("DDP308", "repeat", "how far two runs of one step, from the same seeds, are apart"),
    Demonstration(
        "DDP401 DDP402 DDP403 DDP404 DDP405",
        "running",
        "where it failed, or in which steps it has no samples, or nothing more where it died; a rank that is stuck "
        "shows its Python stack after the timeout",
        steps="all",
        timeout=20,
    ),
    Demonstration("DDP407", "packing", "the numbers that it sends, where other ranks send them in another order"),
    Demonstration(
        "DDP504", "untrained", "the names of parameters that have a gradient in every step and never move", steps="all"
    ),
    Demonstration(
        "DDP505 DDP519", "shards", "how many of its samples other ranks train on as well, and how many no rank has"
    ),
    Demonstration("DDP510", "shared_draws", "how often it draws the same random numbers as all other ranks"),
    Demonstration("DDP517", "discarded", "the names of parameters whose gradient is zeroed before a step has used it"),
)
DEMONSTRATIONS = {code: one for one in _ALL for code in one.codes.split()}
"""By code of a finding; what is not here no script shows."""


def steps_for(finding: Finding, report: Report, chosen: Demonstration) -> int:
    """How many steps the demonstration takes."""
    whole = int(report.world.get("steps", 3))
    first = min(finding.steps, default=0) + 1
    return {
        "named": first if finding.steps else 0,
        "first": first,
        "next": max(first, min(first + 1, whole)),
        "all": whole,
    }[chosen.steps]


_SPLIT = "tensor parallelism: "  # as a note of the report begins whose model is split over ranks


def why_none(finding: Finding, report: Report) -> str:
    """Why no script shows a finding; empty where one does."""
    what = f"no script shows {finding.code} ({RULES[finding.code].name})"
    if finding.code not in DEMONSTRATIONS:
        return what
    split = _is_split(report) and finding.code not in ("DDP101", "DDP102", "DDP103")  # which need no samples in common
    return f"{what} of a model that is split over ranks (tensor parallelism)" if split else ""


def _is_split(report: Report) -> bool:
    return any(str(note).startswith(_SPLIT) for note in report.world.get("notes", ()))


def world_size_for(finding: Finding, report: Report) -> int:
    """The smallest world in which the fault is known to show: the report's, or 2 where it takes no account of ranks."""
    reported = int(report.world.get("world_size", 2))
    of_all = finding.code in ("DDP101", "DDP102", "DDP103", "DDP106", "DDP107", "DDP108", "DDP109", "DDP110", "DDP112")
    return min(reported, 2) if of_all and not (finding.ranks or _is_split(report)) else reported


def tolerance_for(report: Report, chosen: Demonstration) -> float:
    """The relative error to allow: well above the tolerance of the report, well below its worst error."""
    if chosen.name == "repeat":
        return 1e-5  # what a sum in another order may change
    reference = "local" if chosen.name == "local_average" else "single-process"
    entries = [entry for entry in report.parity if entry.reference == reference]
    if not entries:
        return 1e-3
    allowed = max(10 * max(entry.tolerance for entry in entries), 1e-4)
    beyond = [entry.relative_error for entry in entries if entry.relative_error > entry.tolerance]
    return float(f"{min([allowed, max(beyond, default=1.0) / 3]):.1g}")


_PACKAGE = Path(__file__).parents[2]
SOURCES = (
    *(f"report/repro/demonstrations/{name}.py" for name in ("training", "ranks", "harness")),
    *(f"gather/state/{name}.py" for name in ("training_mode", "randomness", "fingerprints")),
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
