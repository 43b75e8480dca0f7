"""Which demonstration shows a finding, and what to expect of it.

This module is light: it never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Report


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One way to show a fault.

    Attributes:
        name: Of the function in `demonstrations/`.
        expect: What each rank says where the fault shows.
        facts: The function there that tells what is compared; empty for most.
        steps: "first" for those up to the first that shows the fault, "next" for one more, "all" of the report's, or
            "named" for none where the finding names no step.
        timeout: Seconds after which a collective gives up.
    """

    name: str
    expect: str
    facts: str = ""
    steps: str = "first"
    timeout: int = 30

    @property
    def compares_with_single(self) -> bool:
        return self.name == "global_gradient"


def _before(facts: str, what: str) -> Demonstration:
    return Demonstration("apart_before", f"{what}, where the ranks differ", facts, steps="named")


def _wrapped(facts: str, what: str) -> Demonstration:
    return Demonstration("apart", f"{what}, where the ranks differ", facts, steps="named")


def _trained(facts: str, what: str) -> Demonstration:
    return Demonstration("apart", f"{what} after a step, where the ranks differ", facts)


_UNUSED = Demonstration(
    "unused",
    "the names of parameters without gradient on this rank, by step, and what DDP makes of it: an error, a hang that "
    "the timeout ends, or silence where it is the last step or find_unused_parameters tolerates it",
    steps="next",
    timeout=20,
)
_ZERO = Demonstration("zero_gradient", "the names of parameters whose gradient is zero in every step", steps="all")
_GRADIENTS = Demonstration(
    "gradients_apart",
    "a gradient that should be the same on every rank after backward, and is not, or the error that DDP raises; and "
    "how many forward passes ran under no_sync where it was called: none, where that was in vain",
    timeout=20,
)
_AVERAGE = Demonstration(
    "local_average", "how far DDP's gradient is from the average of the ranks' own, or the error that DDP raises"
)
_GLOBAL = Demonstration("global_gradient", "how far DDP's gradient is from that of one process on the whole batch")
_RUNNING = Demonstration(
    "running",
    "where it failed, or in which steps it has no samples, or nothing more where it died; a rank that is stuck shows "
    "its Python stack after the timeout",
    steps="all",
    timeout=20,
)
_SHARDS = Demonstration("shards", "how many of its samples other ranks train on as well, and how many no rank has")
_LAYOUT = _before("layout", "a parameter or buffer: its position, shape, dtype, strides, mode and device")
_MODULES = _before("module_classes", "the class, settings and mode of a module")
_OPTIMIZER = _wrapped("optimizer_options", "an option of the optimizer")
_BUFFERS = _trained("buffer_values", "the value of a buffer")
_STATE = _trained("training_state", "parameters, buffers or optimizer state")

DEMONSTRATIONS = {
    **dict.fromkeys(
        ("DDP101", "DDP102", "DDP103", "DDP104", "DDP105", "DDP108", "DDP110", "DDP112", "DDP513"), _UNUSED
    ),
    "DDP106": Demonstration("unregistered", "the shapes of tensors that receive gradient and that DDP does not know"),
    **dict.fromkeys(("DDP107", "DDP307"), _ZERO),
    "DDP109": Demonstration("needless_search", "that DDP searches, and that nothing is unused", steps="all"),
    **dict.fromkeys(
        ("DDP201", "DDP202", "DDP203", "DDP204", "DDP205", "DDP206", "DDP207", "DDP209", "DDP211", "DDP212", "DDP213"),
        _LAYOUT,
    ),
    "DDP208": _wrapped("parameter_values", "the value of a parameter"),
    **dict.fromkeys(("DDP214", "DDP215"), _BUFFERS),
    "DDP216": _trained("unregistered_values", "a tensor that is neither parameter nor buffer"),
    "DDP221": _wrapped("wrapper_options", "an option of the wrapper"),
    **dict.fromkeys(("DDP222", "DDP511"), _MODULES),
    **dict.fromkeys(("DDP223", "DDP507"), _OPTIMIZER),
    **dict.fromkeys(("DDP111", "DDP301", "DDP501", "DDP502", "DDP509"), _GRADIENTS),
    "DDP503": replace(_GRADIENTS, steps="next"),
    **dict.fromkeys(("DDP302", "DDP311", "DDP406"), _AVERAGE),
    **dict.fromkeys(("DDP303", "DDP304", "DDP305", "DDP309", "DDP310", "DDP312", "DDP514", "DDP516"), _GLOBAL),
    **dict.fromkeys(("DDP306", "DDP508", "DDP515"), _STATE),
    "DDP308": Demonstration("repeat", "how far two runs of one step, from the same seeds, are apart"),
    **dict.fromkeys(("DDP401", "DDP402", "DDP403", "DDP404", "DDP405"), _RUNNING),
    "DDP407": Demonstration("packing", "the numbers that it sends, where other ranks send them in another order"),
    **dict.fromkeys(("DDP505", "DDP519"), _SHARDS),
    "DDP504": Demonstration(
        "untrained", "the names of parameters that have a gradient in every step and never move", steps="all"
    ),
    "DDP510": Demonstration("shared_draws", "how often it draws the same random numbers as all other ranks"),
    "DDP517": Demonstration("discarded", "the names of parameters whose gradient is zeroed before a step has used it"),
}


def demonstration_for(finding: Finding) -> Demonstration | None:
    """The demonstration that shows `finding`; None where no script does."""
    return DEMONSTRATIONS.get(finding.code)


def steps_for(finding: Finding, report: Report, chosen: Demonstration) -> int:
    """How many steps the demonstration takes."""
    whole = int(report.world.get("steps", 3))
    first = min(finding.steps, default=0) + 1
    return {
        "named": first if finding.steps else 0,
        "first": first,
        "next": max(first, min(first + 1, whole)),
        "all": whole,
    }[chosen.steps]


def world_size_for(finding: Finding, report: Report) -> int:
    """The smallest world in which the fault is known to show: the report's, or 2 where it takes no account of ranks."""
    reported = int(report.world.get("world_size", 2))
    of_all = finding.code in ("DDP101", "DDP102", "DDP103", "DDP106", "DDP107", "DDP108", "DDP109", "DDP110", "DDP112")
    return min(reported, 2) if of_all and not finding.ranks else reported


def tolerance_for(report: Report, chosen: Demonstration) -> float:
    """The relative error to allow: well above the tolerance of the report, well below its worst error."""
    if chosen.name == "repeat":
        return 1e-5  # what a sum in another order may change
    reference = "local" if chosen.name == "local_average" else "single-process"
    entries = [entry for entry in report.parity if entry.reference == reference]
    if not entries:
        return 1e-3
    allowed = max(10 * max(entry.tolerance for entry in entries), 1e-4)
    beyond = [entry.relative_error for entry in entries if entry.relative_error > entry.tolerance]
    return float(f"{min([allowed, max(beyond, default=1.0) / 3]):.1g}")
