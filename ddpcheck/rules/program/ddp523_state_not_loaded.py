"""DDP523 state-not-loaded: error

load_state_dict(strict=False) loads nothing, because the keys of the state have a different prefix.

Why: The keys of a state taken from a DistributedDataParallel begin with 'module.'. The keys of a compiled module
    begin with '_orig_mod.'. With strict=False torch loads the keys that match and ignores the others. If no key
    matches, training starts from the initial values of the model. (PyTorch docs, torch.nn.Module.load_state_dict.)
Fix: Take and load the state of the same module (`ddp.module` on both sides), or remove the prefix:
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, 'module.'). Without strict=False, torch
    raises.
Detected: `ddpcheck run` compares the keys of each loaded state with those of the module. A load is reported if no key
    matches and most keys would match with a different prefix. It is not reported if a matching state is loaded before
    the next optimizer step or the end of the script.
Ignore: If the load does nothing on purpose.
Line: The call of load_state_dict.
Checks: run files
Example:
    state = torch.load("checkpoint.pt")                # of ddp.state_dict(): "module.head.weight"
    ddp.module.load_state_dict(state, strict=False)    # right: ddp.load_state_dict(state)
"""

from __future__ import annotations

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import new_finding, plural, ranks_or_all
from ddpcheck.rules.registry import rule
from ddpcheck.trace.program import Program


@rule
def judge_loads(program: Program) -> list[Finding]:
    """DDP523: `load_state_dict(strict=False)` calls without a matching key."""
    loads = program.loads
    first = next((call for calls in loads for call in calls), None)
    if first is None:
        return []
    ranks = [rank for rank, calls in enumerate(loads) if any(call.location == first.location for call in calls)]
    source, target = ("state", "module") if first.of_state else ("module", "state")
    return new_finding(
        "DDP523",
        (first.name,),
        f"load_state_dict(strict=False) loads nothing into {first.name}, which stays unchanged: the keys of the "
        f"{source} begin with {first.prefix!r}, those of the {target} do not.",
        ranks=ranks_or_all(ranks, len(loads)),
        location=first.location,
        evidence=[f"none of the {plural(first.keys, 'key')} of {first.name} is in the state"],
    )
