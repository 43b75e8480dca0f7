"""Evidence on `torch.compile`: what each rank has compiled, and why it has compiled it again.

Judged in `judge.loop.script_compilations`; gathered in `record.loop.compilation_recorder`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from ddpcheck.findings.report import Location


class FunctionCompiled(Struct, frozen=True):
    """A function was compiled on a rank, or torch has given up to compile it.

    Attributes:
        function: Its qualified name; of the rest of a function after a graph break as torch calls it.
        defined: Where it is.
        location: The line that reads what has another value than before, where torch says it; else the line of the
            script that calls the function.
        step: How many steps of optimizers have ended.
        seconds: That it took, without what is compiled in the first backward pass.
        trains: Whether the modules of wrappers train, and gradients are asked for.
        guard: What no longer held of what had been compiled before, without its values: the same text for the same
            guard. Empty the first time, and where torch does not say it.
        reason: The same as torch says it.
        given_up: Whether a limit of recompilations was reached: the function runs as it is written from now on, but for
            what was compiled before.
        inputs: A fingerprint of the shapes and dtypes of the tensors that it is given.
        operations: By name of an operation of which backward computes gradients, how many of it were compiled.
    """

    function: str
    defined: Location
    location: Location | None = None
    step: int = 0
    seconds: float = 0.0
    trains: bool = True
    guard: str = ""
    reason: str = ""
    given_up: bool = False
    inputs: int = 0
    operations: Mapping[str, int] = field(default_factory=dict)
