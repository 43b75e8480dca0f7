"""DDP101 unused-parameter: error, stops_ddp, no_gradient, stops_run, keeps_results

A parameter requires grad, and no operation of the forward pass ever reads it.

Why: DDP all-reduces a bucket when all its gradients have arrived. The gradient of an unused parameter never arrives,
    so its bucket is not reduced. The optimizer then steps with each rank's own gradients. The next forward raises
    'Expected to have finished reduction in the prior iteration'. After the last step there is no next forward, so
    nothing is raised. (PyTorch docs, DistributedDataParallel, find_unused_parameters; notes on DDP, 'Backward Pass'.)
Fix: Use the parameter in the forward pass, remove it, or freeze it with requires_grad_(False) before wrapping; if it
    is used in some steps only, pass find_unused_parameters=True.
Detected: At the start of backward, ddpcheck asks the autograd engine which parameters backward will reach. If it will
    not reach all, ddpcheck runs the forward pass again and records which parameters are read. No operation reads the
    reported parameter.
Ignore: Never, if the finding is an error. With find_unused_parameters=True, the finding is a warning or a note.
    Ignore such a finding if another phase of the training uses the parameter.
Line: The branch that may skip the parameter, if there is one; else the line that constructs the parameter. If DDP
    raises and names no parameter: the call that raises.
Checks: report parameters; run parameters; repro missing
Explains: DDP301 DDP302 DDP306 if same subjects; DDP307 if none is there; quietly DDP522 if of graphs
Reports: pytorch/pytorch#43259 open-mmlab/mmdetection#2117 Megvii-BaseDetection/YOLOX#885 pytorch/pytorch#112152
Color: #E69F00
Example:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(8, 8)
            self.head = nn.Linear(8, 2)      # never called: both of its parameters are unused

        def forward(self, x):
            return self.body(x)              # right: return self.head(self.body(x))
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_steps, join_names, plural
from ddpcheck.trace.failures import FailureFacts
from ddpcheck.trace.parameters import MissingGroup


def judge_unused(group: MissingGroup) -> list[Finding]:
    """DDP101: parameters that no operation of the forward pass reads."""
    return group.new_finding("DDP101", f"No operation of the forward pass reads {group.subjects}.")


def reword_in_first_steps(finding: Finding, missing_steps: Sequence[int]) -> Finding:
    """Reword a DDP101 found in first steps: later steps may read the parameter."""
    if finding.code != "DDP101":
        return finding
    return replace(
        finding,
        message=f"{finding.message[:-1]} in {format_steps(missing_steps)}.",
        fix="If other steps read it (a branch, an expert that gets no sample), pass find_unused_parameters=True, or "
        "add 0.0 times its output in idle steps. If no step does, use it, remove it, or freeze it with "
        "requires_grad_(False) before wrapping.",
    )


def explain_unfinished_reduction(facts: FailureFacts) -> list[Finding]:
    """DDP101: parameters without gradients, whose indices are in DDP's error message."""
    match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", facts.text)
    numbers = [int(number) for number in match[1].split()] if match else []
    trained = [[param.name for param in begun.description.parameters if param.requires_grad] for begun in facts.begun]
    candidates = {tuple(row[index] for index in numbers) for row in trained if numbers and max(numbers) < len(row)}
    names = candidates.pop() if len(candidates) == 1 else ()  # DDP does not say which of several wrappers
    location = next((begun.lines[names[0]] for begun in facts.begun if names and names[0] in begun.lines), None)
    who = join_names(names, most=4) if names else plural(len(numbers), "parameter") if numbers else "A parameter"
    return facts.new_finding(
        "DDP101",
        names or ("parameters",),
        f"{who} did not contribute to the previous backward pass: DDP still waits for the gradient, and raises at its "
        "next forward.",
        location=location or Location.parse(facts.first.location),
    )
