"""The text of a script that shows a finding: the target's own code, a training loop, and a demonstration.

This module is light: it never imports torch.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcheck.findings import Finding, Report
from ddpcheck.locate import relative_path
from ddpcheck.repro.choice import Demonstration, steps_for, tolerance_for, world_size_for
from ddpcheck.repro.projects import RECIPE, RECIPE_IMPORTS, absolute, without_ddpcheck
from ddpcheck.repro.sources import (
    Import,
    Source,
    Statement,
    free_names,
    joined,
    needed,
    read_source,
    renamed,
    spelled_imports,
    used_imports,
)
from ddpcheck.rules import RULES
from ddpcheck.wording import listed, spelled, spelled_steps

if TYPE_CHECKING:
    from ddpcheck.repro.probe import Look

_FOLDER = Path(__file__).parent / "demonstrations"
_ROLES = ("model", "batch", "loss", "shard", "optimizer", "wrap", "ddp_kwargs")
_SUMS = {"scalar": r"\1", "dict": r"sum(\1.values())", "list": r"sum(\1)"}
_WIDTH = 88

ENDING = """\
if __name__ == "__main__":
    verdict = main()
    if verdict:
        time.sleep(1)  # torchrun ends all ranks when one fails: let each say its line
    elif dist.is_initialized():
        dist.destroy_process_group()  # else threads of its may abort the exit
    sys.exit(verdict)
"""

_ON_CPU = (
    "    verdict = main()\n",
    "    with synchronised_on_cpu():  # not needed on GPUs\n        verdict = main()\n",
)


def script_for(
    finding: Finding,
    chosen: Demonstration,
    report: Report,
    look: Look,
    name: str,
    beside: Iterable[str],
    synchronised: bool,
) -> str:
    """A script that shows `finding` with the target that `look` has seen.

    Args:
        finding: What it shows.
        chosen: How.
        report: Where the finding is from: versions, world, tolerances.
        look: At the target.
        name: Of the file that it will be.
        beside: The modules that are written into the same folder, as paths.
        synchronised: Whether the code speaks of `nn.SyncBatchNorm`, which refuses CPU tensors.

    Raises:
        UsageError: The target's code needs ddpcheck.
    """
    path = Path(look.file)
    source = read_source(path.read_text(encoding="utf-8"))
    source.imports = [Import(absolute(i.module, look.package), i.name, i.bound) for i in source.imports]
    kept = needed(source, _wanted(look, source))
    used = set(_wanted(look, source)).union(*(statement.uses for statement in kept))
    theirs, statements, recipe = without_ddpcheck(used_imports(source.imports, used), kept, path)
    theirs = [*theirs, *(RECIPE_IMPORTS if recipe else ())]
    flags = _flags(report, look, chosen, synchronised) | ({"uneven"} if finding.code == "DDP405" else set())
    taken = {item.bound for item in theirs}.union(*(statement.binds for statement in statements))
    loop, ending, ours = _demonstration(chosen, finding, report, look, flags, taken, theirs)
    local = {place.partition("/")[0].removesuffix(".py") for place in beside} | {"quiet_random", "cpu_sync_batchnorm"}
    head = f"from __future__ import {', '.join(source.future)}\n\n" if source.future else ""
    head += spelled_imports(dict.fromkeys([*theirs, *ours]), local=local) + "\n"
    body, places = joined(statements)
    stand_in = f"\n\n{RECIPE.format(name=recipe)}" if recipe else ""
    title = f"# The code under test, from {relative_path(look.file)}"
    gap = "\n\n\n" if statements and statements[0].is_definition else "\n\n"
    middle = f"{head}{stand_in}\n\n" + (f"{title}{gap}{body}\n\n\n" if statements else "")
    before = middle.count("\n") - body.count("\n") - 3
    line, said = None, ""
    for _ in range(3):  # until the docstring says its own length right
        said = _docstring(finding, report, look, chosen, name, line, theirs, beside)
        line = _new_line(finding, look, places, said.count("\n") + before)
    return f"{said}{middle}# The training loop, and what shows the fault\n\n{loop}\n\n\n{ending}"


def _wanted(look: Look, source: Source) -> list[str]:
    if look.attribute:
        return [look.attribute.partition(".")[0]]
    return [role for role in _ROLES if role in source.bound]


def _flags(report: Report, look: Look, chosen: Demonstration, synchronised: bool) -> set[str]:
    notes = " ".join(map(str, report.world.get("notes", ())))
    conditions = {
        "draws": look.draws,
        "random": "random" in look.drawn,
        "numpy": "numpy" in look.drawn,
        "optimizer": chosen.needs_optimizer,
        "alone": "process group of one" in notes,
        "cuda": report.world.get("device", "cpu") != "cpu",
        "syncbn": synchronised and report.world.get("device", "cpu") == "cpu",
        "quiet": chosen.compares_with_single and look.forward_draws,
    }
    return {name for name, holds in conditions.items() if holds}


# The demonstration


@cache
def _text(name: str) -> str:
    return (_FOLDER / f"{name}.py").read_text(encoding="utf-8")


def _demonstration(
    chosen: Demonstration,
    finding: Finding,
    report: Report,
    look: Look,
    flags: set[str],
    taken: set[str],
    theirs: Sequence[Import],
) -> tuple[str, str, list[Import]]:
    """The code after the target's own, its last lines, and what it imports."""
    parts = ("pieces", "facts", chosen.name)
    text = "\n\n\n".join(_without_imports(_text(name)) for name in parts)
    ending = ENDING.replace(*_ON_CPU) if "syncbn" in flags else ENDING
    imports = _imports_of(parts)
    changes = _clashes(text, imports, look, taken, theirs)
    text = _specialised(renamed(text, changes), changes, chosen, look, flags)
    statements = needed(read_source(text), [changes.get("main", "main")], ours=True)
    settings = [s.text for s in statements if not s.is_definition and ("cuda" in flags or "DEVICE" not in s.binds)]
    settings += _constants(finding, report, look, chosen, flags, statements)
    if "cuda" in flags:
        settings.append("torch.cuda.set_device(DEVICE)")
    if look.is_function:
        settings.insert(0, f"{changes.get('recipe', 'recipe')} = functools.cache({look.attribute})")
    out = "\n\n\n".join(["\n".join(settings), *(s.text for s in statements if s.is_definition)])
    ending = renamed(ending, changes)
    used = {node.id for node in ast.walk(ast.parse(f"{out}\n{ending}")) if isinstance(node, ast.Name)}
    wanted = [Import(i.module, i.name, changes.get(i.bound, i.bound)) for i in imports]
    return out, ending, [item for item in wanted if item.bound in used]


def _imports_of(parts: Iterable[str]) -> list[Import]:
    """Whatever a demonstration may import; what it does not use is left out later."""
    imports = [item for name in parts for item in read_source(_text(name)).imports if item.root != "ddpcheck"]
    imports += [Import(name, "", name) for name in ("sys", "time", "functools")]
    imports += [Import("quiet_random", name, name) for name in ("QuietRandomness", "quiet_modules")]
    imports += [Import("cpu_sync_batchnorm", "synchronised_on_cpu", "synchronised_on_cpu")]
    return [*imports, Import("torch.nn.parallel", "DistributedDataParallel", "DistributedDataParallel")]


def _clashes(
    text: str, imports: Sequence[Import], look: Look, taken: set[str], theirs: Sequence[Import]
) -> dict[str, str]:
    """New names for what the demonstration would otherwise take from the target, or hide from itself."""
    roots = {look.attribute.partition(".")[0]} if look.attribute else set(_ROLES)
    globally, locally = {"recipe"} if look.is_function else set(), set()
    for statement in read_source(text).statements:
        globally |= statement.binds
        for node in ast.walk(statement.node):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                locally.add(node.id)
            elif isinstance(node, ast.arg):
                locally.add(node.arg)
    foreign = {item.bound for item in imports if item.bound in taken and item not in theirs}
    known = taken | roots | globally | locally | {item.bound for item in imports}
    return free_names(sorted((globally & (taken | roots)) | (locally & roots) | foreign), known.__contains__)


def _without_imports(text: str) -> str:
    return joined(read_source(text).statements)[0]


def _constants(
    finding: Finding,
    report: Report,
    look: Look,
    chosen: Demonstration,
    flags: set[str],
    statements: Sequence[Statement],
) -> list[str]:
    used = set().union(*(statement.uses for statement in statements))
    steps = steps_for(finding, report, chosen)
    seeds = [list(of_step[: world_size_for(finding, report)]) for of_step in look.step_seeds[:steps]]
    values = {
        "STEPS": str(steps),
        "MODEL_SEED": str(look.model_seed),
        "BATCH_SEEDS": f"{list(look.batch_seeds[:steps])}  # by step",
        "STEP_SEEDS": "\n".join(["[  # by step and rank", *(f"    {of_step}," for of_step in seeds), "]"]),
        "TOLERANCE": f"{tolerance_for(report, chosen):g}",
        "TIMEOUT": f"{chosen.timeout}  # seconds, after which a collective gives up",
        "BACKEND": f'"{report.world.get("backend", "gloo")}"',
    }
    return [f"{name} = {value}" for name, value in values.items() if name in used]


def _specialised(text: str, changes: Mapping[str, str], chosen: Demonstration, look: Look, flags: set[str]) -> str:
    """Write what is known of the target into the demonstration."""
    lines = []
    for line in re.sub(r"  # type: ignore\[[a-z-]+\]", "", text).split("\n"):
        code, _, flag = line.partition("  # only: ")
        if not flag or flag in flags:
            lines.append(code)
    text = "\n".join(lines)
    if not {"random", "numpy"} & flags:
        text = re.sub(r"def seed_all.*?\n\n\n", "", text, flags=re.DOTALL).replace("seed_all(", "torch.manual_seed(")
    if "quiet" in flags:
        text = re.sub(r"(?<!_)(?<!\.)(?<!def )\bbackward\(", "quiet_backward(", text)
    if look.loss in _SUMS:
        text = re.sub(r"total\((target\.loss\([^()]*\))\)", _SUMS[look.loss], text)
    cuda = "cuda" in flags
    recipe = changes.get("recipe", "recipe")
    ddp = changes.get("DistributedDataParallel", "DistributedDataParallel")
    root = f"{recipe}()" if look.is_function else look.attribute
    call = f"{root}." if root else ""
    split = {"tensor": r"\1.tensor_split(WORLD_SIZE)[RANK]"}.get(look.batch, rf"part_of_{look.batch}(\1)")
    part = f"{call}shard(\\1, RANK, WORLD_SIZE)" if "shard" in look.given else split
    text = re.sub(r"target\.part\((\w+)\)", f"to_device({part})" if cuda else part, text)
    whole = f"{call}batch(\\1)"
    text = re.sub(r"target\.whole\((\w+)\)", f"to_device({whole})" if cuda else whole, text)
    device = "DEVICE" if cuda else 'torch.device("cpu")'
    options = [r"\1", *(["device_ids=[DEVICE.index]"] if cuda else [])]
    options += [f"**{call}ddp_kwargs"] if look.ddp_kwargs else []
    wrap = rf"{call}wrap(\1, {device})" if "wrap" in look.given else f"{ddp}({', '.join(options)})"
    text = re.sub(r"target\.ddp\((target\.model\(\)|\w+)\)", wrap, text)
    text = text.replace("target.model()", f"{call}model(){'.to(DEVICE)' if cuda else ''}")
    trained = r"(p for p in \1.parameters() if p.requires_grad)"
    sgd = f"{call}optimizer{trained}" if "optimizer" in look.given else r"torch.optim.SGD(\1.parameters(), lr=0.01)"
    text = re.sub(r"target\.sgd\((\w+)\)", sgd, text)
    if chosen.facts:
        text = re.sub(
            r"target\.facts\((\w+), optim\)",
            rf"{chosen.facts}(\1, optim)" if chosen.needs_optimizer else rf"{chosen.facts}(\1)",
            text,
        )
        text = re.sub(r"target\.facts\((\w+)\)", rf"{chosen.facts}(\1)", text)
    return re.sub(r"target\.(\w+)\(", rf"{call}\1(", text)


# The docstring


def _new_line(finding: Finding, look: Look, places: Sequence[tuple[int, int, int]], offset: int) -> int | None:
    """The line of the script that the finding's location has become."""
    if finding.location is None or finding.location.path != relative_path(look.file):
        return None
    for first, at, count in places:
        if first <= finding.location.line < first + count:
            return offset + at + finding.location.line - first
    return None


def _docstring(
    finding: Finding,
    report: Report,
    look: Look,
    chosen: Demonstration,
    name: str,
    line: int | None,
    imports: Sequence[Import],
    beside: Iterable[str],
) -> str:
    size = world_size_for(finding, report)
    where = "" if finding.location is None else str(finding.location)
    here = f", line {line} here" if line else ""
    ranks = spelled(finding.ranks) if finding.ranks else "every rank"
    steps = f", in {spelled_steps(finding.steps)}" if finding.steps else ""
    environment = report.environment
    versions = [f"torch {environment.get('torch', '?')}", f"Python {environment.get('python', '?')}"]
    versions += [str(environment.get("platform", "")), str(report.world.get("backend", "gloo"))]
    files = [*beside]
    paragraphs = [
        f"{finding.code} {RULES[finding.code].name}: {finding.message}",
        "\n".join(
            filter(
                None,
                [
                    _field("what", listed(finding.subjects, most=8)) if finding.subjects else "",
                    _field("where", where + here) if where else "",
                    _field("ranks", ranks + steps),
                    _field("seen with", ", ".join(filter(None, versions))),
                    _field(
                        "found by", f"ddpcheck {report.tool.get('version', '')}".strip() + ", which wrote this file"
                    ),
                    _field("needs", "torch" + (f", and beside it {listed(files, most=9)}" if files else "")),
                ],
            )
        ),
        "Run it with",
        f"    torchrun --standalone --nproc-per-node {size} {name}",
        f"Each rank prints {chosen.expect}. The exit code is not 0 where the fault shows, and 0 where it does not.",
    ]
    text = "\n\n".join(p if p.startswith(("    ", "what", "where", "ranks")) else _wrapped(p) for p in paragraphs)
    return f'"""{_safe(text)}\n"""\n\n'


def _field(label: str, text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=f"{label:<11}", subsequent_indent=" " * 11, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH - 3, break_long_words=False, break_on_hyphens=False)


def _safe(text: str) -> str:
    """`text` as the inside of a docstring, whatever is in it."""
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return shown.replace("\\", "\\\\").replace('"""', "'''").removesuffix('"')
