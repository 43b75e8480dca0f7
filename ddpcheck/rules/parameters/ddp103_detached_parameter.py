"""DDP103 detached-parameter: error, stops_ddp, search_tolerates, no_gradient, stops_run, keeps_results

A parameter is used, but its path to the loss is cut by detach, no_grad, .data or an operation without a gradient.

Why: Backward does not pass the cut, so it computes no gradient for the parameter. DDP waits for this gradient and
    raises one iteration later. With find_unused_parameters=True DDP does not even raise, and this part of the model
    silently never learns. (PyTorch docs, DistributedDataParallel; autograd mechanics, 'Locally disabling gradient
    computation'.)
Fix: Remove the cut at the place named in the finding (use a differentiable operation instead of argmax, round or
    .item()), or, if the cut is intended, freeze the parameters before it with requires_grad_(False).
Detected: The autograd engine does not reach the parameter from the loss. The recorded forward pass shows what cuts
    the path: detach(), no_grad, inference_mode, .data, .item(), an operation without derivative, or a re-entrant
    checkpoint in which no input requires grad.
Ignore: If the cut is intended and the parameters are trained elsewhere. It is better to freeze the parameters.
Line: The line that disables gradients; else the operation that cuts the path; else the line that constructs the
    parameter.
Checks: report parameters; run parameters; repro missing
Explains: DDP301 DDP302 DDP306 if same subjects; DDP307 if none is there; quietly DDP522 if of graphs
Reports: pytorch/pytorch#43259
Color: #D55E00
Example:
    def forward(self, x):
        h = self.encoder(x).detach()         # the encoder never learns
        return self.head(h)                  # right: self.head(self.encoder(x))
"""

from __future__ import annotations

from ddpcheck.findings.report import Finding
from ddpcheck.trace.parameters import MissingGroup


def judge_cut(group: MissingGroup) -> list[Finding]:
    """DDP103: parameters whose autograd path to the loss is cut, e.g. by `detach()`."""
    end = group.end
    message = f"The path from {group.subjects} to the loss is cut by {end.reason}{group.where}."
    begins = [f"{end.reason} begins at {end.no_grad_location}"]
    evidence = begins if end.no_grad_location not in (None, end.location) else []
    return group.new_finding("DDP103", message, evidence, _fix_of_cut(end.reason))


def _fix_of_cut(reason: str) -> str:
    call, comma, _ = reason.partition(",")
    advice = f"Use differentiable operations of torch instead of {call}" if comma else f"Remove {call}"
    if "checkpoint" in call:
        advice = "Pass use_reentrant=False to checkpoint"
    elif call.startswith("torch."):
        advice = f"Run it outside of {call}"
    return f"{advice}. If the cut is intended, freeze the parameters (requires_grad_(False)) or give them another loss."
