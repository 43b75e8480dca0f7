"""ddpcheck's report on an architecture beside the truth about it."""

from __future__ import annotations

import re

from ddpcheck.findings.report import Report
from ddpcheck.report.checking.check import check
from tests.models.catalogue import CATALOGUE
from tests.models.oracle import Truth

PRELOAD = (  # what most architectures import; otherwise every rank of every check does
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.masking_utils",
    "transformers.generation.utils",
    "transformers.processing_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
    "transformers.models.auto.video_processing_auto",
    "transformers.models.encoder_decoder",
    "tests.models.catalogue",
)
SOMETIMES = ("DDP104", "DDP105")  # which of the two depends on what was drawn in a few steps
NEVER = ("DDP101", "DDP102", "DDP103", "DDP108")


def report_on(name: str, world_size: int = 2, steps: int = 3, wrap: str = "") -> Report:
    target = f"tests.models.catalogue:{name}{wrap and f'__{wrap}'}"
    return check(target, world_size=world_size, steps=steps, timeout=120, preload=PRELOAD)


def codes_of(report: Report) -> list[str]:
    """The codes of the findings, DDP105 as DDP104."""
    codes = ["DDP104" if finding.code in SOMETIMES else finding.code for finding in report.findings]
    return sorted(set(codes))


def disagreements(name: str, report: Report, truth: Truth, wrap: str = "") -> list[str]:
    """What ddpcheck says that is not true, what it does not say that is, and what it has not looked at."""
    found = [] if report.error is None else [f"it ends in an error: {report.error.message}"]
    expected = sorted(CATALOGUE[name].expected_in(wrap, report.world.get("world_size", 2)))
    if codes_of(report) != expected:
        found.append(f"codes {codes_of(report)}, expected {expected}")
    found += _participation(report, truth)
    found += _parity(report, truth)
    stopped = any(code.startswith("DDP10") and code != "DDP107" for code in codes_of(report))
    raised = "DDP501" in codes_of(report)
    for item in report.checks:
        if item.status == "skipped" and not (raised or (item.name == "reducer" and stopped)):
            found.append(f"{item.name} was skipped: {item.detail}")
    return found


def _participation(report: Report, truth: Truth) -> list[str]:
    found = []
    if (said := _subjects(report, NEVER)) != truth.never:
        found.append(f"never a gradient: {_apart(said, truth.never)}")
    if (said := _subjects(report, ("DDP107",))) != truth.zero:
        found.append(f"always zero: {_apart(said, truth.zero)}")
    said = _subjects(report, SOMETIMES)
    if _kinds(said) - _kinds(truth.sometimes) or (CATALOGUE[report_name(report)].expected.get("DDP104") and not said):
        found.append(f"sometimes without gradient: {_apart(said, truth.sometimes)}")
    return found


def _parity(report: Report, truth: Truth) -> list[str]:
    told = " ".join([*codes_of(report), *(line for finding in report.findings for line in finding.evidence)])
    normalised, coupled = "DDP305" in told, "DDP304" in told
    even = bool(truth.weights) and all(abs(w * len(truth.weights) - 1) < 1e-3 for w in truth.weights)
    if truth.parity:
        return ["it differs from the global batch, which it does not"] if normalised or coupled else []
    if truth.summed or (truth.weights and not even):
        return [] if normalised and not coupled else ["its loss is a sum, or weighs ranks unevenly; DDP305 it is"]
    return [] if coupled else ["samples are coupled; DDP304 it is"]


def _subjects(report: Report, codes: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for finding in report.findings if finding.code in codes for name in finding.subjects)


def _kinds(names: frozenset[str]) -> frozenset[str]:
    """Names without numbers: which of the layers, or of the experts, is left out is chance."""
    return frozenset(re.sub(r"\d+", "*", name) for name in names)


def _apart(said: frozenset[str], true: frozenset[str]) -> str:
    return f"said but not so {sorted(said - true)[:5]}, so but not said {sorted(true - said)[:5]}"


def report_name(report: Report) -> str:
    """The key in the catalogue of what a report is on."""
    return report.target.rpartition(":")[2].partition("__")[0]
