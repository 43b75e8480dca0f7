"""Helpers for scripts: start-up under torchrun, mpirun and srun, and averages over ranks."""

from __future__ import annotations

from ddpcheck.gather.collectives.allreduce import allreduce_grads, allreduce_params
from ddpcheck.worlds.launchers.init_dist import get_dist_info, init_dist, master_only

__all__ = ["init_dist", "get_dist_info", "master_only", "allreduce_grads", "allreduce_params"]
