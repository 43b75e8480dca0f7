"""Train by a config: torchrun --nproc-per-node 2 train.py digits.py."""

import sys

import torch
from mmengine.config import Config
from mmengine.runner import Runner

if __name__ == "__main__":
    if not torch.cuda.is_available():  # without a GPU mmengine takes a process group, but does not make one
        torch.distributed.init_process_group("gloo")
    Runner.from_cfg(Config.fromfile(sys.argv[1])).train()
