"""DDP504 stale-optimizer: error

The optimizer holds tensors that are no longer the module's parameters, or lacks some that are.

Why: An optimizer built before the module was cast, moved or extended updates stale tensors. The model then does not
    change. (PyTorch docs, torch.optim: construct optimizers after moving the model.)
Fix: Give the optimizer all parameters, once the module has its final ones, device and dtype; freeze the others first.
Detected: ddpcheck compares the tensors of the optimizer with the parameters of the modules. A parameter with
    gradients is reported if no optimizer holds it and it does not change. Also reported: parameters that a custom
    optimizer (not from torch.optim) holds but never changes, while it does change others.
Ignore: If code other than an optimizer updates the parameters.
Line: The line that constructs the optimizer; in `ddpcheck report`, the line that constructs the parameter. For a
    custom optimizer that does not change a parameter: the call of its step.
Checks: report reducer; run replicas, optimizers; repro stale
Repeats: ModelParts, OptimizedParameters
Explains: quietly DDP214 DDP306 if of a copy
Example:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.head = nn.Linear(8, 3)             # right: replace the head first, then make the optimizer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.modules import WrappedModule
from ddpcheck.findings.evidence.replicas import ModelSplit
from ddpcheck.findings.evidence.script import OptimizerStep
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import Names, format_ranks, join_names, make_finding, new_finding, plural, plural_verb
from ddpcheck.rules.registry import rule
from ddpcheck.trace.optimizers import OptimizedParameters
from ddpcheck.trace.script_facts import PartSteps, WrapperTrace
from ddpcheck.trace.unwrapped_params import Steps, param_name

FEWEST_UNMOVED_STEPS = 3  # steps in which a parameter has a gradient and does not change
_ZERO = {"0", "0.0", None}  # learning rates under which nothing changes


def judge_foreign(steps: Sequence[Steps], moved: Mapping[str, bool], param_names: set[str]) -> list[Finding]:
    """DDP504: parameters that never change, if the optimizer's tensors are in no module."""
    unknown = steps[-1][0].loose_params if steps else ()
    idle = [name for name, changes in moved.items() if not changes and name not in param_names]
    if not unknown or not idle:
        return []
    return new_finding(
        "DDP504",
        [param_name(name) for name in idle],
        f"{join_names([param_name(name) for name in idle])} {plural_verb('is', 'are', idle)} in no optimizer and never "
        f"{plural_verb('moves', 'move', idle)}, and the optimizer holds {len(unknown)} tensors that no module has.",
        location=steps[0][0].built_at or steps[0][0].location,
        related={"optimizer steps": steps[0][0].location},
    )


@rule
def judge_params_without_optimizer(optimized: OptimizedParameters) -> list[Finding]:
    """DDP504: wrapped parameters with gradients that no optimizer holds or updates."""
    moved, params = optimized.moved, set(optimized.names)
    unheld = [name for name, changes in moved.items() if not changes and name not in params]
    if (
        not unheld
        or not (params or (optimized.lacks_gradients and len(unheld) == len(moved)))
        or any(not changes for name, changes in moved.items() if name in params)
    ):
        return []  # e.g. a learning rate of zero
    names = [*map(param_name, unheld)]
    are, get = plural_verb("is", "are", names), plural_verb("it gets", "they get", names)
    finding = make_finding(
        "DDP504",
        names,
        f"{join_names(names)} {are} in no optimizer: {get} gradients in each step, which the ranks average, and never "
        f"{plural_verb('moves', 'move', names)}.",
        location=optimized.made,
        evidence=[
            f"{len(unheld)} of {plural(len(moved), 'parameter')} with gradients",
            "the optimizer's parameters have no gradient in any step: they are of another model" if not params else "",
        ],
        severity=Severity.WARNING,
    )
    return name_wrapped_module([finding], optimized.wrappers, moved)


def judge_unchanged_params(steps: Sequence[Sequence[OptimizerStep]], moved: Mapping[str, bool]) -> list[Finding]:
    """DDP504: parameters that a custom optimizer holds and never updates."""
    if len(steps) < FEWEST_UNMOVED_STEPS or steps[0][0].options.get("module", "").startswith("torch."):
        return []
    first, options = steps[0][0], [rank_steps[0].options for rank_steps in steps]
    rates = {name for step_options in options for name in step_options if name.endswith(" lr")}
    counts = Counter(n for by_rank in steps for n in first.ddp_params if all(step.norms.get(n) for step in by_rank))
    names = [name for name, times in counts.items() if name in moved and times >= FEWEST_UNMOVED_STEPS]
    stuck = [param_name(name) for name in names if not moved[name]]
    if not stuck or len(stuck) == len(names) or any({opts.get(name) for opts in options} <= _ZERO for name in rates):
        return []
    kind = first.options.get("class", "the optimizer")
    return new_finding(
        "DDP504",
        stuck,
        f"{kind} holds {join_names(stuck)}, and never moves {plural_verb('it', 'them', stuck)}, although "
        f"{plural_verb('it gets', 'they get', stuck)} gradients in each step.",
        location=first.location,
        evidence=[f"{len(stuck)} of the {len(names)} parameters that it holds and that get gradients", "on every rank"],
        severity=Severity.WARNING,
        fix=f"If ranks share the work of {kind}, each parameter has to be updated on one rank, and the update has to "
        "reach all ranks: let every rank take its share by its rank, and wait for the last collective.",
    )


def judge_optimizer(
    wrapped: Sequence[WrappedModule], evidence: Sequence[DdpStepEvidence], names: Names
) -> list[Finding]:
    """DDP504: parameters with gradients in every step that no optimizer holds or updates.

    Skips parameters that change: an optimizer may keep its own copies and write the values back.
    """

    def is_unchanged(name: str, item: DdpStepEvidence) -> bool:
        before, after = item.parameters_after_backward.get(name), item.parameters.get(name)
        return before is not None and before == after and bool(item.gradients.get(name, 0))

    unheld = [n for n in wrapped[0].not_in_optimizer if evidence and all(is_unchanged(n, item) for item in evidence)]
    if not unheld:
        return []
    foreign = wrapped[0].foreign_tensors
    is_in, moves = plural_verb("is in", "are in", unheld), plural_verb("moves", "move", unheld)
    return names.new_finding(
        "DDP504",
        unheld,
        f"{join_names(names.subjects(unheld))} {is_in} no group of the optimizer and never {moves}.",
        evidence=[f"the optimizer holds {foreign} tensors that are no parameters of the module"] if foreign else [],
        severity=Severity.ERROR if foreign else Severity.WARNING,
    )


def judge_parts_without_optimizer(steps: Sequence[PartSteps], ranks: Sequence[int], split: ModelSplit) -> list[Finding]:
    """DDP504: an optimizer constructed before the model was split, with the old parameters."""
    for rank_steps in steps[-1:]:
        first = rank_steps[0]
        if all(step.unoptimized and not step.split for step in rank_steps):
            return new_finding(
                "DDP504",
                first.unoptimized,
                f"The optimizer holds none of the {plural(len(first.unoptimized), 'parameter')} that "
                f"{plural_verb('is', 'are', first.unoptimized)} split over {format_ranks(ranks)}: it has the previous "
                "ones, which are no longer in a module.",
                location=first.built_at or first.location,
                related={"model split": split.location, "optimizer steps": first.location},
                fix="Call parallelize_module before the optimizer is constructed.",
            )
    return []


def name_wrapped_module(
    findings: Sequence[Finding], wrappers: Sequence[WrapperTrace], moved: Mapping[str, bool]
) -> list[Finding]:
    """Name the wrapped module in findings on unchanged parameters, if there are several wrappers."""
    named = []
    for finding in findings:
        origins = [
            f"of {wrapper.made.module}, which is wrapped at {wrapper.made.location}"
            for wrapper in wrappers
            if all(moved.get(f"{wrapper.number}/{name}") is False for name in finding.subjects)
        ]
        is_one_of_several = len(origins) == 1 < len(wrappers)
        named.append(replace(finding, evidence=(*origins, *finding.evidence)) if is_one_of_several else finding)
    return named
