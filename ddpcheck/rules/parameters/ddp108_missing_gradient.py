"""DDP108 missing-gradient: error, stops_run, keeps_results

Backward reaches a parameter, and the gradient that it computes is None.

Why: A custom autograd Function returned None for an input that requires grad. DDP's hook fires nevertheless, so
    nothing is raised. Zeros are reduced, or .grad stays None, and the parameter never learns. (PyTorch docs,
    'Extending PyTorch': backward returns one gradient per input.)
Fix: Return the gradient for that input from backward of the Function named in the finding, or freeze the parameter.
Detected: Backward reaches the parameter, but no gradient arrives in .grad. Hooks show which custom autograd Function
    returned None.
Ignore: Never. Freeze the parameter if it needs no gradient.
Line: The call of the autograd Function that returns None; else the line that constructs the parameter.
Checks: report parameters; run parameters; repro missing
Explains: DDP307 if none is there
Color: #CC79A7
Example:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad * weight, None       # right: return grad * weight, (grad * x).sum_to_size(weight.shape)
"""

from __future__ import annotations

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import ranks_or_all
from ddpcheck.trace.parameters import MissingGroup


def judge_lost_gradient(group: MissingGroup) -> list[Finding]:
    """DDP108: parameters for which an autograd function returns None in backward."""
    end = group.end
    fn = end.reason or "a custom autograd Function between it and the loss"
    return group.facts.names.new_finding(
        "DDP108",
        group.names,
        f"Backward reaches {group.subjects} and gives no gradient: {fn}{end.at} returns None.",
        ranks=ranks_or_all(group.compiled_on, group.facts.world_size),
        location=end.edit_at,
        path=end.path_of(group.names[0]),
    )
