"""Ranks that a launcher has started, a pytest of its own each: who they are, and work that they do in step."""

from ddpcheck.launched.detection import Launch, detect, require
from ddpcheck.launched.session import Session
from ddpcheck.launched.world import LaunchedWorld

__all__ = ["Launch", "LaunchedWorld", "Session", "detect", "require"]
