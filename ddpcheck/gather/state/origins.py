"""The lines that have registered the parameters, buffers and layers of modules."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules import module as hooks

from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.patching import CALLER, patched


@dataclass(slots=True)
class Origins:
    """Where parameters, buffers and modules were registered, by identity.

    The objects are kept alive so that an identity cannot be used twice.
    """

    _lines: dict[int, Location] = field(default_factory=dict)
    _places: dict[tuple[int, str], Location] = field(default_factory=dict)
    _alive: list[object] = field(default_factory=list)

    def note(self, holder: object, name: str, where: Location | None, thing: object = None) -> None:
        """Remember that `thing` was put under `name` of `holder` at `where`, or something taken away; the last wins."""
        if where is not None:
            self._places[id(holder), name] = where
            self._alive += [holder, thing]
            if thing is not None:
                self._lines[id(thing)] = where

    def of_place(self, holder: object, name: str) -> Location | None:
        """The line that has last put something under `name` of `holder`, or taken it away, as far as that was seen."""
        return self._places.get((id(holder), name))

    def of(self, thing: object) -> Location | None:
        """The line that registered `thing`, as far as it was."""
        return self._lines.get(id(thing))

    def of_name(self, module: nn.Module, name: str) -> Location | None:
        """The line that made the parameter, buffer or module `name` of `module`, else its nearest known parent.

        Copies made by `copy.deepcopy` (the layers of `nn.TransformerEncoder`, say) are not registered one by one;
        for them the line of the module that holds them is the best answer.
        """
        found: Location | None = None
        current: object = module
        for part in name.split("."):
            current = getattr(current, part, None)
            if current is None:
                break
            found = self._lines.get(id(current), found)
        return found


@contextlib.contextmanager
def record_origins() -> Iterator[Origins]:
    """Record every registration of a parameter, buffer or module, and each that is deleted, while the block runs.

    Uses torch's public registration hooks (`torch.nn.modules.module.register_module_parameter_registration_hook`
    and its two sisters); there is none for deletion.
    """
    origins = Origins()

    def on_registration(module: object, name: str, thing: object) -> None:
        origins.note(module, name, user_location(sys._getframe(1)), thing)

    def on_deletion(module: nn.Module, name: str) -> None:
        origins.note(module, name, user_location(sys._getframe(CALLER)))

    with contextlib.ExitStack() as stack:
        for register in (
            hooks.register_module_parameter_registration_hook,
            hooks.register_module_buffer_registration_hook,
            hooks.register_module_module_registration_hook,
        ):
            stack.callback(register(on_registration).remove)
        stack.enter_context(patched(nn.Module, "__delattr__", on_deletion))
        yield origins
