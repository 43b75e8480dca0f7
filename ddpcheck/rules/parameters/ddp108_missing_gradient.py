"""DDP108 missing-gradient: error, stops_run, keeps_results

Backward reaches a parameter, and the gradient that it computes is None.

Why: A custom autograd Function returned None for an input that requires grad. DDP's hook fires nevertheless, so
    nothing is raised. Zeros are reduced, or .grad stays None, and the parameter never learns. (PyTorch docs,
    'Extending PyTorch': backward returns one gradient per input.)
Fix: Return the gradient for that input from backward of the Function named in the finding, or freeze the parameter.
Detected: Backward reaches the parameter, but no gradient arrives in .grad. Hooks show which custom autograd Function
    returned None.
Ignore: Never. Freeze the parameter if it needs no gradient.
Checks: report parameters; run parameters
Explains: DDP307 if none is there
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

from ddpcheck.findings.evidence.steps import PathEnd
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import join_names, plural_verb, unless_all
from ddpcheck.trace.parameters import ParameterFacts, describe_path_end


def judge_lost_gradients(facts: ParameterFacts) -> list[Finding]:
    """DDP108: parameters that backward reaches, for which a function returns None.

    Compiled code also returns None for parameters that do not contribute in eager mode: DDP101, 102 or 103.
    """
    lost: dict[tuple[tuple[int, ...], PathEnd], list[str]] = {}
    for name in facts.trainable:
        if seen := [item for item in facts.evidence if item.states.get(name) == "lost"]:
            end = next((item.path_ends[name] for item in seen if name in item.path_ends), PathEnd("lost"))
            lost.setdefault((tuple(sorted({item.rank for item in seen})), end), []).append(name)
    findings = []
    for (ranks, end), group in lost.items():
        if end.cause in ("unused", "cut", "unreachable"):
            them = plural_verb("it", "them", group)
            code, message, details = describe_path_end(end, facts.names.subjects(group), them)
            findings += facts.names.one_finding(
                code,
                group,
                message,
                ranks=unless_all(ranks, facts.world_size),
                evidence=[*details, f"under torch.compile DDP gets zeros for {them} and raises no error"],
                location=end.edit_at,
                path=end.path_of(group[0]),
            )
            continue
        fn = end.reason or "a custom autograd Function between it and the loss"
        findings += facts.names.one_finding(
            "DDP108",
            group,
            f"Backward reaches {join_names(facts.names.subjects(group))} and gives no gradient: {fn}{end.at} returns "
            "None.",
            ranks=unless_all(ranks, facts.world_size),
            location=end.edit_at,
            path=end.path_of(group[0]),
        )
    return findings
