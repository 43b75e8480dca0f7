"""DDP406 marked-ready-twice: error, stops_ddp, stops_run, keeps_gradients, keeps_results

A parameter's gradient is marked ready twice in one backward pass.

Why: DDP expects one gradient per parameter and iteration. A second one arrives if a re-entrant checkpoint encloses a
    module that is used more than once, or if a parameter is used outside forward. DDP then raises 'Expected to mark a
    variable ready only once'. With re-entrant checkpoints, DDP may instead raise nothing and average only a part of
    the gradient (pytorch issue 109191). (PyTorch docs, DistributedDataParallel and torch.utils.checkpoint.)
Fix: Use checkpoint(..., use_reentrant=False), call shared modules inside forward, or set static_graph=True.
Detected: ddpcheck counts how often the gradient of each parameter arrives in one backward pass. If DDP raises, the
    names of the parameters come from its message.
Ignore: If static_graph=True is set: DDP then handles a second arrival.
Line: In `run`, the backward pass that raised; for a re-entrant checkpoint, the call of checkpoint. In `report`, the
    line that makes the first parameter.
Checks: report parameters; run collectives; repro average
Explains: DDP301 DDP302
Reports: huggingface/accelerate#389 microsoft/FocalNet#4 lucidrains/DALLE2-pytorch#225 pytorch/pytorch#109191
Example:
    h = checkpoint(self.block, x, use_reentrant=True)
    h = checkpoint(self.block, h, use_reentrant=True)   # right: use_reentrant=False in both
"""

from __future__ import annotations

from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import join_names
from ddpcheck.trace.failures import MARKED_TWICE, FailureFacts, WrapperErrorFacts, count_forwards, parameters_in
from ddpcheck.trace.parameters import ParameterFacts


def explain_marked_twice(facts: FailureFacts) -> list[Finding]:
    """DDP406: gradient of a parameter marked ready twice in one backward pass."""
    reentrant = "torch/utils/checkpoint.py" in facts.text  # re-entrant backward of a checkpoint
    unused = any(wrapper.options.get("find_unused_parameters") == "True" for wrapper in facts.begun)
    forwards = count_forwards(facts)
    where, cause, fix = Location.parse(facts.first.location), "", ""
    if reentrant:
        where = facts.checkpoint or where
        cause = ": it is an output of a re-entrant checkpoint, which runs a separate backward pass"
        if unused:
            cause += ", and find_unused_parameters=True has marked its parameters as unused before"
        fix = "Pass use_reentrant=False to checkpoint (in transformers: gradient_checkpointing_kwargs)."
    elif forwards > 1:
        cause = f": the wrapper's forward was called {forwards} times before this backward pass"
        fix = "Call forward once, with concatenated inputs, or backward after each forward (no_sync but the last)."
    elif unused:
        cause = ": a parameter that find_unused_parameters=True takes for unused is used after all, outside of forward"
        fix = "Use parameters inside the wrapper's forward only, so that DDP finds them in its output."
    return facts.new_finding(
        "DDP406",
        parameters_in(facts.text) or ("backward",),
        f"A gradient that DDP had marked ready arrived again in the same backward pass{cause}.",
        location=where,
        fix=fix,
    )


def explain_error_of_second_gradient(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP406: gradient that arrives twice, in a step that succeeds without the wrapper."""
    return facts.finding_of_error("DDP406", "DDP took a gradient to be complete, and it came again", MARKED_TWICE)


def judge_hidden_parameters(facts: ParameterFacts) -> list[Finding]:
    """DDP406: parameters that reach the loss, although DDP's search marks them as unused."""
    hidden = list(dict.fromkeys(name for item in facts.evidence for name in item.hidden_from_ddp))
    if not hidden or not facts.wrapper.find_unused_parameters or not facts.wrapper.is_ddp:
        return []
    subjects = join_names(facts.names.subjects(hidden))
    return facts.names.new_finding(
        "DDP406",
        hidden,
        f"DDP takes {subjects} for unused and marks them ready, and then their gradients arrive.",
        evidence=(
            "they are used in a re-entrant checkpoint, which hides them from the search for unused parameters"
            if any(item.reentrant for item in facts.evidence)
            else "they reach the loss without the output of forward",
        ),
    )


def judge_repeated_arrival(facts: ParameterFacts) -> list[Finding]:
    """DDP406: gradients that arrive more than once in a backward pass."""
    arrivals = [arrival for item in facts.evidence for arrival in item.arrivals.items()]
    if not arrivals or facts.wrapper.static_graph or facts.wrapper.sharded:
        return []
    names = list(dict.fromkeys(name for name, _ in arrivals))
    times = max(count for _, count in arrivals)
    reason = "re-entrant checkpoints (use_reentrant=True) run a separate backward for each use"
    return facts.names.new_finding(
        "DDP406",
        names,
        f"The gradient of {join_names(facts.names.subjects(names))} arrives {times} times in one backward; DDP reduces "
        "it when it first arrives.",
        evidence=[reason] if any(item.reentrant for item in facts.evidence) else (),
        fix="Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or static_graph=True.",
    )
