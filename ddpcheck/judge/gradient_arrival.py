"""DDP112 and 406: gradients that arrive twice, or that DDP's search for unused parameters does not expect.

This module is light: it never imports torch.
"""

from __future__ import annotations

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import join_names, make_finding
from ddpcheck.judge.parameter_facts import ParameterFacts


def judge_opaque_output(facts: ParameterFacts) -> list[Finding]:
    """DDP112: DDP finds no tensor in what forward returned, and so searches nothing."""
    output_type = next((item.output_type for item in facts.evidence if item.output_type), "")
    if not output_type or not facts.wrapper.tolerates_unused or not facts.wrapper.is_ddp:
        return []
    return [
        make_finding(
            "DDP112",
            (output_type,),
            f"forward returns an object of class {output_type}, in which DDP finds no tensor: "
            f"{facts.tolerating_option}=True works from what it finds there.",
            evidence=("DDP looks into tensors, lists, tuples, dicts and dataclasses only",),
        )
    ]


def judge_hidden_parameters(facts: ParameterFacts) -> list[Finding]:
    """DDP406: DDP's search takes parameters for unused that contribute."""
    hidden = list(dict.fromkeys(name for item in facts.evidence for name in item.hidden_from_ddp))
    if not hidden or not facts.wrapper.find_unused_parameters or not facts.wrapper.is_ddp:
        return []
    subjects = facts.names.subjects(hidden)
    return [
        make_finding(
            "DDP406",
            subjects,
            f"DDP takes {join_names(subjects)} for unused and marks them ready, and then their gradients arrive.",
            location=facts.names.location(hidden),
            evidence=(
                "they are used in a re-entrant checkpoint, which hides them from the search for unused parameters"
                if any(item.reentrant for item in facts.evidence)
                else "they reach the loss by another way than what forward returned",
            ),
        )
    ]


def judge_repeated_arrival(facts: ParameterFacts) -> list[Finding]:
    """DDP406: gradients that arrive more than once in a backward pass."""
    arrivals: dict[str, int] = {}
    for item in facts.evidence:
        for name, count in item.arrivals.items():
            arrivals[name] = max(count, arrivals.get(name, 0))
    if not arrivals or facts.wrapper.static_graph:
        return []
    subjects = facts.names.subjects(arrivals)
    return [
        make_finding(
            "DDP406",
            subjects,
            f"The gradient of {join_names(subjects)} arrives {max(arrivals.values())} times in one backward; DDP "
            "reduces it when it arrives first.",
            location=facts.names.location(list(arrivals)),
            evidence=("re-entrant checkpoints (use_reentrant=True) run a backward of their own for each use",)
            if any(item.reentrant for item in facts.evidence)
            else (),
            fix="Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or static_graph=True.",
        )
    ]
