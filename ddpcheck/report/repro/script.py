"""The script that shows a finding: the target's own code, a training loop, and a demonstration.

This module is light: it never imports torch.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.source_lines import relative_path
from ddpcheck.findings.wording import format_ranks, format_steps, join_names
from ddpcheck.report.repro.choice import Demonstration, steps_for, tolerance_for, world_size_for
from ddpcheck.report.repro.projects import Code, free_name, stand_in_for_recipe, without_ddpcheck
from ddpcheck.report.repro.sources import (
    COMPANIONS,
    Import,
    Library,
    imports_of,
    library,
    names_in,
    path_of,
    spelled_definitions,
    spelled_imports,
)

if TYPE_CHECKING:
    from ddpcheck.report.repro.probe import TargetInfo

_SHOWN = tuple(
    f"ddpcheck.report.repro.demonstrations.{name}"
    for name in ("settings", "parameters", "ranks", "references", "running", "facts")
)
_LIBRARY = (*_SHOWN, "ddpcheck.report.repro.demonstrations.harness")
_WIDTH = 88


def our_code() -> Library:
    """The code of the demonstrations."""
    return library(*_LIBRARY)


def script_for(
    finding: Finding,
    chosen: Demonstration,
    report: Report,
    look: TargetInfo,
    name: str,
    beside: Iterable[str],
    cpu_syncbn: bool,
) -> str:
    """A script that shows `finding` with the target that `look` has seen.

    Args:
        finding: What it shows.
        chosen: How.
        report: Where the finding is from: versions, world, tolerances.
        look: At the target.
        name: Of the file that it will be.
        beside: The modules that are written into the same folder, as paths.
        cpu_syncbn: Whether a stand-in for `nn.SyncBatchNorm` on a CPU is needed.

    Raises:
        UsageError: The target's code needs ddpcheck.
    """
    roots = [look.attribute.partition(".")[0]] if look.attribute else look.given
    code = without_ddpcheck(Path(look.file), package=look.package, roots=roots)
    middle = f"# The code under test, from {relative_path(look.file)}\n\n"
    if code.future:
        middle = f"from __future__ import {', '.join(code.future)}\n\n{middle}"
    recipe, stand_in = look.attribute, ""
    if not recipe:
        kind, stand_in = (code.recipe, "") if code.recipe else stand_in_for_recipe(code.binds)
        recipe = f"{kind}({', '.join(f'{role}={role}' for role in look.given)})"
    show = _show(chosen, report, look, cpu_syncbn)
    shown = _demonstration(_settings(finding, chosen, report, look), show, code, recipe)
    line, said = None, ""
    for _ in range(3):  # until the docstring says its own length right
        said = _docstring(finding, report, chosen, name, line, beside)
        line = _new_line(finding, look, code, (said + middle).count("\n"))
    return f"{said}{middle}{code.text}\n\n\n{stand_in}# The training loop, and what shows the fault\n\n{shown}"


# The demonstration


def _settings(finding: Finding, chosen: Demonstration, report: Report, look: TargetInfo) -> dict[str, str]:
    """The values of `demonstrations/settings.py`."""
    steps = steps_for(finding, report, chosen)
    seeds = [list(of_step[: world_size_for(finding, report)]) for of_step in look.step_seeds[:steps]]
    by_rank = f"{seeds}  # by step and rank"
    if len(by_rank) > _WIDTH - len("STEP_SEEDS = "):
        by_rank = "\n".join(["[  # by step and rank", *(f"    {of_step}," for of_step in seeds), "]"])
    on_gpu = 'torch.device("cuda", RANK % torch.cuda.device_count())\ntorch.cuda.set_device(DEVICE)'
    return {
        "DEVICE": 'torch.device("cpu")' if _on_cpu(report) else on_gpu,
        "STEPS": str(steps),
        "MODEL_SEED": str(look.model_seed),
        "BATCH_SEEDS": f"{list(look.batch_seeds[:steps])}  # by step",
        "STEP_SEEDS": by_rank,
        "TOLERANCE": f"{tolerance_for(report, chosen):g}",
        "TIMEOUT": f"{chosen.timeout}  # seconds, after which a collective gives up",
        "BACKEND": f'"{report.world.get("backend", "gloo")}"',
    }


def _on_cpu(report: Report) -> bool:
    return str(report.world.get("device", "cpu")) == "cpu"


def _show(chosen: Demonstration, report: Report, look: TargetInfo, cpu_syncbn: bool) -> str:
    """The function of the script that prepares the recipe and calls the demonstration."""
    join = "dist.init_process_group(BACKEND, timeout=timedelta(seconds=TIMEOUT))"
    make = ["recipe = recipe()"] if look.is_function else []
    if not look.loss_is_scalar:
        make.append("recipe.loss = summed(recipe.loss)")
    if not _on_cpu(report):
        make.append('recipe.ddp_kwargs = {"device_ids": [DEVICE.index], **recipe.ddp_kwargs}')
        make.append("recipe.loss = on_device(recipe.loss)")
    if "shard" not in look.given:
        make.append(f"recipe.shard = recipe.shard or {look.batch}_shard")
    if look.needs_train and chosen.name != "apart_before":
        make.append("recipe.model = in_training_mode(recipe.model)")
    arguments = ["recipe", *filter(None, [chosen.facts])]
    if chosen.compares_with_single:
        quiet = ["quiet=without_randomness"] if look.forward_draws else []
        notes = " ".join(map(str, report.world.get("notes", ())))
        in_group = ["in_group=True"] if "process group of one" in notes else []
        lines = [*make, f"alone = single_process({', '.join(['recipe', *quiet, *in_group])})", join]
        arguments = ["recipe", "alone", *quiet]
    else:
        lines = [join, *make]
    lines.append(f"return {chosen.name}({', '.join(arguments)})")
    if cpu_syncbn:
        lines = ["with synchronised_on_cpu():  # not needed on GPUs", *(f"    {line}" for line in lines)]
    body = textwrap.indent("\n".join(lines), "    ")
    return f'def show(recipe: Any) -> int:\n    """Prepare the recipe, and show the fault."""\n{body}'


def _demonstration(settings: Mapping[str, str], show: str, code: Code, recipe: str) -> str:
    """All after the target's code; in a function of its own where it has names in common with that."""
    ours = our_code()
    definitions = [
        replace(d, text=f"{name} = {settings[name]}") if (name := min(d.binds)) in settings else d
        for d in ours.needed([*names_in(ast.parse(show)), "leave"])
    ]
    first = spelled_definitions(d for d in definitions if d.module in _SHOWN)
    others = spelled_definitions(d for d in definitions if d.module not in _SHOWN)
    text = f"{first}\n\n\n{show}\n\n\n# What that needs\n\n\n{others}"
    imports = ours.imports_for(names_in(ast.parse(text)))
    same = {item.bound for item in imports if (item.bound, item.path) in {(i.bound, i.path) for i in code.imports}}
    bound = {"show"}.union((item.bound for item in imports), *(definition.binds for definition in definitions))
    if bound & (code.binds - same) or "*" in {item.bound for item in code.imports}:
        name = free_name("demonstration", code.binds)
        said = '"""All that follows, in one function: some of its names are in use above."""'
        inside = f"{said}\n{_spelled(imports)}\n\n{text}\n\nleave(show(recipe))".replace("\n\n\n", "\n\n")
        text, last = f"def {name}(recipe: object) -> None:\n{textwrap.indent(inside, '    ')}", f"{name}({recipe})"
    else:
        imports = [item for item in imports if item.bound not in same]
        text, last = f"{_spelled(imports)}\n\n{text}", f"leave(show({recipe}))"
    return f'{text}\n\n\nif __name__ == "__main__":\n    {last}\n'


def _spelled(imports: Iterable[Import]) -> str:
    return spelled_imports(imports, local=COMPANIONS.values())


def companions(script: str) -> dict[str, str]:
    """The files of ours that a script imports, and what is in them."""
    imported = {item.module for node in ast.walk(ast.parse(script)) for item in imports_of(node)}
    files = {}
    for file in imported & set(COMPANIONS.values()):
        names = [name for name in COMPANIONS if COMPANIONS[name] == file]
        module = our_code().companions[names[0]]
        ours = library(module)
        text = spelled_definitions(ours.needed(names))
        said = ast.get_docstring(ast.parse(path_of(module).read_text(encoding="utf-8")))
        imports = spelled_imports(ours.imports_for(names_in(ast.parse(text))))
        files[f"{file}.py"] = f'"""{said}\n"""\n\nfrom __future__ import annotations\n\n{imports}\n\n\n{text}\n'
    return files


# The docstring


def _new_line(finding: Finding, look: TargetInfo, code: Code, before: int) -> int | None:
    """The line of the script that the finding's location has become, with so many lines `before` the target's code."""
    if finding.location is None or finding.location.path != relative_path(look.file):
        return None
    numbers = [number for number, _ in code.lines]
    return before + numbers.index(finding.location.line) + 1 if finding.location.line in numbers else None


def _docstring(
    finding: Finding,
    report: Report,
    chosen: Demonstration,
    name: str,
    line: int | None,
    beside: Iterable[str],
) -> str:
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
        f"    torchrun --standalone --nproc-per-node {world_size_for(finding, report)} {name}",
        _wrapped(f"Each rank prints {chosen.expect}. {exits}"),
    ]
    return '"""' + _safe("\n\n".join(paragraphs)) + '\n"""\n\n'


def _field(label: str, text: str) -> str:
    return textwrap.indent(_wrapped(text, _WIDTH - 11), " " * 11).replace(" " * 11, f"{label:<11}", 1)


def _wrapped(text: str, width: int = _WIDTH - 3) -> str:
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def _safe(text: str) -> str:
    """`text` as the inside of a docstring, whatever is in it."""
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return shown.replace("\\", "\\\\").replace('"""', "'''").removesuffix('"')
