"""DDP112 opaque-output: error, stops_ddp, stops_run, keeps_results

forward returns an object in which DDP finds no tensor.

Why: DDP looks for tensors in the output if it is a tensor, list, tuple, dict or dataclass. In any other object, DDP
    finds none. With find_unused_parameters=True, DDP then treats every parameter as unused. static_graph=True fails
    too. There, DDP finds no tensors in dataclasses and subclasses of dict either, unless they are registered as
    pytree nodes. (PyTorch docs, DistributedDataParallel, forward outputs; torch/nn/parallel/distributed.py,
    _tree_flatten_with_rref.)
Fix: Return a tensor, or a tuple, list or dict of tensors, from forward. Without static_graph, a dataclass of tensors
    works too.
Detected: ddpcheck looks for tensors in the output of forward in the same way as DDP. DDP112 is reported if there are
    none, although parameters contribute to the loss.
Ignore: If neither find_unused_parameters nor static_graph is set: DDP then needs no tensors.
Line: In `ddpcheck run`, the line that constructs the wrapper. `ddpcheck report` names no line.
Checks: report parameters; run parameters; repro missing
Explains: DDP301 DDP302 DDP406
Example:
    class Output:                            # right: decorate it with @dataclass
        def __init__(self, logits):
            self.logits = logits

    def forward(self, x):
        return Output(self.body(x))
"""

from __future__ import annotations

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import new_finding
from ddpcheck.trace.parameters import ParameterFacts


def judge_opaque_output(facts: ParameterFacts) -> list[Finding]:
    """DDP112: forward outputs in which DDP finds no tensor."""
    output_type = next((item.output_type for item in facts.evidence if item.output_type), "")
    if not output_type or not facts.wrapper.tolerates_unused or not facts.wrapper.is_ddp:
        return []
    static = facts.wrapper.static_graph  # static_graph=True disables the search for unused parameters
    return new_finding(
        "DDP112",
        (output_type,),
        f"forward returns an object of class {output_type}, in which DDP finds no tensor: "
        f"{'static_graph' if static else 'find_unused_parameters'}=True depends on the tensors that DDP finds.",
        evidence=(
            "with static_graph=True DDP looks into tensors, lists, tuples, dicts and registered pytree nodes only, not "
            "into dataclasses or subclasses of dict: no gradient is averaged"
            if static
            else "DDP looks into tensors, lists, tuples, dicts and dataclasses only",
        ),
        fix="Return a tensor, tuple, list or dict of tensors from forward." if static else "",
    )
