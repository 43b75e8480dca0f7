"""DDP107 zero-gradient-parameter: warning, stops_run, keeps_results

Backward reaches a parameter, and its gradient is exactly zero in every step.

Why: DDP sees no fault: the gradient arrives and is reduced. But the parameter does not learn. Causes are a factor of
    zero, a branch of torch.where that is never selected, or a ReLU unit that is always off. A comparison with a
    single process shows nothing, because the gradient is zero there too.
Fix: Find the factor that is zero (a mask, a weight, a dead ReLU, a clamp, a rounding) and remove it. If the zero is
    intended, ignore DDP107.
Detected: The gradient is exactly zero on every rank in every step. ddpcheck then changes the parameters slightly and
    runs the step again. The parameter is reported only if its gradient is still zero. The finding names the operation
    in which the gradient becomes zero.
Ignore: If the zero is intended, for example 0.0 * output.sum() to satisfy DDP. Or if terms cancel rightly: a bias has
    no effect on the difference of two means.
Line: The operation in which the gradient becomes zero; else the line that constructs the parameter.
Checks: report parameters; run parameters; repro zero
Color: #BBBBBB
Example:
    loss = mse(main, y) + 0.0 * auxiliary.sum()                # right, if it should learn: a weight that is not zero
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ddpcheck.findings.evidence.steps import PathEnd, StepEvidence
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import group_by, join_names
from ddpcheck.trace.parameters import ParameterFacts


def judge_zero_gradients(
    facts: ParameterFacts, nonzero_when_perturbed: frozenset[str], ends: Mapping[str, PathEnd]
) -> list[Finding]:
    """DDP107: gradients that are exactly zero, even for perturbed parameters.

    If every gradient is zero, DDP107 is silent: DDP307 reports that.
    """
    zero = parameters_with_zero_gradients(facts.evidence)
    always = [name for name in zero if name not in nonzero_when_perturbed]
    if not always or len(zero) == sum(state != "missing" for state in facts.evidence[0].states.values()):
        return []

    def end_or_module(name: str) -> PathEnd | str:
        top = facts.family_of(name, frozenset(always))
        return ends.get(name) or (name.rpartition(".")[0] or name if top == name else top)

    findings = []
    for group in group_by(always, end_or_module).values():
        end = ends.get(group[0])
        origin = f": it becomes zero in {end.reason}{end.at}" if end else ""
        subjects = join_names(facts.names.subjects(group))
        findings += facts.names.new_finding(
            "DDP107",
            group,
            f"The gradient of {subjects} is exactly zero in every step on every rank{origin}.",
            evidence=("in the last of these steps it stays zero for other values of the parameters",),
            location=end.edit_at if end else None,
            path=end.path_of(group[0]) if end else None,
        )
    return findings


def is_refuted(finding: Finding, nonzero: Collection[str]) -> bool:
    """Return True if nonzero gradients of parameters in `nonzero` refute a DDP107."""
    return finding.code == "DDP107" and not set(finding.subjects).isdisjoint(nonzero)


def parameters_with_zero_gradients(evidence: Sequence[StepEvidence]) -> list[str]:
    """Return parameters with exactly zero gradients on every rank in every step."""
    states = evidence[0].states if evidence else ()
    return [name for name in states if all(item.states.get(name) == "zero" for item in evidence)]
