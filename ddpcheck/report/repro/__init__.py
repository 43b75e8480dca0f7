"""A self-contained script that shows a finding under plain `torchrun`, without ddpcheck."""

from __future__ import annotations

import ast
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpcheck.findings.errors import RankError, TargetError, UsageError
from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.source_lines import relative_path
from ddpcheck.harness import World
from ddpcheck.report import calls
from ddpcheck.report.repro.script import DEMONSTRATIONS, script_for, script_name, why_none, world_size_for
from ddpcheck.report.repro.target_code import imports_from_ddpcheck, own_modules

if TYPE_CHECKING:
    from ddpcheck.report.repro.probe import TargetInfo

_OURS = "written by ddpcheck"
_ALSO_OURS = "which wrote this file"


def write_reproduction(report: Report, target: str, directory: str | Path, *, finding: Finding | None = None) -> Path:
    """Write a script that shows a finding under plain `torchrun`, with the modules of the user's that it needs.

    The target is loaded once more, in a process of its own. Its code is copied into the script as it is; what the
    recipe does not use may need ddpcheck, since it does not run. Modules of the user's own project that it imports
    (found next to it or below the working folder, and not installed) are copied beside. Data files are not. Files
    that ddpcheck wrote before are overwritten; others never are.

    Args:
        report: From `check`.
        target: The TARGET that was checked.
        directory: Where to write; made where it is not there.
        finding: Which one; default: the first, which is the worst.

    Returns:
        The script, `repro_<code>.py` in `directory`. It exits with 1 where the fault shows, with 0 where it does not.

    Raises:
        UsageError: There is no finding or no script shows it, `target` is no TARGET, its code needs ddpcheck, or
            `directory` cannot be written.
        TargetError: The target cannot be loaded any more.
    """
    if not isinstance(target, str):
        raise UsageError(
            "a Recipe built in Python cannot be written to a file; put it into a module and name it as a TARGET: "
            "path/to/file.py:attr"
        )
    if finding is None:
        if not report.findings:
            raise UsageError("the report has no finding, so there is nothing to reproduce")
        finding = report.findings[0]
    folder = Path(directory)
    files = reproduction(report, target, finding)
    prepare(folder)
    for name, text in files.items():
        _refuse_foreign(folder / name, text)
    for name, text in files.items():
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
        except OSError as error:
            raise UsageError(f"cannot write {folder / name}: {error.strerror or error}") from error
    return folder / script_name(finding)


def command_for(report: Report, script: Path) -> str:
    """How to run a reproduction of the first finding."""
    size = world_size_for(report.findings[0], report)
    return shlex.join(["torchrun", "--standalone", "--nproc-per-node", str(size), str(script)])


def prepare(folder: Path) -> bool:
    """Make sure that files can be written into `folder`; returns whether it had to be made.

    Raises:
        UsageError: They cannot.
    """
    made = not folder.exists()
    probe = folder / ".ddpcheck-can-write"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"cannot write to the folder {folder}: {reason}") from error
    return made


def _refuse_foreign(path: Path, text: str) -> None:
    if not path.exists():
        return
    try:
        there = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        there = ""
    if there != text and _OURS not in there.partition("\n")[0] and _ALSO_OURS not in there[:4000]:
        raise UsageError(f"{path} is there already, and ddpcheck did not write it; choose another folder")


def reproduction(report: Report, target: str, finding: Finding) -> dict[str, str]:
    """The files of a reproduction, name to text, the script first."""
    if why := why_none(finding, report):
        raise UsageError(why)
    chosen = DEMONSTRATIONS[finding.code]
    info = _look(report, target, finding)
    entry = Path(info.file).resolve()
    roots = [info.attribute.partition(".")[0]] if info.attribute else info.given
    imported = imports_from_ddpcheck(entry, roots)
    name, files = script_name(finding), {}
    for place, path in own_modules(entry, info.package, info.loaded).items():
        imported += imports_from_ddpcheck(path)
        said = f"# From {relative_path(str(path))}, for {name}; {_OURS}.\n"
        files[place] = said + path.read_text(encoding="utf-8")
    text = script_for(finding, chosen, report, info, files, imported)
    ast.parse(text, filename=name)
    return {name: text, **files}


def _look(report: Report, target: str, finding: Finding) -> TargetInfo:
    """Look at the target in a process of its own; without its loss, or its model, where that cannot be run there."""
    world: dict[str, Any] = dict(report.world)
    trouble: RankError | None = None
    for run in ("loss", "model", "")[finding.code.startswith("DDP4") :]:
        with World(1, device=str(world.get("device", "cpu")), timeout=float(world.get("timeout", 30))) as one:
            try:
                return one.run(partial(calls.probe.look, target, int(world.get("seed", 0)), run))[0]
            except RankError as error:
                trouble = error
    assert trouble is not None, "each way has failed"
    trouble.raise_cause()
    raise TargetError(f"{relative_path(target)} cannot be loaded for a reproduction: {trouble}")


__all__ = ["DEMONSTRATIONS", "command_for", "prepare", "reproduction", "script_name", "why_none", "write_reproduction"]
