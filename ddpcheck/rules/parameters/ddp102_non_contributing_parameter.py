"""DDP102 non-contributing-parameter: error, stops_ddp, no_gradient, stops_run, keeps_results

A parameter is used in the forward pass, but its result does not reach the loss.

Why: Every output of forward that depends on parameters has to contribute to the loss. If an output does not, DDP
    waits for a gradient that backward never computes. The bucket is not reduced, and the next forward raises. With
    find_unused_parameters=True nothing is raised, but the parameter silently never learns. (PyTorch docs,
    DistributedDataParallel, forward outputs; notes on DDP.)
Fix: Add the result to the loss, stop computing it, or return it from forward detached and freeze the parameter.
Detected: An operation of the forward pass reads the parameter, but the autograd engine does not reach it from the
    loss. The path is not cut by detach, no_grad or the like (that is DDP103): the result is simply not used.
Ignore: If find_unused_parameters=True is set, and the output is left out of the loss on purpose. It is better to
    freeze the parameters.
Line: The last operation that depends on the parameter; else the line that constructs the parameter.
Checks: report parameters; run parameters; repro missing
Explains: DDP301 DDP302 DDP306 if same subjects; DDP307 if none is there; quietly DDP522 if of graphs
Reports: pytorch/pytorch#57473
Color: #F0E442
Example:
    def forward(self, x):
        return self.main(x), self.auxiliary(x)

    def loss(model, batch):
        main, auxiliary = model(batch["x"])
        return mse(main, batch["y"])         # right: ... + 0.1 * mse(auxiliary, batch["z"])
"""

from __future__ import annotations

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import plural_verb
from ddpcheck.trace.parameters import MissingGroup


def judge_unreachable(group: MissingGroup) -> list[Finding]:
    """DDP102: parameters that are used, but do not contribute to the loss."""
    if group.end.cause == "unknown":
        does = plural_verb("does", "do", group.facts.names.subjects(group.names))
        return group.new_finding("DDP102", f"{group.subjects} {does} not contribute to the loss; the cause is unknown.")
    last = f"the last operation that depends on {group.them} is {group.end.reason}{group.end.at}"
    return group.new_finding("DDP102", f"The result of {group.subjects}{group.where} does not reach the loss.", [last])
