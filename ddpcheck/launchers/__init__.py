"""A script's own way into the ranks of a launcher: set the process group up, who am I, and means over all ranks."""

from ddpcheck.launchers.averaging import allreduce_grads, allreduce_params, average_over_ranks
from ddpcheck.launchers.joining import init_dist
from ddpcheck.launchers.place import get_dist_info, master_only

__all__ = ["allreduce_grads", "allreduce_params", "average_over_ranks", "get_dist_info", "init_dist", "master_only"]
