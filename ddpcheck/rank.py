"""`ddpcheck.rank.current()`: the rank of this process, for functions run by a `World`."""

from ddpcheck.worlds.rank import current

__all__ = ["current"]
