"""DDP204 parameter-dtype: error, stops_ddp, stops_run

The dtype of a parameter differs between ranks.

Why: DDP does not compare dtypes. If the element sizes differ, the process aborts inside the backend, without a Python
    traceback. If the element sizes are equal (float16 and bfloat16), the bits are summed as if the dtype were the
    same. Nothing is raised, and the gradients are completely wrong.
Fix: Cast on every rank or on none, before wrapping; decide it from the configuration, not from the local device.
Detected: Before DDP's first collective, the ranks compare the dtypes of parameters with the same name.
Ignore: Never.
Line: In `ddpcheck run`, the line that wraps the module. In `ddpcheck report`, the line that creates the first
    parameter.
Checks: report consistency; run replicas; repro layouts
Explains: quietly DDP522 if of graphs
Example:
    model.to(torch.bfloat16 if supports_bf16() else torch.float16)   # right: the same dtype on all ranks
"""

from functools import partial

from ddpcheck.rules.replicas.comparisons import compare_attribute

judge_dtype = partial(compare_attribute, "DDP204", "dtype", "dtype")
