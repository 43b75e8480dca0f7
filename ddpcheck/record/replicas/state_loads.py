"""States that are loaded into a module without a key that fits, so that it trains on as it was."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ddpcheck.findings.evidence.state_uses import NothingLoaded
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.patching import patched

_MOST = 16  # modules


class LoadRecorder:
    """Follows `load_state_dict`; hands to `sink`, before the optimizer step after it, what has loaded nothing.

    A script that then loads the state with other keys, or another one, has meant the first load as a trial.
    """

    def __init__(self, sink: Callable[[NothingLoaded], object]) -> None:
        self._sink = sink
        self._in_vain: WeakKeyDictionary[nn.Module, NothingLoaded] = WeakKeyDictionary()
        patched(nn.Module, "load_state_dict", self._loads)

    def _loads(self, module: nn.Module, *arguments: Any, **named: Any) -> Generator[None, Any, None]:
        state = arguments[0] if arguments else named["state_dict"]
        result = yield
        missing, unexpected = list(result.missing_keys), set(result.unexpected_keys)
        if isinstance(module, torch.jit.ScriptModule) or not missing or not unexpected.issuperset(state):
            for other in [one for one in self._in_vain if _holds(module, one) or _holds(one, module)]:
                del self._in_vain[other]
        elif (prefix := common_prefix(missing, unexpected)) is not None and len(self._in_vain) < _MOST:
            name, of_state, keys = type(module).__name__, prefix[0], prefix[1]
            self._in_vain[module] = NothingLoaded(name, user_location(), keys, of_state, len(missing))

    def before_step(self) -> None:
        """An optimizer is about to step."""
        if self._in_vain:
            for one in list(self._in_vain.values()):
                self._sink(one)
            self._in_vain.clear()


def _holds(module: nn.Module, other: nn.Module) -> bool:
    return any(one is other for one in module.modules())


def common_prefix(missing: Sequence[str], unexpected: set[str]) -> tuple[bool, str] | None:
    """What the keys of a state begin with and those of a module do not ("module."), or the other way round.

    Returns:
        Whether the state has the prefix, and the prefix; None where none makes most of the keys fit.
    """
    for key in missing[:4]:
        for other in unexpected:
            if other.endswith(f".{key}"):
                prefix = other.removesuffix(key)
                if 2 * sum(f"{prefix}{one}" in unexpected for one in missing) > len(missing):
                    return True, prefix
            elif key.endswith(f".{other}"):
                prefix = key.removesuffix(other)
                bare = [one.removeprefix(prefix) for one in missing if one.startswith(prefix)]
                if 2 * len(unexpected.intersection(bare)) > len(missing):
                    return False, prefix
    return None
