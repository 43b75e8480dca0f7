"""DDP222 module-structure-or-mode: error, stops_run

The classes of the modules, or their mode (train or eval), differ between ranks.

Why: Equal parameters do not make an equal function. For example, one rank has a ReLU and another a GELU, or dropout
    is switched off on one rank. DDP then silently averages gradients of different models.
Fix: Build the same structure on every rank, and call train() or eval() on every rank at the same places.
Detected: Before DDP's first collective, the ranks compare their modules by name: the class, the options and the mode
    (train or eval). In later steps, the ranks compare the mode again. A module that only some ranks compile is a
    warning.
Ignore: If modules of different ranks compute different functions on purpose.
Line: The line that creates the first module. If the mode differs, the last call of eval() on the ranks that evaluate.
Checks: report consistency; run replicas; repro layouts
Explains: DDP214 DDP215 DDP216 DDP301 DDP302 DDP304 DDP305 DDP312 DDP516; quietly DDP522 if of graphs
Example:
    if dist.get_rank() == 0:
        evaluate(model)                      # calls model.eval() and does not go back; right: model.train() after it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import (
    format_by_rank,
    format_ranks,
    group_by,
    join_names,
    minority_of_any,
    new_finding,
    plain_module,
    plural_verb,
    ranks_or_all,
)
from ddpcheck.trace.replicas import Changes, differing_values

MODE = "training mode"  # attribute that differs, in messages on train() versus eval()


def judge_compiled_modules(descriptions: Sequence[ModuleDescription]) -> list[Finding]:
    """DDP222: modules that only some ranks compile by `torch.compile`, which nests each as `_orig_mod`."""
    compiled = [
        frozenset(plain_module(m[0]) for m in description.modules if m[0].rpartition(".")[2] == "_orig_mod")
        for description in descriptions
    ]
    names = sorted(frozenset.union(*compiled) - frozenset.intersection(*compiled))
    if not names:
        return []
    ranks = [rank for rank, modules in enumerate(compiled) if not modules.isdisjoint(names)]
    return new_finding(
        "DDP222",
        [name or "(the model)" for name in names],
        f"torch.compile compiles {join_names([name or 'the model' for name in names])} on {format_ranks(ranks)} only.",
        ranks=ranks_or_all(ranks, len(compiled)),
        evidence=["the keys of its state_dict have a different prefix there, and compiled code may round differently"],
        severity=Severity.WARNING,
        fix="Compile it on every rank, or on none.",
    )


def judge_modules(descriptions: Sequence[ModuleDescription], *, explained: bool) -> list[Finding]:
    modules = [description.modules for description in descriptions]
    classes = differing_values([{name: f"{kind}({options})" for name, kind, options, _ in mods} for mods in modules])
    modes = differing_values([{m[0]: "training" if m[3] else "evaluating" for m in mods} for mods in modules])
    inner = {name for name in modes for outer in modes if name != outer and (not outer or name.startswith(f"{outer}."))}
    findings = []
    for noun, mismatches in (
        ("class or options", {} if explained else classes),  # a reported mismatch also shows in the options
        (MODE, {name: values for name, values in modes.items() if name not in inner}),
    ):
        if names := list(mismatches):
            findings += new_finding(
                "DDP222",
                [name or "(the model)" for name in names],
                f"{join_names([name or 'the model' for name in names])} {plural_verb('does', 'do', names)} not have "
                f"the same {noun} on every rank.",
                ranks=minority_of_any(mismatches.values())
                if noun != MODE
                else _ranks_in_rarer_mode(list(mismatches.values())),
                evidence=format_by_rank({name or "(the model)": values for name, values in mismatches.items()}),
            )
    return findings


def _ranks_in_rarer_mode(modes_by_name: Sequence[Sequence[str]]) -> list[int]:
    """Return the ranks in the rarer mode or, on a tie, in eval mode."""
    odd = set(minority_of_any(modes_by_name))
    for modes in modes_by_name:
        if 2 * modes.count("evaluating") == len(modes):
            odd -= {rank for rank, mode in enumerate(modes) if mode == "training"}
            odd |= {rank for rank, mode in enumerate(modes) if mode == "evaluating"}
    return sorted(odd)


def relocate(finding: Finding, changes: Changes, _wrapped_at: Location | None) -> Finding:
    """Relocate a finding on train/eval mode to the `eval()` call that set the mode."""
    if MODE not in finding.message:
        return finding
    last_step = finding.steps[0] if finding.steps else 0
    calls = group_by(
        (
            (rank, change)
            for rank, rank_changes in enumerate(changes)
            for change in rank_changes
            if change.what == "mode" and change.step <= last_step and _contains_all(change.names[0], finding.subjects)
        ),
        lambda call: call[1].location,
    )
    exact = {line: pairs for line, pairs in calls.items() if {rank for rank, _ in pairs} == set(finding.ranks)}
    common = {line: pairs for line, pairs in calls.items() if len({rank for rank, _ in pairs}) == len(changes)}
    if not (exact or len(common) == 1):
        return finding
    line = max(exact or common, key=lambda key: calls[key][0][1].step)
    ranks = f"{format_ranks(finding.ranks)} only" if exact else "every rank"
    message = f"eval() is called there, on {ranks}; {format_ranks(finding.ranks)} had not called train() since"
    return replace(finding, location=line, evidence=(*finding.evidence, message))


def _contains_all(path: str, subjects: Iterable[str]) -> bool:
    return not path or all(subject == path or subject.startswith(f"{path}.") for subject in subjects)


def add_step(finding: Finding, step: int) -> Finding:
    """Add the step to a DDP222 that was not found in the first comparison."""
    return replace(finding, steps=(step,)) if finding.code == "DDP222" else finding
