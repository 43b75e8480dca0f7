"""Ranks that a launcher has started: who they are, work that they do in step, and worlds that rank 0 leads."""

from ddpcheck.launched.detection import BY_HAND, Launch, detect, require
from ddpcheck.launched.ending import Ending, explain_exit
from ddpcheck.launched.following import follow
from ddpcheck.launched.leading import Leader
from ddpcheck.launched.session import Session
from ddpcheck.launched.world import LaunchedWorld

__all__ = [
    "BY_HAND",
    "Ending",
    "Launch",
    "LaunchedWorld",
    "Leader",
    "Session",
    "detect",
    "explain_exit",
    "follow",
    "require",
]
