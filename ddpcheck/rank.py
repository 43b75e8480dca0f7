"""The rank that this process is: `ddpcheck.rank.current()`, for functions that a `World` runs."""

from ddpcheck.worlds.rank import current

__all__ = ["current"]
