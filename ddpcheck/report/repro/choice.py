"""Which demonstration shows a finding, and what to expect of it."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.findings.report import Finding, Report


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One way to show a fault.

    Attributes:
        codes: Of the rules that it shows.
        name: Of the function in `demonstrations/`.
        expect: What each rank says where the fault shows.
        facts: The function there that tells what is compared; empty for most.
        steps: "first" for those up to the first that shows the fault, "next" for one more, "all" of the report's, or
            "named" for none where the finding names no step.
        timeout: Seconds after which a collective gives up.
    """

    codes: str
    name: str
    expect: str
    facts: str = ""
    steps: str = "first"
    timeout: int = 30


_GRADIENTS = (
    "a gradient that should be the same on every rank after backward, and is not, or the error that DDP raises; and "
    "how many forward passes ran under no_sync where it was called: none, where that was in vain"
)
_LAYOUT = "a parameter or buffer: its position, shape, dtype, strides, mode and device"
_DIFFER = ", where the ranks differ"
_AFTER = f" after a step{_DIFFER}"

_ALL = (
    Demonstration(
        "DDP101 DDP102 DDP103 DDP104 DDP105 DDP108 DDP110 DDP112 DDP513",
        "unused",
        "the names of parameters without gradient on this rank, by step, and what DDP makes of it: an error, a hang "
        "that the timeout ends, or silence where it is the last step or find_unused_parameters tolerates it",
        steps="next",
        timeout=20,
    ),
    Demonstration("DDP106", "unregistered", "the shapes of tensors that receive gradient and that DDP does not know"),
    Demonstration(
        "DDP107 DDP307", "zero_gradient", "the names of parameters whose gradient is zero in every step", steps="all"
    ),
    Demonstration("DDP109", "needless_search", "that DDP searches, and that nothing is unused", steps="all"),
    Demonstration(
        "DDP201 DDP202 DDP203 DDP204 DDP205 DDP206 DDP207 DDP209 DDP211 DDP212 DDP213",
        "apart_before",
        _LAYOUT + _DIFFER,
        "layout",
        steps="named",
    ),
    Demonstration(
        "DDP222 DDP511",
        "apart_before",
        f"the class, settings and mode of a module{_DIFFER}",
        "module_classes",
        steps="named",
    ),
    Demonstration("DDP208", "apart", f"the value of a parameter{_DIFFER}", "parameter_values", steps="named"),
    Demonstration("DDP221", "apart", f"an option of the wrapper{_DIFFER}", "wrapper_options", steps="named"),
    Demonstration("DDP223 DDP507", "apart", f"an option of the optimizer{_DIFFER}", "optimizer_options", steps="named"),
    Demonstration("DDP214 DDP215", "apart", f"the value of a buffer{_AFTER}", "buffer_values"),
    Demonstration("DDP216", "apart", f"a tensor that is neither parameter nor buffer{_AFTER}", "unregistered_values"),
    Demonstration("DDP306 DDP508 DDP515", "apart", f"parameters, buffers or optimizer state{_AFTER}", "training_state"),
    Demonstration("DDP111 DDP301 DDP501 DDP502 DDP509", "gradients_apart", _GRADIENTS, timeout=20),
    Demonstration("DDP503", "gradients_apart", _GRADIENTS, steps="next", timeout=20),
    Demonstration(
        "DDP302 DDP311 DDP406",
        "local_average",
        "how far DDP's gradient is from the average of the ranks' own, or the error that DDP raises",
    ),
    Demonstration(
        "DDP303 DDP304 DDP305 DDP309 DDP310 DDP312 DDP514 DDP516",
        "global_gradient",
        "how far DDP's gradient is from that of one process on the whole batch",
    ),
    Demonstration("DDP308", "repeat", "how far two runs of one step, from the same seeds, are apart"),
    Demonstration(
        "DDP401 DDP402 DDP403 DDP404 DDP405",
        "running",
        "where it failed, or in which steps it has no samples, or nothing more where it died; a rank that is stuck "
        "shows its Python stack after the timeout",
        steps="all",
        timeout=20,
    ),
    Demonstration("DDP407", "packing", "the numbers that it sends, where other ranks send them in another order"),
    Demonstration(
        "DDP504", "untrained", "the names of parameters that have a gradient in every step and never move", steps="all"
    ),
    Demonstration(
        "DDP505 DDP519", "shards", "how many of its samples other ranks train on as well, and how many no rank has"
    ),
    Demonstration("DDP510", "shared_draws", "how often it draws the same random numbers as all other ranks"),
    Demonstration("DDP517", "discarded", "the names of parameters whose gradient is zeroed before a step has used it"),
)
DEMONSTRATIONS = {code: one for one in _ALL for code in one.codes.split()}
"""By code of a finding; what is not here no script shows."""


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
