"""Which demonstration shows a finding, and what to expect of it.

This module is light: it never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddpcheck.findings.report import Finding, Report


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One way to show a fault.

    Attributes:
        name: Of the function in `demonstrations/`.
        expect: What each rank says where the fault shows.
        facts: The function of `demonstrations/facts.py` that tells what is compared; empty for most.
        all_steps: Whether every step of the report is needed, and not only those up to the first that shows it.
        more_steps: Steps after the first that shows it.
        timeout: Seconds after which a collective gives up.
    """

    name: str
    expect: str
    facts: str = ""
    all_steps: bool = False
    more_steps: int = 0
    timeout: int = 30

    @property
    def compares_with_single(self) -> bool:
        return self.name == "global_gradient"


_NEVER = Demonstration(
    "what_ddp_says",
    "the names of parameters without gradient, and what DDP says of it in the next step: 'Expected to have finished "
    "reduction in the prior iteration', where find_unused_parameters does not keep it silent",
    more_steps=1,
)
_RAISES = Demonstration("what_ddp_says", "the error that DDP raises", more_steps=1)
_SOMETIMES = Demonstration(
    "sometimes_used",
    "the names of parameters without gradient on this rank, by step, and what DDP makes of it: an error, a hang that "
    "the timeout ends, or silence where it is the last step",
    more_steps=1,
    timeout=20,
)
_ZERO = Demonstration("zero_gradient", "the names of parameters whose gradient is zero in every step", all_steps=True)
_GRADIENTS = Demonstration(
    "gradients_apart", "a gradient that should be the same on every rank after backward, and is not", timeout=20
)
_AVERAGE = Demonstration(
    "local_average", "how far DDP's gradient is from the average of the ranks' own, or the error that DDP raises"
)
_GLOBAL = Demonstration("global_gradient", "how far DDP's gradient is from that of one process on the whole batch")
_RUNNING = Demonstration(
    "running",
    "where it failed, or nothing more where it died; a rank that is stuck shows its Python stack after the timeout",
    all_steps=True,
    timeout=20,
)
_SHARDS = Demonstration("shards", "how many of its samples other ranks train on as well, and how many no rank has")


def _before(facts: str, what: str) -> Demonstration:
    return Demonstration("apart_before", f"{what}, where the ranks differ", facts)


def _wrapped(facts: str, what: str) -> Demonstration:
    return Demonstration("apart_wrapped", f"{what}, where the ranks differ", facts)


def _trained(facts: str, what: str) -> Demonstration:
    return Demonstration("apart_trained", f"{what} after a step, where the ranks differ", facts)


_OPTIONS = _wrapped("wrapper_options", "an option of the wrapper")
_OPTIMIZER = _wrapped("optimizer_options", "an option of the optimizer")
_MODULES = _before("module_classes", "the class, settings and mode of a module")
_STATE = _trained("training_state", "parameters, buffers or optimizer state")

DEMONSTRATIONS = {
    **dict.fromkeys(("DDP101", "DDP102", "DDP103"), _NEVER),
    **dict.fromkeys(("DDP104", "DDP105", "DDP513"), _SOMETIMES),
    "DDP106": Demonstration(
        "unregistered", "the shapes of tensors that receive gradient and that DDP does not know", more_steps=1
    ),
    "DDP107": _ZERO,
    "DDP108": Demonstration("missing_gradient", "the names of parameters whose gradient is None after backward"),
    "DDP109": Demonstration("needless_search", "that DDP searches, and that nothing is unused", all_steps=True),
    **dict.fromkeys(("DDP110", "DDP112"), _RAISES),
    "DDP111": _GRADIENTS,
    "DDP201": _before("parameter_names", "a parameter"),
    "DDP202": _before("parameter_positions", "the position of a parameter"),
    "DDP203": _before("parameter_shapes", "the shape of a parameter"),
    "DDP204": _before("parameter_dtypes", "the dtype of a parameter"),
    "DDP205": _before("parameter_strides", "the strides of a parameter"),
    "DDP206": _before("parameter_modes", "whether a parameter requires grad"),
    "DDP207": _before("parameter_devices", "the device of a parameter"),
    "DDP208": _wrapped("parameter_values", "the value of a parameter"),
    "DDP209": _before("parameter_ties", "which parameters are one"),
    "DDP211": _before("buffer_names", "a buffer"),
    "DDP212": _before("buffer_positions", "the position of a buffer"),
    "DDP213": _before("buffer_shapes", "the shape or dtype of a buffer"),
    "DDP214": _trained("buffer_values", "the value of a buffer"),
    "DDP215": _trained("buffer_values", "the value of a buffer"),
    "DDP216": _trained("unregistered_values", "a tensor that is neither parameter nor buffer"),
    "DDP221": _OPTIONS,
    "DDP222": _MODULES,
    "DDP223": _OPTIMIZER,
    **dict.fromkeys(("DDP301", "DDP501", "DDP509"), _GRADIENTS),
    **dict.fromkeys(("DDP302", "DDP311", "DDP406"), _AVERAGE),
    **dict.fromkeys(("DDP303", "DDP304", "DDP305", "DDP309", "DDP310", "DDP312", "DDP514", "DDP516"), _GLOBAL),
    "DDP306": _STATE,
    "DDP307": _ZERO,
    "DDP308": Demonstration("repeat", "how far two runs of one step, from the same seeds, are apart"),
    **dict.fromkeys(("DDP401", "DDP402", "DDP403", "DDP404"), _RUNNING),
    "DDP405": replace(_RUNNING, name="uneven"),
    "DDP407": Demonstration("packing", "the numbers that it sends, where other ranks send them in another order"),
    "DDP502": Demonstration(
        "no_sync",
        "gradients that should be the same on every rank and are not, and how many forward passes ran under no_sync: "
        "none, where it was called in vain",
    ),
    "DDP503": Demonstration(
        "gradients_apart",
        "a gradient that is not the same on every rank, or the error that DDP raises in the next step",
        more_steps=1,
        timeout=20,
    ),
    **dict.fromkeys(("DDP505", "DDP519"), _SHARDS),
    "DDP504": Demonstration(
        "untrained", "the names of parameters that have a gradient in every step and never move", all_steps=True
    ),
    "DDP507": _OPTIMIZER,
    "DDP510": Demonstration("shared_draws", "how often it draws the same random numbers as all other ranks"),
    "DDP511": _MODULES,
    **dict.fromkeys(("DDP508", "DDP515"), _STATE),
    "DDP517": Demonstration("discarded", "the names of parameters whose gradient is zeroed before a step has used it"),
}


def demonstration_for(finding: Finding) -> Demonstration | None:
    """The demonstration that shows `finding`; None where no script does."""
    return DEMONSTRATIONS.get(finding.code)


def steps_for(finding: Finding, report: Report, chosen: Demonstration) -> int:
    """How many steps the demonstration takes."""
    whole = int(report.world.get("steps", 3))
    if chosen.all_steps:
        return whole
    first = min(finding.steps) if finding.steps else 0
    return max(first + 1, min(first + 1 + chosen.more_steps, whole))


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
