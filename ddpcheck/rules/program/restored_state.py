"""Location of state that was restored from a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath

from ddpcheck.findings.evidence.script import FileUsed
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import group_by_value
from ddpcheck.trace.replicas import common_values


def locate_restored_file(findings: Iterable[Finding], uses: Sequence[Sequence[FileUsed]]) -> list[Finding]:
    """Explain findings on diverged state by different files that the ranks loaded.

    Skipped if all ranks read one common file with `torch.load`: the other files are then probably per rank on purpose
    (generator states, shards).
    """
    loads = [{use.location: use for use in reversed(entries) if use.by_torch and not use.writes} for entries in uses]
    read = common_values(loads).values()
    if not read or any(len({use.path for use in row}) == 1 for row in read):
        return list(findings)
    row = min(read, key=lambda row: row[0].began)
    names = group_by_value(["/".join(PurePath(use.path).parts[-2:]) for use in row])
    msg = f"The ranks do not load the same file ({'; '.join(names)})."
    explained = []
    for finding in findings:
        rule = RULES[finding.code]
        if rule.uneven_steps:
            evidence = (*finding.evidence, f"torch.load is called at {row[0].location}. {msg}")
            finding = replace(finding, evidence=evidence)
        elif rule.unequal_start or (rule.values_differ and finding.steps == (0,)):
            fix = "Load the same file on every rank: let rank 0 choose it, and broadcast its name."
            finding = replace(finding, message=f"{msg} {finding.message}", fix=fix).relocated(row[0].location)
        explained.append(finding)
    return explained
