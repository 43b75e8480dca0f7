"""DDP513 static-graph-violated: error, stops_ddp, no_gradient, conditional_use, stops_run

static_graph=True is set, and the set of used parameters or their order changes.

Why: With static_graph=True, DDP records in the first iteration how often each gradient arrives, and relies on it. If
    the graph changes, the ranks hang, DDP raises, or gradients are not reduced. (PyTorch docs,
    DistributedDataParallel, static_graph.)
Fix: Remove static_graph=True and use find_unused_parameters=True, or make every step use the same parameters.
Detected: DDP513 is reported if static_graph=True is set, and backward reaches different parameters in different
    steps. It is also reported if DDP itself raises because the graph has changed.
Ignore: Never. DDP relies on the first iteration.
Line: The branch or operation at which the path from the parameter to the loss ends; else the line that constructs
    the parameter. If DDP raises: the call that raises.
Checks: report parameters; run loop; repro missing
Explains: DDP306 if same subjects; DDP301 DDP302 DDP303 DDP304 DDP305 DDP312; DDP516 if only the loss; quietly DDP522
    if of graphs
Reports: pytorch/pytorch#58111 pytorch/pytorch#97030 deepinsight/insightface#2288
"""

from __future__ import annotations

from ddpcheck.findings.report import Finding
from ddpcheck.trace.failures import GRAPH_CHANGED, FailureFacts, WrapperErrorFacts
from ddpcheck.trace.parameters import ConditionalUse


def judge_static_graph(use: ConditionalUse) -> list[Finding]:
    """DDP513: parameters missing on every rank in some steps under static_graph=True."""
    return use.new_finding("DDP513", use.step_message, use.describe_absences())


def explain_graph_changed(facts: FailureFacts) -> list[Finding]:
    """DDP513: graph that differs from the first step under static_graph=True."""
    return facts.new_finding(
        "DDP513",
        ("backward",),
        "The graph differs from the one that DDP recorded in the first step, which static_graph=True does not allow.",
    )


def explain_error_of_changed_graph(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP513: DDP's error on a changed graph, if the unwrapped module completes the step."""
    message = "The graph is not the one that DDP recorded in the first step"
    return facts.finding_of_error("DDP513", message, GRAPH_CHANGED)
