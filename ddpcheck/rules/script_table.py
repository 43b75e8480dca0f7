"""Views of `ddpcheck run`, in the order in which their judges run."""

from __future__ import annotations

from ddpcheck.trace.collectives import AsyncHandles
from ddpcheck.trace.compilation import Compilations
from ddpcheck.trace.data import Data
from ddpcheck.trace.evaluations import Evaluations
from ddpcheck.trace.loop import GradientChanges, Loop
from ddpcheck.trace.losses import Losses
from ddpcheck.trace.model_parts import HandSplit, ModelParts
from ddpcheck.trace.optimizers import Metrics, OptimizedParameters, Optimizers, OptimizerStates
from ddpcheck.trace.program import Program, Statistics
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.training import Training
from ddpcheck.trace.view import View
from ddpcheck.trace.wrappers import Constructions, Copies, Wrappers

VIEWS: tuple[type[View], ...] = (
    OptimizerStates,
    AsyncHandles,
    Constructions,
    Wrappers,
    ModelParts,
    HandSplit,
    Losses,
    GradientChanges,
    Optimizers,
    Metrics,
    Loop,
    Training,
    Compilations,
    Data,
    Statistics,
    Program,
    Evaluations,
    OptimizedParameters,
    Copies,
)
"""Views in order of evaluation, most specific first."""


def views_of(facts: ScriptFacts) -> list[type[View]]:
    """Return all views; if ranks cannot be compared, omit views that need all ranks."""
    return [view for view in VIEWS if facts.can_compare or not view.needs_all_ranks]


HEADINGS = (
    *("parameters", "replicas", "reducer", "loop", "loss", "optimizers", "data", "files"),
    *("collectives", "evaluation", "parity"),
)
"""Headings of the check lines, in display order."""
