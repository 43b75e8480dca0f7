"""DDP106 unregistered-parameter: error, stops_run, keeps_results

A leaf tensor receives a gradient, but is not a parameter of the wrapped module.

Why: DDP knows only the parameters that module.parameters() returned when DDP was constructed. It misses parameters in
    a Python list or dict, raw tensors with requires_grad, and parameters that are added after wrapping. DDP neither
    broadcasts nor averages these, and every rank silently trains its own copy. (PyTorch docs,
    DistributedDataParallel: all parameters must be registered before wrapping, and none added or removed later.)
Fix: Register it before wrapping: nn.ModuleList, nn.ModuleDict, nn.ParameterList or nn.Parameter.
Detected: ddpcheck compares the leaf tensors that receive a gradient in backward with the parameters of the wrapped
    module. A leaf tensor that is not a parameter is reported.
Ignore: If you average the gradient yourself, or if the tensor is an input and its gradient is only inspected.
Line: The line that assigns the tensor; in `ddpcheck run`, if it is unknown, the line that constructs the wrapper.
Checks: report parameters; run parameters; repro unregistered
Explains: DDP301 DDP302 DDP303 DDP306 DDP515 if same subjects; quietly DDP516 if only the loss; DDP301 DDP302 DDP303
    DDP305 DDP306 if made in forward; quietly DDP304 DDP312 if made in forward
Color: #009E73
Example:
    self.heads = [nn.Linear(8, 2) for _ in range(3)]           # a plain list hides them from DDP
    # right: self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))
"""

from __future__ import annotations

import math

from ddpcheck.findings.evidence.steps import UnregisteredTensor
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import group_by, join_names, new_finding, plural, plural_verb, ranks_or_all
from ddpcheck.trace.parameters import ParameterFacts

MADE_IN_FORWARD = "made in forward"  # tag of DDP106 findings on parameters created after DDP was constructed
_FIX_IN_FORWARD = (
    "Make it in __init__; if its size is not known there, in a lazy module that runs forward before wrapping."
)


def judge_unregistered(facts: ParameterFacts) -> list[Finding]:
    """DDP106: tensors that receive gradient but are no parameters of the wrapped module."""
    tensors: dict[str, UnregisteredTensor] = {}
    ranks: dict[str, set[int]] = {}
    for item in facts.evidence:
        for leaf in item.unregistered:
            tensors.setdefault(leaf.name, leaf)
            ranks.setdefault(leaf.name, set()).add(item.rank)

    def holder_and_ranks(leaf: UnregisteredTensor) -> tuple[bool, str, tuple[int, ...]]:
        name = leaf.name
        holder = name.split("[")[0] if "[" in name else name.rpartition(".")[0] or name
        return leaf.created_in_forward, holder, tuple(sorted(ranks[name]))

    findings = []
    for (created_in_forward, _, on_ranks), leaves in group_by(tensors.values(), holder_and_ranks).items():
        names, wrapper_name = [leaf.name for leaf in leaves], facts.wrapper.named
        is_created, receives = plural_verb("is", "are", names), plural_verb("receives", "receive", names)
        text = f"{join_names(names)} {receives} gradient without being registered as a parameter of the model"
        if created_in_forward:
            call = "called" if wrapper_name == "fully_shard" else "constructed"
            text = f"{join_names(names)} {is_created} created in the forward pass, after {wrapper_name} has been {call}"
        elif len(leaves) == 1 and leaves[0].kind:
            text = f"The {leaves[0].kind} {text}"
        elements = sum(math.prod(leaf.shape) for leaf in leaves)
        findings += new_finding(
            "DDP106",
            names,
            f"{text}, so {wrapper_name} never synchronises {plural_verb('it', 'them', names)}.",
            ranks=ranks_or_all(on_ranks, facts.world_size),
            location=next((leaf.location for leaf in leaves if leaf.location), None),
            evidence=(f"{plural(len(names), 'tensor')}, {elements} elements",),
            fix=_FIX_IN_FORWARD if created_in_forward else "",
            tags=(MADE_IN_FORWARD,) if created_in_forward else (),
        )
    return findings
