"""Ranks that a launcher has started: who they are, work that they do in step, and worlds that rank 0 leads."""

from ddpcheck.worlds.launchers.detection import BY_HAND, LauncherEnv, detect, require
from ddpcheck.worlds.launchers.follower import follow
from ddpcheck.worlds.launchers.group_world import LaunchedWorld
from ddpcheck.worlds.launchers.leader import Leader
from ddpcheck.worlds.launchers.rank_group import RankGroup
from ddpcheck.worlds.launchers.shutdown import Ending, explain_exit

__all__ = [
    "BY_HAND",
    "Ending",
    "LauncherEnv",
    "LaunchedWorld",
    "Leader",
    "RankGroup",
    "detect",
    "explain_exit",
    "follow",
    "require",
]
