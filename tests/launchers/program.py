"""What launchers start: one rank, which sets the process group up and uses it, and writes down what it has seen.

`python -m tests.launchers.program FOLDER OPTIONS`: OPTIONS for `init_dist`, as JSON, with `_again` for other options of
the second time; FOLDER/rankR.json is the answer, or the error, which is printed too.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddpcheck

SAID = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


@ddpcheck.master_only
def who() -> int:
    return dist.get_rank()


def use() -> dict[str, Any]:
    """The group at work, and the two averages, whose ranks hold gradients for different parameters."""
    rank, world_size = ddpcheck.get_dist_info()
    summed = torch.ones(3) * rank
    dist.all_reduce(summed)
    layers = [nn.Linear(2, 2, bias=False) for _ in range(world_size + 1)]
    layers[rank].weight.grad = torch.full((2, 2), float(world_size))
    params = [layer.weight for layer in layers]
    ddpcheck.allreduce_grads(params)
    with torch.no_grad():
        params[0].fill_(rank)
    ddpcheck.allreduce_params(params[:1])
    return {
        "info": [rank, world_size],
        "sum": summed[0].item(),
        "grads": [None if p.grad is None else p.grad[0, 0].item() for p in params],
        "param": params[0][0, 0].item(),
        "master_only": who(),
        "backend": dist.get_backend(),
        "environment": {name: os.environ.get(name) for name in SAID},
    }


def main(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    again = options.pop("_again", {})
    spoken = next(os.environ[n] for n in ("OMPI_COMM_WORLD_RANK", "RANK", "SLURM_PROCID") if n in os.environ)
    said: dict[str, Any] = {"host": socket.gethostname()}
    try:
        said["device"] = str(ddpcheck.init_dist(**options))
        said |= use()
        assert str(ddpcheck.init_dist(**options)) == said["device"], "a second time, nothing happens"
        dist.destroy_process_group()
        ddpcheck.init_dist(**{**options, **again})
        said["again"] = use()
        dist.destroy_process_group()
        time.sleep(0.5)  # until rank 0's store has ended
        dist.init_process_group("gloo")  # from the environment that init_dist has left
        said["others"] = use()["sum"]
        dist.destroy_process_group()
    except Exception as error:
        said["error"] = [type(error).__name__, str(error)]
        print(f"rank {spoken}: {type(error).__name__}: {error}", file=sys.stderr)
    (folder / f"rank{spoken}.json").write_text(json.dumps(said))
    return said


if __name__ == "__main__":
    sys.exit("error" in main(Path(sys.argv[1]), json.loads(sys.argv[2])))
