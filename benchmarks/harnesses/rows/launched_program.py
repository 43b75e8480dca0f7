"""What torchrun starts on each rank."""

import torch.distributed as dist
from work import work

dist.init_process_group("gloo")
work()
dist.destroy_process_group()
