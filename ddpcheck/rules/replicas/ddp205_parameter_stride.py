"""DDP205 parameter-stride: error, stops_ddp, stops_run

The memory layout (strides) of a parameter differs between ranks.

Why: DDP reduces flat memory, so all ranks must lay out a tensor in the same way. Construction fails on the rank that
    differs. The message prints the sizes, which are equal. (PyTorch docs, DistributedDataParallel: corresponding
    parameters must have the same strides.)
Fix: Apply memory_format=torch.channels_last (or a transposed weight) on every rank or on none, before wrapping.
Detected: Before DDP's first collective, the ranks compare the strides of parameters with the same name.
Ignore: Never. DDP refuses the module, or averages elements of different positions.
Line: In `ddpcheck run`, the line that wraps the module. In `ddpcheck report`, the line that creates the first
    parameter.
Checks: report consistency; run replicas; repro layouts
Explains: quietly DDP522 if of graphs
Example:
    if torch.cuda.is_available():            # true on some machines only
        model = model.to(memory_format=torch.channels_last)   # right: on every rank
"""

from functools import partial

from ddpcheck.rules.replicas.comparisons import compare_attribute

judge_stride = partial(compare_attribute, "DDP205", "stride", "memory format (strides)")
