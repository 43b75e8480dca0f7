"""DDP311 saved-tensor-overwritten: error

A tensor that backward needs was overwritten after forward, in place or by a later buffer broadcast.

Why: A second forward under DDP broadcasts rank 0's buffers in place. If the first forward saved one of these buffers
    for backward, autograd raises an error about an in-place modification. If autograd does not notice the change, it
    silently uses the wrong values. (PyTorch docs, DistributedDataParallel, broadcast_buffers; autograd mechanics,
    'In-place correctness checks'.)
Fix: Run one forward on the concatenated inputs, clone the buffer before it is used, or pass broadcast_buffers=False
    and synchronise buffers yourself.
Detected: DDP311 is reported if autograd raises an error about an in-place change in backward. `ddpcheck report` also
    runs the step without the wrapper, and reports DDP311 only if this raises no error. The finding names the
    overwritten parameters, or the buffers that DDP broadcasts before each forward pass. If no error is raised,
    ddpcheck compares the gradients with the average of the ranks' own gradients. A difference is reported as DDP311
    only if DDP broadcast buffers in several forwards before one backward.
Ignore: Never. Backward has failed or has used wrong values.
Line: The line where backward raises. In `ddpcheck report`: the line that creates the first of the overwritten
    parameters or buffers.
Checks: report reducer; repro average
Explains: DDP214 DDP215 DDP302 DDP304 DDP312
Reports: pytorch/pytorch#22095 pytorch/pytorch#65907 pytorch/pytorch#175024 pytorch/pytorch#110363
Example:
    real, fake = ddp(a), ddp(b)              # the second call overwrites buffers that the first one saved
    (real - fake).mean().backward()          # right: real, fake = ddp(torch.cat([a, b])).chunk(2)
"""

from __future__ import annotations

import re

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import join_names
from ddpcheck.trace.failures import MODIFIED_IN_PLACE, FailureFacts, WrapperErrorFacts, count_forwards
from ddpcheck.trace.gradients import ReducerFacts


def explain_overwritten(facts: FailureFacts) -> list[Finding]:
    """DDP311: tensor overwritten before backward; parameters and buffers of its shape are named."""
    match = re.search(r"\[[\w.]*Tensor \[([\d, ]*)\]\]", facts.text)
    shape = tuple(int(size) for size in match[1].split(",") if size.strip()) if match else None
    buffers, parameters = (
        [
            tensor.name
            for begun in facts.begun
            for tensor in getattr(begun.description, kind)
            if shape is not None and sorted(tensor.shape) == sorted(shape)  # a weight may have been transposed
        ]
        for kind in ("buffers", "parameters")
    )
    broadcasts = [wrapper for wrapper in facts.begun if wrapper.options.get("broadcast_buffers") != "False"]
    forwards = count_forwards(facts)
    cause, fix, names = "", "", [*buffers, *parameters]
    if buffers and broadcasts and forwards > 1:
        names = buffers
        cause = (
            f": the wrapper's forward was called {forwards} times before this backward pass, and each call writes "
            "buffers again (DDP broadcasts those of rank 0, a layer updates its own)"
        )
        fix = (
            "Call forward once, with the inputs concatenated; or backward after each forward; or pass "
            "broadcast_buffers=False, if the buffers are the same on all ranks anyway."
        )
    elif parameters and not buffers:
        cause = ": it has the shape of a parameter, which an optimizer's step or an in-place update has written"
        fix = "Update parameters after the backward passes that need them: move the step or the update behind them."
    which = f" ({'one of ' if len(names) > 1 else ''}{join_names(names)}, by its shape)" if names else ""
    return facts.new_finding(
        "DDP311",
        names or ("backward",),
        f"A tensor that backward needs was overwritten after the forward pass had read it{which}{cause}.",
        fix=fix,
    )


def explain_by_overwritten_parameters(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP311: parameters overwritten in place, whose names ddpcheck has added to torch's error."""
    overwritten = re.search(r"ddpcheck: overwritten in place: (.+)", facts.text)
    if overwritten is None or MODIFIED_IN_PLACE not in facts.text:
        return []
    first = facts.failures[0]
    names = overwritten[1].split(", ")
    return facts.known.names.new_finding(
        "DDP311",
        names,
        f"{'One of ' if len(names) > 1 else ''}{join_names(names, most=4)} was overwritten after the forward pass had "
        f"read it, and backward needs the previous value, in {first.place or 'the step'}.",
        ranks=facts.raised_on,
        evidence=[first.message],
        fix="Write it after the backward passes that need it (weight decay, say, in the optimizer), or read a clone.",
    )


def explain_error_of_overwritten_tensor(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP311: tensor of unknown name that is overwritten in place."""
    message = "A tensor that backward needs was overwritten after the forward pass"
    return facts.finding_of_error("DDP311", message, MODIFIED_IN_PLACE)


def explain_by_overwritten_buffers(facts: ReducerFacts) -> list[Finding]:
    """Report buffer broadcasts that overwrite values needed by backward of an earlier forward (DDP311).

    Runs after the explanation by hooks: hooks are observed, but broadcasts are only a likely cause.
    """
    buffers = list(facts.known.local.differing_buffers)
    forwards = max((item.wrapper_calls for item in facts.evidence), default=0)
    if not facts.mismatched or not facts.known.broadcasts_buffers or forwards < 2 or not buffers:
        return []
    return facts.mismatch(
        "DDP311",
        f"DDP broadcasts {join_names(buffers)} before each of {forwards} forwards, which overwrites values that the "
        "backward of the earlier forwards needs.",
        subjects=buffers,
        location=facts.known.names.location(buffers),
    )
