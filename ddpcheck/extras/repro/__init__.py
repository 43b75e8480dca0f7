"""Write a self-contained script that reproduces a finding under plain `torchrun`, without ddpcheck."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpcheck.extras import calls
from ddpcheck.extras.repro import script as scripts
from ddpcheck.findings.errors import RankError, TargetError, UsageError
from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.source_lines import relative_path
from ddpcheck.harness import World

if TYPE_CHECKING:
    from ddpcheck.extras.repro.probe import TargetInfo

_MARKS = ("written by ddpcheck", "which wrote this file")


def write_reproduction(report: Report, target: str, directory: str | Path, *, finding: Finding | None = None) -> Path:
    """Write a script that reproduces a finding under plain `torchrun`.

    The target is loaded again in a separate process. The code of the target is copied unchanged into the script; code
    that the recipe does not use may import ddpcheck, since such code does not run. Imported modules of the user's
    project (below the folder of the target or the working folder, not installed) are copied into `directory`; data
    files are not. Only files written by ddpcheck are overwritten.

    `finding` defaults to the first finding of the report, which is the worst. Returns the path of the script,
    `repro_<code>.py` in `directory`; the script exits with 1 if the fault occurs, else with 0.

    Raises:
        UsageError: There is no finding, the finding has no script, `target` is not a string, the code of the target
            needs ddpcheck, or `directory` cannot be written.
        TargetError: The target cannot be loaded any more.
    """
    if not isinstance(target, str):
        raise UsageError(
            "a Recipe built in Python cannot be written to a file; put it into a module and name it as a TARGET: "
            "path/to/file.py:attr"
        )
    if finding is None and not report.findings:
        raise UsageError("the report has no finding, so there is nothing to reproduce")
    finding = finding or report.findings[0]
    if why := scripts.why_none(finding, report):
        raise UsageError(why)
    info, name, folder = _inspect_target(report, target, finding), scripts.script_name(finding), Path(directory)
    entry, texts = Path(info.file).resolve(), dict[str, str]()
    roots = [info.attribute.partition(".")[0]] if info.attribute else info.parts
    imported = scripts.imports_from_ddpcheck(entry, roots)
    for relative, path in scripts.own_modules(entry, info.package, info.loaded).items():
        imported += scripts.imports_from_ddpcheck(path)
        header = f"# From {relative_path(str(path))}, for {name}; {_MARKS[0]}.\n"
        texts[relative] = header + path.read_text(encoding="utf-8")
    texts[name] = scripts.script_for(finding, report, info, texts, imported)
    prepare(folder)
    files = {folder / relative: text for relative, text in texts.items()}
    for path, text in files.items():
        old = path.read_bytes().decode(errors="replace") if path.is_file() else ""
        if path.exists() and old != text and not any(mark in old[:4000] for mark in _MARKS):
            raise UsageError(f"{path} already exists, and ddpcheck did not write it; choose another folder")
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
    return folder / name


def command_for(report: Report, script: Path) -> str:
    """Return the command line that runs the reproduction of the first finding."""
    size = scripts.world_size_for(report.findings[0], report)
    return shlex.join(["torchrun", "--standalone", "--nproc-per-node", str(size), str(script)])


def prepare(folder: Path) -> None:
    """Check early that scripts can be written to `folder`; raise a `UsageError` if not."""
    made, probe = not folder.exists(), folder / ".ddpcheck-can-write"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
        if made:
            folder.rmdir()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"cannot write to the folder {folder}: {reason}") from error


def _inspect_target(report: Report, target: str, finding: Finding) -> TargetInfo:
    """Inspect the target in a separate process; retry without a training step on failure."""
    seed, timeout = int(report.world.get("seed", 0)), float(report.world.get("timeout", 30))
    trouble: Any = None
    for train in (True, False)[RULES[finding.code].family == "running" :]:
        with World(1, device=str(report.world.get("device", "cpu")), timeout=timeout) as world:
            try:
                return world.run(partial(calls.probe.inspect_target, target, seed, train))[0]
            except RankError as error:
                trouble = error
    trouble.raise_cause()
    raise TargetError(f"{relative_path(target)} cannot be loaded for a reproduction: {trouble}")
