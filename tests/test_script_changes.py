"""The line that has changed a wrapped module, in findings that notice the change later."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpcheck.findings.evidence.changes import ModuleChanged
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import make_finding
from ddpcheck.judge.script_changes import at_the_change

WRAPS, LOADS, RESETS, THAWS = (Location("train.py", line) for line in (5, 9, 12, 40))
LOADED = ModuleChanged(0, "values", "load_state_dict", ("head.weight",), LOADS)
RESET = ModuleChanged(0, "values", "apply", ("head.weight",), RESETS)
THAWED = ModuleChanged(0, "requires_grad", "requires_grad_", ("head.weight",), THAWS)


def finding(code: str, subject: str = "head.weight") -> Finding:
    return replace(make_finding(code, (subject,), "changed"), location=Location("model.py", 3))


@pytest.mark.parametrize(
    ("code", "changes", "where", "ranks"),
    [
        ("DDP515", [[LOADED], []], LOADS, (0,)),
        ("DDP515", [[], [RESET, LOADED]], LOADS, (1,)),
        ("DDP515", [[LOADED], [LOADED]], LOADS, ()),
        ("DDP515", [[LOADED, RESET], [LOADED]], RESETS, (0,)),  # what all ranks load is no reason to differ
        ("DDP515", [[], []], WRAPS, ()),  # it comes after this line
        ("DDP515", [[replace(LOADED, forwards=3)], []], WRAPS, ()),
        ("DDP515", [[replace(LOADED, names=("body.weight",))], []], WRAPS, ()),
        ("DDP306", [[replace(LOADED, forwards=3)], []], LOADS, (0,)),
        ("DDP306", [[replace(LOADED, forwards=3)]] * 2, Location("model.py", 3), ()),
        ("DDP503", [[LOADED, THAWED], [THAWED]], THAWS, ()),
        ("DDP503", [[replace(THAWED, names=())], []], THAWS, ()),
        ("DDP503", [[ModuleChanged(0, "parameters", "head", (), RESETS)], []], RESETS, ()),
        ("DDP503", [[ModuleChanged(0, "parameters", "body", ("body.bias",), RESETS)], []], Location("model.py", 3), ()),
        ("DDP301", [[LOADED], []], Location("model.py", 3), ()),
    ],
)
def test_the_line_of_a_change(
    code: str, changes: list[list[ModuleChanged]], where: Location, ranks: tuple[int, ...]
) -> None:
    found = at_the_change(finding(code), changes, WRAPS)
    assert (found.location, found.ranks) == (where, ranks)
