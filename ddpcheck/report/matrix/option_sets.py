"""Options of `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpcheck.findings.deprecation import renamed

__getattr__ = renamed(__name__, DdpOptions="DDPOptions")


@dataclass(frozen=True, slots=True)
class DDPOptions:
    """One combination of `DistributedDataParallel` arguments and a communication hook."""

    # `DistributedDataParallel` arguments among `VARIED`; absent arguments have torch's defaults
    arguments: Mapping[str, Any] = field(default_factory=dict)
    hook: str = ""  # torch communication hook registered in addition, by name; empty for none

    def __str__(self) -> str:
        words = [f"{name}={value!r}" for name, value in self.arguments.items()]
        return ", ".join([*words, self.hook] if self.hook else words) or "defaults"

    def plus(self, hook: str = "", **arguments: Any) -> DDPOptions:
        """Return these options, with `hook` and `arguments` added."""
        return DDPOptions({**self.arguments, **arguments}, hook or self.hook)


DEFAULTS = DDPOptions()
