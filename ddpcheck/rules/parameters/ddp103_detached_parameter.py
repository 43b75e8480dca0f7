"""DDP103 detached-parameter: error, stops_ddp, stops_run, keeps_results

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
Checks: report parameters; run parameters
Explains: DDP301 DDP302 DDP306 if same subjects; DDP307 if none is there; quietly DDP522 if of graphs
Reports: pytorch/pytorch#43259
Example:
    def forward(self, x):
        h = self.encoder(x).detach()         # the encoder never learns
        return self.head(h)                  # right: self.head(self.encoder(x))
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.steps import PathEnd
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import counted, plural_verb
from ddpcheck.trace.parameters import AT_NEXT_FORWARD, SPARSE_ADVICE, SPARSE_REFUSED, ParameterFacts, describe_path_end


def explain_always_missing(group: Sequence[str], end: PathEnd, facts: ParameterFacts) -> list[Finding]:
    """Report parameters missing for one cause, with consequences under the wrapper's options."""
    wrapper, steps, them = facts.wrapper, len(facts.steps), plural_verb("it", "them", group)
    evidence = [] if wrapper.tolerates_unused or not wrapper.is_ddp else [AT_NEXT_FORWARD]
    if evidence and steps == 1 and facts.ends_here:
        evidence.append("after the last step there is no next forward, so that nothing is raised at all")
    code, message, details = describe_path_end(end, facts.names.subjects(group), them)
    sparse = group[0] in wrapper.sparse
    refused = sparse and wrapper.find_unused_parameters
    if refused:
        details.append(SPARSE_REFUSED)
    elif wrapper.tolerates_unused or wrapper.sharded:
        option = "find_unused_parameters" if wrapper.find_unused_parameters else "static_graph"
        note = f"{option}=True keeps DDP from stopping"
        note = "fully_shard says nothing of it" if wrapper.sharded else note
        details.append(f"{note}; nothing has trained {them} in {counted(steps, 'step')}")
    harmless = (wrapper.tolerates_unused or wrapper.sharded) and code != "DDP103" and not refused
    fix = _fix_of_cut(end.reason) if code == "DDP103" else ""
    if harmless:
        fix = "Use the parameter in the loss, remove it, or freeze it with requires_grad_(False)."
    taking_turns = end.cause == "unused" and facts.others_take_turns(group)
    if taking_turns:
        details.append(
            "others of the same list contribute in some steps or on some ranks only: check more steps (--steps)"
        )
    mildest = Severity.WARNING if steps > 1 and not taking_turns else Severity.NOTE
    return facts.names.one_finding(
        code,
        group,
        message,
        severity=mildest if harmless else None,
        evidence=[*evidence, *details],
        fix=SPARSE_ADVICE if sparse else fix,
        location=end.edit_at,
        path=end.path_of(group[0]),
    )


def _fix_of_cut(reason: str) -> str:
    call, comma, _ = reason.partition(",")
    advice = f"Use differentiable operations of torch instead of {call}" if comma else f"Remove {call}"
    if "checkpoint" in call:
        advice = "Pass use_reentrant=False to checkpoint"
    elif call.startswith("torch."):
        advice = f"Run it outside of {call}"
    return f"{advice}. If the cut is intended, freeze the parameters (requires_grad_(False)) or give them another loss."
