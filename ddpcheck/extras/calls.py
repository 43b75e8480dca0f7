"""Stand-ins for the phases of the extras, as in `ddpcheck.report.calls` for a check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.report.calls import PhaseModule

MODULES = (
    "ddpcheck.extras.graph.graph_phases",
    "ddpcheck.extras.matrix.matrix_phases",
    "ddpcheck.extras.repro.probe",
    "ddpcheck.extras.schedule.schedule_phases",
)
"""Modules that run on ranks; those of the matrix and the schedule are preloaded before the fork."""

if TYPE_CHECKING:  # re-exported under their own names for other modules
    from ddpcheck.extras.graph import graph_phases as graph_phases
    from ddpcheck.extras.matrix import matrix_phases as matrix_phases
    from ddpcheck.extras.repro import probe as probe
    from ddpcheck.extras.schedule import schedule_phases as schedule_phases
else:
    globals().update({name.rpartition(".")[2]: PhaseModule(name) for name in MODULES})
