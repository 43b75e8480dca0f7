"""The options of a world, checked: of a `World`, and of a world of ranks that a launcher has started.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.findings.errors import UsageError
from ddpcheck.worlds import validation


@dataclass(frozen=True, slots=True)
class WorldOptions:
    """As of `ddpcheck.World`, which says what each of them means.

    Raises:
        UsageError: An option makes no sense.
    """

    world_size: int = 2
    backend: str = "gloo"
    device: str = "cpu"
    timeout: float = 30.0
    startup_timeout: float = 120.0
    start_method: str | None = None
    process_group: bool = True
    threads: int | None = None
    env: Mapping[str, str] | None = None
    preload: Sequence[str] = ()
    hash_seeds: bool = False

    def __post_init__(self) -> None:
        validation.check_world(self.world_size, self.backend, self.device, self.timeout, self.startup_timeout)
        if not self.process_group and self.world_size != 1:
            raise UsageError(
                f"process_group=False needs world_size=1, got {self.world_size}; ranks of a larger world need one."
            )
        if self.threads is not None:
            validation.check_count("threads", self.threads, validation.MAX_WORLD_SIZE)
        object.__setattr__(self, "start_method", validation.choose_start_method(self.start_method))
        object.__setattr__(self, "env", validation.check_env(self.env))
        object.__setattr__(self, "preload", validation.check_modules("preload", self.preload))

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables for the ranks."""
        return self.env or {}
