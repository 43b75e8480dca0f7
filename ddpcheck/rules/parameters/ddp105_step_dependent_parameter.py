"""DDP105 step-dependent-parameter: error, stops_ddp, no_gradient, conditional_use, stops_run, keeps_results

A parameter contributes to the loss in some steps only.

Why: In a step without the parameter, DDP waits for a gradient that never arrives. Its bucket is not reduced, and the
    next forward raises. With static_graph=True the set of used parameters is fixed after the first step, so a later
    change fails as well. (PyTorch docs, DistributedDataParallel, find_unused_parameters and static_graph.)
Fix: Pass find_unused_parameters=True and no static_graph, or let the skipped part add 0.0 * output.sum() to the loss.
Detected: ddpcheck compares from step to step which parameters backward reaches. A parameter is reported if backward
    reaches it in some of the checked steps, but on no rank in others. The finding names the steps without the
    parameter.
Ignore: Never. With find_unused_parameters=True, ddpcheck does not report such parameters.
Line: The branch or operation at which the path from the parameter to the loss ends; else the line that constructs
    the parameter.
Checks: report parameters; run parameters; repro missing
Explains: DDP306 if same subjects; DDP301 DDP302 DDP303 DDP304 DDP305 DDP312; DDP516 if only the loss; quietly DDP522
    if of graphs
Reports: Yuanhy1997/SeqDiffuSeq#25
Color: #56B4E9
Example:
    def forward(self, x):
        h = self.body(x)
        if self.step % 2 == 0:
            h = h + self.adapter(h)          # absent in every odd step
        return h                             # right: DistributedDataParallel(model, find_unused_parameters=True)
"""

from __future__ import annotations

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import format_steps
from ddpcheck.trace.parameters import AT_NEXT_FORWARD, ConditionalUse


def judge_step_dependence(use: ConditionalUse) -> list[Finding]:
    """DDP105: parameters missing on every rank in some steps."""
    facts, steps, evidence = use.facts, use.steps, use.describe_absences()
    if facts.wrapper.is_ddp and not facts.wrapper.tolerates_unused:
        silent = f"plain DDP says nothing here, because no forward follows {format_steps(steps)}"
        raises = f"{AT_NEXT_FORWARD} after {format_steps(steps[:1])}"
        evidence.append(silent if facts.ends_here and steps[0] == facts.steps[-1] else raises)
    return use.new_finding("DDP105", use.step_message, evidence)
