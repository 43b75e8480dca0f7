"""DDP111 ignored-parameter: error, stops_run, keeps_results

A parameter is trained, but the wrapper is configured to ignore it.

Why: _set_params_and_buffers_to_ignore_for_model sets a list of names. DDP neither broadcasts nor reduces the
    parameters with these names. Each rank steps with its own gradient, and the copies silently diverge.
Fix: Remove its name from the list, freeze it with requires_grad_(False), or reduce its gradient yourself.
Detected: ddpcheck reads the list of ignored names from the module. A parameter in this list is reported if its
    gradient differs between ranks. Parameters that belong to one rank only, such as experts of a mixture, are not
    reported. ddpcheck recognises them: they reach the loss only through an all_to_all that autograd differentiates.
Ignore: If you average its gradient yourself. If each rank should train its own copy, name it in rank_parameters.
Line: The line that constructs the parameter; in `ddpcheck run` with fully_shard, the line that replaces a sharded
    module, else the call of fully_shard.
Checks: report reducer; run parameters, optimizers; repro reduction
Explains: DDP208 DDP301 DDP306
Color: #5D3A9B
Example:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["head.weight"])
    DistributedDataParallel(model)           # right: leave out names of parameters that train
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import join_names, new_finding, plural_verb
from ddpcheck.trace.gradients import ReducerFacts
from ddpcheck.trace.unwrapped_params import VALUES_DIVERGED, Steps


def explain_by_ignored_parameters(facts: ReducerFacts) -> list[Finding]:
    """Report trained parameters that the wrapper ignores or no `fully_shard` call covers (DDP111)."""
    names = facts.known.names
    ignored = [name for name in facts.unequal if name in facts.known.wrapper.ignored]
    if not ignored:
        return []
    subjects = names.subjects(ignored)
    is_trained = f"{join_names(subjects)} {plural_verb('is', 'are', subjects)} trained"
    them, their = plural_verb("it", "them", subjects), plural_verb("its", "their", subjects)
    if not facts.known.wrapper.sharded:
        return names.new_finding(
            "DDP111",
            ignored,
            f"{is_trained}, but the wrapper is configured to ignore {them}: {their} gradients are not averaged and "
            "differ between the ranks.",
        )
    return names.new_finding(
        "DDP111",
        ignored,
        f"{is_trained}, and no group of fully_shard holds {them}: nothing averages {their} gradients, which differ "
        "between the ranks.",
        fix="Call fully_shard on the root module as well, last, and without this parameter in ignored_params.",
    )


def explain_by_missing_group(
    names: Sequence[str], steps: Sequence[Steps], sharded_at: Location, changes: Sequence[ModuleChanged]
) -> list[Finding]:
    matches = [mod for mod in changes if all(f".{name}".endswith(tuple(f".{n}" for n in mod.names)) for name in names)]
    change = next((mod for mod in matches if mod.location is not None), None)
    them = plural_verb("it", "them", names)
    assignment = "" if change is None else f"{change.how} is assigned there, and replaces a sharded module"
    return new_finding(
        "DDP111",
        names,
        f"{join_names(names)} {plural_verb('is', 'are', names)} trained, and no group of fully_shard holds {them}: "
        f"every rank trains {them} on its own gradients.",
        location=sharded_at if change is None else change.location,
        evidence=[assignment, VALUES_DIVERGED],
        related={"optimizer steps": steps[0][0].location},
        fix="Call fully_shard on the root module as well, last, and without these in ignored_params."
        if change is None
        else "Replace modules before fully_shard.",
    )
