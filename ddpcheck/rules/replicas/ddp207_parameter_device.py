"""DDP207 parameter-device: error, stops_ddp, stops_run

The device type of a parameter differs between ranks, or within a rank.

Why: The collectives of one process group run on one type of device. A rank that is left on the CPU fails, or waits
    while the others use the GPU. DDP asserts one device type within a rank, but compares nothing between ranks.
    (PyTorch docs, DistributedDataParallel, device_ids.)
Fix: Move the module with module.to(device) on every rank before wrapping; make a missing GPU an error.
Detected: Before DDP's first collective, the ranks compare the device types of their parameters. Each rank also
    compares the device types of all its parameters.
Ignore: Never.
Line: In `ddpcheck run`, the line that wraps the module. In `ddpcheck report`, the line that creates the first
    parameter.
Checks: report consistency; run replicas; repro layouts
Explains: quietly DDP522 if of graphs
Example:
    device = "cuda" if torch.cuda.is_available() else "cpu"   # a rank without a GPU falls back without a message
    DistributedDataParallel(model.to(device))                 # right: raise where the GPU is missing
"""

from functools import partial

from ddpcheck.rules.replicas.comparisons import compare_attribute

judge_device = partial(compare_attribute, "DDP207", "device", "device type")
