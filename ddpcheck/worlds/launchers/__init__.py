"""Ranks that a launcher has started: who they are, work that they do in step, and worlds that rank 0 leads."""

from ddpcheck.worlds.launchers.detection import BY_HAND, Launch, detect, require
from ddpcheck.worlds.launchers.follower import follow
from ddpcheck.worlds.launchers.group_world import LaunchedWorld
from ddpcheck.worlds.launchers.leader import Leader
from ddpcheck.worlds.launchers.rank_group import Session
from ddpcheck.worlds.launchers.shutdown import Ending, explain_exit

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
