"""Names as the user's code has them, also where `torch.compile` holds a module as `_orig_mod` of one of its own."""

from __future__ import annotations

import re

from ddpcheck.findings.figures import ParameterPath
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding

_PREFIX = re.compile(r"\b_orig_mod\.|\._orig_mod\b| \(in module _orig_mod\)")


def plain_name(text: str) -> str:
    """A name of a parameter or module, or a text with some in it, without what `torch.compile` puts before them."""
    return _PREFIX.sub("", text)


def without_prefix(finding: Finding) -> Finding:
    """A finding whose names are those of the code as it is written: `torch.compile(module)` holds it as `_orig_mod`."""
    texts = (*finding.subjects, finding.message, finding.fix, *finding.evidence)
    if not any("_orig_mod" in text for text in texts):
        return finding
    subjects, evidence = tuple(map(plain_name, finding.subjects)), tuple(map(plain_name, finding.evidence))
    message, fix = plain_name(finding.message), plain_name(finding.fix)
    return replace(
        finding, subjects=subjects, message=message, fix=fix, evidence=evidence, path=_plain_path(finding.path)
    )


def _plain_path(path: ParameterPath | None) -> ParameterPath | None:
    if path is None:
        return None
    steps = tuple(replace(step, module=plain_module(step.module)) for step in path.steps)
    return replace(path, parameter=plain_name(path.parameter), steps=steps)


def plain_module(name: str) -> str:
    """As `plain_name`, of a module, whose name may be nothing else."""
    return "" if name == "_orig_mod" else plain_name(name)
